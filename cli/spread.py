"""Options that commands share: a dataclass declares them once, and a command takes it as one parameter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with every dataclass parameter replaced, in its place, by that class's fields.

    Typer reads the signature, so each field (an ``Annotated`` type, and a plain default or none) is an option
    as if the command declared it; the command gets the instance. Its dataclass parameters are keyword-only.

    Raises:
        TypeError: two parameters of one name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            groups[name] = kind
            parameters += _of_fields(kind)
        else:
            parameters.append(parameter.replace(annotation=kind))
    names = [parameter.name for parameter in parameters]
    if len(set(names)) != len(names):
        raise TypeError(f"expected each option of {command.__name__} once, got {', '.join(names)}")

    @functools.wraps(command)
    def run(**given: object) -> None:
        built = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**given, **built)

    run.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _of_fields(group: type) -> list[inspect.Parameter]:
    """Return the constructor's parameters, their types resolved."""
    hints = get_type_hints(group, include_extras=True)
    return [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(group).parameters.items()
    ]
