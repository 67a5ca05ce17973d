"""Key: a model's example arguments as flat leaves, and the structure around them that a call must repeat."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from pwcc.cache.errors import ArgumentError
from pwcc.compile.runtime.arrange import FIXED, Argument
from pwcc.compile.runtime.calling import Parameter, plain_arguments
from pwcc.compile.runtime.portable import type_name
from pwcc.compile.signature import parameter_names

_KINDS: dict[Any, str] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}


@dataclass(frozen=True)
class Flat:
    """Arguments, flat: each leaf with its name, and one :class:`Argument` per named parameter of ``forward``.

    ``names`` are those of parameters, or the way to a leaf inside one: ``state[0]``, ``state.key``.
    """

    names: tuple[str, ...]
    leaves: tuple[object, ...]
    arguments: tuple[Argument, ...]
    by_name: Mapping[str, object]

    def beyond_plain(self, parameters: Sequence[Parameter]) -> tuple[Argument, ...]:
        """Return the arguments, or none where the parameters say as much by themselves."""
        return () if self.arguments == plain_arguments(parameters) else self.arguments


def flatten(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Flat:
    """Flatten the arguments of one call of ``forward``; what it leaves out is its default.

    Raises:
        ArgumentError: too many or unknown arguments, or a value that is neither tensor, scalar nor container
            of them.
        TraceError: ``forward`` takes ``*args``.
    """
    positional = parameter_names(model)
    parameters = inspect.signature(model.forward).parameters
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in _KINDS}
    if len(args) > len(positional):
        raise ArgumentError(f"expected at most {len(positional)} inputs {positional}, got {len(args)}")
    given = {**dict(zip(positional, args, strict=False)), **kwargs}
    unknown = [name for name in given if name not in named]
    if unknown:
        raise ArgumentError(f"forward takes no argument {unknown[0]!r}; it takes {list(named)}")
    names: list[str] = []
    leaves: list[object] = []
    arguments: list[Argument] = []
    for name, parameter in named.items():
        has_default = parameter.default is not inspect.Parameter.empty
        if name in given:
            value = given[name]
            default = (
                "required" if not has_default else "compiled" if _same(value, parameter.default) else "other"
            )
            form = _form(value, name, names, leaves)
        elif has_default:
            default = "compiled"
            form = _form(parameter.default, name, names, leaves) if is_scalar(parameter.default) else FIXED
            given[name] = parameter.default
        else:
            default, form = "required", _form(None, name, names, leaves)
            given[name] = None
        arguments.append(Argument(name, _KINDS[parameter.kind], default, form))
    return Flat(tuple(names), tuple(leaves), tuple(arguments), {name: given[name] for name in named})


def form_of(value: object, path: str) -> tuple[object, list[str], list[object]]:
    """Return an argument's structure as an output template, and its leaves with their names.

    Raises:
        ArgumentError: a value that is neither tensor, scalar nor container of them.
    """
    names: list[str] = []
    leaves: list[object] = []
    return _form(value, path, names, leaves, "output"), names, leaves


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an argument with its tensors changed, and its containers copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    found = None if type(value) is dict else _fields(value)
    if found is not None:
        return type(value)(**{name: map_tensors(item, change) for name, item in found.items()})
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def is_scalar(value: object) -> bool:
    """Tell whether a value can be a compiled constant: None, a bool, an int, a finite float or a string."""
    if isinstance(value, float) and type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _same(value: object, default: object) -> bool:
    return is_scalar(value) and type(value) is type(default) and repr(value) == repr(default)


def _form(value: object, path: str, names: list[str], leaves: list[object], tag: str = "leaf") -> object:
    """Append a value's leaves and their names, and return the form around them."""
    if isinstance(value, torch.Tensor) or is_scalar(value):
        names.append(path)
        leaves.append(value)
        return {tag: len(leaves) - 1}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        items = [_form(item, f"{path}[{index}]", names, leaves, tag) for index, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(key is None or type(key) in (bool, int, str) for key in value):
        return {
            "dict": [[key, _form(item, f"{path}[{key!r}]", names, leaves, tag)] for key, item in value.items()]
        }
    found = _fields(value)
    if found is None:
        raise ArgumentError(
            f"argument {path!r}: expected a tensor, None, a finite scalar or a container of them, "
            f"got {value!r:.80}",
            hint="wrap the model so that its forward takes tensors",
        )
    keyed = isinstance(value, Mapping)
    pairs = [
        [key, _form(item, f"{path}[{key!r}]" if keyed else f"{path}.{key}", names, leaves, tag)]
        for key, item in found.items()
    ]
    return {"class": type_name(type(value)), "fields": pairs}


def _fields(value: object) -> dict[str, object] | None:
    if isinstance(value, Mapping):
        return dict(value.items()) if all(type(key) is str for key in value) else None
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else dict(zip(names, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None
