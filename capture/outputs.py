"""Graph: what a call returns: cut to the true token count, and the caller's to keep unless it chose not to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from pwcc.cache.errors import CaptureError

Outputs = Literal["owned", "static"]
Shape = tuple[int, ...] | int | float | None
"""A tensor's shape, a number itself, None for anything else."""


class OutputSlices:
    """Knows along which dimension each output of a program follows the token count.

    An entry does not record it, so it is observed: outputs of two sizes are compared, and a dimension that is
    the size in both follows it. With one size observed, a dimension of exactly that size does. Any other change
    (twice the count, one less, two dimensions at once, a number) cannot be cut and is refused.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Shape, ...]] = {}
        self._dims: tuple[int | None, ...] | None = None

    def observe(self, size: int, outputs: Sequence[object]) -> None:
        """Remember the shapes of one size's outputs.

        Raises:
            CaptureError: an output differs from another size's in a way that cannot be cut; names it.
        """
        self._seen[size] = tuple(_shape(output) for output in outputs)
        self._dims = None
        self._dims = self._find()

    @property
    def dims(self) -> tuple[int | None, ...]:
        """Per output the dimension that follows the token count, or None. Raises as :meth:`observe`."""
        if self._dims is None:
            self._dims = self._find()
        return self._dims

    def _find(self) -> tuple[int | None, ...]:
        count = len(next(iter(self._seen.values()), ()))
        return tuple(
            _following(index, [(size, shapes[index]) for size, shapes in self._seen.items()])
            for index in range(count)
        )

    def cut(self, outputs: Sequence[object], *, count: int, keep: Outputs) -> list[object]:
        """Return a batch's outputs, ``count`` tokens long.

        ``owned`` outputs are fresh tensors. ``static`` ones are views that the next call overwrites.
        """
        found: list[object] = []
        for output, dim in zip(outputs, self.dims, strict=True):
            if not isinstance(output, Tensor):
                found.append(output)
                continue
            part = output if dim is None or output.shape[dim] == count else output.narrow(dim, 0, count)
            found.append(part if keep == "static" else part.clone())
        return found


def _shape(output: object) -> Shape:
    if isinstance(output, Tensor):
        return tuple(output.shape)
    return output if isinstance(output, (int, float)) else None


def _following(index: int, observed: Sequence[tuple[int, Shape]]) -> int | None:
    """Return the one dimension that is the token count, or None for an output that does not change."""
    (first_size, first), *others = observed
    if not others:
        return first.index(first_size) if isinstance(first, tuple) and first_size in first else None
    different = next(((size, shape) for size, shape in others if shape != first), None)
    if different is None:
        return None
    if isinstance(first, tuple):
        for dim in range(len(first)):
            rest = _cut(first, dim, first_size)
            if rest is not None and all(_cut(shape, dim, size) == rest for size, shape in others):
                return dim
    raise CaptureError(
        f"output {index} is {first} at {first_size} tokens and {different[1]} at {different[0]}, so that what "
        "padding adds cannot be cut off",
        hint="only one dimension of an output may change, and must be the token count: use mode NONE",
    )


def _cut(shape: Shape, dim: int, size: int) -> tuple[int, ...] | None:
    """Return a shape without a dimension that is ``size``; None where it is not."""
    if not isinstance(shape, tuple) or dim >= len(shape) or shape[dim] != size:
        return None
    return (*shape[:dim], *shape[dim + 1 :])
