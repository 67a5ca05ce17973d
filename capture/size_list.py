"""Graph: the list of sizes to capture: the default one, a user's, and one that is a multiple of something."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pwcc.cache.errors import UsageError

LARGEST: Final = 512  # a larger decode batch is bound by arithmetic, not by launches
SMALL: Final = (1, 2, 4)
FINE_STEP: Final = 8
FINE_UNTIL: Final = 256
COARSE_STEP: Final = 16


def default_sizes(*, max_num_seqs: int = 256, max_tokens: int = 8192) -> tuple[int, ...]:
    """Return 1, 2, 4, then 8s to 256, then 16s, up to ``min(2 * max_num_seqs, 512, max_tokens)``.

    The maximum itself is always in the list, so that no batch below it goes without a graph.
    """
    if max_num_seqs < 1 or max_tokens < 1:
        raise UsageError(
            f"expected max_num_seqs and max_tokens of at least 1, got {max_num_seqs}, {max_tokens}"
        )
    largest = min(2 * max_num_seqs, LARGEST, max_tokens)
    steps = [
        *SMALL,
        *range(FINE_STEP, FINE_UNTIL, FINE_STEP),
        *range(FINE_UNTIL, largest + 1, COARSE_STEP),
        largest,
    ]
    return tuple(sorted({size for size in steps if size <= largest}))


def usable_sizes(sizes: Iterable[int], *, max_tokens: int, multiple: int = 1) -> tuple[int, ...]:
    """Return sorted unique sizes, each rounded up to ``multiple`` (for sequence parallelism).

    The largest size is never lost: where rounding up would pass ``max_tokens``, it is rounded down.

    Raises:
        UsageError: no size, one that is no integer, one below 1 or above ``max_tokens``, or a multiple that
            none can have.
    """
    listed = list(sizes)
    wrong = [size for size in listed if not isinstance(size, int)]
    if wrong:
        raise UsageError(f"expected sizes that are integers, got {wrong[0]!r}")
    given = sorted(set(listed))
    if not given:
        raise UsageError("expected at least one size to capture", hint="use mode NONE to capture nothing")
    if given[0] < 1:
        raise UsageError(f"expected sizes of at least 1, got {given[0]}")
    if given[-1] > max_tokens:
        raise UsageError(
            f"expected sizes of at most {max_tokens} tokens, got {given[-1]}",
            hint="leave it out, or compile with a larger --max-tokens",
        )
    if not 1 <= multiple <= max_tokens:
        raise UsageError(f"expected a multiple from 1 to {max_tokens}, got {multiple}")
    highest = max_tokens // multiple * multiple
    return tuple(sorted({min(-(-size // multiple) * multiple, highest) for size in given}))
