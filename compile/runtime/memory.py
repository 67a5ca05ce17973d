"""Artifact: which tensors share memory, asked where compiled code writes some of them.

Compiled code takes tensors that were separate when they were traced for separate. Extents decide, from a
tensor's first byte to its last, so that interleaved slices of one buffer count as shared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pwcc.cache.errors import ArgumentError, CacheMiss

if TYPE_CHECKING:
    from pwcc.compile.runtime.calling import Weight

Extent = tuple[int, int]


def extent(tensor: torch.Tensor) -> Extent:
    """Return the addresses of a tensor's first byte and of the one behind its last; (0, 0) without memory."""
    start = tensor.data_ptr()
    if not start or not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: Extent, other: Extent) -> bool:
    """Tell whether two extents have a byte in common."""
    return one[0] < other[1] and other[0] < one[1]


def refuse_shared_weights(weights: Sequence[Weight], bound: Sequence[torch.Tensor]) -> None:
    """Refuse weights of which the program writes one and that share memory only here.

    Costs nothing for a program that writes no weight.

    Raises:
        CacheMiss: names both tensors.
    """
    written = [index for index, weight in enumerate(weights) if weight.written]
    if not written:
        return
    extents = [extent(tensor) for tensor in bound]
    for index in written:
        weight = weights[index]
        for other, place in enumerate(extents):
            names = weights[other].names
            if names == weight.names or other in weight.shares or not overlap(extents[index], place):
                continue
            raise CacheMiss(
                f"{weight.names[0]!r} and {names[0]!r} share memory here, and did not when compiled; "
                f"the model writes {weight.names[0]!r}",
                hint=f"give {names[0]!r} memory of its own, or compile this model",
            )


class Extents:
    """Named extents, asked for one that overlaps a given one in the time of one bisection."""

    def __init__(self, named: Sequence[tuple[Extent, str]]) -> None:
        self._named = [item for item in named if item[0][1]]
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(item for item, _ in self._named):  # merged, so that they are disjoint
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def holder(self, place: Extent) -> str | None:
        """Return the name of what shares memory with an extent, if anything does."""
        at = bisect_left(self._starts, place[1]) - 1
        if at < 0 or self._ends[at] <= place[0]:
            return None
        return next((name for held, name in self._named if overlap(held, place)), None)


class BoundMemory:
    """The memory of a program's weights, to refuse a call's arguments that lie in it where one is written."""

    def __init__(self, weights: Sequence[Weight], bound: Sequence[torch.Tensor]) -> None:
        named = [(extent(tensor), weight.names[0]) for weight, tensor in zip(weights, bound, strict=True)]
        written = [item for item, weight in zip(named, weights, strict=True) if weight.written]
        self._all, self._written = Extents(named), Extents(written)

    def refuse(self, name: str, tensor: torch.Tensor, *, written: bool) -> None:
        """Refuse one argument that shares memory with a weight where the program writes one of the two.

        Raises:
            ArgumentError: names both.
        """
        weight = (self._all if written else self._written).holder(extent(tensor))
        if weight is not None:
            which = "the argument" if written else "the weight"
            raise ArgumentError(
                f"argument {name!r} shares memory with the model's {weight!r}, and the model writes {which}",
                hint=f"pass {name!r} as a copy",
            )
