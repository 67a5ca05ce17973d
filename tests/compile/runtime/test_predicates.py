"""The stored form of predicates: exact, shared, bounded, and never trusted."""

from __future__ import annotations

import enum
import functools
import json
import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.paths import STEPS, getter, show_path
from pwcc.compile.runtime.portable import NotPortable, describe, show
from pwcc.compile.runtime.predicates import Predicate, PredicateSet, Rule


class Color(enum.Enum):
    RED = 1


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5
        self.sizes = {"a": 1}


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Norm() for _ in range(layers))


def rules(layers: int, per_layer: int = 1) -> list[Predicate]:
    made = []
    for layer in range(layers):
        root = f"model:layers.{layer}"
        made.append(Predicate(root, Rule((("attr", "eps"),), "is", describe(1e-5), "m.py:3")))
        for number in range(per_layer - 1):
            made.append(Predicate(root, Rule((), "lacks_own", f"attribute_{number}")))
    return made


def test_equal_layers_share_one_rule() -> None:
    found = PredicateSet.of(rules(32, 3))
    assert (len(found), found.distinct_rules) == (96, 3)
    again = PredicateSet.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert again.check(Stack(32), {}) == []


def test_the_limit_holds_and_a_missing_layer_is_said_once() -> None:
    found = PredicateSet.of(rules(32, 3))
    model: Any = Stack(31)
    for layer in model.layers:
        layer.eps = 1e-6
    assert len(found.check(model, {})) == 20
    text = [str(item) for item in found.check(model, {}, limit=1000)]
    assert len(text) == 32
    assert "model.layers.0.eps: compiled with 1e-05, found 1e-06 (relied on at m.py:3)" in text
    assert "model.layers.31: compiled with it present, found no submodule (relied on at m.py:3)" in text


def test_three_thousand_predicates_take_milliseconds() -> None:
    found = PredicateSet.of(rules(100, 32))
    model = Stack(100)
    assert len(found) == 3200
    assert found.check(model, {}) == []
    start = time.perf_counter()
    assert found.check(model, {}) == []
    assert time.perf_counter() - start < 0.06  # 0.9 ms measured; ten times the budget for a busy machine


def one(steps: tuple[Any, ...], test: str, value: Any) -> PredicateSet:
    return PredicateSet.from_json(PredicateSet.of([Predicate("model:", Rule(steps, test, value))]).to_json())


@pytest.mark.parametrize(
    ("test", "value", "good", "bad"),
    [
        ("is", describe(float("nan")), float("nan"), 0.0),
        ("is", describe(-0.0), -0.0, 0.0),
        ("is", describe(float("inf")), math.inf, -math.inf),
        ("is", describe(1), 1, True),
        ("is", describe(True), True, 1),
        ("is", describe(2**70), 2**70, 2**70 + 1),
        ("is", describe((1, "a")), (1, "a"), [1, "a"]),
        ("is", describe({1, 2}), {2, 1}, {1}),
        ("is", describe(Color.RED), Color.RED, 1),
        ("is", describe(torch.float16), torch.float16, torch.bfloat16),
        ("is", describe(torch.device("cuda:1")), torch.device("cuda:0"), torch.device("cpu")),
        ("is", describe(nn.Linear), nn.Linear, nn.Conv1d),
        ("is", describe(torch.relu), torch.relu, torch.sigmoid),
        ("is", describe(nn.functional.silu), nn.functional.silu, nn.functional.gelu),
        ("is", describe(torch.ops.aten.add), torch.ops.aten.add, torch.ops.aten.sub),
        ("is", describe(None), None, object()),
        ("type", "builtins:int", 1, True),
        ("base", ["int", 3], type("Int", (int,), {})(3), 4),
        ("length", 2, [1, 2], [1]),
        ("length", 2, (1, 2), None),
        ("keys", ["a", "b"], {"a": 1, "b": 2}, {"b": 1, "a": 2}),
        ("contains", "a", {"a": 1}, {}),
        ("contains", describe(nn.Linear), {nn.Linear: 1}, {}),
        ("excludes", "a", {}, {"a": 1}),
        ("has", "real", 1, object()),
        ("lacks", "real", object(), 1),
        ("lacks_own", "a", Color, Norm()),
        ("not_none", None, 0, None),
        ("tensor", ["torch:Tensor", "torch.float32", [2], [1]], torch.ones(2), torch.ones(3)),
    ],
)
def test_each_kind_of_test(test: str, value: Any, good: Any, bad: Any) -> None:
    model = nn.Module()
    found = one((("attr", "held"),), test, value)
    model.held = good
    assert found.check(model, {}) == []
    model.held = bad
    if test == "lacks_own":
        bad.a = 1
    assert len(found.check(model, {})) == 1
    assert found.check(model, {})[0].path == "model.held"
    del model.held
    assert "found nothing" in str(found.check(model, {})[0])


def test_aliasing_is_by_object() -> None:
    found = one((("attr", "a"),), "same", ["model:", [["attr", "b"]]])
    model: Any = nn.Module()
    model.a = model.b = [1]
    assert found.check(model, {}) == []
    model.b = [1]
    assert str(found.check(model, {})[0]) == (
        "model.a: compiled with the same object as model.b, found another object"
    )


def test_a_module_that_is_not_imported_is_named() -> None:
    found = PredicateSet.of([Predicate("module:no.such", Rule((), "not_none", None))])
    text = str(found.check(nn.Module())[0])
    assert text == "no.such: compiled with it present, found no imported module no.such"


def test_a_property_that_raises_is_a_violation() -> None:
    class Broken(nn.Module):
        @property
        def size(self) -> int:
            raise RuntimeError("not now")

    assert "RuntimeError" in str(one((("attr", "size"),), "is", 1).check(Broken(), {})[0])


def test_functions_are_told_apart_by_code_not_by_name() -> None:
    def outer(bias: int) -> Any:
        @functools.wraps(nn.functional.silu)
        def silu(x: int) -> int:
            return x + bias

        return silu

    assert describe(outer(1)) == describe(outer(2))  # cells are guarded on their own
    assert describe(outer(1)) != describe(nn.functional.silu)
    assert describe(lambda x: x + 1) != describe(lambda x: x + 2)
    assert describe(eval("lambda x: x + 1")) == describe(eval("lambda x: x + 1"))


@pytest.mark.parametrize("value", [object(), nn.Linear(1, 1), "x" * (1 << 21), "\ud800", torch.ones(1)])
def test_objects_with_identity_are_not_portable(value: object) -> None:
    with pytest.raises(NotPortable):
        describe(value)


constants = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(st.integers(), max_size=3),
    max_leaves=8,
)


@given(constants, constants)
def test_described_values_are_equal_just_when_the_constants_are(a: object, b: object) -> None:
    assert json.loads(strict.canonical(describe(a))) == describe(a)
    assert isinstance(show(describe(a)), str)
    assert (describe(a) == describe(b)) == (repr(a) == repr(b))


def stored(**changes: object) -> bytes:
    base: dict[str, object] = {
        "schema": 1,
        "rules": [[[["attr", "eps"]], "is", 1, ""]],
        "groups": [[["model:"], [0]]],
    }
    return strict.canonical({**base, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"extra": 1},
        {"rules": [[[["call", "eps"]], "is", 1, ""]]},
        {"rules": [[[["attr"]], "is", 1, ""]]},
        {"rules": [[[["attr", 1]], "is", 1, ""]]},
        {"rules": [[[["type", "x"]], "is", 1, ""]]},
        {"rules": [[[["attr", "x"]] * 65, "is", 1, ""]]},
        {"rules": [[[["attr", "eps"]], "eval", 1, ""]]},
        {"rules": [[[["attr", "eps"]], "length", "1", ""]]},
        {"rules": [[[["attr", "eps"]], "length", True, ""]]},
        {"rules": [[[["attr", "eps"]], "same", ["nowhere:", []], ""]]},
        {"rules": [[[["attr", "eps"]], "same", [], ""]]},
        {"rules": [[[["attr", "eps"]], "tensor", [1], ""]]},
        {"rules": [[[["attr", "eps"]], "is", ["float", "x"], ""]]},
        {"rules": [[[["attr", "eps"]], "is", ["dict", [1]], ""]]},
        {"rules": [[[["attr", "eps"]], "is", [], ""]]},
        {"rules": [[[["attr", "eps"]], "is", ["float"], ""]]},
        {"rules": [[[["attr", "eps"]], "base", [], ""]]},
        {"rules": [[[["attr", "eps"]], "is", 1]]},
        {"rules": [1]},
        {"groups": [[["model:"], [1]]]},
        {"groups": [[["model:"], [-1]]]},
        {"groups": [[["elsewhere:"], [0]]]},
        {"groups": [[["model:"]]]},
        {"groups": 1},
    ],
)
def test_damaged_predicates_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptEntry):
        PredicateSet.from_json(stored(**changes))


def test_the_undamaged_form_is_read() -> None:
    assert len(PredicateSet.from_json(stored())) == 1


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"schema":1,"schema":1}', b"{}"])
def test_what_is_not_the_form_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptEntry):
        PredicateSet.from_json(data)


def test_every_step_is_followed_and_shown() -> None:
    def function() -> object:
        return cell

    cell = {"k": [7], 1: "one"}
    followed = {
        "attr": (("__name__",), function, "function"),
        "plain_attr": (("__name__",), function, "function"),
        "item": (("k",), cell, [7]),
        "bytes_item": (("k",), {b"k": 1}, 1),
        "dict_item": ((1,), cell, "one"),
        "list_item": ((0,), [5], 5),
        "key": ((1,), cell, 1),
        "value_at": ((1,), cell, "one"),
        "free": (("cell",), function, cell),
        "type": ((), 1, int),
        "vars": ((), Color, Color.__dict__),
        "fields": ((), Rule, Rule.__dataclass_fields__),
    }
    assert set(followed) == set(STEPS)
    for kind, (operand, value, expected) in followed.items():
        step: Any = (kind, *operand)
        got: Any = getter([step])(value)
        assert got == expected or [field.name for field in got] == list(Rule.__dataclass_fields__)
        assert show_path("model:a", [step]).startswith("model.a")
