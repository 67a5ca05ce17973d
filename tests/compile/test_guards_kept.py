"""Every size from 1 to 40 of models that look at their sizes equals eager, or is refused by line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, CallError, PwccError, SizeError, SpecializationError, TraceError

Compare = Callable[..., Any]
TraceModel = Callable[..., Any]
Forward = Callable[..., Any]
MOST = 40


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 4, 3, stride=2, padding=1)
        self.register_buffer("pos", torch.randn(20, 8))
        self.register_buffer("long", torch.randn(64, 8))
        self.hidden = 8


def make(forward: Forward) -> nn.Module:
    model: nn.Module = type(forward.__name__, (Base,), {"forward": forward})().eval()
    return model


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


def branch_above(self: Any, x: Tensor) -> Any:
    if x.shape[0] > 16:
        return attend(self.lin(x)) * 2
    return attend(self.lin(x))


def three_ranges(self: Any, x: Tensor) -> Any:
    if x.shape[0] > 30:
        return attend(x) * 3
    if x.shape[0] >= 11:
        return attend(x) * 2
    return attend(x)


def branch_on_hidden(self: Any, x: Tensor) -> Any:
    if x.shape[0] == self.hidden:
        return attend(x) * 2
    return attend(self.lin(x))


def outside_a_band(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    if n < 5 or n > 12:
        return attend(x) * 2
    return attend(x)


def branch_on_multiple(self: Any, x: Tensor) -> Any:
    if x.shape[0] % 4 == 0:
        return attend(self.lin(x)) * 2
    return attend(self.lin(x))


def view_in_fours(self: Any, x: Tensor) -> Any:
    return attend(x)[:, 0].contiguous().view(-1, 4)


def short_buffer(self: Any, x: Tensor) -> Any:
    return attend(x) + self.pos[: x.shape[0]]


def long_buffer(self: Any, x: Tensor) -> Any:
    return attend(x) + self.long[: x.shape[0]]


def first_half(self: Any, x: Tensor) -> Any:
    return attend(x)[: x.shape[0] // 2] * 2


def last_row(self: Any, x: Tensor) -> Any:
    return attend(x)[x.shape[0] - 1]


def last_column(self: Any, x: Tensor) -> Any:
    return attend(x)[:, -1]


def special_below_two(self: Any, x: Tensor) -> Any:
    if x.shape[0] <= 1:
        return x * 2
    return attend(x)


def expanded(self: Any, x: Tensor) -> Any:
    return attend(x) + x.sum(0, keepdim=True).expand(x.shape[0], 8)


def broadcast(self: Any, x: Tensor) -> Any:
    return attend(x)[:, None] * x[None]


def strided_convolution(self: Any, x: Tensor) -> Any:
    return attend(self.conv(x.t()[None])[0].t().contiguous())


def three_way(self: Any, x: Tensor) -> Any:
    return torch.where(x > 0, attend(x), -x)


def where_alone(self: Any, x: Tensor) -> Any:
    return torch.where(x[:, 0] > 0)[0]


def nonzero(self: Any, x: Tensor) -> Any:
    return attend(x)[x[:, 0].nonzero()[:, 0]]


def masked(self: Any, x: Tensor) -> Any:
    return attend(x)[x[:, 0] > 0]


SERVED: dict[Forward, list[tuple[int, int]]] = {
    branch_above: [(1, 1), (2, 16), (17, 40)],
    three_ranges: [(1, 1), (2, 10), (31, 40), (11, 30)],
    branch_on_hidden: [(1, 1), (8, 8), (2, 40)],
    outside_a_band: [(1, 1), (2, 4), (5, 12), (13, 40)],
    long_buffer: [(1, 40)],
    first_half: [],
    last_row: [],
    last_column: [],
    special_below_two: [(1, 1), (2, 40)],
    expanded: [],
    broadcast: [],
    strided_convolution: [],
    three_way: [(1, 40)],
}


@pytest.mark.parametrize("forward", SERVED, ids=lambda forward: forward.__name__)
def test_every_size_is_as_eager(forward: Forward, same_as_eager: Compare) -> None:
    program = same_as_eager(make(forward))
    spans = [(item.low, item.high) for item in program.traced]
    assert {size for low, high in spans for size in range(low, high + 1)} == set(range(1, MOST + 1))
    if SERVED[forward]:
        assert spans == SERVED[forward]
    for size in (0, MOST + 1):
        with pytest.raises(CallError, match=r"outside the compiled range|expected shape"):
            program(torch.ones(size, 8))


@pytest.mark.parametrize(
    ("forward", "said", "line"),
    [
        (branch_on_multiple, "n % 4 != 0 for n tokens.*size 4 is the first", "% 4 == 0"),
        (view_in_fours, "n % 4 == 0 for n tokens.*size 1 is the first", "view(-1, 4)"),
        (short_buffer, "size 21 is the first", "self.pos["),
    ],
    ids=["branch_on_multiple", "view_in_fours", "short_buffer"],
)
def test_what_cannot_be_served_is_refused_by_condition_and_line(
    forward: Forward, said: str, line: str, traced: TraceModel
) -> None:
    with pytest.raises(SpecializationError, match=said) as raised:
        traced(make(forward))
    source = Path(__file__).read_text().splitlines()
    where = str(raised.value.where)
    assert where.startswith(f"{__file__}:")
    assert line in source[int(where.removeprefix(f"{__file__}:").split(":")[0]) - 1]
    assert "--sizes" in str(raised.value.hint)


@pytest.mark.parametrize("forward", [where_alone, nonzero, masked], ids=lambda forward: forward.__name__)
def test_sizes_that_depend_on_values_are_refused(forward: Forward, traced: TraceModel) -> None:
    with pytest.raises(TraceError) as raised:
        traced(make(forward))
    assert __file__ in str(raised.value.where)


def test_excluded_sizes_that_were_asked_for_are_traced_on_their_own(same_as_eager: Compare) -> None:
    program = same_as_eager(make(branch_on_multiple), sizes=range(1, 41), static=tuple(range(4, 41, 4)))
    *single, rest = program.traced
    assert [(item.low, item.high) for item in single] == [(size, size) for size in (1, *range(4, 41, 4))]
    assert all(item.variants[0].static for item in single)
    assert (rest.low, rest.high) == (2, 39)
    (predicate,) = program.calling[-1].predicates
    assert predicate.text == "s0 % 4 != 0"
    assert str(predicate.where).startswith("test_guards_kept.py:")


def test_few_excluded_sizes_are_traced_without_being_asked_for(same_as_eager: Compare) -> None:
    program = same_as_eager(make(branch_on_multiple), max_tokens=12)
    assert [(item.low, item.high) for item in program.traced] == [(1, 1), (4, 4), (8, 8), (12, 12), (2, 11)]


def test_a_static_size_goes_to_the_trace_that_holds_for_it(traced: TraceModel) -> None:
    found = traced(make(branch_on_hidden), sizes=(4, 8, 12))
    assert [[str(v) for v in item.variants] for item in found] == [
        ["n=1"],
        ["n=8"],
        ["n=2..40", "n=4", "n=12"],
    ]


def test_a_size_that_eager_refuses_too_is_no_reason_to_refuse_others(traced: TraceModel) -> None:
    (item,) = traced(make(short_buffer), max_tokens=20)
    assert item.trace.calling.predicates == ()


# --- strides, offsets and kinds of tensors -----------------------------------------------------------


LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda n: torch.randn(8, n).t(),
    "every second column": lambda n: torch.randn(n, 16)[:, ::2],
    "every second row": lambda n: torch.randn(2 * n, 8)[::2],
    "one row expanded": lambda n: torch.randn(1, 8).expand(n, 8),
    "one column expanded": lambda n: torch.randn(n, 1).expand(n, 8),
    "overlapping": lambda n: torch.randn(8 * n + 8).as_strided((n, 8), (4, 1)),
    "misaligned": lambda n: torch.randn(8 * n + 1)[1:].view(n, 8),
    "rows of a larger one": lambda n: torch.randn(n + 3, 8)[3:],
    "odd stride of one row": lambda n: torch.randn(n, 3, 8)[:, 0] if n == 1 else torch.randn(n, 8),
}


@settings(max_examples=120, deadline=None)
@given(size=st.integers(1, MOST), layout=st.sampled_from(sorted(LAYOUTS)))
def test_any_layout_is_right_or_refused(size: int, layout: str, program: Any) -> None:
    model, compiled = program
    x = LAYOUTS[layout](size)
    try:
        got = compiled(x)
    except ArgumentError as error:
        assert "'x': expected stride" in error.message  # noqa: PT017
        assert not x.is_contiguous()
        return
    with torch.no_grad():
        assert torch.allclose(got, model(x), atol=1e-5)


@pytest.fixture(scope="module")
def program(interpreted: Callable[..., Any]) -> tuple[nn.Module, Any]:
    model = make(branch_above)
    return model, interpreted(model)


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(5, 8).to_sparse(), "is a tensor of layout sparse_coo"),
        (vars(torch)["_efficientzerotensor"](5, 8), "zeros without memory"),
        (torch.ones(5, 8, dtype=torch.complex64).conj().imag, "negated view"),
        (torch.ones(5, 8).as_subclass(Wrapped), "a tensor subclass, Wrapped"),
        (torch.ones(5, 8, dtype=torch.float64), "expected float32 on cpu, got float64"),
        (torch.ones(5, 8, device="meta"), "got float32 on meta"),
        (torch.ones(5), "expected 2 dimensions"),
        (torch.ones(5, 8, 1), "expected 2 dimensions"),
        (torch.ones(5, 9), r"expected shape \(5, 8\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_compiled_code_cannot_read(x: Tensor, said: str, program: Any) -> None:
    with pytest.raises(ArgumentError, match=said):
        program[1](x)


def test_no_call_inside_a_transform(program: Any) -> None:
    with pytest.raises(PwccError, match=r"torch\.func transform"):
        torch.func.vmap(program[1])(torch.ones(2, 5, 8))


def test_channels_last(interpreted: Callable[..., Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return F.avg_pool2d(x, 2) * 2

    model = make(forward)
    program = interpreted(model, ("x:float32[n,4,6,6]",))
    x = torch.randn(3, 4, 6, 6)
    assert torch.equal(program(x), model(x))
    with pytest.raises(ArgumentError, match="expected stride"):
        program(x.to(memory_format=torch.channels_last))
    one = torch.randn(1, 4, 6, 6)
    with pytest.raises(ArgumentError, match="expected stride"):
        program(one.to(memory_format=torch.channels_last))


def test_modes_of_a_call_change_no_answer(program: Any) -> None:
    model, compiled = program
    x = torch.randn(5, 8)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for _ in range(2):
            with mode():
                given = x.clone()
                assert torch.equal(compiled(given), model(given))


def test_size_errors_name_the_whole_range(program: Any) -> None:
    with pytest.raises(SizeError, match=r"size 41 of 'x' \(dimension 0\) is outside"):
        program[1](torch.ones(41, 8))
