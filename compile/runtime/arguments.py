"""Artifact: the arguments of a piece's operations: encoded as JSON, checked, and decoded again.

See :mod:`pwcc.compile.piece_graph` for the form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.expressions import parse_expression

_TORCH_VALUES: Mapping[str, type] = MappingProxyType(
    {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
)
_FLOATS = ("inf", "-inf", "nan")
_NUMBERS: Mapping[str, Callable[[str], complex]] = MappingProxyType({"float": float, "complex": complex})


def encode_constant(value: object) -> object:
    """Encode a leaf that is neither a node nor a symbol.

    Raises:
        TypeError: the value has no portable form.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": str(value)}
        case torch.device():
            return {"device": value.type}
        case _ if value is ...:
            return {"ellipsis": True}
    for tag, kind in _TORCH_VALUES.items():
        if type(value) is kind:
            return {tag: str(value).removeprefix("torch.")}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def check_argument(value: object, made: int, symbols: Sequence[str], where: str) -> None:
    """Check an encoded argument that may use the first ``made`` values and the given symbols.

    Raises:
        CorruptEntry: another form, an unknown tag, or a value that does not exist yet.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, list):
        for item in value:
            check_argument(item, made, symbols, where)
        return
    if not isinstance(value, dict) or len(value) != 1:
        raise CorruptEntry(f"expected an argument, got {repr(value)[:80]}", where=where)
    ((tag, held),) = value.items()
    if tag == "v" and type(held) is int and 0 <= held < made:
        return
    if tag == "s" and isinstance(held, str):
        parse_expression(held, symbols)
        return
    for item in _parts(tag, held, where):
        check_argument(item, made, symbols, where)


def _parts(tag: str, held: object, where: str) -> Sequence[object]:
    """Return the arguments inside a tagged one, whose form is checked."""
    match tag:
        case "dtype" | "layout" | "memory_format" if isinstance(held, str):
            torch_value(tag, held)
            return ()
        case "device" if isinstance(held, str):
            _device(held)
            return ()
        case "float" if held in _FLOATS:
            return ()
        case "complex" if isinstance(held, str) and _is_complex(held):
            return ()
        case "ellipsis" if held is True:
            return ()
        case "tuple" if isinstance(held, list):
            return held
        case "slice" if isinstance(held, list) and len(held) == 3:
            return held
        case "dict" if isinstance(held, list) and all(_is_pair(item) for item in held):
            return [item for _, item in held]
        case _:
            raise CorruptEntry(f"expected an argument, got {repr({tag: held})[:80]}", where=where)


def _is_complex(text: str) -> bool:
    try:
        return str(complex(text)) == text
    except ValueError:
        return False


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)


def torch_value(tag: str, name: str) -> object:
    """Return ``torch.<name>``, a dtype, layout or memory format.

    Raises:
        CorruptEntry: it is none of that kind.
    """
    found = vars(torch).get(name)  # not getattr: torch imports some of its modules when they are asked for
    if type(found) is not _TORCH_VALUES[tag]:
        raise CorruptEntry(f"expected a {tag}, got {name[:80]!r}")
    return found


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise CorruptEntry(f"expected a device, got {name[:80]!r}") from None


def decode_argument(
    value: object, values: Sequence[object], size: Callable[[str], object], device: torch.device
) -> object:
    """Turn a checked argument into what the operation takes; ``size`` evaluates an expression."""
    if isinstance(value, list):
        return [decode_argument(item, values, size, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, held),) = value.items()
    match tag:
        case "v":
            return values[held]
        case "s":
            return size(held)
        case "dtype" | "layout" | "memory_format":
            return torch_value(tag, held)
        case "device":
            return _device(held) if held != device.type else device
        case "slice":
            return slice(*(decode_argument(item, values, size, device) for item in held))
        case "ellipsis":
            return ...
        case "tuple":
            return tuple(decode_argument(item, values, size, device) for item in held)
        case "dict":
            return {key: decode_argument(item, values, size, device) for key, item in held}
        case "float" | "complex":
            return _NUMBERS[tag](held)
        case _:
            raise CorruptEntry(f"unknown argument tag {tag!r} in a piece graph")


def values_in(item: object) -> list[int]:
    """Return the numbers of the values that an encoded argument uses."""
    if isinstance(item, (list, tuple)):
        return [value for element in item for value in values_in(element)]
    if isinstance(item, dict):
        if "v" in item:
            return [cast(int, item["v"])]
        return [value for element in item.values() for value in values_in(element)]
    return []
