"""Plain text tables that fit a terminal; plain, so that they can be cut, searched and pasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_GAP: Final = "  "
_SHORTEST: Final = 6


@dataclass(frozen=True)
class Column:
    """One column: its heading, and whether it is right-aligned (numbers) or may be shortened (names)."""

    heading: str
    right: bool = False
    elastic: bool = False


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int, indent: str = ""
) -> list[str]:
    """Return the lines of a table; elastic columns are shortened until a line fits ``width``."""
    body = [[c.heading for c in columns], *[list(row) for row in rows]]
    widths = [max(len(row[index]) for row in body) for index in range(len(columns))]
    excess = len(indent) + sum(widths) + len(_GAP) * (len(columns) - 1) - width
    while excess > 0:
        # Take from the widest first: short names stay whole.
        elastic = [i for i, column in enumerate(columns) if column.elastic and widths[i] > _SHORTEST]
        if not elastic:
            break
        widths[max(elastic, key=lambda i: widths[i])] -= 1
        excess -= 1
    return [indent + _line(columns, row, widths) for row in body]


def facts(pairs: Sequence[tuple[str, str]], *, indent: str = "  ") -> list[str]:
    """Return ``name  value`` lines, values aligned."""
    longest = max((len(name) for name, _ in pairs), default=0)
    return [f"{indent}{name:<{longest}}{_GAP}{value}".rstrip() for name, value in pairs]


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> str:
    cells = []
    for column, cell, width in zip(columns, row, widths, strict=True):
        shown = _shortened(cell, width)
        cells.append(shown.rjust(width) if column.right else shown.ljust(width))
    return _GAP.join(cells).rstrip()


def _shortened(cell: str, width: int) -> str:
    if len(cell) <= width:
        return cell
    tail = (width - 1) // 3  # the end of a name often tells two apart
    return f"{cell[: width - 1 - tail]}…{cell[len(cell) - tail :]}"
