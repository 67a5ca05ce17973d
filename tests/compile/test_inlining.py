"""Bodies of marking operations are put in place of their call; what computes more stays."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.inlining import inline_bodies

HIGHER: Any = torch.ops.higher_order


def body_of(*factors: float) -> fx.GraphModule:
    """A body that returns its operand times each factor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = "kept"
    graph.output(tuple(graph.call_function(operator.mul, (x, factor)) for factor in factors))
    return fx.GraphModule(torch.nn.Module(), graph)


def calling(operation: Any, body: fx.GraphModule, *between: object, operands: int = 1) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"i{index}") for index in range(operands)]
    root = torch.nn.Module()
    root.add_module("body", body)
    arguments: Any = (graph.get_attr("body"), *between, *inputs)
    called = graph.call_function(operation, arguments)
    results: Any = next(node for node in body.graph.nodes if node.op == "output").args[0]
    graph.output(tuple(graph.call_function(operator.getitem, (called, index)) for index in range(len(results))))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(
    ("operation", "between"), [(HIGHER.tag_activation_checkpoint, ()), (HIGHER.invoke_subgraph, ("name",))]
)
def test_body_takes_the_place_of_its_call(operation: Any, between: tuple[object, ...]) -> None:
    module = calling(operation, body_of(2.0, 3.0), *between)
    inline_bodies(module)
    module.graph.lint()
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [operator.mul] * 2
    assert not [node for node in module.graph.nodes if node.op == "get_attr"]
    assert [float(item) for item in module(torch.tensor(2.0))] == [4.0, 6.0]


def test_bodies_in_bodies() -> None:
    module = calling(HIGHER.tag_activation_checkpoint, calling(HIGHER.tag_activation_checkpoint, body_of(2.0)))
    inline_bodies(module)
    assert [float(item) for item in module(torch.tensor(2.0))] == [4.0]


def test_operations_that_compute_more_stay() -> None:
    module = calling(HIGHER.cond, body_of(2.0))
    before = str(module.graph)
    inline_bodies(module)
    assert str(module.graph) == before


def test_another_number_of_operands() -> None:
    with pytest.raises(UnsealableError, match="2 operands for 1 inputs"):
        inline_bodies(calling(HIGHER.tag_activation_checkpoint, body_of(2.0), operands=2))
