"""Graph: the padding table: which captured size a batch is padded to, in one tuple look-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pwcc.cache.errors import UsageError


class PaddingTable:
    """Maps a token count to the smallest captured size that holds it.

    ``waste_limit`` bounds the padded size over the true one: a batch that would be padded further runs
    unpadded instead. None means no bound.
    """

    def __init__(self, sizes: Sequence[int], *, waste_limit: float | None = None) -> None:
        if waste_limit is not None and not waste_limit >= 1:
            raise UsageError(f"expected a padding-waste limit of at least 1, got {waste_limit}")
        self.sizes = tuple(sizes)
        self.largest = self.sizes[-1] if self.sizes else 0
        table = [0]
        for size in self.sizes:
            fits = [
                size if waste_limit is None or size <= waste_limit * n else 0
                for n in range(len(table), size + 1)
            ]
            table.extend(fits)
        self._table = tuple(table)

    def padded(self, num_tokens: int) -> int:
        """Return the captured size for a batch; 0 if there is none (above the largest, or too much waste)."""
        return self._table[num_tokens] if 0 <= num_tokens <= self.largest else 0


def check_fixed_points(compiled_sizes: Iterable[int], table: PaddingTable) -> None:
    """Refuse a table that would pad a batch away from the variant compiled for exactly its size.

    Raises:
        UsageError: names the compiled sizes below the largest captured one that are not captured.
    """
    lost = [size for size in compiled_sizes if size <= table.largest and table.padded(size) != size]
    if lost:
        listed = ", ".join(map(str, lost))
        raise UsageError(
            f"sizes {listed} have a variant of their own that no batch would reach: they would be padded to "
            f"{', '.join(str(table.padded(size) or 'none') for size in lost)}",
            hint=f"add {listed} to the sizes to capture",
        )
