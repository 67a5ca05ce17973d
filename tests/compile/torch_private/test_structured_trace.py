"""What pwcc adds to torch's structured trace, as torch writes it and as tlparse reads it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Machine

TLPARSE = Path(sys.executable).parent / "tlparse"


@pytest.mark.slow
def test_the_programs_of_a_trace_are_in_it(machine: Machine, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    machine.pwcc("compile", "--model", "llama-tiny", "--device", "cpu", "--dry-run", TORCH_TRACE=str(logs))
    text = "".join(path.read_text() for path in logs.glob("*.log"))
    names = ("graph", "stitch", "p0", "p1", "p2")
    for name in names:
        assert f'"pwcc_program0_{name}"' in text
    tlparse = shutil.which("tlparse") or (str(TLPARSE) if TLPARSE.exists() else None)
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (log,) = logs.glob("*.log")
    subprocess.run(
        [tlparse, str(log), "-o", str(tmp_path / "out"), "--no-browser"], check=True, capture_output=True
    )
    shown = {path.name for path in (tmp_path / "out").rglob("pwcc_program0_*")}
    assert {name.split("_")[2] for name in shown} >= set(names)
    stitch = next(path for path in (tmp_path / "out").rglob("pwcc_program0_stitch*"))
    assert "def bind(pieces, operation, constant, weights):" in stitch.read_text()
