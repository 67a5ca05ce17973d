"""A secret that a model took from the environment is compared by digest, and shown nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.compile.runtime.predicates import Predicate, PredicateSet, Rule
from pwcc.compile.secrets import Secrets

SECRET = "sk-volpe-e-gatto-0042"
VARIABLES = ("MY_API_KEY", "MY_MODE", "MY_PLACE")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("MY_MODE", "fast")
    monkeypatch.setenv("MY_PLACE", "postgres://mangiafoco:trottola@db.internal/x")


class Model(torch.nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.__dict__.update(held)


def rule(name: str, test: str, value: Any) -> Predicate:
    return Predicate("model:", Rule((("attr", name),), test, value, "m.py:3"))


def stored(*predicates: Predicate) -> tuple[PredicateSet, bytes]:
    data = PredicateSet.of(Secrets(VARIABLES).hide(predicates, "salt")).to_json()
    return PredicateSet.from_json(data), data


@pytest.mark.parametrize(
    ("name", "test", "value", "right", "wrong"),
    [
        ("plain", "is", SECRET, SECRET, "sk-altro-9999"),
        ("longer", "is", f"Bearer {SECRET}", f"Bearer {SECRET}", f"Bearer {SECRET}x"),
        ("part", "is", "trottola", "trottola", "girotondo"),
        ("inner", "is", ["list", ["a", SECRET]], ["a", SECRET], ["a", "b"]),
        ("raw", "is", ["bytes", SECRET.encode().hex()], SECRET.encode(), b"other"),
        ("table", "keys", [SECRET, "other"], {SECRET: 1, "other": 2}, {"other": 2}),
        ("some", "contains", SECRET, {SECRET}, {"other"}),
        ("none", "excludes", SECRET, {"other"}, {SECRET}),
        ("based", "base", ["str", SECRET], SECRET, "other-secret"),
        ("auth_header", "is", "not-from-the-environment", "not-from-the-environment", "else"),
    ],
)
def test_a_secret_is_compared_and_not_kept(name: str, test: str, value: Any, right: Any, wrong: Any) -> None:
    predicates, data = stored(rule(name, test, value))
    for text in (SECRET, "trottola", SECRET.encode().hex(), "not-from-the-environment"):
        assert text.encode() not in data
    assert predicates.check(Model(**{name: right})) == []
    (violated,) = predicates.check(Model(**{name: wrong}))
    assert "compiled with a value that is not shown, found another (relied on at m.py:3)" in str(violated)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "fast"), ("num_key_heads", 8), ("activation", "silu"), ("token_class", ["class", "m:Token"])],
)
def test_plain_settings_stay_readable(name: str, value: Any) -> None:
    (kept,) = Secrets(VARIABLES).hide([rule(name, "is", value)], "salt")
    assert kept == rule(name, "is", value)


def test_one_secret_has_another_digest_in_another_models_entry() -> None:
    one, other = (Secrets(VARIABLES).hide([rule("k", "is", SECRET)], salt)[0] for salt in ("a", "b"))
    assert one.rule.value[2] != other.rule.value[2]  # type: ignore[index]


def test_a_secret_of_this_host_is_not_shown_where_another_value_was_compiled() -> None:
    predicates, _ = stored(rule("place", "is", "local"))
    (violated,) = predicates.check(Model(place=SECRET))
    assert str(violated).startswith("model.place: compiled with 'local', found a value that is not shown")


def test_a_secret_on_the_way_to_a_value_is_refused() -> None:
    on_the_way = Predicate("model:", Rule((("attr", "table"), ("item", SECRET)), "is", 3, "m.py:3"))
    with pytest.raises(UnsealableError, match="secret of the environment") as error:
        Secrets(VARIABLES).hide([on_the_way], "salt")
    assert SECRET not in str(error.value)


def test_a_secret_among_the_constants_of_a_graph_is_refused() -> None:
    graph = fx.Graph()
    graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), [1, "fast"]))
    Secrets(VARIABLES).require_none_in([graph])
    graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("y"), [1, SECRET]))
    with pytest.raises(UnsealableError, match="secret of the environment"):
        Secrets(VARIABLES).require_none_in([graph])


def test_a_secret_as_the_default_of_a_parameter_is_refused() -> None:
    Secrets(VARIABLES).require_none_among(["fast", None, 3])
    with pytest.raises(UnsealableError, match="default of a parameter"):
        Secrets(VARIABLES).require_none_among([f"Bearer {SECRET}"])


@pytest.mark.parametrize("value", [["is", "salt"], ["length", "salt", "00"], ["is", 1, "00"], "text"])
def test_a_stored_secret_of_another_form_is_corrupt(value: Any) -> None:
    data = (
        PredicateSet.of([rule("k", "is", 1)])
        .to_json()
        .replace(b'"is",1', b'"secret",%s' % repr(value).replace("'", '"').encode())
    )
    with pytest.raises(CorruptEntry):
        PredicateSet.from_json(data)
