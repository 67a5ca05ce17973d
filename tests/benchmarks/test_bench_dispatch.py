"""The dispatch benchmark's table, from made-up measurements, and that every step of run_all has a script."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("bench_dispatch", "run_all", "lab", "results")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in MODULES:
        if name not in before:
            sys.modules.pop(name, None)


def outcome(bench: Any, **us: float) -> Any:
    names = {
        "alone": bench.ALONE,
        "stock": "torch.compile",
        "bare": "no guards",
        "two": "level 2",
        "three": "level 3",
    }
    return bench.Outcome({"calls": {names[key]: {"us": value} for key, value in us.items()}, "guards": 230})


def test_each_way_is_shown_above_the_graph_alone(load: Any) -> None:
    bench = load("bench_dispatch")
    runs = [
        outcome(bench, alone=2.0, stock=102.0, bare=52.0, two=32.0, three=7.0),
        outcome(bench, alone=4.0, stock=104.0, bare=54.0, two=34.0, three=9.0),
        bench.Outcome({}, "failed: killed"),
    ]
    assert bench.row("64 layers", runs) == [
        "64 layers", "230", "3.00 us", "+100 us", "+50.0 us", "+30.0 us", "+5.00 us", "20 x"
    ]  # fmt: skip


def test_a_row_that_nobody_measured_says_why(load: Any) -> None:
    bench = load("bench_dispatch")
    row = bench.row("64 layers", [bench.Outcome({}, "failed: no room")])
    assert row == ["64 layers", "failed: no room", "-", "-", "-", "-", "-", "-"]


def test_run_all_has_it_and_every_script_exists(load: Any) -> None:
    steps = load("run_all").STEPS
    assert ("dispatch", "bench_dispatch.py") in [(step.name, step.script) for step in steps]
    assert [step.script for step in steps if not (BENCHMARKS / step.script).is_file()] == []
