"""Progress on stderr: bars where it is a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pwcc.cli import output

if TYPE_CHECKING:
    from pwcc.compile.report import OnProgress, Progress


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Yield a function that shows progress events until the block ends."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bars() as show:
            yield show
    else:
        yield plain_lines(output.word, time.monotonic)


def plain_lines(write: Callable[[str], None], clock: Callable[[], float]) -> OnProgress:
    """Return a function that writes one line per event, with the seconds since it was made."""
    start = clock()
    last = ""

    def show(event: Progress) -> None:
        nonlocal last
        line = " ".join(part for part in (_words(event), event.detail) if part)
        if line != last:
            write(f"[{clock() - start:6.1f} s] {line}")
            last = line

    return show


@contextmanager
def _bars() -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.fields[words]:<20}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), redirect_stdout=False) as bars:
        tasks: dict[str, TaskID] = {}

        def show(event: Progress) -> None:
            if event.stage not in tasks:
                for task in tasks.values():
                    bars.update(task, total=1, completed=1, detail="")
                tasks[event.stage] = bars.add_task(event.stage, total=None, words=event.stage, detail="")
            bars.update(
                tasks[event.stage],
                total=event.total or None,
                completed=event.done,
                words=_words(event),
                detail=event.detail,
            )

        yield show
        for task in tasks.values():
            bars.update(task, total=1, completed=1, detail="")


def _words(event: Progress) -> str:
    return f"{event.stage} {event.done} of {event.total}" if event.total else event.stage
