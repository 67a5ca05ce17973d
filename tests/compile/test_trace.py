"""What a trace assumes is recorded or refused with the user's line; nothing else of the model is assumed."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pwcc.cache.errors import ArgumentError, PwccError, SpecializationError, TraceError, UnsealableError
from pwcc.compile.coverage import token_predicates
from pwcc.compile.origins import WeightInput
from pwcc.compile.trace import SizeMode, trace

Compare = Callable[..., Any]
TraceModel = Callable[..., Any]
Forward = Callable[..., Any]
COUNT = 0
LOG: list[int] = []
GLOBAL_TENSOR = torch.ones(8)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        self.register_buffer("buf", torch.randn(8))
        self.register_buffer("scratch", torch.randn(8), persistent=False)
        self.register_buffer("cache", torch.zeros(64, 8))
        self.register_buffer("pos", torch.randn(20, 8))
        self.plain = torch.randn(8)
        self.counter = 0
        self.seen: list[int] = []
        self.table: dict[str, Tensor] = {}
        self.hidden = 8


def make(forward: Forward) -> nn.Module:
    model: nn.Module = type(forward.__name__, (Base,), {"forward": forward})().eval()
    return model


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


def line_of(forward: Forward, words: str) -> str:
    """``file:line: code`` of the line of this file, within ``forward``, that holds ``words``."""
    lines = Path(__file__).read_text().splitlines()
    first = forward.__code__.co_firstlineno
    number = next(i for i in range(first, len(lines) + 1) if words in lines[i - 1])
    return f"{__file__}:{number}: {lines[number - 1].strip()}"


# --- conditions on the size ------------------------------------------------------------------------


def branch_on_multiple(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    if x.shape[0] % 4 == 0:
        y = y * 2
    return attend(y)


def branch_above(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    if x.shape[0] > 16:
        y = y * 2
    return attend(y)


def branch_on_hidden(self: Any, x: Tensor) -> Any:
    if x.shape[0] == self.hidden:
        return attend(x) * 2
    return attend(x)


def view_in_fours(self: Any, x: Tensor) -> Any:
    y = attend(x)[:, 0]
    return y.contiguous().view(-1, 4)


def fixed_buffer(self: Any, x: Tensor) -> Any:
    return attend(x) + self.pos[: x.shape[0]]


def checked(self: Any, x: Tensor) -> Any:
    torch._check(x.shape[0] <= 20)  # type: ignore[no-untyped-call]
    return attend(x)


def fixed_operand(self: Any, x: Tensor) -> Any:
    y = attend(x)
    return y + torch.zeros(4, 1)


def loop_over_tokens(self: Any, x: Tensor) -> Any:
    for i in range(x.shape[0]):
        x = x + i
    return x


@pytest.mark.parametrize(
    ("forward", "message", "words"),
    [
        (branch_on_multiple, "n % 4 != 0 for n tokens, but sizes 2 to 40.*size 4 is the first", "% 4 == 0"),
        (view_in_fours, "n % 4 == 0 for n tokens, but sizes 1 to 40.*size 1 is the first", "view(-1, 4)"),
        (fixed_buffer, r"n (== min\(20, n\)|<= 20) for n tokens.*size 21 is the first", "self.pos["),
        (checked, "n <= 20 for n tokens.*size 21 is the first", "_check"),
        (fixed_operand, "fixes dimension 0 of 'x' to 4", "torch.zeros(4, 1)"),
        (loop_over_tokens, "fixes dimension 0 of 'x' to 7", "for i in range"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_narrowed_range_names_condition_size_and_line(
    forward: Forward, message: str, words: str, traced: TraceModel
) -> None:
    with pytest.raises(SpecializationError, match=message) as raised:
        traced(make(forward))
    assert raised.value.where == line_of(forward, words)


@pytest.mark.parametrize(
    ("forward", "max_tokens"), [(branch_above, 16), (branch_on_hidden, 7), (fixed_buffer, 20), (checked, 20)]
)
def test_condition_that_holds_on_the_asked_range_is_no_condition(
    forward: Forward, max_tokens: int, same_as_eager: Compare
) -> None:
    program = same_as_eager(make(forward), max_tokens=max_tokens)
    assert [calling.predicates for calling in program.calling] == [()] * len(program.calling)


def test_predicates_hold_no_path_and_lines_are_whole() -> None:
    x = torch.randn(7, 8)
    found = trace(make(fixed_buffer), [x], {0: (0,)}, mode=SizeMode.UNBACKED, low=1, high=40)
    (predicate,) = found.calling.predicates
    where = line_of(fixed_buffer, "self.pos[")
    assert predicate.text in ("s0 == min(20, s0)", "s0 <= 20")  # torch 2.13, 2.11
    assert predicate.where == "test_trace.py:" + where.removeprefix(__file__ + ":").split(":")[0]
    assert found.lines == {predicate.text: where}
    assert token_predicates(found.calling) == [predicate]
    assert str(Path(__file__).parent) not in found.calling.to_bytes().decode()


def two_inputs(self: Any, x: Tensor, p: Tensor) -> Any:
    return attend(x) + p[:, None]


def two_that_never_meet(self: Any, x: Tensor, p: Tensor) -> Any:
    return attend(x), p * 2


def joined(self: Any, x: Tensor, p: Tensor) -> Any:
    return attend(torch.cat([x, p[:, None].expand(-1, 8)]))


def unread(self: Any, x: Tensor, p: Tensor) -> Any:
    return attend(x)


def first_unread(self: Any, x: Tensor, p: Tensor) -> Any:
    return p * 2


def only_the_shape(self: Any, x: Tensor, p: Tensor) -> Any:
    return torch.ones(x.shape[0]) + p.sum()


@pytest.mark.parametrize(
    "forward", [two_inputs, two_that_never_meet, joined, unread, first_unread, only_the_shape]
)
def test_inputs_share_the_token_count(forward: Forward, same_as_eager: Compare) -> None:
    program = same_as_eager(make(forward), ("x:float32[n,8]", "p:int64[n]"))
    assert [symbol.name for symbol in program.calling[0].symbols] == ["s0"]
    assert [parameter.shape for parameter in program.calling[0].parameters] == [("s0", 8), ("s0",)]
    assert all(len(piece.graph.symbols) <= 1 for piece in program.traced[0].program.pieces)
    with pytest.raises(ArgumentError, match=r"'p': expected shape \(5,\)|'x': expected shape \(4, 8\)"):
        program(torch.ones(5, 8), torch.ones(4, dtype=torch.int64))


def test_token_count_twice_in_one_argument(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Any:
        return attend(mask @ x)

    program = same_as_eager(make(forward), ("x:float32[n,8]", "mask:float32[n,n]"))
    with pytest.raises(ArgumentError, match="'mask'"):
        program(torch.ones(5, 8), torch.ones(5, 4))


def test_sizes_that_can_not_be_one_number(traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor, p: Tensor) -> Any:
        return attend(x.view(-1, 4)) + p[:, None]  # p is twice as long

    with pytest.raises(SpecializationError, match="n"):
        traced(make(forward), ("x:float32[n,8]", "p:float32[n]"))


# --- what does not trace ---------------------------------------------------------------------------


def prints(self: Any, x: Tensor) -> Any:
    print("hello")
    return attend(x)


def branches_on_an_item(self: Any, x: Tensor) -> Any:
    if x.sum().item() > 0:
        return attend(x)
    return x


def branches_on_a_tensor(self: Any, x: Tensor) -> Any:
    if x.sum() > 0:
        return attend(x)
    return x


def raises(self: Any, x: Tensor) -> Any:
    raise ValueError("no")


def wrong_shapes(self: Any, x: Tensor) -> Any:
    return x @ self.lin.weight[:3]


def missing_method(self: Any, x: Any) -> Any:
    return x.nosuch()


@pytest.mark.parametrize(
    ("forward", "words", "line"),
    [
        (prints, "print", "print("),
        (branches_on_an_item, "data-dependent", ".item() > 0"),
        (branches_on_a_tensor, "Data-dependent branching", "x.sum() > 0"),
        (raises, "raised exception ValueError", "raise ValueError"),
        (wrong_shapes, "forward fails: RuntimeError", "weight[:3]"),
        (missing_method, "nosuch", ""),
    ],
)
def test_graph_break_names_reason_and_line(
    forward: Forward, words: str, line: str, traced: TraceModel, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError) as raised:
        traced(make(forward))
    assert words in raised.value.message
    assert str(raised.value.where).startswith(f"{__file__}:")
    if line:  # torch 2.11 lets some errors of the code pass without their line
        assert raised.value.where == line_of(forward, line)
    assert capfd.readouterr() == ("", "")  # torch's own report of the failure stays off the terminal


@pytest.mark.parametrize("words", ["x[:k]", "x[mask]"])
def test_sizes_known_at_run_time_only(words: str, traced: TraceModel) -> None:
    def item_as_size(self: Any, x: Tensor) -> Any:
        k = int(x.sum().item())
        return x[:k]

    def mask_as_index(self: Any, x: Tensor) -> Any:
        mask = x[:, 0] > 0
        return x[mask]

    forward = item_as_size if words == "x[:k]" else mask_as_index
    with pytest.raises(TraceError, match="known only at run time") as raised:
        traced(make(forward))
    assert raised.value.where == line_of(forward, f"return {words}")


# --- side effects ----------------------------------------------------------------------------------


def counts(self: Any, x: Tensor) -> Any:
    self.counter += 1
    return attend(x)


def keeps(self: Any, x: Tensor) -> Any:
    y = attend(x)
    self.last = y * 2
    return y


def rebinds_a_buffer(self: Any, x: Tensor) -> Any:
    self.buf = self.buf + 1
    return attend(x) + self.buf


def rebinds_a_tensor(self: Any, x: Tensor) -> Any:
    self.plain = self.plain + 1
    return attend(x) * self.plain


def writes_a_global(self: Any, x: Tensor) -> Any:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return attend(x)


def appends(self: Any, x: Tensor) -> Any:
    self.seen.append(1)
    return attend(x)


def appends_to_a_global(self: Any, x: Tensor) -> Any:
    LOG.append(1)
    return attend(x)


def sets_an_item(self: Any, x: Tensor) -> Any:
    self.table["x"] = x
    return attend(x)


def sets_on_a_submodule(self: Any, x: Tensor) -> Any:
    self.lin.scale = 2
    return attend(x) * self.lin.scale


@pytest.mark.parametrize(
    ("forward", "name", "line"),
    [
        (counts, "self.counter", "self.counter += 1"),
        (keeps, "self.last", "self.last ="),
        (rebinds_a_buffer, "buf", "self.buf ="),
        (rebinds_a_tensor, "self.plain", "self.plain ="),
        (writes_a_global, "COUNT", "COUNT += 1"),
        (appends, "self.seen", "self.seen.append"),
        (appends_to_a_global, "LOG", "LOG.append"),
        (sets_an_item, "self.table", 'self.table["x"]'),
        (sets_on_a_submodule, "self.lin.scale", "self.lin.scale = 2"),
    ],
)
def test_side_effect_is_refused_and_does_not_happen(
    forward: Forward, name: str, line: str, traced: TraceModel
) -> None:
    model: Any = make(forward)
    before = {**model.__dict__, "_buffers": dict(model._buffers)}
    with pytest.raises(UnsealableError, match="forward changes") as raised:
        traced(model)
    assert name in raised.value.message
    assert raised.value.where == line_of(forward, line)
    assert {**model.__dict__, "_buffers": dict(model._buffers)} == before
    assert (model.counter, model.seen, model.table, COUNT, LOG) == (0, [], {}, 0, [])
    assert not hasattr(model.lin, "scale")


@dataclass
class Flag:
    on: bool = False
    seen: list[int] = field(default_factory=list)


FLAG = Flag()


def test_what_is_set_and_reset_is_no_side_effect(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        before = FLAG.on
        FLAG.on = True
        y = attend(x) * (2 if FLAG.on else 3)
        FLAG.on = before
        return y

    same_as_eager(make(forward), sizes=(1, 5))
    assert not FLAG.on


def test_containers_of_the_forwards_own(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        items = [x]
        items.append(attend(items[0]))
        table = {"last": items[-1]}
        table["first"] = items[0]
        return table["last"] + table["first"]

    same_as_eager(make(forward), sizes=(1, 5))


# --- hooks, signatures, outputs --------------------------------------------------------------------


def test_hooks_on_the_root_are_refused(traced: TraceModel) -> None:
    model = make(two_inputs)
    model.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(UnsealableError, match="forward hooks on its root"):
        traced(model, ("x:float32[n,8]", "p:int64[n]"))


def test_an_overridden_call_is_refused(traced: TraceModel) -> None:
    def call(self: Any, *args: Any) -> Any:
        return self.forward(*args) + 100

    model = type("Overrides", (Base,), {"forward": branch_above, "__call__": call})().eval()
    with pytest.raises(UnsealableError, match="overrides __call__") as raised:
        traced(model)
    assert str(raised.value.where).startswith(__file__)


def test_global_hooks_are_refused(traced: TraceModel) -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UnsealableError, match="_global_forward_hooks"):
            traced(make(two_inputs), ("x:float32[n,8]", "p:int64[n]"))
    finally:
        handle.remove()


def test_hooks_on_a_submodule_are_part_of_the_graph(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return attend(self.lin(x))

    model: Any = make(forward)
    model.lin.register_forward_hook(lambda module, args, output: output * 2)
    same_as_eager(model, sizes=(1, 5))


def test_varargs_are_refused_by_line() -> None:
    def forward(self: Any, *xs: Tensor) -> Any:
        return xs[0]

    model = make(forward)
    with pytest.raises(TraceError, match=r"takes \*args") as raised:
        trace(model, [torch.ones(7, 8)], {0: (0,)}, mode=SizeMode.UNBACKED, low=1, high=40)
    assert str(raised.value.where).startswith(f"{__file__}:{forward.__code__.co_firstlineno} ")


def test_too_many_inputs() -> None:
    x = torch.ones(7, 8)
    with pytest.raises(ArgumentError, match="expected at most 1 inputs"):
        trace(make(counts), [x, x], {}, mode=SizeMode.UNBACKED, low=1, high=40)


@pytest.mark.parametrize("value", [float("nan"), [torch.float32], torch.float32])
def test_constant_arguments_are_plain(value: object) -> None:
    def forward(self: Any, x: Tensor, flag: object) -> Any:
        return attend(x)

    with pytest.raises(
        ArgumentError, match=r"'flag.*': expected a tensor, None, a finite scalar or a container"
    ):
        trace(make(forward), [torch.ones(7, 8), value], {0: (0,)}, mode=SizeMode.UNBACKED, low=1, high=40)


class Keyed:
    def __init__(self, first: Tensor) -> None:
        self.first = first


@dataclass
class Computed:
    first: Tensor
    second: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.second = object()


class Reordered(collections.OrderedDict[str, Any]):
    def __init__(self, **fields: Any) -> None:
        super().__init__(reversed(fields.items()))


@pytest.mark.parametrize("kind", [Keyed, Computed, Reordered, "tuple key", "tensor key"])
def test_outputs_that_can_not_be_rebuilt_are_refused(kind: Any, traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = attend(x)
        if kind == "tuple key":
            return {(1, 2): y}
        if kind == "tensor key":
            return {torch.float32: y}
        if kind == "size":
            return self.lin.weight.shape, y
        if kind is Reordered:
            return Reordered(first=y, second=y)
        return kind(y)

    with pytest.raises(PwccError) as raised:
        traced(make(forward))
    assert __file__ in str(raised.value.where)


@dataclass
class Open:
    first: Any


@pytest.mark.parametrize(
    "build",
    [
        lambda y, n: (y, f"{n} tokens"),
        lambda y, n: (y, "{:>12}".format(n)),  # noqa: UP032 (another way through Dynamo)
        lambda y, n: {f"of {n}": y},
    ],
    ids=["text", "format", "key"],
)
def test_texts_made_of_a_size_are_refused(build: Callable[[Tensor, int], Any], traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return build(attend(x), x.shape[0])

    with pytest.raises(UnsealableError, match="follows the size of an argument"):
        traced(make(forward))


def test_what_a_constructor_would_lose_is_refused(traced: TraceModel) -> None:
    def attribute(self: Any, x: Tensor) -> Any:
        made: Any = Open(attend(x))
        made.more = 3
        return made

    def factory(self: Any, x: Tensor) -> Any:
        made: Any = collections.defaultdict(list)
        made["y"].append(attend(x))
        return made

    for forward in (attribute, factory):
        with pytest.raises(UnsealableError, match="which pwcc cannot rebuild"):
            traced(make(forward))


def test_local_class_in_the_output_is_refused(traced: TraceModel) -> None:
    @dataclass
    class Local:
        first: Any

    def forward(self: Any, x: Tensor) -> Any:
        return Local(attend(x))

    with pytest.raises(UnsealableError, match="Local"):
        traced(make(forward))


# --- weights and state -----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Linear(8, 8)
        self.again = self.block
        self.plain = torch.randn(8)
        self.register_buffer("scratch", torch.randn(8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = attend(self.block(self.embed(ids)))
        logits: Tensor = self.head(self.again(x) * self.plain + self.scratch)
        return logits


def test_origins_keep_every_name(same_as_eager: Compare) -> None:
    program = same_as_eager(Tied(), ("ids:int64[n]",))
    names = {
        origin.names for origin in program.traced[0].trace.origins.values() if isinstance(origin, WeightInput)
    }
    assert names == {
        ("embed.weight", "head.weight"),
        ("block.weight", "again.weight"),
        ("block.bias", "again.bias"),
        ("plain",),
        ("scratch",),
    }


def test_returned_weights_are_bound_too(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return attend(x), self.buf, self.buf, self.scratch

    program = same_as_eager(make(forward), sizes=(1, 4))
    assert [weight.names for weight in program.calling[0].weights] == [("buf",), ("scratch",)]


def test_cache_on_the_module_is_updated_in_place(same_as_eager: Compare) -> None:
    def forward(self: Any, x: Tensor, slots: Tensor) -> Any:
        self.cache.index_copy_(0, slots, self.lin(x))
        y = attend(x)
        self.buf.mul_(0.5)
        return y + self.cache[: self.cache.shape[0] // 2].sum(0) + self.buf

    model: Any = make(forward)
    before = model.cache
    same_as_eager(model, ("x:float32[n,8]", "slots:int64[n]"), sizes=(3, 1, 5))
    assert model.cache is before
    assert model.cache.any()


def test_tensor_from_elsewhere_is_refused_by_name_and_line(traced: TraceModel) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return attend(x) * GLOBAL_TENSOR

    with pytest.raises(
        UnsealableError, match=r"neither an argument nor held by the model.*GLOBAL_TENSOR"
    ) as raised:
        traced(make(forward))
    assert raised.value.where == line_of(forward, "GLOBAL_TENSOR")


def test_written_arguments_are_recorded_and_may_not_be_shared(interpreted: Compare) -> None:
    def forward(self: Any, x: Tensor, y: Tensor, out: Tensor) -> Any:
        x.add_(1)
        torch.ops.pwcctest.attend(x, out)
        return y * 2

    program = interpreted(make(forward), ("x:float32[n,8]", "y:float32[n,8]", "out:float32[n,8]"))
    assert [parameter.written for parameter in program.calling[0].parameters] == [True, False, True]
    x, y = torch.ones(6, 8), torch.ones(3, 8)
    with pytest.raises(ArgumentError, match="'x' and 'y' share memory, and the model writes 'x'"):
        program(x[:3], x[3:], torch.empty(3, 8))
    with pytest.raises(ArgumentError, match=r"'out' and 'y' share memory|'out' and 'x' share memory"):
        program(torch.ones(3, 8), y, y)
    out = torch.empty(3, 8)
    assert torch.equal(program(x[:3], y, out), y * 2)
    assert torch.equal(out, torch.full((3, 8), 2.0).cumsum(0))


def test_traced_code_names_every_function(traced: TraceModel) -> None:
    (item,) = traced(make(two_inputs), ("x:float32[n,8]", "p:int64[n]"))
    assert {"two_inputs", "attend"} <= {code.co_name for code in item.trace.traced_code}


def test_tracing_twice_gives_the_same(traced: TraceModel) -> None:
    first, second = (traced(make(fixed_buffer), max_tokens=20)[0] for _ in range(2))
    assert first.trace.calling == second.trace.calling
    assert first.program == second.program
