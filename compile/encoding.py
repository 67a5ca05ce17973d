"""Key: arguments of traced operations in portable form: sizes become expressions, constants become JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.compile.conditions import source_line
from pwcc.compile.runtime.arguments import encode_constant
from pwcc.compile.runtime.targets import resolve_target, target_name
from pwcc.compile.sizes import Sizes

_OF_NUMBERS = {"__round__": "builtins.round"}
"""Methods that a trace calls on numbers only, and what computes the same of them."""


class Encoder:
    """Encodes the arguments of nodes; ``names`` are those of symbols, ``value`` says what a node is."""

    def __init__(self, sizes: Sizes, names: Mapping[Any, str], value: Callable[[fx.Node], object]) -> None:
        self._sizes = sizes
        self._names = names
        self._value = value

    def encode(self, item: object, node: fx.Node) -> object:
        """Encode an argument of ``node``.

        Raises:
            UnsealableError: a constant without a portable form, by its operation and source line.
        """
        match item:
            case fx.Node():
                if self._sizes.is_number(item) and not self._sizes.is_computed(item):
                    return self._sizes.encode(item.meta["example_value"], self._names)
                return self._value(item)
            case torch.SymInt():
                return self._sizes.encode(item, self._names)
            case torch.Size() | tuple():
                return {"tuple": [self.encode(element, node) for element in item]}
            case list():
                return [self.encode(element, node) for element in item]
            case dict():
                return {"dict": [[str(key), self.encode(element, node)] for key, element in item.items()]}
            case slice():
                return {"slice": [self.encode(part, node) for part in (item.start, item.stop, item.step)]}
        try:
            return encode_constant(item)
        except TypeError as error:
            raise UnsealableError(
                f"an argument of {node.target} has no portable form: {error}", where=source_line(node)
            ) from None


def leaves(value: object) -> Iterator[object]:
    """Yield the nodes and constants in the arguments of a node."""
    match value:
        case tuple() | list():
            for item in value:
                yield from leaves(item)
        case dict():
            for item in value.values():
                yield from leaves(item)
        case slice():
            yield from leaves((value.start, value.stop, value.step))
        case _:
            yield value


def qualified_name(node: fx.Node) -> str:
    """Return the name by which another process finds a node's operation.

    Raises:
        UnsealableError: it has none, or a piece may not call it.
    """
    if node.op == "call_method":
        name: str | None = _OF_NUMBERS.get(str(node.target)) or f"torch.Tensor.{node.target}"
    else:
        name = target_name(node.target)  # type: ignore[arg-type]
    if name is None:
        raise UnsealableError(
            f"the operation {node.target!r} has no qualified name by which another process finds it",
            where=nearest_line(node),
        )
    try:
        resolve_target(name)
    except CorruptEntry as error:
        raise UnsealableError(
            error.message,
            where=nearest_line(node),
            hint="compute it outside the compiled module, or put it into a custom operator",
        ) from None
    return name


def nearest_line(node: fx.Node) -> str | None:
    """Return the user's line of a node, or of the next one that has a line."""
    while node.op != "output" and source_line(node) is None:
        node = node.next
    return source_line(node)
