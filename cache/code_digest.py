"""Key: the content digest of a code object that has no file, and how to find it again by name.

The digest covers bytecode, constants (nested code too), names, flags and exception table. It leaves
out file name, line numbers and addresses, so that re-running a notebook cell unchanged is the same
code. Bytecode belongs to one Python minor version: under another one the digest differs.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Iterator, Mapping

from pwcc.cache.errors import FactorError
from pwcc.cache.ids import FactorDigest, factor_digest


def digest_code(code: types.CodeType) -> FactorDigest:
    """Return the XXH3-128 of what ``code`` does.

    Raises:
        FactorError: a constant of a type that has no stable form.
    """
    return factor_digest(_encode(code))


def find_code(namespace: Mapping[str, object], qualname: str) -> list[types.CodeType]:
    """Return the code objects that ``qualname`` may name below a module's ``namespace``.

    Runs no user code: classes and descriptors are read through their ``__dict__``. Functions made
    inside other functions are found as constants of those; more than one may match.
    """
    head, *rest = [part for part in qualname.split(".") if part != "<locals>"]
    return list(dict.fromkeys(_descend(namespace.get(head), rest)))


def _descend(value: object, rest: list[str]) -> Iterator[types.CodeType]:
    if isinstance(value, type) and rest:
        yield from _descend(vars(value).get(rest[0]), rest[1:])
        return
    for code in _codes_of(value):
        found = [code]
        for name in rest:
            inner = [const for outer in found for const in outer.co_consts if isinstance(const, types.CodeType)]
            found = [const for const in inner if const.co_name == name]
        yield from found


def _codes_of(value: object) -> Iterator[types.CodeType]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield from _codes_of(accessor)
    seen = 0
    while isinstance(value, types.FunctionType) and seen < 32:
        yield value.__code__
        value = vars(value).get("__wrapped__")  # functools.wraps: the decorated function lies below
        seen += 1


def _encode(value: object) -> bytes:
    if value is None or value is Ellipsis or isinstance(value, bool):
        return _part(b"k", repr(value).encode())
    if isinstance(value, int):
        return _part(b"i", str(value).encode() if abs(value) < 2**64 else hex(value).encode())
    if isinstance(value, float):
        return _part(b"f", struct.pack("<d", value))
    if isinstance(value, complex):
        return _part(b"c", struct.pack("<dd", value.real, value.imag))
    if isinstance(value, str):
        return _part(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _part(b"b", value)
    if isinstance(value, tuple):
        return _part(b"t", b"".join(_encode(item) for item in value))
    if isinstance(value, frozenset):
        return _part(b"z", b"".join(sorted(_encode(item) for item in value)))
    if isinstance(value, slice):
        return _part(b"l", _encode((value.start, value.stop, value.step)))
    if isinstance(value, types.CodeType):
        return _part(b"o", _encode_code(value))
    raise FactorError(f"expected a plain constant in a code object, got {type(value).__qualname__}")


def _encode_code(code: types.CodeType) -> bytes:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return b"".join(
        _encode(part)
        for part in (code.co_name, counts, code.co_code, code.co_exceptiontable, names, code.co_consts)
    )


def _part(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(8, "little") + data
