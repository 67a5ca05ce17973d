"""The text of ``--max-memory`` as a number of bytes."""

from __future__ import annotations

import re
from typing import Final

from pwcc.cache.errors import UsageError

_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_TEXT: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})\s*")


def parse_byte_count(text: str, *, option: str) -> int:
    """Return the bytes of ``2GiB`` (1024s), ``2GB`` (1000s), ``2G`` (as GiB) or ``2147483648``.

    Raises:
        UsageError: anything else, or less than one byte; the message names ``option``.
    """
    match = _TEXT.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if count < 1:
        raise UsageError(f"{option}: expected a size such as 2GiB or 500MB, got {text!r}")
    return count
