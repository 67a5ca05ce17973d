"""Store: JSON that is read strictly and written canonically.

Everything pwcc reads back from a cache directory passes through :func:`loads` and :class:`Fields`:
bounded size, depth and number of values, no duplicate keys, no NaN or infinity, no huge integers, no lone
surrogates, no unknown fields. Messages hold a bounded part of what came.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias, TypeVar

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import DIGEST_PATTERN, KEY_PATTERN, BlobDigest

T = TypeVar("T")

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_BYTES = 64 * 1024 * 1024  # the largest manifest seen, 32 layers x 5 variants, is under 2 MiB
MAX_DEPTH = 64
# An empty object takes 3 bytes of text and 72 of memory. The largest file seen has some 100,000 values.
MAX_VALUES = 1_000_000
_ALWAYS_FEW = 1024 * 1024  # bytes of JSON that need no count: three bytes a value
NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
MAX_INT_DIGITS = 20  # 64-bit values and a sign
MAX_FLOAT_DIGITS = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def canonical(value: object) -> bytes:
    """Return ``value`` as JSON bytes: sorted keys, no spaces, UTF-8, no NaN. Same value, same bytes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def loads(data: bytes, *, where: str, max_bytes: int = MAX_BYTES) -> object:
    """Parse bounded, duplicate-free JSON.

    Raises:
        CorruptEntry: larger than ``max_bytes``, more than a million values, deeper than 64 levels, a
            duplicate key, NaN, Infinity or a number that is none, an integer beyond 20 digits, text with
            lone surrogates, or not JSON in UTF-8 at all.
    """
    if len(data) > max_bytes:
        raise CorruptEntry(f"expected at most {max_bytes} bytes of JSON, got {len(data)}", where=where)
    if len(data) > _ALWAYS_FEW and sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise CorruptEntry(f"expected at most {MAX_VALUES} values in a JSON file", where=where)

    def fail(what: str) -> NoReturn:
        raise CorruptEntry(f"expected strict JSON, got {what}", where=where)

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(items)
        if len(found) != len(items):
            fail("an object with a duplicate key")
        return found

    def integer(text: str) -> int:
        if len(text) > MAX_INT_DIGITS:
            fail(f"an integer of {len(text)} digits")
        return int(text)

    def real(text: str) -> float:
        if len(text) > MAX_FLOAT_DIGITS or not math.isfinite(value := float(text)):
            fail("a number that is not finite, or of too many digits")
        return value

    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=real,
            parse_constant=fail,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptEntry(f"expected JSON, got {type(error).__name__}: {error}", where=where) from None
    _check_depth(value, fail)
    if _SURROGATE.search(data):  # an escape: UTF-8 itself cannot hold one
        try:
            canonical(value)
        except UnicodeEncodeError:
            fail("text with a lone surrogate")
    return value


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """Return what came, for a message: its repr, of at most 80 characters, without building a longer one."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _check_depth(value: object, fail: Callable[[str], NoReturn]) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [item for item in below if isinstance(item, (dict, list))]
        if not level:
            return
    fail(f"nesting deeper than {MAX_DEPTH}")


class Fields:
    """Typed access to one JSON object; every wrong type or unknown key is a :class:`CorruptEntry`.

    Take fields by name, then call :meth:`done`, which refuses what was not taken.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CorruptEntry(f"expected an object, got {type(value).__name__}", where=where)
        self._value = value
        self._left = set(value)
        self.where = where

    def fail(self, name: str, expected: str, got: object) -> NoReturn:
        """Raise the error for field ``name``."""
        raise CorruptEntry(f"expected {expected} in field {name!r}, got {shown(got)}", where=self.where)

    def take(self, name: str) -> object:
        """Return the raw field, which must exist."""
        if name not in self._value:
            raise CorruptEntry(f"expected a field {name!r}, found none", where=self.where)
        self._left.discard(name)
        return self._value[name]

    def str_(self, name: str, *, max_length: int = 4096) -> str:
        """Return a string of at most ``max_length`` characters."""
        value = self.take(name)
        if not isinstance(value, str) or len(value) > max_length:
            self.fail(name, f"a string of at most {max_length} characters", value)
        return value

    def opt_str(self, name: str) -> str | None:
        """Return a string or None."""
        return None if self.take(name) is None else self.str_(name)

    def int_(self, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int:
        """Return an integer within ``[low, high]``."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"an integer in [{low}, {high}]", value)
        return value

    def opt_int(self, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int | None:
        """Return an integer within ``[low, high]`` or None."""
        return None if self.take(name) is None else self.int_(name, low=low, high=high)

    def bool_(self, name: str) -> bool:
        """Return a boolean."""
        value = self.take(name)
        if not isinstance(value, bool):
            self.fail(name, "true or false", value)
        return value

    def float_(self, name: str) -> float:
        """Return a number as a float."""
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(name, "a number", value)
        return float(value)

    def digest(self, name: str) -> BlobDigest:
        """Return a SHA-256 blob digest."""
        value = self.take(name)
        if not isinstance(value, str) or not DIGEST_PATTERN.fullmatch(value):
            self.fail(name, "64 hex digits", value)
        return BlobDigest(value)

    def opt_digest(self, name: str) -> BlobDigest | None:
        """Return a SHA-256 blob digest or None."""
        return None if self.take(name) is None else self.digest(name)

    def key(self, name: str) -> str:
        """Return a 32-digit key."""
        value = self.take(name)
        if not isinstance(value, str) or not KEY_PATTERN.fullmatch(value):
            self.fail(name, "32 hex digits", value)
        return value

    def list_(self, name: str, item: Callable[[object, str], T], *, max_items: int = 100_000) -> tuple[T, ...]:
        """Return a list whose items are parsed by ``item(value, where)``."""
        value = self.take(name)
        if not isinstance(value, list) or len(value) > max_items:
            self.fail(name, f"a list of at most {max_items} items", value)
        return tuple(item(element, f"{self.where}:{name}[{index}]") for index, element in enumerate(value))

    def mapping(self, name: str, item: Callable[[object, str], T], *, max_items: int = 100_000) -> dict[str, T]:
        """Return an object whose values are parsed by ``item(value, where)``."""
        value = self.take(name)
        if not isinstance(value, dict) or len(value) > max_items:
            self.fail(name, f"an object of at most {max_items} fields", value)
        return {key: item(element, f"{self.where}:{name}.{key[:80]}") for key, element in value.items()}

    def item(self, name: str, parse: Callable[[object, str], T]) -> T:
        """Return the field parsed by ``parse(value, where)``."""
        return parse(self.take(name), f"{self.where}:{name}")

    def opt_item(self, name: str, parse: Callable[[object, str], T]) -> T | None:
        """Return the field parsed by ``parse(value, where)``, or None."""
        return None if self.take(name) is None else self.item(name, parse)

    def child(self, name: str) -> Fields:
        """Return a nested object."""
        return Fields(self.take(name), f"{self.where}:{name}")

    def done(self) -> None:
        """Refuse fields that were not taken."""
        if self._left:
            raise CorruptEntry(f"unknown fields {shown(sorted(self._left)[:5])}", where=self.where)


def as_str(value: object, where: str) -> str:
    """Item parser: a string of at most 4,096 characters."""
    if not isinstance(value, str) or len(value) > 4096:
        raise CorruptEntry(f"expected a string, got {type(value).__name__}", where=where)
    return value


def as_int(value: object, where: str) -> int:
    """Item parser: an integer of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise CorruptEntry(f"expected an integer, got {type(value).__name__}", where=where)
    return value


def as_digest(value: object, where: str) -> BlobDigest:
    """Item parser: a SHA-256 blob digest."""
    if not isinstance(value, str) or not DIGEST_PATTERN.fullmatch(value):
        raise CorruptEntry("expected 64 hex digits", where=where)
    return BlobDigest(value)


def as_json(value: object, where: str) -> Json:
    """Item parser: any JSON value with string keys, depth already bounded by :func:`loads`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [as_json(item, where) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, where) for key, item in value.items()}
    raise CorruptEntry(f"expected a JSON value, got {type(value).__name__}", where=where)


def as_text(value: object, where: str) -> str:
    """Item parser: a printable string of at most 4,096 characters.

    Control characters are refused because ``inspect`` prints these fields to a terminal.
    """
    text = as_str(value, where)
    if not text.isprintable():
        raise CorruptEntry(f"expected printable text, got {text[:80]!r}", where=where)
    return text


def as_name(value: object, where: str) -> str:
    """Item parser: a name safe as a file name: letters, digits and ``_.-``, no leading dot, at most 128."""
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise CorruptEntry(f"expected a plain name, got {shown(value)}", where=where)
    return value


def as_key(value: object, where: str) -> str:
    """Item parser: a 32-digit key."""
    if not isinstance(value, str) or not KEY_PATTERN.fullmatch(value):
        raise CorruptEntry("expected 32 hex digits", where=where)
    return value


def read_bounded(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a plain file of at most ``max_bytes``. Waits for nobody: a named pipe in a cache is refused.

    Raises:
        CorruptEntry: the file is larger, or no plain file. OSError passes through.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptEntry("expected a plain file, got something else", where=path.name)
        if found.st_size > max_bytes:
            raise CorruptEntry(f"expected at most {max_bytes} bytes, got {found.st_size}", where=path.name)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            data = stream.read(found.st_size + 1)  # not max_bytes: the buffer is allocated first
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise CorruptEntry(f"expected at most {max_bytes} bytes", where=path.name)
    return data
