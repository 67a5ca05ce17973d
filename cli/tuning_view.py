"""What the tuning of an entry measured, as text: per choice the winner, its time and what it won against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pwcc.cache.strict import Json
from pwcc.cli.table import Column, table

_COLUMNS: Final = (
    Column("CHOICE", elastic=True),
    Column("WINNER", elastic=True),
    Column("US", right=True),
    Column("TRIED", right=True),
    Column("SLOWEST", right=True),
)


def tuning_lines(tuning: Mapping[str, Json], *, width: int) -> list[str]:
    """Return one row per kernel or operation that had a choice; ``--json`` has every candidate.

    ``US`` and ``SLOWEST`` are microseconds as measured while tuning; ``-`` where nothing was timed.
    ``(d)`` marks a configuration that coordinate descent found.
    """
    if "problem" in tuning:
        return ["tuning", f"  unreadable: {tuning['problem']}"]
    if not tuning:
        return ["tuning", "  none: nothing was tuned, or the results did not travel with the entry"]
    lines = ["tuning: microseconds as measured; not part of what is digested"]
    for name, value in tuning.items():
        piece = value if isinstance(value, dict) else {}
        rows = list(_rows(piece.get("choices")))
        lines += [f"  {name}: {piece.get('runs')} timing runs"]
        if rows:
            lines += table(_COLUMNS, rows, width=width, indent="    ")
    return lines


def _rows(choices: Json) -> Iterator[tuple[str, ...]]:
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        winner, held = str(choice.get("winner")), choice.get("candidates")
        tried = [item for item in held if isinstance(item, dict)] if isinstance(held, list) else []
        times = [float(us) for item in tried if isinstance(us := item.get("us"), int | float)]
        won = [
            float(us)
            for item in tried
            if item["config"] == winner and isinstance(us := item["us"], int | float)
        ]
        yield (
            str(choice.get("name")),
            winner + (" (d)" if choice.get("descent") is True else ""),
            f"{min(won):.2f}" if won else "-",
            str(len(tried)) if tried else "-",
            f"{max(times):.2f}" if times else "-",
        )
