"""A collection's report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pwcc.cli import units
from pwcc.cli.table import Column, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pwcc.cache.gc import Collected
    from pwcc.cache.retention import Verdict

_COLUMNS: Final = (
    Column("ENTRY"),
    Column("USED", right=True),
    Column("FREES", right=True),
    Column("WHY", elastic=True),
)
SHORT: Final = 12


def collected_lines(report: Collected, *, now: float, width: int) -> list[str]:
    """Return one row per removed entry, and what was freed and is left."""
    removed = report.removed
    lines = table(_COLUMNS, _rows(removed, now), width=width) if removed else []
    would = "would remove" if report.dry_run else "removed"
    what = (
        units.count(len(removed), "entry"),
        units.count(report.pieces, "piece record"),
        units.count(report.blobs, "blob"),
    )
    lines.append(f"{would} {what[0]}, {what[1]} and {what[2]}: {units.bytes_(report.before - report.after)}")
    left = len(report.verdicts) - len(removed)
    after = f"{units.bytes_(report.after)} in {units.count(left, 'entry')}"
    lines.append(f"{'would be left' if report.dry_run else 'left'}: {after}")
    if report.waiting:
        lines.append(
            f"unused, but younger than {units.age(report.grace_s)} and so kept for now: "
            f"{units.count(report.waiting, 'file')}, {units.bytes_(report.waiting_bytes)}"
        )
    return lines


def _rows(removed: Iterable[Verdict], now: float) -> list[tuple[str, str, str, str]]:
    return [
        (
            verdict.held.ref.entry_key[:SHORT],
            units.age(max(0.0, now - verdict.held.used_s)),
            units.bytes_(verdict.freed),
            verdict.reason,
        )
        for verdict in removed
    ]
