"""``pwcc capture``: refusals without a compile, then the report, the plan and a read-only cache with one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache.ids import EntryKey
from pwcc.cache.store import Store
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import CapturePlan
from pwcc.capture.plan_store import load_plan
from tests.conftest import Warm

Run = Callable[..., subprocess.CompletedProcess[str]]
TINY = ("--model", "llama-tiny", "--device", "cpu")


def test_not_a_cache_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    done = run("capture", tmp_path, "--model", "no such model")
    assert done.returncode == 1
    assert done.stderr.startswith("error: expected a pwcc cache directory")


@pytest.mark.parametrize("name", ["", "nope"])
def test_no_cache_is_a_miss_as_for_load(run: Run, tmp_path: Path, name: str) -> None:
    done = run("capture", tmp_path / name, "--model", "no such model")
    assert done.returncode == 3
    assert "is empty or does not exist" in done.stderr
    assert "pwcc compile" in done.stderr


def test_an_empty_cache_is_a_miss(run: Run, store: Store) -> None:
    done = run("capture", store.root, *TINY, "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["type"] == "CacheMiss"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-memory", "lots"), "--max-memory: expected a size such as 2GiB"),
        (("--mode", "SOME"), "expected a capture mode, got 'SOME'"),
        (("--name", "../x"), "expected a plain name"),
        (("--backend", "cuda"), "graphs need a GPU, got a model on cpu"),
        (("--model", "lama-tiny"), "did you mean llama-tiny"),
    ],
)
def test_wrong_options_are_usage_errors(run: Run, store: Store, options: tuple[str, ...], said: str) -> None:
    done = run("capture", store.root, *TINY, *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.fixture
def cache(llama: Warm, tmp_path: Path) -> Path:
    return llama.copy(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "code", "said"),
    [
        ("--num-blocks", "99999999999", 1, "out of memory for a KV cache of"),
        ("--max-seq-len", "999999999999", 2, "limits are integers from 1 to 2147483647"),
    ],
)
def test_limits_beyond_all_memory(
    run: Run, llama: Warm, cache: Path, option: str, value: str, code: int, said: str
) -> None:
    done = run("capture", cache, *llama.model, "--sizes", "1", option, value)
    assert done.returncode == code
    assert said in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.slow
def test_the_report_and_the_plan(run: Run, llama: Warm, cache: Path) -> None:
    sizes = "1,2,8,12"
    done = run("capture", cache, *llama.model, "--sizes", sizes, "--max-num-seqs", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert "the fake backend stands in for graphs" in done.stderr
    found = json.loads(done.stdout)
    assert found["entry"] == llama.report["entry_key"]
    rows = {(r["mode"], r["size"], r["uniform_decode"]): r["graphs"] for r in found["report"]["rows"]}
    pieces = 3  # two layers
    assert rows == {
        **{("PIECEWISE", size, False): pieces for size in (1, 2, 8, 12)},
        **{("FULL", size, True): 1 for size in (1, 2, 8)},
    }
    assert found["report"]["done"]
    assert set(found["estimate"]["modes"]) == {"PIECEWISE", "FULL"}
    assert found["load"]["clean"]
    plan = load_plan(Store.open(cache), EntryKey(found["entry"]))
    assert isinstance(plan, CapturePlan)
    assert (plan.sizes, plan.mode) == ((1, 2, 8, 12), CaptureMode.FULL_AND_PIECEWISE)
    assert len(plan.measured) == len(rows)
    assert plan.to_json() == found["plan"]
    assert Path(found["saved"]).is_relative_to(cache / "v1" / "plans")


@pytest.mark.slow
def test_the_text(run: Run, llama: Warm, cache: Path) -> None:
    done = run("capture", cache, *llama.model, "--sizes", "1-2", "--mode", "piecewise", "--name", "small")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        f"captured entry {llama.report['entry_key'][:12]} with the fake backend: 2 sizes"
    )
    facts = {line.split()[0]: line.split(None, 1)[1] for line in lines[1:5]}
    assert facts["mode"] == "PIECEWISE"
    assert facts["sizes"] == "1,2"
    assert facts["memory"].endswith("MiB")
    assert facts["plan"].endswith("/small.json")
    table = [line.split()[:4] for line in lines if line.startswith("  PIECEWISE")]
    assert table == [
        ["PIECEWISE", "any", "2", "3"],
        ["PIECEWISE", "any", "1", "3"],
        ["PIECEWISE", "total", "6", "6"],
    ]


@pytest.mark.slow
def test_sizes_that_do_not_fit_are_dropped_and_said(run: Run, llama: Warm, cache: Path) -> None:
    options = (cache, *llama.model, "--sizes", "1,2,8,64", "--mode", "PIECEWISE", "--json")
    total = json.loads(run("capture", *options).stdout)["estimate"]["total_bytes"]
    done = run("capture", *options, "--max-memory", str(total - 1))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    captured = {row["size"] for row in report["rows"]}
    assert report["dropped"]
    assert sorted([*captured, *report["dropped"]]) == [1, 2, 8, 64]
    assert 64 in captured  # else larger batches would go without a graph
    done = run("capture", *options, "--max-memory", "1B")
    assert done.returncode == 1
    assert "1 are given" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.slow
def test_a_cache_whose_plans_cannot_be_written(run: Run, llama: Warm, cache: Path) -> None:
    """Root may write everywhere, so a file stands where the folder of the plans should be."""
    plans = cache / "v1" / "plans"
    if plans.exists():
        plans.rmdir()
    plans.write_text("")
    done = run("capture", cache, *llama.model, "--sizes", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "warning: the plan was not saved: " in done.stderr
    assert json.loads(done.stdout)["saved"] is None
