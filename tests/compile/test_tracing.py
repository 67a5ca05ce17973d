"""One trace serves every size; where code asks for the value of a size, two traces do, or an error says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwcc.cache.errors import SizeError, TraceError
from pwcc.compile.rebuild import Variant
from pwcc.compile.request import Request
from pwcc.compile.tracing import make_plan, piece_names, stitch_of

Compare = Callable[..., Any]
TraceModel = Callable[..., Any]
Forward = Callable[..., Any]


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


def make(forward: Forward) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lin = nn.Linear(8, 8)

    model: nn.Module = type(forward.__name__, (Model,), {"forward": forward})()
    return model


def plain(self: Any, x: Tensor) -> Any:
    return self.lin(attend(self.lin(x))) + 1


def special_at_one(self: Any, x: Tensor) -> Any:
    if x.shape[0] == 1:
        return attend(x) * 2
    return attend(self.lin(x))


def never_empty(self: Any, x: Tensor) -> Any:
    if x.shape[0] == 0:
        return x
    return attend(x)


def pooled(self: Any, x: Tensor) -> Any:
    return attend(F.max_pool1d(x[None], 2)[0])


def causal_sdpa(self: Any, x: Tensor) -> Any:
    q = x.view(1, -1, 2, 4).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return attend(y.transpose(1, 2).reshape(-1, 8))


def test_one_unbacked_trace_with_every_variant(traced: TraceModel) -> None:
    (item,) = traced(make(plain), sizes=(4, 1, 40))
    assert item.trace.mode.value == "unbacked"
    assert (item.low, item.high) == (1, 40)
    assert item.variants == (Variant(1, 40), *(Variant(size, size, static=True) for size in (1, 4, 40)))


@pytest.mark.parametrize("forward", [never_empty, pooled, causal_sdpa])
def test_a_size_is_known_not_to_be_zero(forward: Forward, same_as_eager: Compare) -> None:
    (item,) = same_as_eager(make(forward), sizes=range(1, 41)).traced
    assert (item.trace.mode.value, item.low, item.high) == ("unbacked", 1, 40)


def test_backed_fallback_serves_every_size(same_as_eager: Compare) -> None:
    program = same_as_eager(make(special_at_one), sizes=range(1, 41))
    one, rest = program.traced
    assert [item.trace.mode.value for item in program.traced] == ["static", "backed"]
    assert one.variants == (Variant(1, 1, static=True),)
    assert (one.low, one.high, rest.low, rest.high) == (1, 1, 2, 40)
    assert one.trace.calling.symbols == ()
    assert program.calling[1].symbols[0].low == 2
    for size in (0, 41):
        with pytest.raises(SizeError, match=rf"size {size} of 'x' .* is outside the compiled range \[2, 40\]"):
            program(torch.ones(size, 8))


def test_sizes_go_to_the_trace_that_holds_for_them(traced: TraceModel) -> None:
    one, rest = traced(make(special_at_one), sizes=(1, 2, 8))
    assert one.variants == (Variant(1, 1, static=True),)
    assert rest.variants == (Variant(2, 40), Variant(2, 2, static=True), Variant(8, 8, static=True))


def between(self: Any, x: Tensor) -> Any:
    if x.shape[0] > 10:
        return attend(x) * 2
    return attend(x)


def test_each_side_of_a_branch_is_traced(same_as_eager: Compare) -> None:
    program = same_as_eager(make(between), sizes=range(1, 41))
    assert [(item.low, item.high, item.trace.mode.value) for item in program.traced] == [
        (1, 1, "static"),
        (2, 10, "backed"),
        (11, 40, "backed"),
    ]
    assert [calling.predicates for calling in program.calling] == [(), (), ()]
    assert [(calling.symbols[0].low, calling.symbols[0].high) for calling in program.calling[1:]] == [
        (2, 10),
        (11, 40),
    ]


def test_backed_fallback_is_not_tried_for_other_breaks(traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if x.sum() > 0:
            return attend(x)
        return x

    with pytest.raises(TraceError) as raised:
        traced(make(forward))
    assert not raised.value.data_dependent


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("forward", [plain, special_at_one])
def test_small_ranges(forward: Forward, max_tokens: int, same_as_eager: Compare) -> None:
    program = same_as_eager(make(forward), max_tokens=max_tokens)
    with pytest.raises(Exception, match=r"size|expected shape"):
        program(torch.ones(max_tokens + 1, 8))


def test_weights_on_the_meta_device_are_traced(traced: TraceModel) -> None:
    with torch.device("meta"):
        model = make(plain)
    (item,) = traced(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    (real,) = traced(make(plain))
    assert item.program == real.program


def test_two_models_in_one_process(same_as_eager: Compare, traced: TraceModel) -> None:
    first = traced(make(plain))
    same_as_eager(make(causal_sdpa), sizes=(1, 9))
    again = traced(make(plain))
    assert [item.program for item in first] == [item.program for item in again]
    assert [stitch_of(item) for item in first] == [stitch_of(item) for item in again]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(attend(x))
        return x


def test_plan_and_names(traced: TraceModel, asked: Callable[..., Request]) -> None:
    model = Layers()
    found = traced(model, sizes=(4,))
    names = piece_names(found)
    assert list(names.values()) == ["p0", "p1", "p2"]
    plan = make_plan(model, asked(model, sizes=(4,)), found)
    assert plan.pieces == ("p0", "p1", "p1", "p2")
    assert [(piece.name, piece.uses) for piece in plan.unique] == [("p0", 1), ("p1", 2), ("p2", 1)]
    assert plan.variants == ("n=1..40", "n=4")
    assert (plan.splits, plan.size_mode) == (3, "unbacked")
    assert plan.parameters == 8 * 8 + 8 + 2 * 8 * 8
    assert plan.parameter_bytes == 4 * plan.parameters
