"""Numbers as people read them."""

from __future__ import annotations

from typing import Final

from pwcc.cache.amounts import size_text

_AGE_UNITS: Final = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))


def bytes_(count: int) -> str:
    """Return ``12.3 MB`` for a number of bytes; units are powers of 1,000."""
    return size_text(count)


def seconds(value: float) -> str:
    """Return ``12 ms``, ``3.4 s`` or ``128 s``."""
    if value < 0.9995:
        return f"{value * 1000:.{1 if value < 0.00995 else 0}f} ms"
    return f"{value:.{1 if value < 99.95 else 0}f} s"


def age(value: float) -> str:
    """Return ``3 d`` for a number of seconds: the largest unit that fits, rounded down."""
    for size, unit in _AGE_UNITS:
        if value >= size:
            return f"{int(value // size)} {unit}"
    return f"{int(value)} s"


def count(number: int, noun: str) -> str:
    """Return ``1 entry``, ``2 entries``: the number and its noun."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"


def sizes(values: tuple[int, ...]) -> str:
    """Return ``1-4,8`` for sizes in order, ``-`` for none."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(_run(run) for run in runs) or "-"


def _run(run: list[int]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(value) for value in run)
