"""Artifact: the reading of a piece's graph that fusion passes share: equal values, casts, scalars, users.

Two nodes that compute the same thing from the same things are one value here: after Inductor's
decompositions a norm's input is often widened twice. Nothing is asked of symbolic sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch import fx

from pwcc.compile.torch_private.graph_values import same_sizes

_ATEN: Final = torch.ops.aten
_CONVERT: Final = torch.ops.prims.convert_element_type.default
_OVERLOAD: Final = type(_CONVERT)
ADD: Final = (_ATEN.add.Tensor, _ATEN.add.Scalar)
MUL: Final = (_ATEN.mul.Tensor, _ATEN.mul.Scalar)
DIV: Final = (_ATEN.div.Tensor, _ATEN.div.Scalar)
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


class Values:
    """The values of one graph. A node stands for its value: the first node that computes it.

    ``epoch`` counts the writes before a node, ``order`` all nodes: a value read before a write in place is
    another one than after it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order: dict[fx.Node, int] = {}
        self.epoch: dict[fx.Node, int] = {}
        self._first: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, list[fx.Node]] = {}
        known: dict[object, fx.Node] = {}
        epoch = 0
        for position, node in enumerate(graph.nodes):
            epoch += _writes(node)
            self.order[node] = position
            self.epoch[node] = epoch
            key = self._key(node)
            first = node if key is None else known.setdefault(key, node)
            self._first[node] = first
            self._same.setdefault(first, []).append(node)

    def _key(self, node: fx.Node) -> object:
        if node.op != "call_function" or not _is_pure(node.target):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda item: self._first.get(item, item))
        key = (self.epoch[node], node.target, _hashable(args), _hashable(kwargs))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def of(self, item: object) -> fx.Node | None:
        """Return the value of an argument, None if it is no node."""
        return self._first.get(item) if isinstance(item, fx.Node) else None

    def same(self, value: fx.Node) -> list[fx.Node]:
        """Return all nodes that compute a value, in the graph's order."""
        return self._same[value]

    def operands(self, value: fx.Node, targets: Collection[object]) -> tuple[object, ...] | None:
        """Return the arguments, nodes as values, if ``value`` is made by one of ``targets`` and plainly so."""
        if value.op != "call_function" or value.target not in targets or value.kwargs:
            return None
        return tuple(self._first.get(item, item) if isinstance(item, fx.Node) else item for item in value.args)

    def pair(self, value: fx.Node, targets: Collection[object]) -> Iterator[tuple[Any, Any]]:
        """Yield the two operands of a commutative operation in both orders, nothing if it is another one."""
        found = self.operands(value, targets)
        if found is not None and len(found) == 2:
            yield found[0], found[1]
            if found[0] is not found[1]:
                yield found[1], found[0]

    def uncast(self, value: object, taken: set[fx.Node] | None = None) -> fx.Node | None:
        """Return the value below casts between floating dtypes of 16 or more bits; ``taken`` gets the casts.

        Inductor computes in float32 whatever is cast in between, so that the casts round nothing.
        """
        node = self.of(value)
        while node is not None and is_cast(node) and dtype_of(node) in FLOATS:
            below = self.of(node.args[0])
            if below is None or dtype_of(below) not in FLOATS:
                break
            if taken is not None:
                taken.add(node)
            node = below
        return node

    def unwidened(self, value: object) -> fx.Node | None:
        """Return the value below a cast to float32, which loses nothing; other casts stay."""
        node = self.of(value)
        if node is not None and is_cast(node) and dtype_of(node) is torch.float32:
            below = self.of(node.args[0])
            if below is not None and dtype_of(below) in FLOATS:
                return below
        return node

    def inside(self, taken: Collection[fx.Node], outputs: Collection[fx.Node]) -> bool:
        """Tell whether all users of ``taken`` are in ``taken`` too, those of ``outputs`` left aside."""
        return all(
            self._first[user] in taken
            for value in taken
            if value not in outputs
            for node in self._same[value]
            for user in node.users
        )


def _writes(node: fx.Node) -> bool:
    target: Any = node.target
    if isinstance(target, _OVERLOAD):
        return bool(target._schema.is_mutable)
    return node.op == "call_function" and "mutation" in getattr(target, "__name__", "")


def _is_pure(target: Any) -> bool:
    return target is operator.getitem or (
        isinstance(target, _OVERLOAD)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and target.namespace in ("aten", "prims")
        and "empty" not in target._opname
    )


def _hashable(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, float):
        return ("float", value.hex())  # 1 and 1.0, 0.0 and -0.0 are equal but not the same
    return (type(value).__name__, value)


def is_cast(node: fx.Node) -> bool:
    """Tell whether a node only changes the dtype."""
    return node.op == "call_function" and node.target is _CONVERT


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's value, None if that is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the shape of a node's value; sizes may be symbols, which ``==`` must not be asked of."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def same_shape(one: fx.Node, other: fx.Node) -> bool:
    """Tell whether two shapes are equal for every value of their symbols."""
    return same_sizes(shape_of(one), shape_of(other))


def rows_of(node: fx.Node, limit: int) -> int | None:
    """Return the width of a value that is rows ``[..., width]`` of 16 or 32 bits, at most ``limit`` wide."""
    shape = shape_of(node)
    if len(shape) < 2 or dtype_of(node) not in FLOATS or type(shape[-1]) is not int:
        return None
    return shape[-1] if 0 < shape[-1] <= limit else None


def number(value: object) -> float | None:
    """Return a plain number, None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def close(value: object, to: float) -> bool:
    """Tell whether a plain number is ``to`` but for float32's rounding."""
    found = number(value)
    return found is not None and math.isclose(found, to, rel_tol=1e-7)


def over_last(value: fx.Node, args: tuple[object, ...]) -> bool:
    """Tell whether a reduction of ``value`` has the arguments (input, last dimension, keepdim=True)."""
    last = len(shape_of(value)) - 1
    match args:
        case [_, [int(dim)], True]:
            return dim in (-1, last)
        case _:
            return False
