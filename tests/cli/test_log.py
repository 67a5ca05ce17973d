"""``PWCC_LOG`` on the command line: lines on stderr, the answer on stdout as without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Warm


@pytest.mark.slow
def test_a_load_logs_its_steps(llama: Warm, tmp_path: Path) -> None:
    argv: tuple[str | Path, ...] = ("load", llama.copy(tmp_path / "cache"), *llama.model, "--json")
    done = llama.machine.pwcc(*argv, PWCC_LOG="warning,load=info")
    answer = json.loads(done.stdout)
    assert answer["entry"] == llama.report["entry_key"]
    steps = re.findall(r"INFO pwcc\.load: load\.(\w+): \d+\.\d{3} s$", done.stderr, re.MULTILINE)
    assert list(dict.fromkeys(steps)) == list(answer["receipt"]["steps_ms"])
    assert re.search(r"INFO pwcc\.load: load: ", done.stderr)


def test_the_variable_is_read_at_the_first_line_to_write() -> None:
    code = """
from pwcc.cache.telemetry import span
with span("load.bind"):
    pass
with span("compile.trace"):
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PWCC_LOG": "compile=info"},
    )
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "INFO pwcc.compile: compile.trace: " in line
