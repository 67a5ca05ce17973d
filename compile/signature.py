"""Key: the parameters of a model's ``forward``, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import TraceError
from pwcc.compile.runtime.portable import NotPortable, describe

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameter_names(model: nn.Module) -> list[str]:
    """Return the positional parameters of ``forward`` in order; keyword-only ones keep their defaults.

    Raises:
        TraceError: ``forward`` takes ``*args``.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        raise TraceError("forward takes *args; pwcc needs named parameters", where=definition(model.forward))
    return [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]


def signature_facts(model: nn.Module) -> list[list[str]]:
    """Return every parameter of ``forward`` with its default, as text: what a call without it would use.

    Raises:
        TraceError: ``forward`` takes ``*args``.
    """
    parameter_names(model)
    parameters = inspect.signature(model.forward).parameters.values()
    return [[parameter.name, _default_text(parameter.default)] for parameter in parameters]


def _default_text(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    try:
        return strict.canonical(describe(value)).decode()
    except NotPortable:
        return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def definition(function: Callable[..., object]) -> str | None:
    """Return ``file:line in name`` of a function, or None for one without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if code else None
