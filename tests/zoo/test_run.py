"""A sample of eight architectures end to end, through the command that makes the table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zoo.conftest import ZOO

SAMPLE = ("llama", "mistral", "gemma2", "gpt2", "phi", "mixtral", "deepseek_v2", "gpt_oss")
"""Dense, sliding window, softcap, absolute positions, partial rotary, experts, MLA, sinks."""
pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]


def run(*options: str | Path, code: int = 0) -> str:
    command = [sys.executable, str(ZOO / "run.py"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sample_of_eight_compiles_and_loads_in_a_fresh_process(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ("--only", ",".join(SAMPLE), "--work", tmp_path / "work", "--results", results, "--jobs", "2")
    run(*options)
    found = json.loads(results.read_text())["architectures"]
    assert set(found) == set(SAMPLE)
    for name, stages in found.items():
        assert all(stages[stage]["ok"] for stage in ("trace", "compile", "load")), name
        assert stages["trace"]["graphs"] == 1, name
        assert stages["trace"]["splits"] >= 2, name
        assert stages["trace"]["decodes"] == "yes", name
        assert stages["compile"]["sealed"] == 100, name
    assert "0 to run" in run(*options)  # it goes on where it ended


def test_an_architecture_that_is_not_installed_is_a_usage_error(tmp_path: Path) -> None:
    said = run("--only", "llamma", "--work", tmp_path, "--results", tmp_path / "r.json", code=2)
    assert "llamma" in said
