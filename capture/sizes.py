"""Graph: the batch sizes that a user names, as a sorted tuple of token counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pwcc.cache.errors import UsageError

MAX_TOKENS: Final = 2**31 - 1  # sizes are int32 in kernels and manifests
_RANGE: Final = re.compile(r"([0-9]{1,10})\s*-\s*([0-9]{1,10})")
_SIZE: Final = re.compile(r"[0-9]{1,10}")


def parse_sizes(text: str, *, max_tokens: int) -> tuple[int, ...]:
    """Parse ``1,2,4,8`` or ``1-4,8`` into sorted unique token counts; an empty text gives none.

    Raises:
        UsageError: an item that is neither a positive integer nor a range of them, or one that lies
            beyond ``max_tokens``; the message names the item.
    """
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise UsageError(f"expected --max-tokens from 1 to {MAX_TOKENS}, got {max_tokens}")
    if not text.strip():
        return ()
    return tuple(sorted({size for item in text.split(",") for size in _sizes(item.strip(), max_tokens)}))


def _sizes(item: str, max_tokens: int) -> Iterator[int]:
    low, high = _bounds(item)
    if low < 1:
        raise UsageError(f"expected sizes of at least 1, got {item!r}")
    if low > high:
        raise UsageError(f"expected a range from low to high, got {item!r}")
    if high > max_tokens:
        raise UsageError(
            f"expected sizes of at most {max_tokens} tokens, got {item!r}",
            hint=f"leave it out, or raise --max-tokens to {high}",
        )
    yield from range(low, high + 1)


def _bounds(item: str) -> tuple[int, int]:
    if _SIZE.fullmatch(item):
        return int(item), int(item)
    if match := _RANGE.fullmatch(item):
        return int(match[1]), int(match[2])
    raise UsageError(
        f"expected a size such as 8 or a range such as 1-4, got {item!r}", hint="for example --sizes 1,2,4,8"
    )
