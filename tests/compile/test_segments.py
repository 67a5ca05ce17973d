"""Segments: what is a splitting operation, and which operations are compiled together."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from pwcc.compile.segments import Segment, SplittingOps, segments


def node_of(target: Any) -> fx.Node:
    graph = fx.Graph()
    if isinstance(target, str):
        return graph.call_method(target, (graph.placeholder("x"),))
    return graph.call_function(target, ())


@pytest.mark.parametrize(
    ("target", "names", "matches"),
    [
        (torch.ops.aten.add, ["aten::add"], True),
        (torch.ops.aten.add.Tensor, ["aten::add"], True),
        (torch.ops.aten.add.Tensor, ["aten::add.Tensor"], True),
        (torch.ops.aten.add.Tensor, ["aten::add.Scalar"], False),
        (torch.ops.aten.add, ["aten::add.Tensor"], False),  # which overload it is, only the call says
        (F.scaled_dot_product_attention, ["aten::scaled_dot_product_attention"], True),
        (F.linear, ["aten::linear"], True),
        (F.linear, ["aten::linear.default"], False),
        ("softmax", ["aten::softmax"], True),
        ("softmax", ["softmax", "other::softmax"], False),
        (F.linear, [], False),
    ],
)
def test_names_of_splitting_operations(target: Any, names: list[str], matches: bool) -> None:
    assert (node_of(target) in SplittingOps(names)) is matches


class Script:
    """Builds a graph by name: ``op``, ``split``, ``alloc``, each with the indices of what it uses."""

    targets: dict[str, Any] = {"op": torch.neg, "split": F.linear, "alloc": torch.empty_like}  # noqa: RUF012

    def __init__(self, *script: tuple[str, tuple[int, ...]]) -> None:
        graph = fx.Graph()
        self.nodes = [graph.placeholder("x")]
        for name, used in script:
            node = graph.call_function(self.targets[name], tuple(self.nodes[index] for index in used))
            node.meta["example_value"] = torch.empty(0)
            self.nodes.append(node)

    def cut(self) -> list[tuple[bool, list[int]]]:
        found: list[Segment] = segments(self.nodes[1:], SplittingOps(["aten::linear"]))
        return [(segment.eager, [self.nodes.index(node) for node in segment.members]) for segment in found]


def test_order_is_kept() -> None:
    script = Script(("op", (0,)), ("split", (1,)), ("split", (2,)), ("op", (3,)))
    assert script.cut() == [(False, [1]), (True, [2, 3]), (False, [4])]


def test_allocation_joins_the_piece_before_it() -> None:
    script = Script(("op", (0,)), ("split", (1,)), ("alloc", (1,)), ("split", (2, 3)), ("op", (3,)))
    assert script.cut() == [(False, [1, 3]), (True, [2, 4]), (False, [5])]


def test_allocation_like_a_later_value_runs_eagerly() -> None:
    script = Script(("op", (0,)), ("split", (1,)), ("alloc", (2,)), ("split", (2, 3)))
    assert script.cut() == [(False, [1]), (True, [2, 3, 4])]
    assert Script(("alloc", (0,)), ("split", (0, 1))).cut() == [(True, [1, 2])]


def test_parts_stay_with_what_made_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.chunk, (x, 2))
    pair.meta["example_value"] = (torch.empty(0), torch.empty(0))
    cut = graph.call_function(F.linear, (x, x))
    part = graph.call_function(operator.getitem, (pair, 1))
    row = graph.call_function(operator.getitem, (cut, 0))
    for node in (cut, part, row):
        node.meta["example_value"] = torch.empty(0)
    found = segments([pair, cut, part, row], SplittingOps(["aten::linear"]))
    assert [segment.members for segment in found] == [[pair, part], [cut], [row]]
