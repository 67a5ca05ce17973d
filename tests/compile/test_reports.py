"""Faults that users of such caches reported elsewhere and that show in a trace, without compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pwcc.compile.tracing import Traced

TraceModel = Callable[..., list[Traced]]
Compare = Callable[..., Any]


def _named(x: Tensor, out: Tensor, name: str) -> None:
    out.copy_(x.cumsum(0))


def _register() -> torch.library.Library:
    library = torch.library.Library("pwccreports", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("named(Tensor x, Tensor(a!) out, str name) -> ()")  # type: ignore[no-untyped-call]
    library.impl("named", _named, "CPU")  # type: ignore[no-untyped-call]
    library.impl("named", lambda x, out, name: None, "Meta")  # type: ignore[no-untyped-call]
    return library


_library = _register()
OPS = ("pwcctest::one", "pwccreports::named")


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.pwcctest.one(torch.relu(self.linear(x)))
        return out


class Blocks(nn.Module):
    def __init__(self, *biases: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(bias) for bias in biases)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_piece_is_not_its_position(traced: TraceModel, same_as_eager: Compare) -> None:
    """13: two blocks of equal sizes, one with a bias, in both orders; and an index moved by another cut."""
    orders = {}
    for biases in ((True, False), (False, True)):
        (item,) = traced(Blocks(*biases), ops=OPS)
        orders[biases] = [piece.graph.digest for piece in item.program.pieces]
        same_as_eager(Blocks(*biases), ops=OPS, sizes=(1, 2, 7))
    one, other = orders[True, False], orders[False, True]
    assert one == list(reversed(other))
    assert len(set(one)) == 2
    (whole,) = traced(Blocks(True, False), ops=())
    assert {piece.graph.digest for piece in whole.program.pieces}.isdisjoint(one)


class NamedBlock(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.pwccreports.named(x, out, self.name)
        return torch.relu(self.linear(out))


def test_equal_layers_whose_names_are_handed_to_an_operation_are_one_piece(
    traced: TraceModel, same_as_eager: Compare
) -> None:
    """25: twelve layers, each of which passes its own name to the operation that cuts the graph."""
    model = nn.Sequential(*(NamedBlock(f"model.layers.{index}.attention") for index in range(12)))
    (item,) = traced(model, ("input:float32[n,8]",), ops=OPS)
    assert item.program.splits == 12
    assert len(item.program.pieces) >= 12
    assert len(item.program.unique) <= 3
    same_as_eager(model, ("input:float32[n,8]",), ops=OPS, sizes=(1, 5))
