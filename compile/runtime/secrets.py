"""Artifact: values that must not be readable in a store or in a message: salted digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, Final

from pwcc.cache import strict
from pwcc.cache.observed import is_clear
from pwcc.compile.runtime.comparisons import Check, as_base, keys_of
from pwcc.compile.runtime.portable import Json, NotPortable, attempt

SHORTEST: Final = 6
"""A shorter value is looked for as a whole only: as a part of a text it would be found by chance."""


def _base(value: Any) -> Json:
    try:
        return list(as_base(value))
    except NotPortable:
        return ["unportable"]


_READ: Final[dict[str, Callable[[Any], Json]]] = {"is": attempt, "base": _base, "keys": keys_of}
_AMONG: Final = ("contains", "excludes")
HIDEABLE: Final = (*_READ, *_AMONG)
"""Tests whose value may be kept as a digest."""


def hidden(test: str, value: Json, salt: str) -> list[Json]:
    """Return what a ``secret`` predicate keeps in place of ``test`` and its value."""
    return [test, salt, _digest(salt, value)]


def _digest(salt: str, value: Json) -> str:
    return hashlib.sha256(f"pwcc secret 1\0{salt}\0".encode() + strict.canonical(value)).hexdigest()


def secret(expected: Json) -> Check:
    """Meets the test that is named, whose value is known by its digest."""
    if not isinstance(expected, list) or len(expected) != 3 or not all(isinstance(e, str) for e in expected):
        raise ValueError("expected [test, salt, digest]")
    test, salt, digest = (str(item) for item in expected)
    if test in _READ:
        read = _READ[test]
        return lambda value, _: _digest(salt, read(value)) == digest
    if test not in _AMONG:
        raise ValueError(f"expected one of {', '.join(HIDEABLE)}")
    return lambda value, _: any(_digest(salt, attempt(key)) == digest for key in value) == (test == "contains")


def concealed(text: str) -> str:
    """Return a message's words about a live value, unless they hold a variable's value that is not plain."""
    for name, value in os.environ.items():
        if (
            value
            and not is_clear(name, value)
            and (text == repr(value) or (len(value) >= SHORTEST and value in text))
        ):
            return "a value that is not shown"
    return text
