"""Records of classes: what is the same under one name, and what a difference is called."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.compile.runtime import hooks
from pwcc.compile.runtime.classes import class_record, contrast, is_plain
from pwcc.compile.runtime.predicates import Predicate, PredicateSet, Rule


class Relu:
    def act(self, x: Tensor) -> Tensor:
        return torch.relu(x)


class Tanh:
    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def one(self: Any) -> int:
    return 1


def two(self: Any) -> int:
    return 2


def through(function: Any) -> Any:
    def inner(self: Any) -> Any:
        return function(self)

    return inner


class Meta(type):
    scale = 2.0


def layer(base: type = Relu, meta: type = type, **members: object) -> type:
    made: type = meta("Layer", (base,), {"__module__": __name__, "limit": 3, "run": one, **members})
    return made


def differs(base: type = Relu, meta: type = type, **members: object) -> str:
    expected = json.loads(json.dumps(class_record(layer())))
    found = layer(base, meta, **members)
    assert class_record(found) != expected
    return " / ".join(contrast(expected, found))


def test_a_class_made_again_has_the_same_record() -> None:
    assert class_record(layer()) == class_record(layer())
    assert class_record(layer()) == class_record(layer(limit=4))  # Dynamo guards constants that are read
    assert json.loads(json.dumps(class_record(layer()))) == class_record(layer())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"base": Tanh}, f"one over {__name__}:Tanh"),
        ({"meta": Meta}, f"one of metaclass {__name__}:Meta"),
        ({"run": two}, f"one where it is {__name__}:two:"),
        ({"run": classmethod(one)}, "builtins:classmethod over"),
        ({"run": property(one)}, "builtins:property over"),
        ({"run": through(one)}, "through.<locals>.inner:"),
        ({"run": functools.partialmethod(one)}, "functools:partialmethod over"),
        ({"run": functools.lru_cache(one)}, "functools:_lru_cache_wrapper over"),
        ({"run": torch.relu}, "builtin over"),
        ({"__getattr__": two}, "Layer.__getattr__ is absent"),
        ({"__call__": lambda self: self}, "Layer.__call__ is absent"),
    ],
)
def test_a_difference_is_named(changed: dict[str, Any], said: str) -> None:
    assert said in differs(**changed)


def test_what_a_decorator_closes_over_and_what_hides_a_base_count() -> None:
    before, after = class_record(layer(run=through(one))), class_record(layer(run=through(two)))
    assert before != after
    base = layer()
    assert class_record(layer(base, limit=4)) != class_record(
        type("Layer", (base,), {"__module__": __name__, "run": one})
    )


def test_the_constants_of_a_metaclass_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(meta=Meta)
    before: Any = class_record(made)
    monkeypatch.setattr(Meta, "scale", 4.0)
    assert "Meta.scale is 2.0" in contrast(before, made)[0]
    monkeypatch.undo()
    made.scale = 8.0  # type: ignore[attr-defined]
    assert "8.0" in contrast(before, made)[1]


def test_torchs_and_pythons_classes_are_known_by_name() -> None:
    assert is_plain(nn.Linear)
    assert is_plain(dict)
    assert not is_plain(layer())


def test_a_predicate_tells_two_classes_of_one_name_apart() -> None:
    class Model(nn.Module):
        pass

    model = Model()
    model.part = layer()()
    steps = (("attr", "part"),)
    rules = [
        Predicate("model:", Rule(steps, "instance", class_record(layer()))),
        Predicate("model:", Rule((*steps, ("type",)), "class", class_record(layer()))),
    ]
    predicates = PredicateSet.from_json(PredicateSet.of(rules).to_json())
    assert not predicates.check(model)
    model.part = layer(Tanh)()
    said = [str(violation) for violation in predicates.check(model)]
    assert len(said) == 2
    assert all("found one over" in text for text in said), said
    del model.part
    assert len(predicates.check(model)) == 2


@pytest.mark.parametrize("name", ["__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"])
def test_replaced_functions_of_module_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert hooks.replaced_calls() == []
    monkeypatch.setattr(nn.Module, name, two)
    assert hooks.replaced_calls() == [f"Module.{name}"]
