"""Generated models: cold = warm = eager, or refused by name; and the generator and comparison themselves."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.fuzz import generator, one, run, table

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_models(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.run",
        "--count",
        "20",
        "--work",
        str(tmp_path),
        "--result",
        str(result),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=HERE.parents[1])
    summary = json.loads(result.read_text())
    assert summary["bad"] == {}, done.stdout
    assert summary["models"] == 20
    assert summary["verdicts"]["ok"] >= 10, done.stdout


def test_a_seed_is_a_model() -> None:
    assert generator.generate(7) == generator.generate(7)
    assert generator.generate(7).source != generator.generate(8).source


def test_every_construct_is_generated_and_parses() -> None:
    seen: Counter[str] = Counter()
    for seed in range(600):
        made = generator.generate(seed)
        ast.parse(made.source)
        seen.update(made.constructs)
    assert set(seen) == {construct.name for construct in generator.CONSTRUCTS}


def test_two_results_are_told_apart() -> None:
    x = torch.randn(3, 8)
    one.same({"a": (x, None, 3)}, {"a": (x.clone(), None, 3)}, 1e-6, "here")
    for other in (x + 1e-3, x[:2], x.double(), None, 3):
        with pytest.raises(one.WrongError, match="here"):
            one.same({"a": other}, {"a": x}, 1e-6, "here")
    with pytest.raises(one.WrongError, match="expected a tuple, got a list"):
        one.same([x], (x,), 1e-6, "here")
    with pytest.raises(one.WrongError):
        one.same(x, torch.full_like(x, float("nan")), 1e-6, "here")


def test_shared_memory_is_told_apart() -> None:
    x = torch.randn(3, 8)
    assert one.sharing((x[:, :4], x + 1), {"x": x}) == [["argument x", "result 0"]]
    assert one.sharing((x[:, :4].clone(), x + 1), {"x": x}) == []


def test_equal_refusals_are_one_reason() -> None:
    rows: list[run.Row]
    rows = [
        {"type": "UnsealableError", "message": f"piece p{n} (n=1..64): 'v{n}' holds {n} things"} for n in (1, 2)
    ]
    assert len({run.reason(row) for row in rows}) == 1


def test_a_summary_counts_what_is_bad() -> None:
    rows: dict[int, run.Row]
    rows = {
        0: {"verdict": "ok"},
        1: {"verdict": "wrong", "message": "x"},
        2: {"verdict": "refused", "type": "T", "message": "m"},
    }
    summary = run.summarise(rows, "cpu")
    assert summary["bad"] == {"1": rows[1]}
    assert run.share_refused(summary) == pytest.approx(1 / 3)
    assert summary["refusals"] == {"T: m": [2]}


def test_the_document_is_what_the_committed_run_says() -> None:
    assert table.DOCUMENT.read_text() == table.document(json.loads(table.RESULTS.read_text()))


def test_the_document_names_every_refusal_and_everything_bad() -> None:
    rows: dict[int, run.Row] = {
        1: {"verdict": "refused", "type": "TraceError", "message": "no | graph"},
        2: {"verdict": "wrong", "message": "differs"},
    }
    text = table.document(run.summarise(rows, "cpu"))
    assert "| TraceError: no / graph | 1 | 1 |" in text
    assert "- model 2: wrong: differs" in text
