"""A call is checked before anything compiled runs; what is refused is refused by the argument's name."""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pwcc.cache.errors import (
    ArgumentError,
    CorruptEntry,
    GuardViolation,
    HostMismatch,
    SizeError,
    WrongCall,
)
from pwcc.compile.runtime import binding
from pwcc.compile.runtime.arrange import Argument
from pwcc.compile.runtime.binding import Binder, same_constant
from pwcc.compile.runtime.calling import (
    CallingConvention,
    Parameter,
    ShapePredicate,
    SizeSymbol,
    Weight,
)
from pwcc.compile.runtime.output import build_output

CPU = torch.device("cpu")
X = Parameter("x", "tensor", "float32", "cpu", ("s0", 8), (8, 1))
MASK = Parameter("mask", "constant", value=None)
P = Parameter("p", "tensor", "int64", "cpu", ("s0",), (1,))
SCALE = Parameter("scale", "constant", value=0.5)
FLAG = Parameter("flag", "constant", value=True)
TOKENS = SizeSymbol("s0", 0, 0, 1, 40)
CONVENTION = CallingConvention((X, MASK, P, SCALE, FLAG), (TOKENS,), ())


def x(n: int = 5) -> torch.Tensor:
    return torch.ones(n, 8)


def p(n: int = 5) -> torch.Tensor:
    return torch.ones(n, dtype=torch.int64)


@pytest.fixture
def binder() -> Binder:
    return Binder(CONVENTION, CPU)


# --- arguments -------------------------------------------------------------------------------------


def test_every_way_to_pass_the_arguments(binder: Binder) -> None:
    first, second = x(), p()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((first, None, second, 0.5, True), {}),
        ((first, None, second), {}),
        ((first,), {"p": second}),
        ((), {"p": second, "x": first}),
        ((), {"flag": True, "scale": 0.5, "p": second, "mask": None, "x": first}),
    ]
    for args, kwargs in calls:
        tensors, sizes = binder.bind(args, kwargs)
        assert [id(tensor) for tensor in tensors] == [id(first), id(second)]
        assert sizes == (5,)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, r"missing arguments \['x', 'p'\]"),
        ((x(),), {}, r"missing arguments \['p'\]"),
        ((x(), None, p(), 0.5, True, 1), {}, "at most 5 arguments"),
        ((x(), None, p()), {"q": 1}, "unexpected argument 'q'"),
        ((x(), None, p()), {"x": x()}, "'x' given twice"),
        ((x(), p(), p()), {}, "'mask' was compiled as None, got a Tensor"),
        ((x(), False, p()), {}, "'mask' was compiled as None, got False"),
        ((x(), None, p(), 0.25), {}, "'scale' was compiled as 0.5, got 0.25"),
        ((x(), None, p(), x()), {}, "'scale' was compiled as 0.5, got a Tensor"),
        ((x(), None, p(), 0.5, 1), {}, "'flag' was compiled as True, got 1"),
        ((x(), None, p(), 0.5, "y" * 500), {}, "'flag' was compiled as True, got 'y"),
        ((None, None, p()), {}, "'x' was compiled as a tensor, got NoneType"),
        (([1.0], None, p()), {}, "'x' was compiled as a tensor, got list"),
        ((x().double(), None, p()), {}, "'x': expected float32 on cpu, got float64 on cpu"),
        ((x().to("meta"), None, p()), {}, "'x': expected float32 on cpu, got float32 on meta"),
        ((x()[0], None, p()), {}, r"'x': expected 2 dimensions, got \(8,\)"),
        ((x(), None, p()[None]), {}, r"'p': expected 1 dimensions, got \(1, 5\)"),
        ((torch.ones(5, 9), None, p()), {}, r"'x': expected shape \(5, 8\), got \(5, 9\)"),
        ((x(5), None, p(4)), {}, r"'p': expected shape \(5,\) beside 'x', got \(4,\)"),
    ],
)
def test_wrong_arguments(args: Any, kwargs: Any, words: str, binder: Binder) -> None:
    binder.bind((x(), None, p()), {})
    for _ in range(2):  # nothing of a refused call is remembered
        with pytest.raises(ArgumentError, match=words):
            binder.bind(args, kwargs)


class Wrapper(torch.Tensor):
    pass


def test_tensor_kinds(binder: Binder) -> None:
    held = nn.Parameter(x())
    (bound, _), _ = binder.bind((held, None, p()), {})
    assert bound is held  # it is what forward returns of it, and a call with gradients is refused for it
    with pytest.raises(ArgumentError, match="a tensor subclass, Wrapper"):
        binder.bind((nn.Parameter(x().as_subclass(Wrapper)), None, p()), {})
    binder.bind((nn.Buffer(x()), None, p()), {})
    with pytest.raises(ArgumentError, match="'x' was compiled as a tensor, got a tensor subclass, Wrapper"):
        binder.bind((x().as_subclass(Wrapper), None, p()), {})


# --- layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(8, 5).t(),
        lambda: torch.ones(5, 16)[:, ::2],
        lambda: torch.ones(10, 8)[::2],
        lambda: torch.ones(1, 8).expand(5, 8),
        lambda: torch.ones(40).as_strided((5, 8), (4, 1)),
    ],
    ids=["transposed", "every second column", "every second row", "expanded", "overlapping"],
)
def test_other_layouts_are_refused(make: Callable[[], torch.Tensor], binder: Binder) -> None:
    binder.bind((x(), None, p()), {})
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"'x': expected stride \(8, 1\), got"):
            binder.bind((make(), None, p()), {})


def test_layouts_that_make_no_difference(binder: Binder) -> None:
    shifted = torch.ones(7, 8)[2:]
    one_row = torch.ones(8, 1).t()
    assert one_row.stride() == (1, 1)
    assert binder.bind((shifted, None, p()), {})[1] == (5,)
    assert binder.bind((one_row, None, p(1)), {})[1] == (1,)
    assert binder.bind((torch.ones(4, 8).expand(4, 8)[:1], None, p(1).expand(1)), {})[1] == (1,)


def test_layout_of_an_argument_that_is_never_read() -> None:
    convention = replace(CONVENTION, parameters=(replace(X, stride=()), MASK, P, SCALE, FLAG))
    binder = Binder(convention, CPU)
    assert binder.bind((torch.ones(8, 5).t(), None, p()), {})[1] == (5,)
    with pytest.raises(ArgumentError, match="'x': expected shape"):
        binder.bind((torch.ones(9, 5).t(), None, p()), {})


def test_scalars_and_static_shapes() -> None:
    zero = Parameter("t", "tensor", "float32", "cpu", (), ())
    none = Parameter("e", "tensor", "float32", "cpu", (0, 3), (3, 1))
    binder = Binder(CallingConvention((zero, none), (), ()), CPU)
    assert binder.bind((torch.tensor(1.0), torch.ones(0, 3)), {})[1] == ()
    assert binder.bind((torch.tensor(1.0), torch.ones(3, 0).t()), {})[1] == ()
    with pytest.raises(ArgumentError, match="'t': expected 0 dimensions"):
        binder.bind((torch.ones(1), torch.ones(0, 3)), {})


# --- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 41, 1000])
def test_sizes_outside_the_range(size: int, binder: Binder) -> None:
    with pytest.raises(SizeError, match=rf"size {size} of 'x' \(dimension 0\) is outside .* \[1, 40\]"):
        binder.bind((x(size), None, p(size)), {})


def test_predicates_are_named_with_their_line() -> None:
    predicate = ShapePredicate("s0 % 4 == 0", "model.py:12")
    binder = Binder(replace(CONVENTION, predicates=(predicate,)), CPU)
    assert binder.bind((x(8), None, p(8)), {})[1] == (8,)
    for _ in range(2):
        with pytest.raises(GuardViolation, match=r"s0 % 4 == 0; this call has \{'s0': 6\}") as raised:
            binder.bind((x(6), None, p(6)), {})
        assert raised.value.where == "model.py:12"


def test_two_independent_symbols_and_derived_sizes() -> None:
    y = Parameter("y", "tensor", "float32", "cpu", ("s1", "2*s0"), ("2*s0", 1))
    convention = CallingConvention(
        (X, y), (TOKENS, SizeSymbol("s1", 1, 0, 2, 9)), (ShapePredicate("s1 < s0", None),)
    )
    binder = Binder(convention, CPU)
    assert binder.bind((x(5), torch.ones(3, 10)), {})[1] == (5, 3)
    with pytest.raises(ArgumentError, match=r"'y': expected shape \(3, 10\)"):
        binder.bind((x(5), torch.ones(3, 9)), {})
    with pytest.raises(SizeError, match="size 1 of 'y'"):
        binder.bind((x(5), torch.ones(1, 10)), {})
    with pytest.raises(GuardViolation, match="s1 < s0"):
        binder.bind((x(3), torch.ones(3, 6)), {})


def test_names_of_positional_only_arguments_are_refused_where_all_are_given() -> None:
    arguments = tuple(
        Argument(name, kind, "required", {"leaf": index})
        for index, (name, kind) in enumerate((("x", "positional"), ("p", "either")))
    )
    binder = Binder(CallingConvention((X, P), (TOKENS,), (), arguments=arguments), CPU)
    assert binder.bind((x(),), {"p": p()})[1] == (5,)
    with pytest.raises(WrongCall, match="'x' is positional-only"):
        binder.bind((), {"x": x(), "p": p()})


def test_what_the_call_before_met_is_not_taken_for_another(binder: Binder) -> None:
    first = binder.bind((x(), None, p()), {})
    assert binder.bind((x(), None, p()), {})[1] == first[1] == (5,)
    assert binder.bind((x(6), None, p(6)), {})[1] == (6,)
    assert binder.bind((x(), None, p()), {})[1] == (5,)
    for wrong in (x().double(), x()[:, ::2], torch.ones(8, 5).t(), None, x(4)):
        with pytest.raises(ArgumentError):
            binder.bind((wrong, None, p()), {})
    binder.forget()
    assert binder.bind((x(), None, p()), {})[1] == (5,)


def test_accepted_sizes_are_remembered_and_values_are_not(binder: Binder) -> None:
    for size in (1, 5, 1, 5, 40):
        tensors, sizes = binder.bind((x(size), None, p(size)), {})
        assert sizes == (size,)
        assert tensors[0].shape == (size, 8)
    assert len(binder._accepted) == 3


def test_steady_state_is_cheap() -> None:
    binder = Binder(CallingConvention((X, P), (TOKENS,), ()), CPU)
    args = (x(), p())
    best = min(timeit.repeat(lambda: binder.bind(args, {}), number=2000, repeat=7)) / 2000
    assert best < 30e-6  # 2 us on a free core; the bound only catches a check that runs anew each time


# --- stored form -----------------------------------------------------------------------------------

STORED = replace(
    CONVENTION,
    predicates=(ShapePredicate("s0 < 30", "model.py:3"), ShapePredicate("s0 != 4", None)),
    weights=(Weight(("a", "b"), "float32", (8, 8), (8, 1)),),
    output={"tuple": [{"output": 0}, {"constant": None}]},
)


def test_round_trip() -> None:
    data = STORED.to_bytes()
    assert CallingConvention.from_bytes(data, where="test") == STORED
    assert STORED.to_bytes() == data


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("weights"),
        lambda c: c.update(extra=1),
        lambda c: c.update(parameters={}),
        lambda c: c["parameters"][0].update(kind="function"),
        lambda c: c["parameters"][0].update(dtype="load"),
        lambda c: c["parameters"][0].update(dtype=3),
        lambda c: c["parameters"][0].update(stride=[8]),
        lambda c: c["parameters"][0].update(shape=[1.5, 8]),
        lambda c: c["parameters"][0].update(written="yes"),
        lambda c: c["parameters"][0].pop("shape"),
        lambda c: c["symbols"][0].update(parameter=5),
        lambda c: c["symbols"][0].update(parameter=1),
        lambda c: c["symbols"][0].update(parameter=-1),
        lambda c: c["symbols"][0].update(dim=2),
        lambda c: c["symbols"][0].update(name="max"),
        lambda c: c["symbols"].append(c["symbols"][0]),
        lambda c: c["predicates"][0].update(text=3),
        lambda c: c["weights"][0].update(names=[]),
        lambda c: c["weights"][0].update(names=[3]),
    ],
)
def test_another_form_is_corrupt(change: Change) -> None:
    value = json.loads(STORED.to_bytes())
    change(value)
    with pytest.raises(CorruptEntry):
        CallingConvention.from_bytes(json.dumps(value).encode(), where="test")


@pytest.mark.parametrize("text", ["s1", "__import__('os').system('true')", "s0.real", ""])
def test_expressions_outside_the_grammar_are_corrupt(text: str) -> None:
    for convention in (
        replace(CONVENTION, predicates=(ShapePredicate(text, None),)),
        replace(CONVENTION, parameters=(replace(X, shape=(text, 8)), MASK, P, SCALE, FLAG)),
        replace(CONVENTION, parameters=(replace(X, stride=(text, 1)), MASK, P, SCALE, FLAG)),
    ):
        with pytest.raises(CorruptEntry):
            Binder(convention, CPU)


# --- outputs ---------------------------------------------------------------------------------------


@dataclass
class Record:
    first: Any
    second: Any = None


class Named(NamedTuple):
    first: Any
    second: Any


class Plain:
    def __init__(self, **fields: Any) -> None:
        raise AssertionError("never called")


def test_templates() -> None:
    output, argument, held = torch.ones(1), torch.ones(2), torch.ones(3)
    template = {
        "tuple": [
            {"list": [{"output": 0}, {"argument": 0}, {"weight": 0}]},
            {"dict": [["a", {"output": 0}], [3, {"constant": None}], [None, {"float": "inf"}]]},
            {"class": f"{__name__}:Record", "fields": [["first", {"output": 0}], ["second", {"tuple": []}]]},
            {"class": f"{__name__}:Named", "fields": [["first", {"constant": 1}], ["second", {"list": []}]]},
            {"class": "collections:OrderedDict", "fields": [["b", {"constant": "text"}], ["a", {"output": 0}]]},
        ]
    }
    found: Any = build_output(template)([output], [argument], [held])
    assert found[0][0] is output
    assert found[0][1] is argument
    assert found[0][2] is held
    assert found[1] == {"a": output, 3: None, None: float("inf")}
    assert found[2] == Record(output, ())
    assert found[3] == Named(1, [])
    assert list(found[4].items()) == [("b", "text"), ("a", output)]


@pytest.mark.parametrize(
    "template",
    [
        None,
        [],
        {},
        {"output": 0, "argument": 0},
        {"output": "0"},
        {"output": -1},
        {"output": True},
        {"weight": None},
        {"constant": []},
        {"constant": {}},
        {"float": "1.0"},
        {"tuple": {}},
        {"list": [3]},
        {"dict": [["a"]]},
        {"dict": [[["a"], {"output": 0}]]},
        {"dict": {}},
        {"unknown": 0},
        {"class": f"{__name__}:Record"},
        {"class": f"{__name__}:Record", "fields": {}},
        {"class": f"{__name__}:Record", "fields": [["first"]]},
        {"class": f"{__name__}:Absent", "fields": []},
        {"class": f"{__name__}:Plain", "fields": []},
        {"class": f"{__name__}:build_output", "fields": []},
        {"class": "subprocess:Popen", "fields": [["args", {"constant": "true"}]]},
        {"class": "builtins:eval", "fields": []},
        {"class": 3, "fields": []},
    ],
)
def test_other_templates_are_corrupt(template: object) -> None:
    with pytest.raises(CorruptEntry):
        build_output(template)


def test_class_of_a_module_that_is_not_imported() -> None:
    with pytest.raises(HostMismatch, match=r"returns a nosuch\.module:Record") as raised:
        build_output({"list": [{"class": "nosuch.module:Record", "fields": []}]})
    assert raised.value.hint == "import nosuch.module before loading"


# --- through a whole program -----------------------------------------------------------------------


class Model(nn.Module):
    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        p: torch.Tensor,
        scale: float = 0.5,
        flag: bool = True,
        *,
        extra: int = 1,
    ) -> torch.Tensor:
        y = x * scale + p[:, None]
        if mask is not None:
            y = y + mask
        return y if flag else -y


def test_defaults_of_a_traced_model(interpreted: Callable[..., Any]) -> None:
    model = Model()
    program = interpreted(model, ("x:float32[n,8]", "p:int64[n]"))
    (calling,) = program.calling
    assert [(q.name, q.kind, q.value) for q in calling.parameters] == [
        ("x", "tensor", None),
        ("mask", "constant", None),
        ("p", "tensor", None),
        ("scale", "constant", 0.5),
        ("flag", "constant", True),
        ("extra", "constant", 1),
    ]
    wanted = model(x(), None, p())
    assert torch.equal(program(x(), None, p()), wanted)
    assert torch.equal(program(x(), p=p(), mask=None, flag=True, extra=1), wanted)
    with pytest.raises(ArgumentError, match="'flag' was compiled as True, got False"):
        program(x(), None, p(), flag=False)
    with pytest.raises(ArgumentError, match="'mask' was compiled as None, got a Tensor"):
        program(x(), torch.ones(5, 8), p())
    with pytest.raises(ArgumentError, match="'extra' was compiled as 1, got 2"):
        program(x(), None, p(), extra=2)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x(), None, p(), 0.5, True, 1), {}),
        ((x(),), {"p": p()}),
        ((x(), None, p()), {"more": 1}),
        ((x(), None, p()), {"x": x()}),
        ((), {}),
    ]
    for args, kwargs in wrong:
        for call in (model, program):
            with pytest.raises(TypeError):
                call(*args, **kwargs)


def test_minus_zero_is_another_constant() -> None:
    assert same_constant(0.0, 0.0)
    assert not same_constant(-0.0, 0.0)
    assert same_constant(float("nan"), float("nan"))
    assert not same_constant(1, True)


def test_named_results_of_operations() -> None:
    fields: list[object] = [["values", {"output": 0}], ["indices", {"output": 1}]]
    output = build_output({"class": "torch.return_types:topk", "fields": fields})
    values, indices = torch.ones(2), torch.ones(2)
    made: Any = output([values, indices], [], [])
    assert type(made).__qualname__ == "topk"
    assert made.values is values
    assert made.indices is indices
    with pytest.raises(CorruptEntry, match="expected 2 fields"):
        build_output({"class": "torch.return_types:topk", "fields": fields[:1]})


def test_the_remedy_for_a_size_of_its_own_is_its_bound() -> None:
    own = SizeSymbol("s1", 1, 0, 1, 512)
    tokens = SizeSymbol("s0", 0, 0, 1, 64)
    assert "--input" in binding._remedy(own, 513)
    assert "--max-tokens" in binding._remedy(tokens, 65)
    assert "at least" in binding._remedy(tokens, 0)
