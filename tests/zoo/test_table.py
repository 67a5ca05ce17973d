from __future__ import annotations

import json
from typing import Any

import pytest

from tests.zoo.conftest import ZOO, Load

PASSED: dict[str, Any] = {
    "trace": {"ok": True, "seconds": 2.0, "graphs": 1, "eager_error": 1e-6, "decodes": "yes"},
    "compile": {"ok": True, "seconds": 30.4, "pieces": 3, "unique": 2, "sealed": 100, "cold_error": 3e-6},
    "load": {"ok": True, "seconds": 4.0, "warm_error": 2e-6},
}
FAILED: dict[str, Any] = {
    "trace": {"ok": False, "seconds": 1.0, "reason": "a | b", "where": "models/x.py:7: if n:"}
}


def test_a_row_has_the_worst_error_and_all_seconds(zoo: Load) -> None:
    found = zoo("table").row("llama", PASSED)
    assert found.passed
    assert found.cells == (
        "llama",
        "LlamaForCausalLM",
        "1",
        "3",
        "2",
        "100 %",
        "3.0e-06",
        "36",
        "yes",
        "passes",
    )


def test_a_failure_has_its_reason_and_line(zoo: Load) -> None:
    found = zoo("table").row("llama", FAILED)
    assert not found.passed
    assert not found.excluded
    assert found.cells[-1] == "trace: a | b (`models/x.py:7`)"


def test_an_exclusion_says_why_unless_it_passes(zoo: Load) -> None:
    table = zoo("table")
    assert table.row("bloom", FAILED).excluded
    assert table.row("bloom", FAILED).cells[-1].startswith("excluded: computes attention itself")
    assert table.row("bloom", {}).excluded
    assert not table.row("bloom", PASSED).excluded
    assert table.row("bloom", PASSED).passed


def test_a_stage_that_was_not_run_is_said(zoo: Load) -> None:
    row = zoo("table").row
    assert row("llama", {}).cells[-1] == "not run yet"
    assert row("llama", {"trace": PASSED["trace"]}).cells[-1] == "trace passes; compile not run yet"
    assert not row("llama", {"trace": PASSED["trace"]}).passed


def test_the_page_counts_what_is_not_excluded(zoo: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    table = zoo("table")
    monkeypatch.setattr(table, "ARCHITECTURES", {"llama": "A", "qwen2": "B", "bloom": "C"})
    document = {"transformers": "5", "torch": "2", "architectures": {"llama": PASSED, "qwen2": FAILED}}
    text = table.page(document, "before\n<!-- zoo -->\nold\n<!-- /zoo -->\nafter\n")
    assert "3 architectures, 1 excluded, 1 of the other 2 pass (50 %)" in text
    assert "a \\| b" in text
    assert text.startswith("before\n<!-- zoo -->\n")
    assert text.endswith("<!-- /zoo -->\nafter\n")
    assert table.page(document, text) == text


def test_a_gpu_row_has_the_figures_of_a_load_or_the_reason(zoo: Load) -> None:
    good = {"ok": True, "pieces": 3, "kernels": 39, "error": 0.01, "eager_error": 0.02}
    bad = {"ok": False, "reason": "error 0.3", "where": "zoo/gpu.py:1"}
    document = {
        "machine": "one GPU",
        "torch": "2",
        "transformers": "5",
        "architectures": {
            "llama": {"checkpoint": "L", "compile": good, "load": {**good, "load_ms": 30.0}},
            "gpt_oss": {"checkpoint": "G", "compile": bad},
        },
    }
    text = zoo("table").gpu_page(document, "a\n<!-- zoo-gpu -->\nold\n<!-- /zoo-gpu -->\nb\n")
    assert "1 of 2 pass" in text
    assert "| llama | L | 3 | 39 | 30.0 | 0.01 | 0.02 | passes |" in text
    assert "| gpt_oss | G |  |  |  |  |  | error 0.3 |" in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")


def test_the_committed_page_shows_the_committed_results_of_every_architecture(zoo: Load) -> None:
    import transformers

    table = zoo("table")
    document = json.loads((ZOO / "results.json").read_text())
    text = table.PAGE.read_text()
    assert table.gpu_page(json.loads(table.GPU_RESULTS.read_text()), text) == text
    if document["transformers"] != transformers.__version__:
        pytest.skip("the results are those of another transformers")
    assert table.page(document, text) == text
    assert set(document["architectures"]) <= set(table.ARCHITECTURES)
    assert all(f"| {name} |" in text for name in table.ARCHITECTURES)
    for name, stages in document["architectures"].items():
        for result in stages.values():
            assert result["ok"] or result["reason"], name
