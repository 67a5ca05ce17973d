"""The decorated example: cold, warm, and only from the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Machine

EXAMPLE = REPOSITORY / "examples" / "decorated.py"


@pytest.mark.slow
def test_the_example_compiles_once_and_loads_ever_after(machine: Machine, tmp_path: Path) -> None:
    options = ("--cache-dir", tmp_path / "cache", "--layers", "1")
    cold = machine.run(EXAMPLE, *options).stdout.splitlines()
    assert "compiling: no entry" in cold[0]
    assert "serving: entry " in cold[-1]
    assert "static sizes [1]" in cold[-1]
    (warm,) = machine.run(EXAMPLE, *options, "--mode", "load").stdout.splitlines()
    assert warm.partition("serving: ")[2] == cold[-1].partition("serving: ")[2]


def test_without_a_cache_and_without_a_compile_it_misses(machine: Machine, tmp_path: Path) -> None:
    done = machine.run(EXAMPLE, "--cache-dir", tmp_path / "cache", "--mode", "load", code=1)
    assert "CacheMiss" in done.stderr
