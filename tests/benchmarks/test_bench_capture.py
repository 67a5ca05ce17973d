"""The decode benchmark's tables and budgets, from made-up measurements."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("bench_capture")
    for name in ("bench_capture", "lab", "results"):
        if name not in before:
            sys.modules.pop(name, None)


def steps(bench: Any, **ms: float) -> dict[str, Any]:
    return {n[1:]: {"step_ms": t, "issue_ms": 0.1, "norm": 2.0, "tokens": [7]} for n, t in ms.items()}


@pytest.fixture
def runs(bench: Any) -> dict[str, Any]:
    outcome = bench.Outcome
    return {
        bench.FLOOR: outcome({"floor_ms": 4.0, "bandwidth": 4e12, "read_bytes": 16e9}),
        bench.EAGER: outcome({"steps": steps(bench, n1=40, n8=40, n64=40)}),
        bench.REDUCED: outcome({"steps": steps(bench, n1=6, n8=6, n64=6)}),
        bench.COMPILED: outcome({}, "failed: no room"),
        bench.PLAIN: outcome(
            {
                "NONE": {"steps": steps(bench, n1=8)},
                "PIECEWISE": {"steps": steps(bench, n1=5.2, n8=6, n64=7)},
                "FULL": {"steps": steps(bench, n1=5.0, n8=5.9, n64=6.6)},
            }
        ),
        bench.TUNED: outcome({"FULL": {"steps": steps(bench, n1=4.4)}, "NONE": {"failure": "broken"}}),
        bench.COST: outcome(
            {
                "PIECEWISE": {
                    "sizes": 35,
                    "largest": 256,
                    "seconds": 2.5,
                    "driver_bytes": 500 * 2**20,
                    "report": {"totals": {"PIECEWISE": {"graphs": 1155}}},
                },
                "FULL_DECODE_ONLY": {"failure": "out of memory"},
            }
        ),
    }


def test_every_budget_is_judged(bench: Any, runs: dict[str, Any]) -> None:
    kept = {row[0]: (row[1], row[3]) for row in bench.budget_rows(runs)}
    assert kept == {
        "FULL to torch.compile reduce-overhead, batch 1": ("0.833 x", "yes"),
        "FULL to torch.compile reduce-overhead, batch 8": ("0.983 x", "yes"),
        "FULL to torch.compile reduce-overhead, batch 64": ("1.10 x", "no"),
        "PIECEWISE to FULL, batch 1": ("1.04 x", "yes"),
        "FULL with autotune to the floor, batch 1": ("1.10 x", "yes"),
        "capture, PIECEWISE, time": ("2.50 s", "no"),
        "capture, PIECEWISE, memory": ("500 MiB", "yes"),
    }


def test_what_was_not_measured_is_not_judged(bench: Any) -> None:
    assert {row[3] for row in bench.budget_rows({})} == {"-"}


def test_a_row_per_way_and_failures_in_words(bench: Any, runs: dict[str, Any]) -> None:
    rows = {row[1]: row[2:] for row in bench.step_rows(bench.lab.LARGE, runs)}
    assert rows["pwcc FULL"] == (
        "5.00 (0.100)",
        "5.90 (0.100)",
        "6.60 (0.100)",
        "1.2 x",
        "3 of 3, norm 0.0e+00 off",
    )
    assert rows["torch.compile"][0] == "failed: no room"
    assert rows["pwcc autotune NONE"][0] == "broken"
    assert rows["floor"][0] == "4.00"
    costs = {row[1]: row[2:] for row in bench.cost_rows(bench.lab.LARGE, runs)}
    assert costs["PIECEWISE"] == ("35", "1155", "2.50", "500")
    assert costs["FULL_DECODE_ONLY"][2] == "out of memory"


def test_other_tokens_than_eager_show(bench: Any, runs: dict[str, Any]) -> None:
    runs[bench.PLAIN].values["FULL"]["steps"]["1"]["tokens"] = [8]
    runs[bench.PLAIN].values["FULL"]["steps"]["1"]["norm"] = 2.2
    rows = {row[1]: row[-1] for row in bench.step_rows(bench.lab.LARGE, runs)}
    assert rows["pwcc FULL"] == "2 of 3, norm 1.0e-01 off"
