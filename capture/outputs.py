"""Graph: what a call returns: cut to the true token count, and the caller's to keep unless it chose not to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

Outputs = Literal["owned", "static"]


class OutputSlices:
    """Knows along which dimension each output of a program follows the token count.

    An entry does not record it, so it is observed: outputs of two sizes are compared, and a dimension that is
    the size in both follows it. With one size observed, a dimension of exactly that size does.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[tuple[int, ...] | None, ...]] = {}
        self._dims: tuple[int | None, ...] | None = None

    def observe(self, size: int, outputs: Sequence[object]) -> None:
        """Remember the shapes of one size's outputs."""
        self._seen[size] = tuple(tuple(o.shape) if isinstance(o, Tensor) else None for o in outputs)
        self._dims = None

    @property
    def dims(self) -> tuple[int | None, ...]:
        """Per output the dimension that follows the token count, or None."""
        if self._dims is None:
            shapes = [
                [(size, shape[index]) for size, shape in self._seen.items()] for index in range(self._count())
            ]
            self._dims = tuple(_following(observed) for observed in shapes)
        return self._dims

    def _count(self) -> int:
        return len(next(iter(self._seen.values()), ()))

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


def _following(observed: Sequence[tuple[int, tuple[int, ...] | None]]) -> int | None:
    shapes = [(size, shape) for size, shape in observed if shape is not None]
    if not shapes:
        return None
    for dim in range(len(shapes[0][1])):
        if all(dim < len(shape) and shape[dim] == size for size, shape in shapes):
            return dim
    return None
