"""Key: the content digest of a code object that has no file, and how to find it again by name.

The digest covers bytecode, constants (nested code too), names, flags and exception table. It leaves
out file name, line numbers and addresses, so that re-running a notebook cell unchanged is the same
code. Bytecode belongs to one Python minor version: under another one the digest differs.
"""

from __future__ import annotations

import functools
import struct
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from pwcc.cache.errors import FactorError
from pwcc.cache.ids import FactorDigest, factor_digest

MAX_FUNCTIONS: Final = 64
"""Functions that one value may lead to, through what decorators wrap and close over."""
_CACHED: Final[type] = type(functools.lru_cache(lambda: None))


def digest_code(code: types.CodeType) -> FactorDigest:
    """Return the XXH3-128 of what ``code`` does.

    Raises:
        FactorError: a constant of a type that has no stable form.
    """
    return factor_digest(_encode(code))


def find_code(namespace: Mapping[str, object], qualname: str) -> list[types.CodeType]:
    """Return the code objects that ``qualname`` may name below a module's ``namespace``.

    Runs no user code: classes and descriptors are read through their ``__dict__``. Functions made
    inside other functions are found as constants of those, decorated ones behind what decorators left
    under the name; more than one may match.
    """
    head, *rest = [part for part in qualname.split(".") if part != "<locals>"]
    return list(dict.fromkeys(_descend(namespace.get(head), rest)))


def _descend(value: object, rest: list[str]) -> Iterator[types.CodeType]:
    if isinstance(value, type) and rest:
        yield from _descend(vars(value).get(rest[0]), rest[1:])
        return
    for code in codes_of(value):
        found = [code]
        for name in rest:
            inner = [const for outer in found for const in outer.co_consts if isinstance(const, types.CodeType)]
            found = [const for const in inner if const.co_name == name]
        yield from found


def codes_of(value: object) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions it wraps or closes over, outermost first."""
    for function in functions_of(value):
        yield function.__code__


def functions_of(value: object) -> Iterator[types.FunctionType]:
    """Yield the functions behind descriptors, decorators and partial calls, outermost first.

    Calls none of them, and reads no attribute but through ``__dict__``. At most 64.
    """
    waiting: deque[object] = deque([value])
    seen: dict[int, object] = {}
    while waiting and len(seen) < MAX_FUNCTIONS:
        found = waiting.popleft()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, types.FunctionType):
            yield found
            waiting.append(vars(found).get("__wrapped__"))  # what functools.wraps leaves
            waiting += [held for cell in found.__closure__ or () if _is_wrapper(held := _content(cell))]
        elif isinstance(found, (staticmethod, classmethod, types.MethodType)):
            waiting.append(found.__func__)
        elif isinstance(found, property):
            waiting += [found.fget, found.fset, found.fdel]
        elif isinstance(found, (functools.partial, functools.partialmethod, functools.cached_property)):
            waiting.append(found.func)
        elif isinstance(found, _CACHED):
            waiting.append(found.__dict__.get("__wrapped__"))


def _is_wrapper(held: object) -> bool:
    return isinstance(held, (types.FunctionType, types.MethodType, functools.partial, _CACHED))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


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
