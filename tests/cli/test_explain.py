"""``pwcc explain``: exit codes and output; the differences themselves are in tests/compile/test_explain.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pwcc.cache.store import Store
from tests.cli.conftest import Run
from tests.conftest import Warm

MODEL = ("--model", "llama-tiny", "--arg", "layers=2", "--device", "cpu")


def test_an_empty_cache_is_a_miss(run: Run, tmp_path: Path) -> None:
    root = Store.create(tmp_path / "cache").root
    done = run("explain", *MODEL, "--cache-dir", root)
    assert (done.returncode, done.stderr) == (3, "")
    assert "pwcc.load: miss" in done.stdout
    assert "the cache holds no entry for this model tree: pwcc.compile.models.llama:Llama" in done.stdout
    found = json.loads(run("explain", *MODEL, "--cache-dir", root, "--json").stdout)
    assert (found["exit_code"], [a["outcome"] for a in found["answers"]]) == (3, ["miss", "miss"])


def test_a_wrong_directory_and_a_bad_target_are_said_at_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):  # a miss, as for pwcc load
        done = run("explain", *MODEL, "--cache-dir", tmp_path / name)
        assert (done.returncode, done.stdout) == (3, "")
        assert "the cache directory is empty or does not exist" in done.stderr
        assert "next: run: pwcc compile" in done.stderr
    root = Store.create(tmp_path / "cache").root
    path = tmp_path / "host.json"
    path.write_text("{}")
    done = run("explain", *MODEL, "--cache-dir", root, "--target", path)
    assert done.returncode == 2
    assert "no host record" in done.stderr
    assert "pwcc env --json" in done.stderr


def test_what_a_load_would_refuse_is_said(run: Run, tmp_path: Path) -> None:
    root = Store.create(tmp_path / "cache").root
    root.chmod(0o777)
    done = run("explain", *MODEL, "--cache-dir", root)
    assert done.returncode == 3
    assert "warning: pwcc.load refuses this directory without --trust-dir" in done.stderr


@pytest.mark.slow
def test_a_hit_a_miss_and_another_host(run: Run, llama: Warm, tmp_path: Path) -> None:
    hit = run("explain", *MODEL, "--cache-dir", llama.root)  # a load hits, a compile of other sizes would not
    assert hit.returncode == 0
    assert f"pwcc.load: hit, entry {llama.report['entry_key'][:12]}" in hit.stdout
    assert "pwcc compile: miss" in hit.stdout
    miss = run("explain", *MODEL, "--arg", "eps=1e-4", "--cache-dir", llama.root)
    assert miss.returncode == 3
    assert "next: build the model as it was compiled" in miss.stdout
    host = json.loads(run("env", "--device", "cpu", "--json").stdout)
    host["facts"]["python_abi"] = "cpython-399"
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host))
    other = run("explain", *MODEL, "--cache-dir", llama.root, "--target", path)
    assert other.returncode == 4
    assert "python_abi: expected " in other.stdout
    assert "cpython-399" in other.stdout


@pytest.mark.slow
def test_key_shows_what_an_entry_recorded(run: Run, llama: Warm) -> None:
    found = json.loads(run("key", *MODEL, "--cache-dir", llama.root, "--json").stdout)
    assert found["lookup_key"] == llama.report["lookup_key"]
    assert found["entry_key"] == llama.report["entry_key"]
    assert any(name.startswith("pwcc.compile.models.llama:") for name in found["after_tracing"]["sources"])
