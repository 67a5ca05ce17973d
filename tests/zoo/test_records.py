from __future__ import annotations

import json
from pathlib import Path

from tests.zoo.conftest import Load

ALL = ("trace", "compile", "load")


def test_a_run_goes_on_where_the_last_one_ended(zoo: Load, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = zoo("records").Records(path)
    assert first.missing("llama", ALL, failed=False)
    first.put("llama", "trace", {"ok": True})
    first.put("qwen2", "trace", {"ok": False, "reason": "r"})
    again = zoo("records").Records(path)
    assert again.passed("llama", "trace")
    assert not again.missing("llama", ALL[:1], failed=False)
    assert again.missing("llama", ALL, failed=False)
    assert not again.missing("qwen2", ALL, failed=False)
    assert again.missing("qwen2", ALL, failed=True)
    assert list(json.loads(path.read_text())["architectures"]) == ["llama", "qwen2"]


def test_an_earlier_stage_forgets_the_later_ones(zoo: Load, tmp_path: Path) -> None:
    records = zoo("records").Records(tmp_path / "results.json")
    for stage in ALL:
        records.put("llama", stage, {"ok": True})
    records.put("llama", "trace", {"ok": True, "seconds": 1})
    assert records.found["llama"] == {"trace": {"ok": True, "seconds": 1}}
