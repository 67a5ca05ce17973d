"""Artifact: what a class is beyond its name: its bases, its metaclass, and the functions its methods are.

A class of the same name may have other bases or other methods: a factory chooses a mixin, a class body
takes one of two functions, a process patches a method. Dynamo runs what it finds by type, so the record is
``[name, bases in order, metaclass, members]``. A member is ``[class number and attribute, what it is]``; the
functions that a class's own file defines in it are one text of names and lines: the file's digest says the
rest. Constants are left out (Dynamo guards those that are read), but for those of a metaclass.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

from pwcc.cache.code_digest import functions_of
from pwcc.compile.runtime.portable import (
    Json,
    NotPortable,
    code_identity,
    describe,
    module_name,
    show,
    type_name,
)

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not by C code
_PYTHON = sys.stdlib_module_names | {"torch", "builtins"}
_OWN = "(own)"
_PLAIN_CELLS = ((), ("__class__",))  # a method that says super() closes over its class
_IGNORED = frozenset({"__class_getitem__", "__subclasshook__", "__abstractmethods__"})


def is_plain(cls: type) -> bool:
    """Tell whether a class is Python's, torch's or an extension's: known by its name and the torch build."""
    return all(_is_python(base) for base in cls.__mro__) and _is_python(type(cls))


def class_record(cls: type) -> list[Json]:
    """Return the record of a class; runs no code of its own. Some microseconds per method."""
    mro = cls.__mro__
    members: list[Json] = []
    for number, base in enumerate(mro):
        if not _is_python(base):
            members += _members(number, base)
    members += _hidden(mro)
    meta = type(cls)
    if not _is_python(meta):
        for base in inspect.getmro(meta):
            if not _is_python(base):
                members += _members(-1, base)
                members += _constants(cls, base)
    return [type_name(cls), [type_name(base) for base in mro[1:]], type_name(meta), members]


def contrast(expected: Any, cls: type) -> tuple[str, str]:
    """Word how a live class differs from a record: what was compiled, what was found."""
    found: Any = class_record(cls)
    name = str(expected[0])
    if found[0] != name:
        return f"type {name}", f"type {found[0]}"
    if found[1] != expected[1]:
        return f"type {name} over {_bases(expected[1])}", f"one over {_bases(found[1])}"
    if found[2] != expected[2]:
        return f"type {name} of metaclass {expected[2]}", f"one of metaclass {found[2]}"
    before, after = (_expanded(record[3]) for record in (expected, found))
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            number, _, attribute = key.partition(".")
            index = int(number)
            owner = expected[2] if index < 0 else ([name, *expected[1]])[index]
            return (
                f"type {name} whose {owner}.{attribute} is {_member(before, key)}",
                f"one where it is {_member(after, key)}",
            )
    return f"type {name}", "the same"


def contrast_class(expected: Any, value: object) -> tuple[str, str]:
    """Word how what was found in a class's place differs from the record; see :func:`contrast`."""
    if isinstance(value, type):
        return contrast(expected, value)
    return f"class {expected[0]}", f"an object of type {type_name(type(value))}"


def _bases(names: list[str]) -> str:
    return ", ".join(name for name in names if name != "builtins:object") or "nothing"


def _member(members: Mapping[str, Json], key: str) -> str:
    if key not in members:
        return "absent"
    found = members[key]
    if isinstance(found, int):
        return f"its own at line {found}"
    return " over ".join(map(str, found)) if isinstance(found, list) else str(found)


@functools.lru_cache(maxsize=1024)
def _is_python_name(module: str) -> bool:
    return module.partition(".")[0] in _PYTHON


def _is_python(cls: type) -> bool:
    if not cls.__flags__ & _HEAP_TYPE:
        return True
    module = cls.__module__
    return isinstance(module, str) and _is_python_name(module)


def _members(number: int, base: type) -> Iterator[Json]:
    own, prefix = base.__module__, base.__qualname__ + "."
    lines: list[str] = []
    for name, value in sorted(vars(base).items()):
        if name in _IGNORED:
            continue
        if type(value) is FunctionType and not value.__dict__:
            code = value.__code__
            if (
                code.co_freevars in _PLAIN_CELLS
                and code.co_qualname == prefix + name
                and value.__globals__.get("__name__") == own
                and not code.co_filename.startswith("<")
            ):
                lines.append(f"{name}={code.co_firstlineno}")
                continue
        found = _what(value)
        if found:
            yield [f"{number}.{name}", found]
    if lines:  # one text, as it is most of every record
        yield [f"{number}.{_OWN}", " ".join(lines)]


def _expanded(members: Any) -> dict[str, Json]:
    """Return a record's members by number and attribute, those of the class's own file too."""
    found: dict[str, Json] = {}
    for key, what in members:
        number, _, name = key.partition(".")
        if name == _OWN:
            for text in str(what).split():
                attribute, _, line = text.partition("=")
                found[f"{number}.{attribute}"] = int(line)
        else:
            found[key] = what
    return found


def _hidden(mro: Sequence[type]) -> Iterator[Json]:
    """Yield the plain data of a class that hides data of the same name further down."""
    first: dict[str, int] = {}
    for number in reversed(range(len(mro))):
        if _is_python(mro[number]):
            continue
        for name, value in sorted(vars(mro[number]).items()):
            if name.startswith(("__", "_abc_")) or isinstance(value, FunctionType) or _what(value):
                continue
            if name in first:
                yield [f"{number}.{name}", [f"set over {type_name(mro[first[name]])}"]]
            first[name] = number


def _what(value: object) -> list[Json]:
    """Return what a member is: its kind, and each function it leads to; empty for plain data."""
    kind = type(value)
    if isinstance(value, type):
        return ["class", type_name(value)]
    if isinstance(value, BuiltinFunctionType):
        return ["builtin", f"{value.__module__}.{value.__name__}"]
    functions = [_named(function) for function in functions_of(value)]
    if not functions and not (kind.__flags__ & _HEAP_TYPE and any("__get__" in vars(b) for b in kind.__mro__)):
        return []
    return [type_name(kind), *functions] if kind is not FunctionType else [*functions]


def _named(function: FunctionType) -> str:
    """Return ``module:qualified name:line``, or with the code's digest where no file tells the code."""
    code = function.__code__
    home = module_name(function.__globals__.get("__name__"))
    if code.co_qualname.startswith("__create_fn__."):  # a dataclass made it from a class that is a source
        return f"{home}:{code.co_name} (generated)"
    if _is_python_name(home):  # the line of a function of Python's changes with its patch version
        return f"{home}:{code.co_qualname}"
    try:
        identity = code_identity(code)
    except NotPortable as error:
        identity = [code.co_qualname, str(error)]
    return ":".join(
        [
            home,
            str(identity[0]),
            str(code.co_firstlineno),
            *(str(part)[:16] for part in identity[1:] if part != code.co_firstlineno),
        ]
    )


def _constants(cls: type, meta: type) -> Iterator[Json]:
    """Yield what a class has under the names of its metaclass's constants."""
    for name, value in sorted(vars(meta).items()):
        if name.startswith("__") or _what(value):
            continue
        held = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), value)
        try:
            described = describe(held)
        except NotPortable:
            described = describe(type(held))
        yield [f"-1.{name}", [show(described)]]
