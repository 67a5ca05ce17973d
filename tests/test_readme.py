"""README.md keeps its word: its tables are current, its code is code, its commands and files exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Warm

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
ALL = "\n".join([TEXT, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))])


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_benchmark_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_python_examples_are_short_and_import_what_exists() -> None:
    assert blocks("python")
    for code in blocks("python"):
        assert len([line for line in code.splitlines() if line.strip()]) <= 18
        for node in ast.parse(code).body:
            if isinstance(node, ast.ImportFrom):
                assert node.module
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.slow
def test_the_python_examples_run_one_after_the_other(llama: Warm, tmp_path: Path) -> None:
    """Each runs in the one before it; the model is the fixture's, which has fewer layers."""
    code = "\n".join(blocks("python"))
    built = 'build(ModelRef.parse("llama-tiny"), '
    assert code.count(built) == 1
    (tmp_path / "warm").symlink_to(llama.root)
    done = subprocess.run(
        [sys.executable, "-c", code.replace(built, built + 'args={"layers": 2}, ')],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    eager_order, *_, replayed, decision = done.stdout.splitlines()
    assert eager_order == replayed
    assert "PIECEWISE" in decision


def test_every_command_and_variable_is_in_a_table() -> None:
    listed = set(re.findall(r"^\| `pwcc (\w+)", TEXT, re.MULTILINE))
    assert listed == set(click_commands())
    read = {
        name
        for folder in ("cache", "cli", "compile", "capture")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\"(PWCC_\w+)\"", path.read_text())
    }
    assert set(re.findall(r"^\| `(PWCC_\w+)`", TEXT, re.MULTILINE)) == read


def click_commands() -> list[str]:
    import typer.main

    from pwcc.cli.app import app

    group = typer.main.get_group(app)
    return list(group.commands)


def options_of(command: str) -> set[str]:
    """The options of a command, and of its subcommands."""
    import typer.main

    from pwcc.cli.app import app

    found = typer.main.get_group(app).commands[command]
    parts = getattr(found, "commands", {command: found}).values()
    return {option for part in parts for parameter in part.params for option in parameter.opts}


@pytest.mark.parametrize("command", sorted(set(re.findall(r"pwcc (\w+) [^`\n#]*--", ALL))))
def test_every_option_shown_exists(command: str) -> None:
    shown = {
        option
        for line in re.findall(rf"pwcc {command} [^`\n#]*", ALL)
        for option in re.findall(r"(--[a-z-]+)", re.split(r"&&|[|]", line)[0])
    }
    assert shown - options_of(command) == set()


def test_every_linked_file_exists() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        prose = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
    for path in re.findall(r"`((?:examples|benchmarks|tests)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), path


def test_make_targets_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`", TEXT)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
