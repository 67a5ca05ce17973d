"""Every forward of the table computes what eager does after the split, or is refused by its named reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pwcc.cache.errors import PwccError
from tests.compile.conftest import require_equal
from tests.compile.split_cases import (
    EQUAL,
    REFUSED,
    SIZED,
    TWO,
    Forward,
    embedded,
    floats_across,
    make,
    numbers_of_the_model,
)

SIZES = (1, 2, 7, 12)
pytestmark = [  # eager says these at every call
    pytest.mark.filterwarnings("ignore:CUDA is not available"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
Compare = Callable[..., Any]


@pytest.mark.parametrize("forward", EQUAL, ids=lambda forward: forward.__name__)
def test_equal_to_eager(forward: Forward, same_as_eager: Compare) -> None:
    program = same_as_eager(make(forward), max_tokens=12, sizes=SIZES)
    assert all(item.trace.calling.predicates == () for item in program.traced)


@pytest.mark.parametrize("forward", [embedded, numbers_of_the_model, floats_across], ids=lambda f: f.__name__)
def test_one_graph_although_dynamo_restarts(forward: Forward, traced: Callable[..., Any]) -> None:
    (item,) = traced(make(forward), max_tokens=12)
    floats = [node for node in item.trace.graph_module.graph.nodes if node.op == "placeholder"]
    assert not any(isinstance(node.meta.get("example_value"), (float, torch.SymFloat)) for node in floats)


def test_split_at_torchs_own_functions(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        q, k, v = self.big(x).view(1, -1, 3, 8).unbind(2)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
            z = self.lin(y).softmax(-1)
        return self.lin(z.float())

    names = ("aten::scaled_dot_product_attention", "aten::softmax")
    program = same_as_eager(make(forward), max_tokens=12, sizes=SIZES, ops=names)
    assert program.shape == ["piece", "scaled_dot_product_attention", "piece", "softmax", "piece"]


def test_graph_module_with_a_constant(same_as_eager: Compare) -> None:
    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.ops.pwcctest.one(x * torch.tensor([1.0, 2.0] * 4)) + torch.tensor(3)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fx.symbolic_trace(Constant())

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    model = Holder()
    assert any(node.op == "get_attr" for node in model.inner.graph.nodes)
    same_as_eager(model, max_tokens=12, sizes=SIZES)


@pytest.mark.parametrize("forward", TWO, ids=lambda forward: forward.__name__)
def test_two_arguments_equal_to_eager(forward: Forward, same_as_eager: Compare) -> None:
    same_as_eager(make(forward), ("x:float32[n,8]", "y:float32[n,8]"), max_tokens=12, sizes=SIZES)


@pytest.mark.parametrize("forward", SIZED, ids=lambda forward: forward.__name__)
def test_two_sizes_equal_to_eager(forward: Forward, interpreted: Callable[..., Any]) -> None:
    model = make(forward)
    program = interpreted(model, ("x:float32[n,8]", "y:float32[m<=12,8]"), max_tokens=12)
    for n, m in itertools.product(SIZES, SIZES):
        x, y = torch.randn(n, 8), torch.randn(m, 8)
        with torch.no_grad():
            require_equal(program(x, y), model(x, y), f"sizes {n} and {m}")
    for item in program.traced:
        assert item.trace.calling.predicates == ()
        for graph in item.program.unique:
            assert set(graph.bounds.values()) <= {(1, 12)}


@pytest.mark.parametrize(("forward", "words"), REFUSED, ids=[forward.__name__ for forward, _ in REFUSED])
def test_refused_by_name(forward: Forward, words: str, traced: Callable[..., Any]) -> None:
    with pytest.raises(PwccError) as raised:
        traced(make(forward), max_tokens=12)
    assert words in raised.value.message
    assert "split_cases.py:" in str(raised.value.where)
