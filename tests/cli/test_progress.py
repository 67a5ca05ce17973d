from __future__ import annotations

import os
import pty
import subprocess
import sys

from pwcc.cli.progress import plain_lines
from pwcc.compile.report import Progress


def test_plain_lines() -> None:
    lines: list[str] = []
    times = iter([10.0, 10.5, 11.25, 80.0])
    show = plain_lines(lines.append, lambda: next(times))
    show(Progress("trace"))
    show(Progress("compile", 1, 12, "piece_1 [n=4]"))
    show(Progress("compile", 1, 12, "piece_1 [n=4]"))
    show(Progress("publish"))
    assert lines == ["[   0.5 s] trace", "[   1.2 s] compile 1 of 12 piece_1 [n=4]", "[  70.0 s] publish"]


SCRIPT = """
from pwcc.cli.progress import progress
from pwcc.compile.report import Progress
with progress() as show:
    show(Progress("trace"))
    show(Progress("compile", 3, 12, "piece_1 [n=4]"))
print("data")
"""


def test_bars_on_a_terminal_leave_stdout_alone() -> None:
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, stdout=subprocess.PIPE, stderr=follower, env=env, text=True
    )
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert done.stdout == "data\n"
    assert "compile 3 of 12" in shown


def test_a_dumb_terminal_gets_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=True,
        capture_output=True,
        env={**os.environ, "TERM": "dumb"},
        text=True,
    )
    assert done.stdout == "data\n"
    assert [line.partition("] ")[2] for line in done.stderr.splitlines()] == [
        "trace",
        "compile 3 of 12 piece_1 [n=4]",
    ]
