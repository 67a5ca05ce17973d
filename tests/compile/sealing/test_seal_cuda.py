"""A CUDA piece sealed without a GPU: real Inductor kernels and sm_90 cubins, nothing launched."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from pwcc.cache.sealed import SealedPiece, TritonKernel
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("cuda") / "out"
    result = subprocess.run(
        [sys.executable, "-m", "tests.compile.sealing.build_cuda_piece", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_kernels_and_launchers(report: dict[str, Any]) -> None:
    record = SealedPiece.parse(report["record"], "piece.json")
    assert len(record.kernels) == 2
    for kernel in record.kernels:
        assert isinstance(kernel, TritonKernel)
        assert kernel.capability == "9.0"
        assert kernel.arg_types.endswith("OO"), "Triton's two scratch arguments"
        assert f"def {kernel.name}(" in report["program"]
        assert f"launch_kernel(_function_{kernel.name}, " in report["program"]
        assert report["cubins"][kernel.name] > 1000
    compile(report["program"], "piece.py", "exec")


def test_weights_are_assumed_aligned_and_activations_checked(report: dict[str, Any]) -> None:
    record = SealedPiece.parse(report["record"], "piece.json")
    assert record.aligned == (1, 2, 3)
    # before 2.12 the outer callable realigns what is not static, from then on the program does
    assert record.realigned == (0,) or "copy_if_misaligned" in report["program"]


def test_a_kernel_that_was_not_tuned_is_refused(report: dict[str, Any]) -> None:
    assert report["untuned"].startswith("UnsealableError")
    assert "run the piece once" in report["untuned"]


def test_no_path_of_the_builder(report: dict[str, Any]) -> None:
    assert report["leaks"] == []
