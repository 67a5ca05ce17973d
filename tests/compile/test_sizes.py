"""Numbers of a trace: which are sizes with an expression, and which their operations must compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from pwcc.cache.errors import TraceError, UnsealableError
from pwcc.compile.segments import operation_name
from pwcc.compile.sizes import Sizes
from tests.compile.split_cases import attend, make


@pytest.fixture(scope="module")
def numbers(traced: Callable[..., Any]) -> tuple[Sizes, dict[str, fx.Node], dict[Any, str]]:
    def forward(self: Any, x: Tensor) -> Any:
        n = x.shape[0]
        shape, root, condition = x.size(), n**0.5, n > 3
        return attend(x).view(shape) * (2 * n) * root * int(root), condition

    (item,) = traced(make(forward), max_tokens=12)
    nodes = {operation_name(node): node for node in item.trace.graph_module.graph.nodes}
    return Sizes(item.trace.shape_env, item.trace.symbol_names), nodes, dict(item.trace.symbol_names)


def test_kinds_of_numbers(numbers: Any) -> None:
    sizes, nodes, _ = numbers
    found = {name for name, node in nodes.items() if sizes.is_number(node)}
    assert {"size", "pow", "sym_int", "gt"} <= found
    assert "view" not in found
    assert {name for name in found if sizes.is_computed(nodes[name])} >= {"pow", "sym_int", "gt"}
    assert not sizes.is_computed(nodes["size"])
    assert not sizes.is_computed(nodes["view"])


def test_sizes_are_expressions(numbers: Any) -> None:
    sizes, nodes, names = numbers
    assert sizes.encode(nodes["size"].meta["example_value"], names) == {"tuple": [{"s": "s0"}, 8]}
    assert sizes.encode(torch.Size([2, 3]), names) == {"tuple": [2, 3]}
    assert sizes.encode(2.5, names) == 2.5
    assert sizes.encode(True, names) is True


def test_tensor_whose_size_has_no_expression(numbers: Any) -> None:
    sizes, nodes, names = numbers
    with pytest.raises(UnsealableError, match="crosses from one piece to the next") as raised:
        sizes.text(nodes["sym_int"].meta["example_value"], names, nodes["view"])
    assert __file__ in str(raised.value.where)


def test_size_that_the_graph_computes(numbers: Any) -> None:
    sizes, nodes, _ = numbers
    unknown = Sizes(sizes._env, {})
    with pytest.raises(TraceError, match="run time") as raised:
        list(unknown.symbols(nodes["size"].meta["example_value"], "model.py:3"))
    assert raised.value.where == "model.py:3"
    assert list(sizes.symbols((3, 2.0, None), None)) == []
