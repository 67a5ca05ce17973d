"""The numerics check of a loaded entry finds wrong code, and says where."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pwcc
from pwcc.cache.errors import CorruptEntry
from pwcc.cli import main
from pwcc.compile.check import CheckReport, CheckRow
from pwcc.compile.compiled_model import CompiledModel
from pwcc.compile.models.llama import Llama, LlamaConfig
from tests.conftest import Warm


def row(error: float, tolerance: float) -> CheckRow:
    return CheckRow("piece 0", 1, error, tolerance)


def test_a_report_is_good_only_if_every_row_is() -> None:
    good, bad = row(1e-7, 2e-7), row(3e-7, 2e-7)
    assert CheckReport((good,)).ok
    assert not CheckReport((good, bad)).ok
    assert CheckReport((good, bad)).worst is bad
    assert CheckReport((good, bad)).max_error == 3e-7
    assert CheckReport((good, bad)).tolerance == 2e-7
    assert not CheckReport(()).ok
    assert CheckReport((row(0.0, 0.0),)).ok


def test_nan_is_no_agreement() -> None:
    report = CheckReport((row(math.nan, 1.0),))
    assert not report.ok
    assert report.to_json()["ok"] is False


def load(warm: Warm) -> tuple[Llama, CompiledModel]:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(layers=2)).eval()
    return model, pwcc.load(model, cache_dir=warm.root)


def inputs(size: int) -> tuple[Tensor, Tensor]:
    return torch.arange(size), torch.arange(size)


@pytest.mark.slow
def test_every_piece_of_every_variant_is_checked(llama: Warm) -> None:
    _, compiled = load(llama)
    report = compiled.check()
    kinds = [("dynamic", (1, 2, 64)), ("static", (1,)), ("static", (2,))]
    assert [(r.what, r.size) for r in report.rows] == [
        (f"piece {piece} {kind}", size) for kind, sizes in kinds for piece in range(3) for size in sizes
    ]
    assert report.ok
    whole = compiled.check(inputs)
    assert {(r.what, r.size) for r in whole.rows[len(report.rows) :]} == {
        ("model against eager", n) for n in (1, 2, 3, 17)
    }
    assert whole.to_json()["rows"] == [
        {"what": r.what, "size": r.size, "error": r.error, "tolerance": r.tolerance, "ok": True}
        for r in whole.rows
    ]


@pytest.mark.slow
def test_a_piece_that_computes_something_else_is_found(llama: Warm) -> None:
    _, compiled = load(llama)
    variant = compiled.programs[0].variants[1]
    first, middle, last = variant.pieces

    def wrong(values: list[object]) -> tuple[object, ...]:
        return tuple(value * 1.001 if isinstance(value, Tensor) else value for value in last.call(values))

    variant.pieces = (first, middle, replace(last, call=wrong))
    report = compiled.check()
    assert not report.ok
    assert [(r.what, r.size) for r in report.rows if not r.ok] == [("piece 2 static", 1)]
    assert report.worst.what == "piece 2 static"


@pytest.mark.slow
def test_a_binding_to_other_weights_is_found(llama: Warm) -> None:
    """The pieces are right; only the whole model against eager can tell."""
    model, compiled = load(llama)
    old = model.lm_head.weight  # kept alive, so that its replacement goes unnoticed
    model.lm_head.weight = torch.nn.Parameter(torch.randn(512, 128))
    assert compiled.check().ok
    report = compiled.check(inputs)
    assert not report.ok
    assert old is not model.lm_head.weight
    assert {r.what for r in report.rows if not r.ok} == {"model against eager"}


@pytest.mark.slow
def test_a_damaged_numerics_record_is_said(
    llama: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not read by a load, so a load without --check works."""
    root = llama.copy(tmp_path / "cache")
    torch.manual_seed(0)
    compiled = pwcc.load(Llama(LlamaConfig(layers=2)).eval(), cache_dir=root)
    digest = compiled.manifest.numerics
    assert digest is not None
    path = root / "v1/blobs/sha256" / digest[:2] / digest
    path.write_bytes(path.read_bytes().replace(b"0.0", b"0.1", 1))
    with pytest.raises(CorruptEntry, match="expected SHA-256"):
        compiled.check()
    assert main(["load", str(root), *llama.model]) == 0
    assert main(["load", str(root), *llama.model, "--check"]) == 1
    assert "expected SHA-256" in capsys.readouterr().err
