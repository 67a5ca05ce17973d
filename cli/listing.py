"""A cache's entries as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pwcc.cli import units
from pwcc.cli.table import Column, table

if TYPE_CHECKING:
    from pwcc.cache.inspection import EntrySummary

_COLUMNS: Final = (
    Column("ENTRY"),
    Column("MODEL", elastic=True),
    Column("SIZES", elastic=True),
    Column("PIECES", right=True),
    Column("DEVICE", elastic=True),
    Column("BYTES", right=True),
    Column("AGE", right=True),
    Column("SEALED", right=True),
)


def listing_lines(entries: Sequence[EntrySummary], *, width: int) -> list[str]:
    """Return one row per readable entry, one line per unreadable one, and a line of totals.

    ``PIECES`` reads ``unique/all``; ``SIZES`` are the static ones besides the dynamic range.
    """
    readable = [entry for entry in entries if entry.problem is None]
    lines = table(_COLUMNS, [_row(entry) for entry in readable], width=width) if readable else []
    broken = [entry for entry in entries if entry.problem is not None]
    lines += [f"{entry.key}  unreadable: {entry.problem}" for entry in broken]
    total = units.count(len(entries), "entry")
    return [*lines, f"{total}, {len(broken)} unreadable" if broken else total]


def _row(entry: EntrySummary) -> tuple[str, ...]:
    return (
        entry.key,
        entry.model.removeprefix("builtin:") + (f" [{entry.profile}]" if entry.profile else ""),
        units.sizes(entry.sizes),
        f"{entry.unique}/{entry.pieces}",
        entry.device,
        units.bytes_(entry.bytes),
        "-" if entry.age_s is None else units.age(entry.age_s),
        f"{entry.sealed * 100:.0f}%",
    )
