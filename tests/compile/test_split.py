"""A split program computes what eager does, for every size; what cannot cross a boundary is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwcc.cache.errors import PwccError, SpecializationError, TraceError, UnsealableError
from pwcc.compile.trace import SizeMode

Compare = Callable[..., Any]
TraceModel = Callable[..., Any]
Forward = Callable[..., Any]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        self.big = nn.Linear(8, 24)
        self.register_buffer("buf", torch.randn(8))
        self.plain = torch.randn(8)


def make(forward: Forward) -> nn.Module:
    cls = type(forward.__name__, (Base,), {"forward": forward})
    model: nn.Module = cls()
    return model


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


CASES: list[tuple[Forward, list[str] | None]] = []


def case(*steps: str) -> Callable[[Forward], Forward]:
    """Register a forward and the steps that its program must have; none: any."""

    def register(forward: Forward) -> Forward:
        CASES.append((forward, list(steps) or None))
        return forward

    return register


AROUND = ("piece", "attend", "piece")


@case(*AROUND)
def chunk(self: Any, x: Tensor) -> Any:
    q, k, v = self.big(x).chunk(3, -1)
    return attend(q) * k + v


@case(*AROUND)
def split_sizes(self: Any, x: Tensor) -> Any:
    q, k, v = self.big(x).split([8, 8, 8], -1)
    return attend(q) * k + v


@case(*AROUND)
def unbind(self: Any, x: Tensor) -> Any:
    q, k, v = self.big(x).view(-1, 3, 8).unbind(1)
    return attend(q) * k + v


@case(*AROUND)
def topk(self: Any, x: Tensor) -> Any:
    values, indices = x.topk(2, -1)
    return attend(x).gather(-1, indices) + values


@case(*AROUND)
def maximum_by_name(self: Any, x: Tensor) -> Any:
    found = x.max(-1)
    return attend(x) + found.values[:, None], found.indices


@case(*AROUND)
def var_mean(self: Any, x: Tensor) -> Any:
    variance, mean = torch.var_mean(x, -1)
    return attend(x) * variance[:, None] + mean[:, None]


@case(*AROUND)
def late_getitem(self: Any, x: Tensor) -> Any:
    parts = self.big(x).chunk(3, -1)
    attended = attend(x)
    return attended * parts[1] + parts[2]


@case("empty_like", "attend", "piece")
def size_of_a_dimension(self: Any, x: Tensor) -> Any:
    n = x.size(0)
    return attend(x).view(n, 2, 4).sum(1)


@case()
def whole_size(self: Any, x: Tensor) -> Any:
    size = x.size()
    return (attend(x) * 2).view(size)


@case()
def size_doubled(self: Any, x: Tensor) -> Any:
    return attend(x).reshape(x.shape[0] * 2, 4)


@case()
def view_minus_one(self: Any, x: Tensor) -> Any:
    return attend(x).view(x.shape[0], -1) * 2


@case()
def size_passed_on(self: Any, x: Tensor) -> Any:
    attended = attend(x)
    return torch.ones(x.shape) * attended + torch.zeros(*x.shape)


@case()
def size_unpacked(self: Any, x: Tensor) -> Any:
    n, d = x.shape
    return attend(x).view(n, 2, d // 2).transpose(1, 2).reshape(n, d)


@case()
def numel_and_len(self: Any, x: Tensor) -> Any:
    return attend(x).reshape(x.numel()) / x.numel() + len(x) ** 0.5


@case()
def size_of_a_cat(self: Any, x: Tensor) -> Any:
    doubled = torch.cat([x, x])
    attended = attend(doubled)
    return attended + torch.arange(doubled.shape[0])[:, None]


@case()
def padded_to_a_multiple(self: Any, x: Tensor) -> Any:
    blocks = (x.shape[0] + 7) // 8
    return F.pad(attend(x), (0, 0, 0, blocks * 8 - x.shape[0])).view(blocks, 8, 8).sum(1)


def size_halved_across(self: Any, x: Tensor) -> Any:
    half = x.shape[0] // 2
    attended = attend(x)
    return attend(attended[:half].clone()), attended[half:]


@case("empty_like", "attend", "piece")
def split_first(self: Any, x: Tensor) -> Any:
    return self.lin(attend(x))


@case("piece", "attend")
def split_last(self: Any, x: Tensor) -> Any:
    return attend(self.lin(x))


@case("empty_like", "attend")
def split_only(self: Any, x: Tensor) -> Any:
    return attend(x)


@case("one")
def functional_only(self: Any, x: Tensor) -> Any:
    return torch.ops.pwcctest.one(x)


@case("piece", "attend", "attend", "piece")
def twice_in_a_row(self: Any, x: Tensor) -> Any:
    return attend(attend(self.lin(x))) * 2


@case("one", "one")
def functional_twice(self: Any, x: Tensor) -> Any:
    return torch.ops.pwcctest.one(torch.ops.pwcctest.one(x))


@case("piece")
def none_at_all(self: Any, x: Tensor) -> Any:
    return self.lin(x)


@case("piece", "two", "getitem", "getitem", "piece")
def two_results(self: Any, x: Tensor) -> Any:
    first, second = torch.ops.pwcctest.two(self.lin(x))
    return self.lin(first) * second


@case("piece", "two", "getitem", "getitem", "piece", "one", "piece")
def two_results_used_apart(self: Any, x: Tensor) -> Any:
    first, second = torch.ops.pwcctest.two(self.lin(x))
    return torch.ops.pwcctest.one(self.lin(first)) + second


@case()
def one_of_two_results(self: Any, x: Tensor) -> Any:
    _, second = torch.ops.pwcctest.two(self.lin(x))
    return second * 2


@case()
def results_returned(self: Any, x: Tensor) -> Any:
    return torch.ops.pwcctest.two(self.lin(x))


@case()
def scale_of_the_op(self: Any, x: Tensor) -> Any:
    out = x.new_empty(x.shape[0], 8)
    torch.ops.pwcctest.attend(x, out, 0.5)
    return out


@case()
def identity(self: Any, x: Tensor) -> Any:
    return x


@case()
def output_is_an_input(self: Any, x: Tensor) -> Any:
    return self.lin(x), x


@case()
def same_output_twice(self: Any, x: Tensor) -> Any:
    y = attend(self.lin(x))
    return y, y, {"again": y, 3: [y]}


@case()
def constants_in_the_output(self: Any, x: Tensor) -> Any:
    return self.lin(x), None, True, 3, 2.5, "text", float("inf"), float("nan"), []


@dataclass
class Record:
    first: Any
    second: Any = None


class Named(NamedTuple):
    first: Any
    second: Any = None


@case()
def dataclass_output(self: Any, x: Tensor) -> Any:
    return Record(attend(x), Record(x * 2))


@case()
def named_tuple_output(self: Any, x: Tensor) -> Any:
    return Named(attend(x), x)


@case()
def weights_in_the_output(self: Any, x: Tensor) -> Any:
    return self.lin(x), self.buf, self.plain, self.lin.bias * 1


@case()
def only_a_buffer(self: Any, x: Tensor) -> Any:
    return self.buf


@case()
def only_allocations(self: Any, x: Tensor) -> Any:
    first = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, first)
    second = torch.empty(x.shape)
    torch.ops.pwcctest.attend(first, second)
    return second * 2


@case("piece", "attend", "attend", "piece")
def allocation_joins_the_piece_before(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    first = torch.empty_like(y)
    torch.ops.pwcctest.attend(y, first)
    second = x.new_empty(x.shape[0], 8)
    torch.ops.pwcctest.attend(first, second)
    return second * 2


@case()
def view_written_across(self: Any, x: Tensor) -> Any:
    y = x * 2
    view = y[:, ::2]
    first = attend(y)
    view.mul_(2)
    return first + attend(y) + y


@case()
def input_written_across(self: Any, x: Tensor) -> Any:
    x.add_(1)
    attended = attend(x)
    x.mul_(2)
    return attended


@case()
def state_written_across(self: Any, x: Tensor) -> Any:
    self.buf.add_(1)
    attended = attend(x) + self.buf
    self.plain.mul_(0.5)
    return attended + self.plain


@case()
def constants_made_inside(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    mask = torch.full((n, 1), float("-inf")).masked_fill(torch.ones(n, 1, dtype=torch.bool), 0.0)
    ramp = torch.arange(n)[:, None] + torch.arange(8)
    return attend(x) * torch.tensor(5.0) + torch.tensor([1.0, 2.0] * 4) + ramp + mask


@case()
def causal_mask(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    return attend((x @ x.t()).masked_fill(mask, -1e9).softmax(-1) @ x)


@case(*AROUND)
def autocast_before(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
    return attend(y.float()) * 2


@case(*AROUND)
def autocast_on_both_sides(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
        with torch.autocast("cpu", enabled=False):
            y = self.lin(y.float())
    y = attend(y)
    with torch.autocast("cpu", torch.bfloat16):
        return self.lin(y)


@case(*AROUND)
def no_grad_across(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = attend(self.lin(x))
        with torch.enable_grad():
            y = y * 2
    return y.detach()


@case("piece", "attend")
def inference_mode_across(self: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        return attend(self.lin(x))


@case()
def slices_and_indices(self: Any, x: Tensor) -> Any:
    y = attend(x)
    y[:, 0] = 1.0
    y[0] = self.buf
    return y[..., :4], y[None], y[-1], y[::2]


@case()
def dtypes_and_devices(self: Any, x: Tensor) -> Any:
    y = attend(x.to(torch.float64).to(x.dtype))
    return y.to(x.device), x.type_as(self.buf), y.half(), x.to(torch.int32)


@case()
def functionals(self: Any, x: Tensor) -> Any:
    y = attend(F.layer_norm(torch.einsum("nd,ed->ne", x, self.lin.weight), (8,), self.buf))
    y = F.gelu(F.rms_norm(y, (8,)), approximate="tanh") + F.dropout(y, 0.5, self.training)
    return torch.where(y > 0, y, 0.0), torch.linalg.vector_norm(y, dim=-1), torch.special.expit(y)


@case()
def vmapped(self: Any, x: Tensor) -> Any:
    return attend(torch.vmap(lambda row: row * 2)(x))


@pytest.mark.parametrize(("forward", "steps"), CASES, ids=[forward.__name__ for forward, _ in CASES])
def test_program_equals_eager_for_every_size(
    forward: Forward, steps: list[str] | None, same_as_eager: Compare
) -> None:
    program = same_as_eager(make(forward))
    if steps is not None:
        expected = [step for step in steps if step != "empty_like"]
        assert [step for step in program.shape if step not in ("empty_like", "new_empty")] == expected
    for item in program.traced:
        assert len(item.trace.calling.symbols) == (item.trace.mode is not SizeMode.STATIC)
        assert item.trace.calling.predicates == ()


def test_size_that_may_be_one(same_as_eager: Compare) -> None:
    try:
        same_as_eager(make(size_halved_across))
    except SpecializationError as error:  # torch 2.11 asks whether the half is 1
        refused = error
    else:
        return
    assert "size 2 is the first that does not fit" in refused.message
    assert str(refused.where).startswith(f"{__file__}:")


def test_model_output_is_rebuilt(same_as_eager: Compare) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def forward(self: Any, x: Tensor) -> Any:
        return outputs.CausalLMOutputWithPast(logits=attend(x))

    program = same_as_eager(make(forward), sizes=(1, 7))
    found = program(torch.ones(3, 8))
    assert type(found) is outputs.CausalLMOutputWithPast
    assert found[0] is found.logits


def test_segments_and_order(traced: TraceModel) -> None:
    (item,) = traced(make(twice_in_a_row))
    assert item.program.splits == 2
    assert len(item.program.pieces) == 2
    assert item.program.segments == 3  # consecutive splitting ops share one eager segment


def test_splitting_op_by_overload_or_not_at_all(traced: TraceModel) -> None:
    (by_overload,) = traced(make(split_last), ops=("pwcctest::attend.default",))
    (other_overload,) = traced(make(split_last), ops=("pwcctest::attend.other",))
    (whole,) = traced(make(split_last), ops=())
    assert by_overload.program.splits == 1
    assert other_overload.program.splits == whole.program.splits == 0
    assert len(whole.program.pieces) == 1


def test_weights_and_alias_groups(traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = x * 2
        left, right = y[:, :4], y[:, 4:]
        attended = attend(x)
        return attended[:, :4] + left * right + self.lin.bias[:4]

    (item,) = traced(make(forward))
    assert item.program.weights == (("lin.bias",),)
    last = item.program.pieces[-1]
    first = len(last.graph.symbols)
    shared = [position for group in last.alias_groups for position in group]
    assert len(shared) == 2
    assert all(position >= first for position in shared)


# --- refusals --------------------------------------------------------------------------------------


def random_numbers(self: Any, x: Tensor) -> Any:
    return attend(x) + torch.rand(8)


def conditional(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


def numpy_inside(self: Any, x: Tensor) -> Any:
    return torch.from_numpy(x.numpy() * 2)


@pytest.mark.parametrize(
    ("forward", "kind", "words"),
    [
        (random_numbers, UnsealableError, "random numbers (rand)"),
        (conditional, PwccError, ""),
        (numpy_inside, UnsealableError, "no qualified name"),
    ],
)
def test_refusal_names_construct_and_line(
    forward: Forward, kind: type[PwccError], words: str, traced: TraceModel
) -> None:
    with pytest.raises(kind) as raised:
        traced(make(forward))
    assert words in raised.value.message
    assert raised.value.where is not None
    assert raised.value.where.startswith(f"{__file__}:")


def test_no_tensor_operation(traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return 3

    with pytest.raises(TraceError, match="no tensor operation") as raised:
        traced(make(forward))
    assert __file__ in str(raised.value.where)


def test_outputs_of_one_memory_that_is_written_later_or_returned_twice_are_told(traced: TraceModel) -> None:
    def written(self: Any, x: Tensor) -> Tensor:
        y = self.lin(x).cos()
        rows, other = y.t(), y * 2
        torch.ops.pwcctest.attend(other, rows)
        return y  # type: ignore[no-any-return]

    def read(self: Any, x: Tensor) -> Tensor:
        y = self.lin(x).cos()
        return attend(y.t()).t() + y  # type: ignore[no-any-return]

    def returned(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = self.lin(x).cos()
        turned = y.t()
        return attend(y), y, turned

    for forward, groups in ((written, ((0, 1),)), (read, ()), (returned, ((0, 1),))):
        (item,) = traced(make(forward))
        assert item.program.pieces[0].shared == groups, forward.__name__
