"""``pwcc load`` where it must refuse; its happy path needs a compiled entry and is tested with one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache.store import Store

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_not_a_cache_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of somebody")
    done = run("load", tmp_path, "--model", "no such model")
    assert done.returncode == 1
    assert done.stderr.startswith("error: expected a pwcc cache directory")


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_directory_with_nothing_in_it_is_a_miss(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run("load", tmp_path / name, "--model", "llama-tiny", "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["where"]) == ("CacheMiss", str(tmp_path / name))
    assert "pwcc compile --model llama-tiny" in error["hint"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_unknown_model(run: Run, store: Store) -> None:
    done = run("load", store.root, "--model", "lama-tiny")
    assert done.returncode == 2
    assert "did you mean llama-tiny" in done.stderr


def test_an_empty_cache_is_a_miss(run: Run, store: Store) -> None:
    done = run("load", store.root, "--model", "llama-tiny", "--device", "cpu", "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("CacheMiss", 3)


def test_another_models_entry_is_a_miss_that_says_why(
    run: Run, store: Store, publish: Callable[..., Path]
) -> None:
    publish("0a")
    done = run("load", store.root, "--model", "llama-tiny", "--device", "cpu")
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert done.stdout == ""
