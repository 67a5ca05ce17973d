from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from pwcc.compile.torch_private.dataflow import same_dataflow

Function = Callable[[Tensor, Tensor], object]


def same(one: Function, other: Function) -> bool:
    return same_dataflow(fx.symbolic_trace(one), fx.symbolic_trace(other))


def add(x: Tensor, y: Tensor) -> object:
    a = x.sin()
    b = torch.cos(y)
    return {"sum": a + b, "parts": [a, b]}


def add_in_another_order(x: Tensor, y: Tensor) -> object:
    b = torch.cos(y)
    a = x.sin()
    return {"sum": a + b, "parts": [a, b]}


def test_pure_operations_may_change_places() -> None:
    assert same(add, add_in_another_order)
    assert same(add, add)


def swapped(x: Tensor, y: Tensor) -> object:
    a = x.sin()
    b = torch.cos(y)
    return {"sum": b + a, "parts": [a, b]}


def other_constant(x: Tensor, y: Tensor) -> object:
    a = x.sin()
    b = torch.cos(y) * 2
    return {"sum": a + b, "parts": [a, b]}


def more(x: Tensor, y: Tensor) -> object:
    a = x.sin()
    b = torch.cos(y)
    _ = x.exp()
    return {"sum": a + b, "parts": [a, b]}


@pytest.mark.parametrize("other", [swapped, other_constant, more])
def test_other_values_are_a_difference(other: Function) -> None:
    assert not same(add, other)


def read_then_write(x: Tensor, y: Tensor) -> object:
    a = x.sin()
    x.add_(y)
    return a + x


def write_then_read(x: Tensor, y: Tensor) -> object:
    x.add_(y)
    a = x.sin()
    return a + x


def write_twice(x: Tensor, y: Tensor) -> object:
    x.add_(y)
    x.mul_(y)
    return x


def write_twice_in_another_order(x: Tensor, y: Tensor) -> object:
    x.mul_(y)
    x.add_(y)
    return x


def item(x: Tensor, y: Tensor) -> object:
    a = y.sin()
    x.__setitem__(0, y)
    return a


def item_first(x: Tensor, y: Tensor) -> object:
    x.__setitem__(0, y)
    return y.sin()


def out(x: Tensor, y: Tensor) -> object:
    a = y.sin()
    torch.cos(x, out=y)
    return a


def out_first(x: Tensor, y: Tensor) -> object:
    torch.cos(x, out=y)
    return y.sin()


def mutable(x: Tensor, y: Tensor) -> object:
    a = y.sin()
    torch.ops.aten.add_(y, x)
    return a


def mutable_first(x: Tensor, y: Tensor) -> object:
    torch.ops.aten.add_(y, x)
    return y.sin()


def draws(x: Tensor, y: Tensor) -> object:
    a = torch.rand_like(x)
    b = torch.randn_like(y)
    return a + b


def draws_in_another_order(x: Tensor, y: Tensor) -> object:
    b = torch.randn_like(y)
    a = torch.rand_like(x)
    return a + b


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (read_then_write, write_then_read),
        (write_twice, write_twice_in_another_order),
        (item, item_first),
        (out, out_first),
        (mutable, mutable_first),
        (draws, draws_in_another_order),
    ],
)
def test_what_writes_or_draws_keeps_its_place(one: Function, other: Function) -> None:
    assert same(one, one)
    assert not same(one, other)


class Constants(torch.nn.Module):
    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([first]))
        self.register_buffer("b", torch.tensor([second]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a - x * self.b  # type: ignore[operator]


def test_constants_count_by_value_not_by_name() -> None:
    one, equal, other = (fx.symbolic_trace(Constants(*values)) for values in ((1, 2), (1, 2), (2, 1)))
    assert same_dataflow(one, equal)
    assert not same_dataflow(one, other)
