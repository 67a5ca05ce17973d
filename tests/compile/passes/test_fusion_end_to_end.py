"""The small FP8 decoder, compiled with every fusion pass, then served by a host without a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machine

MODEL = Path(__file__).parents[2] / "fixtures" / "models" / "fp8_decoder.py"
NAMES = (
    "rms_norm_static_fp8",
    "rms_norm_dynamic_fp8",
    "silu_and_mul_static_fp8",
    "silu_and_mul_dynamic_fp8",
)
PASSES = ",".join(["noop", *(f"{name}(min_tokens=1,max_tokens=null,cpu=true)" for name in NAMES)])


@pytest.mark.slow
def test_a_decoder_is_fused_sealed_and_served_without_a_compiler(tmp_path: Path) -> None:
    builder, host = Machine.make(tmp_path / "a", "ann"), Machine.make(tmp_path / "b", "bob", bare=True)
    cache = tmp_path / "cache"
    model = ("--model", f"{MODEL}:factory", "--arg", "layers=1", "--arg", "dynamic=true", "--device", "cpu")
    builder.pwcc_json("compile", *model, "--passes", PASSES, "--max-tokens", "1", "--cache-dir", cache)

    (entry,) = [path.name for path in cache.glob("v1/entries/*/*")]
    found = builder.pwcc_json("inspect", cache, entry)
    records = [piece["records"][0]["record"] for piece in found["programs"][0]["unique"]]
    assert [fused(record) for record in records] == [
        {"rms_norm_dynamic_per_token_fp8_quant": 1},
        {"rms_norm_dynamic_per_token_fp8_quant": 1, "silu_and_mul_dynamic_per_token_fp8_quant": 1},
    ]
    assert [matches(record) for record in records] == [[0, 0, 1, 0, 0], [0, 0, 1, 0, 1]]

    answer = host.pwcc("load", cache, *model, "--check")
    assert "check ok" in answer.stdout + answer.stderr
    assert "none of a compiler" in answer.stdout + answer.stderr


def matches(record: dict[str, Any]) -> list[int]:
    return [one["matches"] for one in record["passes"]]


def fused(record: dict[str, Any]) -> dict[str, int]:
    names = [name.removeprefix("pwcc::").partition(".")[0] for name in record["fallbacks"] if "pwcc::" in name]
    return {name: names.count(name) for name in names}
