"""What Inductor makes of the fused FP8 operators: on CUDA kernels of the piece, on a CPU calls."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pwcc.compile.ops.fused import OPERATORS
from pwcc.compile.sealing.rewrite import rewrite
from pwcc.compile.sealing.wrapper import parse_wrapper
from pwcc.compile.torch_private import fused_lowering

OPS: Any = torch.ops.pwcc
SCRIPT = Path(__file__).parents[2] / "fixtures" / "programs" / "lower_fused.py"


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("triton")
    folder = str(tmp_path_factory.mktemp("caches"))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder},
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_on_cuda_they_are_kernels_of_the_piece_that_can_be_sealed(wrapper: str) -> None:
    rewritten = rewrite(parse_wrapper(wrapper), constants=(), device_type="cuda", device_index=0)
    text = ast.unparse(ast.fix_missing_locations(rewritten.call))
    assert {name: k.factory for name, k in rewritten.outside.kernels.items()} == {
        "triton_poi_fused_0": "triton",
        "rms_norm_fp8_0": "triton",
        "silu_and_mul_fp8_1": "triton",
    }
    assert not rewritten.outside.fallbacks
    assert not rewritten.outside.externs
    # five tensors are made: the doubled input, and the four outputs; slices are read where they lie
    assert text.count("empty_strided_cuda(") == 5
    assert "reinterpret_tensor(both_1, (u0, 96), (192, 1), 96)" in text
    assert "copy_" not in text


@pytest.mark.slow
def test_their_launches_have_a_program_a_row_of_any_number(wrapper: str) -> None:
    lines = [line.strip() for line in wrapper.splitlines() if ".run(" in line and "_fp8_" in line]
    assert [line.partition("stream=")[0].rstrip(" ,").rsplit(", ", 3)[1:] for line in lines] == [
        ["u0", "1", "1"]
    ] * 2


def test_a_model_that_calls_an_operator_itself_gets_its_lowering() -> None:
    from torch._inductor.lowering import lowerings

    graph = torch.fx.Graph()
    x, weight, scale = (graph.placeholder(name) for name in ("x", "weight", "scale"))
    graph.call_function(OPS.rms_norm_static_fp8_quant, (x, weight, scale, 1e-5))
    fused_lowering.install_for(graph)
    assert all(getattr(OPS, name).default in lowerings for name in OPERATORS)
