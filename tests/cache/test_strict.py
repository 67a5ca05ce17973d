from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_canonical_round_trip(value: object) -> None:
    data = strict.canonical(value)
    assert strict.canonical(strict.loads(data, where="test")) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a":1,"a":2}',
        b"NaN",
        b"-Infinity",
        b"1" * 21,
        b"[" * 65 + b"]" * 65,
        b"[" * 10**6,
        b"\xff",
        b"1 2",
    ],
)
def test_what_is_not_strict(data: bytes) -> None:
    with pytest.raises(CorruptEntry, match="test"):
        strict.loads(data, where="test")


def test_size_limit() -> None:
    with pytest.raises(CorruptEntry, match="at most 3"):
        strict.loads(b"1234", where="test", max_bytes=3)


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "a b", "a\n", "é", "x" * 129, 3, None])
def test_names(name: object) -> None:
    with pytest.raises(CorruptEntry):
        strict.as_name(name, "test")
    assert strict.as_name("piece_0.v1-b", "test") == "piece_0.v1-b"


def test_fields_refuse_what_was_not_taken() -> None:
    fields = strict.Fields(json.loads('{"a": 1, "b": 2}'), "test")
    fields.int_("a")
    with pytest.raises(CorruptEntry, match="'b'"):
        fields.done()
