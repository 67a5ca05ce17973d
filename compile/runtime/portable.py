"""Artifact: Python values as JSON that means the same in another process on another machine.

``describe`` is used by both sides: on the value that was compiled with, and on the live one; equal
JSON is equal for us. Natives stay as they are (None, booleans, strings, 64-bit integers); all else is
``[tag, ...]``. Nothing here holds an address, an absolute path or a hash that varies by process.

Private names: the classes ``OpOverload`` and ``OpOverloadPacket`` of ``torch._ops`` (2.11.0, 2.13.0),
the types of ``torch.ops.aten.add.Tensor`` and ``torch.ops.aten.add``.
"""

from __future__ import annotations

import enum
import hashlib
import math
import sys
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, TypeAlias

import torch

from pwcc.cache import strict
from pwcc.compile.torch_private import user_kernels

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_CONSTANT = 1 << 20  # a longer constant is data, not configuration
_INT64 = 1 << 63


class NotPortable(Exception):
    """The value has no form that another process could compare with; the message says what it is."""


def type_name(cls: type) -> str:
    """Return ``module:qualname``."""
    return f"{module_name(cls.__module__)}:{cls.__qualname__}"


def module_name(name: object) -> str:
    """Return a module's name; a spawned child knows the script as ``__mp_main__``."""
    return "__main__" if name == "__mp_main__" else str(name)


def attempt(value: object) -> Json:
    """Return the portable form of a live value, or one that equals no compiled value."""
    try:
        return describe(value)
    except NotPortable as error:
        return ["unportable", str(error)]


def float_text(value: float) -> str:
    """Return a float exactly: hexadecimal, so that -0.0 differs from 0.0 and every nan is equal."""
    return "nan" if math.isnan(value) else value.hex()


def describe(value: object) -> Json:
    """Return the portable form of a constant, type, function, module, operator or Triton kernel.

    Devices are described by type alone: the index is the serving host's choice.

    Raises:
        NotPortable: an object with identity or state of its own, or a constant over 1 MiB.
    """
    kind = type(value)
    exact = _EXACT.get(kind)
    if exact is not None:
        return exact(value)
    for base, form in _KINDS:
        if isinstance(value, base):
            return form(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return ["numpy", kind.__name__, describe(value.item())]  # type: ignore[attr-defined]  # numpy scalars have it
    if kind.__module__ == "numpy" and _is_numpys_own(value):
        return ["builtin", "numpy", str(getattr(value, "__name__", None))]
    if user_kernels.is_kernel(value):
        return _kernel(value)
    raise NotPortable(f"an object of type {type_name(kind)}")


def _is_numpys_own(value: object) -> bool:
    """Tell whether NumPy itself has this function (a ufunc such as ``np.sqrt``) under its name."""
    name = getattr(value, "__name__", None)
    return isinstance(name, str) and getattr(sys.modules.get("numpy"), name, None) is value


def _kernel(value: Any) -> Json:
    """A Triton kernel by name and source, with the configurations that it tries."""
    function = user_kernels.jitted(value)
    try:
        return [
            "kernel",
            module_name(function.__module__),
            str(function.__name__),
            user_kernels.source_digest(value),
        ]
    except Exception as error:  # Triton reads and parses the source, which may fail in any way
        raise NotPortable(f"a Triton kernel whose source cannot be read: {type(error).__name__}") from error


def _enum(value: enum.Enum) -> Json:
    """An enum member by type and name, and by what it stands for where that has a form of its own."""
    try:
        held = describe(value.value)
    except NotPortable:
        held = []
    return ["enum", type_name(type(value)), str(value.name), held]


def _integer(value: int) -> Json:
    return value if -_INT64 <= value < _INT64 else ["int", hex(value)]


def _text(value: str) -> Json:
    if len(value) > MAX_CONSTANT:
        raise NotPortable(f"a string of {len(value)} characters")
    if not value.isascii() and value != value.encode(errors="replace").decode():
        raise NotPortable("a string with lone surrogates")
    return value


def _bytes(value: bytes) -> Json:
    if len(value) > MAX_CONSTANT:
        raise NotPortable(f"{len(value)} bytes")
    return ["bytes", value.hex()]


def _sequence(tag: str) -> Callable[[Any], Json]:
    return lambda value: [tag, [describe(item) for item in value]]


def _unordered(tag: str) -> Callable[[Any], Json]:
    return lambda value: [tag, sorted((describe(item) for item in value), key=strict.canonical)]


def _builtin_name(value: object) -> str:
    qualname = str(getattr(value, "__qualname__", ""))
    # pybind11 puts a record name there that spells out the C++ library and its ABI
    return qualname.rpartition(".")[2] if qualname.startswith("pybind11_") else qualname


def code_identity(code: CodeType) -> list[Json]:
    """Return what tells this code object from others, given that its source file digests the same.

    The qualified name of the code (not of the function: ``functools.wraps`` copies that); the line for
    local functions, several of which may share a name; the code's digest where a line cannot tell
    (lambdas) or no file exists (notebooks, ``exec``). Byte code varies by Python minor version, so the
    digest is used only there.
    """
    name = code.co_qualname
    fileless = code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")
    if fileless or "<lambda>" in name:
        return [name, code_digest(code)]
    return [name, code.co_firstlineno] if "<locals>" in name else [name]


def code_digest(code: CodeType) -> str:
    """Return the SHA-256 of a code object's meaning: instructions, names, constants, nested code."""
    digest = hashlib.sha256(code.co_code)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount)
    digest.update(strict.canonical(describe(names)))
    for constant in code.co_consts:
        text = code_digest(constant) if isinstance(constant, CodeType) else strict.canonical(describe(constant))
        digest.update(b"\0" + (text.encode() if isinstance(text, str) else text))
    return digest.hexdigest()


_EXACT: dict[object, Callable[[Any], Json]] = {
    type(None): lambda value: None,
    bool: bool,
    str: _text,
    int: _integer,
    float: lambda value: ["float", float_text(value)],
    complex: lambda value: ["complex", float_text(value.real), float_text(value.imag)],
    bytes: _bytes,
    tuple: _sequence("tuple"),
    list: _sequence("list"),
    torch.Size: _sequence("size"),
    set: _unordered("set"),
    frozenset: _unordered("frozenset"),
    dict: lambda value: ["dict", [[describe(key), describe(item)] for key, item in value.items()]],
    slice: lambda value: ["slice", [describe(part) for part in (value.start, value.stop, value.step)]],
    range: lambda value: ["range", [value.start, value.stop, value.step]],
    type(Ellipsis): lambda value: ["ellipsis"],
    torch.device: lambda value: ["device", value.type],
    CodeType: lambda value: ["code", *code_identity(value)],
    FunctionType: lambda value: ["function", _home(value), *code_identity(value.__code__)],
    MethodType: lambda value: ["method", describe(value.__func__), type_name(type(value.__self__))],
}
"""Forms of exact types: a subclass may compare, print or behave as it likes."""

_KINDS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Json]], ...] = (
    (enum.Enum, _enum),
    (type, lambda value: ["class", type_name(value)]),
    (ModuleType, lambda value: ["module", module_name(value.__name__)]),
    ((torch.dtype, torch.layout, torch.memory_format, torch.qscheme), lambda value: ["torch", str(value)]),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), lambda value: ["operator", str(value)]),
    (
        (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType),
        lambda value: ["builtin", str(getattr(value, "__module__", None)), _builtin_name(value)],
    ),
)
"""Forms of whole families of types."""


def _home(function: FunctionType) -> str:
    return module_name(function.__globals__.get("__name__"))


def show(value: Json) -> str:
    """Return a described value for a message: Python's own spelling where there is one."""
    if not isinstance(value, list):
        return repr(value)
    tag, rest = str(value[0]), value[1:]
    items = rest[0] if rest and isinstance(rest[0], list) else []
    if tag == "float":
        text = repr(float.fromhex(str(rest[0])))
    elif tag == "dict":
        text = "{" + ", ".join(f"{show(key)}: {show(item)}" for key, item in map(_pair, items)) + "}"
    elif items:
        text = f"{tag}({', '.join(show(item) for item in items)})"
    elif tag in ("torch", "operator", "unportable"):
        text = str(rest[0])
    elif tag == "bytes":
        text = repr(bytes.fromhex(str(rest[0])))
    elif tag in ("function", "code", "kernel"):
        text = _shown_code(tag, rest)
    elif tag == "method" and isinstance(rest[0], list):
        text = f"method {show(rest[0])} of a {rest[1]}"
    else:
        text = f"{tag} {' '.join(str(part) for part in rest if part != [])}".strip()
    return text


def _shown_code(tag: str, parts: list[Json]) -> str:
    """Word a function or a code object: its name, then the line or the digest that tells it from others."""
    named = 1 if tag == "code" else 2
    name, more = ":".join(map(str, parts[:named])), parts[named:]
    what = "source" if tag == "kernel" else "code"
    told = [f"at line {part}" if isinstance(part, int) else f"with {what} {str(part)[:12]}" for part in more]
    return " ".join([tag, name, *told])


def _pair(value: Json) -> tuple[Json, Json]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("expected a pair")
    return value[0], value[1]
