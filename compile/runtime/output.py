"""Artifact: what ``forward`` returns, rebuilt from a template around the tensors that a program computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pwcc.cache.errors import CorruptEntry, HostMismatch
from pwcc.compile.runtime.expressions import compile_expressions


class Output(Protocol):
    """Builds an output of graph outputs, tensor arguments, weights, and the sizes of the call."""

    def __call__(
        self,
        outputs: Sequence[object],
        arguments: Sequence[object],
        weights: Sequence[object],
        sizes: Sequence[int] = (),
        /,
    ) -> object:
        """Return what ``forward`` returns."""
        ...


def build_output(template: object, symbols: Sequence[str] = ()) -> Output:
    """Compile an output template; ``symbols`` name the sizes of a call, in order.

    Templates: ``{"output": i}``, ``{"argument": i}``, ``{"weight": i}``, ``{"constant": x}``,
    ``{"float": "inf"}``, ``{"size": "2*s0"}``, ``{"tuple": [...]}``, ``{"list": [...]}``,
    ``{"dict": [[key, t], ...]}``, ``{"shape": [...]}`` (a ``torch.Size``) and
    ``{"class": "module:qualname", "fields": [[name, t], ...]}`` for dataclasses, mappings with a
    constructor by keyword (Hugging Face's ModelOutput), named tuples and ``torch.return_types``.

    Raises:
        CorruptEntry: another form.
        HostMismatch: a class of a module that this process has not imported.
    """
    if not isinstance(template, dict):
        raise CorruptEntry("expected an output template")
    if "class" in template:
        return _build_class(template, symbols)
    if len(template) != 1:
        raise CorruptEntry("expected an output template of one key")
    ((tag, held),) = template.items()
    match tag:
        case "output" if type(held) is int and held >= 0:
            return lambda outputs, arguments, weights, sizes=(): outputs[held]
        case "argument" if type(held) is int and held >= 0:
            return lambda outputs, arguments, weights, sizes=(): arguments[held]
        case "weight" if type(held) is int and held >= 0:
            return lambda outputs, arguments, weights, sizes=(): weights[held]
        case "constant" if held is None or isinstance(held, (bool, int, float, str)):
            return lambda outputs, arguments, weights, sizes=(): held
        case "float" if held in ("inf", "-inf", "nan"):
            number = float(held)
            return lambda outputs, arguments, weights, sizes=(): number
        case "size" if isinstance(held, str):
            value = compile_expressions([held], symbols)
            return lambda outputs, arguments, weights, sizes=(): value(*sizes)[0]
        case "tuple" | "list" | "shape" if isinstance(held, list):
            return _build_sequence(tag, [build_output(item, symbols) for item in held])
        case "dict" if isinstance(held, list):
            pairs = [(_hashable(key), build_output(item, symbols)) for key, item in map(_pair, held)]
            return lambda outputs, arguments, weights, sizes=(): {
                key: item(outputs, arguments, weights, sizes) for key, item in pairs
            }
        case _:
            raise CorruptEntry(f"unknown output template {repr(template)[:80]}")


def _build_sequence(tag: str, items: Sequence[Output]) -> Output:
    kinds: dict[str, Callable[[list[object]], object]] = {"tuple": tuple, "list": list, "shape": _shape}
    kind = kinds[tag]
    return lambda outputs, arguments, weights, sizes=(): kind(
        [item(outputs, arguments, weights, sizes) for item in items]
    )


def _shape(sizes: list[Any]) -> object:
    import torch

    return torch.Size(sizes)


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise CorruptEntry(f"expected a name and a template, got {repr(item)[:80]}")
    return item[0], item[1]


def _hashable(key: object) -> object:
    if key is not None and not isinstance(key, (bool, int, str)):
        raise CorruptEntry(f"expected a key, got {repr(key)[:80]}")
    return key


def _build_class(template: Mapping[str, object], symbols: Sequence[str]) -> Output:
    found = record_class(template["class"], "returns")
    held = template.get("fields")
    if not isinstance(held, list):
        raise CorruptEntry("expected a list of fields")
    fields = [(str(name), build_output(item, symbols)) for name, item in map(_pair, held)]
    constructor: Callable[..., object] = found
    if is_result(found):
        if len(fields) != len(found.__match_args__):  # type: ignore[attr-defined]
            raise CorruptEntry(f"expected {len(found.__match_args__)} fields of {template['class']!r}")  # type: ignore[attr-defined]
        return lambda outputs, arguments, weights, sizes=(): constructor(
            [item(outputs, arguments, weights, sizes) for _, item in fields]
        )
    return lambda outputs, arguments, weights, sizes=(): constructor(
        **{name: item(outputs, arguments, weights, sizes) for name, item in fields}
    )


def record_class(name: object, verb: str) -> type:
    """Return the dataclass, named tuple or mapping ``module:qualname`` that ``forward`` takes or returns.

    Raises:
        CorruptEntry: it is none of these.
        HostMismatch: its module is not in this process; nothing that an entry names is imported.
    """
    module, _, qualname = str(name).partition(":")
    if isinstance(name, str) and module and qualname and module not in sys.modules:
        raise HostMismatch(
            f"the model {verb} a {name}, whose module this process has not imported",
            hint=f"import {module} before loading",
        )
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise CorruptEntry(f"the class {name!r} that the model {verb} is not in this process")
    if not (is_record(found) or issubclass(found, Mapping) or (verb == "returns" and is_result(found))):
        raise CorruptEntry(f"expected a dataclass, named tuple or mapping, got {name!r}")
    return found


def is_result(cls: type) -> bool:
    """Tell whether a class is a tuple with names that torch's operations return, such as of ``topk``."""
    return issubclass(cls, tuple) and cls.__module__ == "torch.return_types"


def is_record(cls: type) -> bool:
    """Tell whether a class is a dataclass or a named tuple."""
    return hasattr(cls, "__dataclass_fields__") or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
