"""Counters and reports as JSON and Prometheus text."""

from __future__ import annotations

import json

from pwcc.capture.dispatch import Dispatch, Fall
from pwcc.capture.plan import Measured
from pwcc.capture.report import CaptureReport, CaptureRow, MemoryEstimate, ModeEstimate
from pwcc.capture.stats import GraphStats
from pwcc.compile.ops.forward_context import BatchDescriptor, RunMode


def test_counters() -> None:
    stats = GraphStats()
    stats.count(Dispatch(RunMode.FULL, BatchDescriptor(8, True)), 5)
    stats.count(Dispatch(RunMode.PIECEWISE, BatchDescriptor(16), Fall.TOO_LONG), 16)
    stats.count(Dispatch(RunMode.NONE, BatchDescriptor(700), Fall.ABOVE_LARGEST), 700)
    assert stats.by_mode == {RunMode.NONE: 1, RunMode.PIECEWISE: 1, RunMode.FULL: 1}
    assert json.loads(json.dumps(stats.to_json())) == {
        "hits": [
            {"mode": "FULL", "size": 8, "count": 1},
            {"mode": "NONE", "size": 0, "count": 1},
            {"mode": "PIECEWISE", "size": 16, "count": 1},
        ],
        "falls": {"mode": 0, "above_largest": 1, "waste": 0, "not_ready": 0, "too_long": 1},
        "tokens": 721,
        "padding_tokens": 3,
        "captures": 0,
        "failures": 0,
    }
    lines = stats.prometheus().splitlines()
    assert "# TYPE pwcc_graph_calls_total counter" in lines
    assert 'pwcc_graph_calls_total{mode="NONE",size="0"} 1' in lines
    assert "pwcc_graph_padding_tokens_total 3" in lines
    assert all(line.startswith(("# ", "pwcc_graph_")) for line in lines)


def test_totals_leave_out_failures_and_do_not_invent_nodes() -> None:
    def row(size: int, nodes: int | None, error: str | None = None) -> CaptureRow:
        return CaptureRow(Measured(RunMode.FULL, size, True, 0.5, 100, 1, nodes), error)

    report = CaptureReport("fake", rows=[row(8, 30), row(4, 30), row(2, 0, "failed")])
    assert report.totals() == {RunMode.FULL: Measured(RunMode.FULL, 8, True, 1.0, 200, 2, 60)}
    report.rows.append(row(1, None))
    assert report.totals()[RunMode.FULL].nodes is None
    assert [r["error"] for r in report.to_json()["rows"]] == [None, None, "failed", None]  # type: ignore[index, union-attr, call-overload]


def test_an_estimate_is_first_plus_the_others() -> None:
    found = MemoryEstimate({RunMode.FULL: ModeEstimate(100, 10, 5), RunMode.PIECEWISE: ModeEstimate(7, 1, 1)})
    assert found.total_bytes == 140 + 7
    assert found.to_json()["total_bytes"] == 147
