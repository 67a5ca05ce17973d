from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (
    "# x\n\n<!-- bench:speed -->\nold\n<!-- /bench -->\nbetween\n<!-- bench:none -->\n<!-- /bench -->\nend\n"
)
RESULT = {
    "name": "speed",
    "variant": "cpu",
    "columns": ["what", "ms"],
    "rows": [["a|b", "1.5"]],
    "command": "python benchmarks/bench_speed.py",
    "note": "Median of 5.",
    "machine": {"cpu": "Some CPU", "cores": "2"},
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A README of our own beside a copy of the generator."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for name in ("tables.py", "results.py"):
        shutil.copy(ROOT / "benchmarks" / name, tmp_path / "benchmarks" / name)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "benchmarks" / "results" / "speed.cpu.json").write_text(json.dumps(RESULT))
    other = {**RESULT, "variant": "h200", "machine": {"gpu": "Some GPU"}, "note": ""}
    (tmp_path / "benchmarks" / "results" / "speed.h200.json").write_text(json.dumps(other))
    return tmp_path


def run(tree: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "benchmarks" / "tables.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tables_lie_between_their_markers_and_nothing_else_changes(tree: Path) -> None:
    assert run(tree, "--check").returncode == 1
    assert (tree / "README.md").read_text() == README
    assert run(tree).returncode == 0
    table = "| what | ms |\n| --- | --- |\n| a\\|b | 1.5 |\n\n"
    assert (tree / "README.md").read_text() == (
        "# x\n\n<!-- bench:speed -->\n"
        f"{table}Median of 5. *Some CPU, cores 2; `python benchmarks/bench_speed.py`*\n\n"
        f"{table}*Some GPU; `python benchmarks/bench_speed.py`*\n"
        "<!-- /bench -->\nbetween\n<!-- bench:none -->\nNot measured yet.\n<!-- /bench -->\nend\n"
    )
    assert run(tree, "--check").returncode == 0


def test_a_row_of_another_length_is_refused(tree: Path) -> None:
    path = tree / "benchmarks" / "results" / "speed.cpu.json"
    path.write_text(json.dumps({**RESULT, "rows": [["a"]]}))
    done = run(tree)
    assert done.returncode != 0
    assert "speed.cpu.json: every row must have 2 cells" in done.stderr


def test_documents_hold_tables_too(tree: Path) -> None:
    (tree / "docs").mkdir()
    document = tree / "docs" / "speed.md"
    document.write_text("<!-- bench:speed -->\n<!-- /bench -->\n")
    assert run(tree).returncode == 0
    assert "| a\\|b | 1.5 |" in document.read_text()
    document.write_text(document.read_text().replace("1.5", "1.4"))
    stale = run(tree, "--check")
    assert stale.returncode == 1
    assert stale.stderr.startswith("docs/speed.md: ")
