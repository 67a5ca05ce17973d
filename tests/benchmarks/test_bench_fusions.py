"""The rule that keeps a fusion only where it wins, from made-up times and from the committed ones."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pwcc.compile.passes.fusion_gate import SiluMulDynamicQuant, SiluMulStaticQuant
from pwcc.compile.passes.fusion_norm import RMSNormDynamicQuant, RMSNormStaticQuant

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PASSES = (RMSNormStaticQuant, RMSNormDynamicQuant, SiluMulStaticQuant, SiluMulDynamicQuant)
Times = dict[int, dict[str, float]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("bench_fusions")
    for name in ("bench_fusions", "lab", "results"):
        if name not in before:
            sys.modules.pop(name, None)


def times(**fused: float) -> Times:
    """Ten microseconds unfused, eleven tuned, at ``n<tokens>``."""
    return {int(n[1:]): {"plain": 10.0, "tuned": 11.0, "fused": t} for n, t in fused.items()}


def test_the_longest_run_of_sizes_that_win_is_kept(bench: Any) -> None:
    found = {"norm": times(n1=9, n8=10, n64=9, n512=9.69, n4096=8)}
    assert bench.keep({"norm": "pass"}, found) == {"pass": (64, 4096)}


def test_a_gain_below_three_percent_is_none(bench: Any) -> None:
    assert bench.keep({"norm": "pass"}, {"norm": times(n1=9.8, n8=9.71)}) == {"pass": None}


def test_the_better_of_both_unfused_ways_counts(bench: Any) -> None:
    found: Times = {1: {"plain": 10, "tuned": 8, "fused": 9}}
    assert bench.keep({"norm": "pass"}, {"norm": found}) == {"pass": None}


def test_forms_of_one_pass_count_together_and_at_sizes_that_all_have(bench: Any) -> None:
    found = {"norm": times(n1=11, n8=8, n64=1), "add": times(n1=8, n8=8)}
    assert bench.keep({"norm": "pass", "add": "pass"}, found) == {"pass": (1, 8)}


def test_of_runs_of_one_length_the_larger_sizes_are_kept(bench: Any) -> None:
    assert bench.keep({"norm": "pass"}, {"norm": times(n1=8, n8=12, n64=8)}) == {"pass": (64, 64)}


def test_what_was_not_measured_is_not_kept(bench: Any) -> None:
    assert bench.keep({"norm": "pass"}, {}) == {"pass": None}


@pytest.mark.parametrize("kind", PASSES)
def test_the_defaults_are_what_was_measured(bench: Any, kind: type[RMSNormStaticQuant]) -> None:
    result = json.loads((BENCHMARKS / "results" / "fusions.h200.json").read_text())
    low, high = result["data"]["keep"][kind.name]
    assert kind().min_tokens == low
    assert kind().max_tokens == (None if high == max(bench.TOKENS) else high)
