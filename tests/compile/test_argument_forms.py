"""Arguments and results are those of the eager module: names, order, defaults, containers, constants, sizes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, CallError, SizeError, UnsealableError, UsageError, WrongCall
from pwcc.compile.inputs import input_specs
from pwcc.compile.predicates import collect
from pwcc.compile.request import Request, make_request
from pwcc.compile.tracing import trace_all
from tests.compile.conftest import Interpreted, require_equal

Forward = Callable[..., Any]


@dataclass
class State:
    key: Tensor
    scale: float
    value: Tensor | None = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Answer:
    hidden: Tensor
    count: int
    rest: Any = None


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)


def make(forward: Forward) -> nn.Module:
    model: nn.Module = type(forward.__name__, (Base,), {"forward": forward})().eval()
    return model


def asked_for(model: nn.Module, examples: Callable[[int], object] | list[str]) -> Request:
    declarations = examples if isinstance(examples, list) else ()
    return make_request(
        model,
        specs=input_specs(
            model,
            declarations=declarations,
            example_inputs=None if isinstance(examples, list) else examples,
        ),
        sizes=(),
        max_tokens=40,
        device="cpu",
        identity="test",
        args={},
        splitting_ops=("pwcctest::attend",),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=True,
    )


def compiled(model: nn.Module, examples: Callable[[int], object] | list[str]) -> Interpreted:
    """Trace a model as a compile does, its guards included."""
    traced = trace_all(model, asked_for(model, examples))
    for item in traced:
        collect(
            item.trace.guards,
            model=model,
            local_scope=item.trace.local_scope,
            global_scope=item.trace.global_scope,
        )
    return Interpreted(model, traced)


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def same(model: nn.Module, program: Interpreted, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        require_equal(program(*args, **kwargs), model(*args, **kwargs), "a call")


# --- containers ------------------------------------------------------------------------------------


def of_list(self: Any, x: Tensor, states: Any) -> Any:
    return self.lin(x) + states[0] * states[1]


def of_dict(self: Any, x: Tensor, states: Any) -> Any:
    return self.lin(x) + states["a"] * 2 + states["b"]


def of_record(self: Any, x: Tensor, states: Any) -> Any:
    return self.lin(x) + states.key * states.scale


def of_pair(self: Any, x: Tensor, states: Any) -> Any:
    return self.lin(x) + states.first * states.second


def of_nested(self: Any, x: Tensor, states: Any) -> Any:
    (a, b), layers = states["kv"], states["layers"]
    return self.lin(x) + a * b + layers[1]["w"]


Form = tuple[Forward, Callable[[int], Any], list[Callable[[int], Any]]]
FORMS: list[Form] = [
    (of_list, lambda n: [rows(n, 1), rows(n, 2)], [lambda n: (rows(n), rows(n)), lambda n: [rows(n)]]),
    (of_list, lambda n: (rows(n, 1), 0.5), [lambda n: [rows(n), 0.5], lambda n: (rows(n), 0.25)]),
    (
        of_dict,
        lambda n: {"a": rows(n, 1), "b": rows(n, 2)},
        [lambda n: {"b": rows(n), "a": rows(n)}, lambda n: {"a": rows(n)}, rows],
    ),
    (
        of_dict,
        lambda n: collections.OrderedDict(a=rows(n, 1), b=rows(n, 2)),
        [lambda n: {"a": rows(n), "b": rows(n)}],
    ),
    (of_pair, lambda n: Pair(rows(n, 1), rows(n, 2)), [lambda n: (rows(n), rows(n))]),
    (
        of_nested,
        lambda n: {"kv": (rows(n, 1), rows(n, 2)), "layers": [None, {"w": rows(n, 3)}]},
        [
            lambda n: {"kv": (rows(n, 1), rows(n, 2)), "layers": [rows(n), {"w": rows(n, 3)}]},
            lambda n: {"kv": (rows(n, 1), rows(n, 2)), "layers": [None, {"v": rows(n, 3)}]},
        ],
    ),
    (
        of_record,
        lambda n: State(rows(n, 1), 0.5),
        [
            lambda n: State(rows(n), 0.25),
            lambda n: State(rows(n), 0.5, rows(n)),
            lambda n: Pair(rows(n), rows(n)),
        ],
    ),
]


@pytest.mark.parametrize(("forward", "states", "others"), FORMS)
def test_containers_of_tensors(
    forward: Forward, states: Callable[[int], Any], others: list[Callable[[int], Any]]
) -> None:
    model = make(forward)
    program = compiled(model, lambda n: (rows(n), states(n)))
    for size in (1, 2, 9, 40):
        same(model, program, rows(size), states(size))
        same(model, program, states=states(size), x=rows(size))
    for other in others:
        with pytest.raises(ArgumentError, match=r"states.* was compiled as"):
            program(rows(3), other(3))
    with pytest.raises(ArgumentError, match=r"states[\[.].*: expected shape"):
        program(rows(3), states(4))


def test_an_object_that_is_no_container_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a tensor, None, a finite scalar or a container"):
        compiled(make(of_list), lambda n: (rows(n), object()))


# --- ways to call ----------------------------------------------------------------------------------


def by_kind(self: Any, x: Tensor, /, y: Tensor, *, z: Tensor, flag: bool = False, scale: float = 2.0) -> Any:
    return (self.lin(x) + y) * scale - z if flag else self.lin(x) + y - z


def test_kinds_of_parameters() -> None:
    model = make(by_kind)
    program = compiled(model, lambda n: {"x": rows(n), "y": rows(n), "z": rows(n), "flag": True})
    x, y, z = rows(5, 1), rows(5, 2), rows(5, 3)
    same(model, program, x, y, z=z, flag=True)
    same(model, program, x, z=z, flag=True, y=y, scale=2.0)
    with pytest.raises(ArgumentError, match="'flag' was left out, and its default is not what was compiled"):
        program(x, y, z=z)
    with pytest.raises(ArgumentError, match=r"'scale' was compiled as 2\.0, got 3\.0"):
        program(x, y, z=z, flag=True, scale=3.0)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y, z), {"flag": True}),
        ((), {"x": x, "y": y, "z": z, "flag": True}),
        ((x, y), {"flag": True}),
        ((x, y), {"z": z, "y": y, "flag": True}),
        ((x, y), {"z": z, "flag": True, "other": 1}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(TypeError):
            model(*args, **kwargs)
        with pytest.raises(WrongCall):
            program(*args, **kwargs)


def with_rest(self: Any, x: Tensor, **rest: Any) -> Any:
    return self.lin(x) * rest.get("scale", 1)


def test_open_keywords_are_compiled_without_any() -> None:
    model = make(with_rest)
    program = compiled(model, lambda n: (rows(n),))
    same(model, program, rows(3))
    with pytest.raises(WrongCall, match="unexpected argument 'scale'"):
        program(rows(3), scale=2)


def optional(self: Any, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Any:
    y = self.lin(x)
    y = y if mask is None else y * mask
    return y if bias is None else y + bias


def test_none_and_a_tensor_are_two_entries() -> None:
    model = make(optional)
    without = compiled(model, ["x:float32[n,8]"])
    masked = compiled(model, ["x:float32[n,8]", "mask:float32[n,8]"])
    last = compiled(model, ["x:float32[n,8]", "bias:float32[n,8]"])
    x, mask = rows(4), rows(4, 1)
    same(model, without, x)
    same(model, without, x, None, bias=None)
    same(model, masked, x, mask)
    same(model, last, x, None, mask)
    same(model, last, x, bias=mask)
    with pytest.raises(ArgumentError, match="'mask' was compiled as None, got a Tensor"):
        without(x, mask)
    with pytest.raises(ArgumentError, match="'mask' was left out, and its default is not what was compiled"):
        masked(x)
    with pytest.raises(ArgumentError, match="'mask' was compiled as a tensor, got NoneType"):
        masked(x, None)


def scaled(self: Any, x: Tensor, times: int, by: float, name: str = "plain") -> Any:
    return self.lin(x) * by + times if name == "plain" else x


def test_constants_are_compiled() -> None:
    model = make(scaled)
    program = compiled(model, ["x:float32[n,8]", "times=3", "by=0.5"])
    same(model, program, rows(4), 3, 0.5)
    same(model, program, rows(4), by=0.5, times=3, name="plain")
    for times, by, said in [
        (4, 0.5, "'times' was compiled as 3, got 4"),
        (3, 0.25, "'by' was compiled as 0.5"),
    ]:
        with pytest.raises(ArgumentError, match=said) as raised:
            program(rows(4), times, by)
        assert "one entry holds one" in str(raised.value.hint)
    with pytest.raises(ArgumentError, match=r"'times' was compiled as 3, got 3\.0"):
        program(rows(4), 3.0, 0.5)
    with pytest.raises(ArgumentError, match="'times' was compiled as 3, got a Tensor"):
        program(rows(4), torch.tensor(3), 0.5)


MARK = object()


def hidden_default(self: Any, x: Tensor, how: Any = MARK, scale: float = 1.0) -> Any:
    return self.lin(x) * scale if how is MARK else x


def test_a_default_without_a_form_cannot_be_passed() -> None:
    def forward(self: Any, x: Tensor, how: Any = (1, 2), scale: float = 1.5) -> Any:
        return self.lin(x) * scale

    model = make(forward)
    program = compiled(model, ["x:float32[n,8]"])
    same(model, program, rows(3))
    same(model, program, rows(3), scale=1.5)
    with pytest.raises(ArgumentError, match="'how' was compiled with its default"):
        program(rows(3), (1, 2))


# --- results ---------------------------------------------------------------------------------------


def with_sizes(self: Any, x: Tensor) -> Any:
    return self.lin(x), x.shape[0], x.shape, (2 * x.shape[0] + 1, [x.numel()]), len(x)


def record_of_sizes(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    return Answer(y, y.shape[0], {"first": (y + 1, None), "shape": y.size(), "flag": True, "word": "yes"})


def input_and_weight(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    return {"x": x, "w": self.lin.weight, "y": [y, y], "none": None, "nan": float("inf")}


@pytest.mark.parametrize("forward", [with_sizes, record_of_sizes, input_and_weight])
def test_results(forward: Forward) -> None:
    model = make(forward)
    program = compiled(model, ["x:float32[n,8]"])
    for size in (1, 2, 7, 8, 40):
        x = rows(size)
        with torch.no_grad():
            got, wanted = program(x), model(x)
        require_equal(got, wanted, f"size {size}")


def test_a_number_that_only_python_computes_from_a_size_is_right_or_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.lin(x), "x" * x.shape[0]

    model = make(forward)
    try:
        program = compiled(model, ["x:float32[n,8]"])
    except Exception as error:
        refused = isinstance(error, UnsealableError) or "fixes dimension 0" in str(error)
        assert refused or "type: str" in str(error)  # noqa: PT017 (torch 2.11 traces no text)
        return
    for size in (1, 3):
        same(model, program, rows(size))


# --- several sizes ---------------------------------------------------------------------------------


def across(self: Any, x: Tensor, memory: Tensor) -> Any:
    return torch.softmax(self.lin(x) @ memory.t(), -1) @ memory, memory.shape[0]


def apart(self: Any, x: Tensor, memory: Tensor) -> Any:
    return torch.cat([self.lin(x), memory]), memory.sum(0)


def grid(self: Any, x: Tensor, memory: Tensor) -> Any:
    return self.lin(x).sum() + memory * 2


@pytest.mark.parametrize(
    ("forward", "memory"),
    [
        (across, "[m,8]"),
        (apart, "[m,8]"),
        (across, "[2<=m<=20,8]"),
        (grid, "[n,m<=20]"),
        (grid, "[m<=20,k<=20]"),
    ],
)
def test_sizes_of_their_own(forward: Forward, memory: str) -> None:
    model = make(forward)
    program = compiled(model, ["x:float32[n,8]", f"memory:float32{memory}"])
    (calling,) = program.calling
    assert [symbol.name for symbol in calling.symbols] == ["s0", "s1", "s2"][: len(calling.symbols)]
    two = {"[n,m<=20]": (None, 3), "[m<=20,k<=20]": (5, 3)}.get(memory)
    for size in (1, 2, 3, 17, 40):
        for other in (2, 3, 17, size if 2 <= size <= 20 else 4):
            shape = (other, 8) if two is None else (size if two[0] is None else other, two[1])
            same(model, program, rows(size), torch.randn(shape))
    if "20" in memory:
        with pytest.raises(SizeError, match=r"outside the compiled range \[[12], 20\]"):
            program(rows(3), torch.randn(21, 8) if two is None else torch.randn(3, 21))


def test_sizes_that_the_code_makes_equal_are_checked_by_line() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        return self.lin(x) + y

    model = make(forward)
    program = compiled(model, ["x:float32[n,8]", "y:float32[m,8]"])
    same(model, program, rows(5), rows(5, 1))
    with pytest.raises(CallError, match=r"s0|expected shape") as raised:
        program(rows(5), rows(6))
    assert "test_argument_forms.py" in str(raised.value) or "expected shape" in str(raised.value)
