"""A piece that writes one tensor of shared memory takes that memory once, and makes the views of it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pwcc.compile.piece_graph import TensorInput
from pwcc.compile.steps import PieceStep
from tests.compile.state_cases import attend, make

Traced = Callable[..., Any]


def pieces(traced: Traced, forward: Callable[..., Any]) -> list[PieceStep]:
    (item,) = traced(make(forward), ops=("pwcctest::attend",))
    return list(item.program.pieces)


def written_beside_its_base(self: Any, x: Tensor) -> Any:
    part = x[:, ::2]
    y = attend(x)
    part.add_(1)
    return x * 2 + y


def halves_of_a_split(self: Any, x: Tensor) -> Any:
    one, other = self.cache.split(32)
    flat = other.view(-1)
    y = attend(x)
    one.add_(1)
    flat[:8].mul_(2)
    return y + other[0]


def returned_by_a_write(self: Any, x: Tensor) -> Any:
    same = self.row.add_(1)
    part = same[2:4]
    y = attend(x)
    part.mul_(2)
    return y + same + self.row


def only_read(self: Any, x: Tensor) -> Any:
    one, other = (x + 1).chunk(2, -1)
    y = attend(x)
    return one * other + y[:, :4]


def of_a_value(self: Any, x: Tensor) -> Any:
    y = x + 1
    part = y.view(-1, 4)[::2]
    z = attend(x)
    part.mul_(3)
    return y + z


def groups(steps: list[PieceStep]) -> list[tuple[tuple[int, ...], ...]]:
    return [step.alias_groups for step in steps]


def test_views_are_made_again_where_one_is_written(traced: Traced) -> None:
    for forward in (written_beside_its_base, halves_of_a_split, returned_by_a_write, of_a_value):
        assert groups(pieces(traced, forward))[-1] == (), forward.__name__


def test_the_copies_follow_the_whole_chain(traced: Traced) -> None:
    last = pieces(traced, halves_of_a_split)[-1]
    names = [target.rpartition(".")[2] for target in last.graph.ops]
    assert names[:5].count("split") >= 1
    assert "view" in names
    tensors = [item for item in last.graph.inputs if isinstance(item, TensorInput)]
    assert [tuple(item.shape) for item in tensors].count((64, 8)) == 1


def test_what_is_only_read_crosses_as_it_is(traced: Traced) -> None:
    steps = pieces(traced, only_read)
    assert steps[-1].alias_groups != ()
    assert "chunk" not in " ".join(steps[-1].graph.ops)


def test_results_and_state_equal_eager(same_as_eager: Callable[..., Any]) -> None:
    for forward in (written_beside_its_base, halves_of_a_split, returned_by_a_write, only_read, of_a_value):
        same_as_eager(make(forward), max_tokens=8, sizes=(2, 4, 8), ops=("pwcctest::attend",))


def test_the_program_runs_in_one_memory(interpreted: Callable[..., Any]) -> None:
    program = interpreted(make(written_beside_its_base), max_tokens=8, ops=("pwcctest::attend",))
    x = torch.zeros(4, 8)
    program(x)
    assert x[0].tolist() == [1.0, 0.0] * 4
