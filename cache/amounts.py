"""Store: amounts as people write and read them: ``10G`` or ``512MiB`` of bytes, ``30d`` or ``12h`` of time."""

from __future__ import annotations

import re
from typing import Final

from pwcc.cache.errors import UsageError

MAX_AMOUNT: Final = 2**63 - 1
_NUMBER: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?([A-Za-z]*)")
_BYTES: Final = {
    "": 1,
    "b": 1,
    **{unit: 1000**power for power, letter in enumerate("kmgtp", 1) for unit in (letter, f"{letter}b")},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_SHOWN: Final = ("kB", "MB", "GB", "TB")
_SECONDS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Return a number of bytes: ``0``, ``1500``, ``10G``, ``1.5GB``, ``512MiB``; case does not matter.

    K, M, G, T, P and KB, MB, ... are powers of 1,000, as everything that pwcc prints; KiB, MiB, ... of 1,024.

    Raises:
        UsageError: another form, or more than 2**63 - 1 bytes.
    """
    return _parse(text, _BYTES, "a size", "10G, 1.5GB or 512MiB")


def parse_age(text: str) -> int:
    """Return a number of seconds: ``90s``, ``15min``, ``12h``, ``30d``, ``2w``. A unit is required.

    Raises:
        UsageError: another form, or more than 2**63 - 1 seconds.
    """
    return _parse(text, _SECONDS, "an age", "90s, 15min, 12h, 30d or 2w")


def size_text(count: int) -> str:
    """Return ``12.3 MB`` for a number of bytes; units are powers of 1,000."""
    if count < 1000:
        return f"{count} B"
    value, power = count / 1000, 0
    while value >= 999.5 and power < len(_SHOWN) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.{1 if value < 99.95 else 0}f} {_SHOWN[power]}"


def _parse(text: str, units: dict[str, int], what: str, examples: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    factor = units.get(found[3].lower()) if found else None
    if found is None or factor is None:
        raise UsageError(f"expected {what} such as {examples}, got {text[:40]!r}")
    whole, fraction = found[1], found[2] or ""
    scale: int = 10 ** len(fraction)
    value = int(whole + fraction) * factor // scale
    if value > MAX_AMOUNT:
        raise UsageError(f"expected {what} of at most {MAX_AMOUNT}, got {text[:40]!r}")
    return value
