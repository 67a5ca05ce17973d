"""Key: stand-ins for what a traced graph returns, to see what Dynamo's output bytecode builds of them.

A tensor is an empty one; a size is an ``int`` of a class of its own, which a ``torch.Size`` keeps; a condition
is a plain object. A float of sizes arrives as a float64 scalar tensor of which the bytecode takes ``item()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx


class SizeMarker(int):
    """Stands for a size. Its value is like no size that a model returns as a constant."""


class TensorMarker(torch.Tensor):
    """Stands for a tensor, and notes whether its number was taken."""

    number: float | None

    @staticmethod
    def make() -> TensorMarker:
        """Return a new one."""
        marker = torch.empty(0).as_subclass(TensorMarker)
        marker.number = None
        return marker

    def item(self) -> float:
        """Return a float that stands for the scalar; always the same object."""
        if self.number is None:
            self.number = float(_FIRST + id(self) % _FIRST)
        return self.number


class ArgumentMarker(torch.Tensor):
    """A tensor argument whose dynamic dimensions say markers, for bytecode that reads an argument's shape."""

    _markers: Mapping[int, SizeMarker]

    @staticmethod
    def of(tensor: torch.Tensor, markers: Mapping[int, SizeMarker]) -> ArgumentMarker:
        """Return a tensor like the given one, with ``markers`` by dimension."""
        marker = tensor.detach().as_subclass(ArgumentMarker)
        marker._markers = markers
        return marker

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # pyright: ignore
        """Sizes, those of dynamic dimensions as markers."""
        sizes = self.as_subclass(torch.Tensor).shape
        return torch.Size([self._markers.get(dim, size) for dim, size in enumerate(sizes)])

    def size(self, dim: int | None = None) -> Any:
        """Return one size, or all of them."""
        return self.shape if dim is None else self.shape[dim]


_FIRST = 1 << 60


def make_markers(results: Sequence[object], first: int = _FIRST) -> list[Any]:
    """Return a marker for each result of a graph, which are the arguments of its output node.

    Sizes are counted from ``first``.
    """
    return [_marker(result, first + index) for index, result in enumerate(results)]


def settled(made: Sequence[Any]) -> list[Any]:
    """Return the markers, and where the bytecode took a tensor's number, that number."""
    return [
        marker.number if isinstance(marker, TensorMarker) and marker.number is not None else marker
        for marker in made
    ]


def unwrap_numbers(output: fx.Node, made: Sequence[Any]) -> None:
    """Make a graph return the number itself where the bytecode would take it from a scalar tensor."""
    results: list[Any] = list(cast(Sequence[Any], output.args[0]))
    for index, marker in enumerate(made):
        node = results[index]
        taken = isinstance(marker, TensorMarker) and marker.number is not None
        if taken and isinstance(node, fx.Node) and node.target is torch.scalar_tensor:
            results[index] = node.args[0]
    output.args = (tuple(results),)


def _marker(result: object, size: int) -> Any:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else result
    if isinstance(value, (torch.SymBool, bool)):
        return object()
    if isinstance(value, (torch.SymInt, int)):
        return SizeMarker(size)
    return TensorMarker.make()
