"""The policy's text, what it makes of a graph, the operators' numbers, and a compile under either choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pwcc.cache.errors import UsageError
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.ops import custom_ops, layers
from pwcc.compile.ops.custom_ops import MODULES, CustomOp, parse_policy, register, write_out
from pwcc.compile.ops.layers import RMSNorm, SiluAndMul
from pwcc.compile.piece_compiler import MemoryBlobs, PieceTask, compile_piece
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.rebuild import Variant
from pwcc.compile.sealing.profile import cpu_profile, cuda_profile
from tests.compile.one_piece import one_piece
from tests.conftest import REPOSITORY

ALL = tuple(sorted(MODULES))


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", ()),
        ("none", ()),
        ("all", ALL),
        ("all,-rms_norm", tuple(name for name in ALL if name != "rms_norm")),
        ("none,+silu_and_mul", ("silu_and_mul",)),
        ("+silu_and_mul, +rms_norm", ("rms_norm", "silu_and_mul")),
        ("-rms_norm", ()),
    ],
)
def test_policy(text: str, on: tuple[str, ...]) -> None:
    assert parse_policy(text) == on


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("rms_norm", "got 'rms_norm'", "+rms_norm"),
        ("+rms_nrm", "no custom operator 'rms_nrm'", "did you mean rms_norm?"),
        ("-other", "no custom operator 'other'", "there are rms_norm"),
        ("+rms_norm,-rms_norm", "on and off", ""),
        ("+rms_norm,all", "got 'all'", "come first"),
    ],
)
def test_what_a_policy_refuses(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(text)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_every_operator_of_the_table_registers_itself() -> None:
    for name in MODULES:
        op = custom_ops.named(name)
        assert op.name == name
        assert hasattr(torch.ops.pwcc, name)
        assert op.kernels


def test_an_operator_outside_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        register(CustomOp("other", layers.silu_and_mul, {}))


def graph_of_operators() -> fx.GraphModule:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    normed = graph.call_function(torch.ops.pwcc.rms_norm, (x, weight, 1e-5))
    gated = graph.call_function(torch.ops.pwcc.silu_and_mul.default, (normed,))
    graph.output((graph.call_function(torch.relu, (gated,)),))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("keep", "device", "left", "changed"),
    [
        ((), "cpu", (), 2),
        (("rms_norm",), "cpu", ("rms_norm",), 1),
        (("rms_norm", "silu_and_mul"), "cpu", ("rms_norm", "silu_and_mul"), 0),
        (("rms_norm",), "cuda", (), 2),
    ],
)
def test_what_is_off_is_written_out(
    keep: tuple[str, ...], device: str, left: tuple[str, ...], changed: int
) -> None:
    module = graph_of_operators()
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = module(x, weight)
    assert write_out(module, keep=keep, device_type=device) == changed
    targets = [str(node.target) for node in module.graph.nodes]
    assert {name for name in MODULES if any(f"pwcc.{name}" in target for target in targets)} == set(left)
    if device == "cpu":
        assert torch.equal(module(x, weight)[0], expected[0])


def test_modules_compute_what_their_plain_forms_say() -> None:
    norm, act = RMSNorm(8), SiluAndMul()
    norm.weight.data = torch.randn(8)
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    wide = total.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    assert (normed.double() - expected).abs().max() < 0.05
    assert torch.equal(norm(x)[1], x)
    assert torch.equal(act(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = RMSNorm(16), SiluAndMul()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Any:
        y, residual = self.norm(x)
        y, _ = self.norm(self.down(self.act(self.up(y))), residual)
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("keep", [(), ("rms_norm",)])
def test_a_piece_under_either_choice(keep: tuple[str, ...], tmp_path: Path) -> None:
    """Off leaves no call of an operator of ours; on leaves those that are on. Numbers are checked too."""
    task = PieceTask(
        "p0", piece_of(Block().eval()), Variant(1, 64), "cpu", cpu_profile("native"), custom_ops=keep
    )
    blobs = MemoryBlobs()
    result = compile_piece(task, blobs, scratch=tmp_path)
    record = SealedPiece.from_bytes(blobs.read_blob(result.sealed), where="piece")
    assert {name.split(".")[0] for name in record.fallbacks} == {f"pwcc::{name}" for name in keep}


def piece_of(model: nn.Module) -> PieceGraph:
    graph = one_piece(model, "x:float32[n,16]")
    assert "torch.ops.pwcc.rms_norm" in "".join(graph.ops)  # the graph holds the operator, whatever the policy
    return graph


SCRIPT = Path(__file__).parents[2] / "fixtures" / "programs" / "interpret_layers.py"


@pytest.mark.slow
def test_kernels_agree_with_the_plain_forms(tmp_path: Path) -> None:
    """Under Triton's interpreter, in a process of its own: it is chosen at import."""
    pytest.importorskip("triton")
    environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, float] = json.loads(ran.stdout)
    assert len(found) == 36
    bounds = {name: 0.02 if "bfloat16" in name else 1e-5 for name in found}
    assert {name: error for name, error in found.items() if not error <= bounds[name]} == {}


@pytest.mark.slow
def test_kernels_become_kernels_of_a_cuda_piece(tmp_path: Path) -> None:
    """Triton makes sm_90 cubins without a GPU, and a sealed piece launches them without Triton."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.compile.ops.build_layer_piece", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    ours = [name for name in found["on"]["kernels"] if name.startswith(("rms_norm", "silu_and_mul"))]
    assert len(ours) >= 2
    assert not [name for name in found["off"]["kernels"] if name in ours]
    assert found["on"]["fallbacks"] == found["off"]["fallbacks"] == []
    assert found["on"]["mutated"] == []
    assert "import triton" not in found["on"]["source"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what the compilers say on a GPU is shown, not judged
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """Eagerly the operators run their kernels; a piece that keeps them is checked against eager when sealed."""
    x = torch.randn(33, 1000, device="cuda", dtype=dtype)
    residual, weight = torch.randn_like(x), torch.randn(1000, device="cuda", dtype=dtype)
    for name, args in (
        ("rms_norm", (x, weight, 1e-5)),
        ("fused_add_rms_norm", (x, residual, weight, 1e-5)),
        ("silu_and_mul", (x,)),
    ):
        got, expected = getattr(torch.ops.pwcc, name)(*args), getattr(layers, name)(*args)
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    graph = piece_of(Block().eval())
    moved = PieceGraph.from_bytes(graph.to_bytes().replace(b'"cpu"', b'"cuda"'), where="moved")
    options = cuda_profile(autotune=False)
    task = PieceTask("p0", moved, Variant(1, 64), "cuda:0", options, custom_ops=ALL)
    blobs = MemoryBlobs()
    result = compile_piece(task, blobs, scratch=tmp_path)
    record = SealedPiece.from_bytes(blobs.read_blob(result.sealed), where="piece")
    assert any(kernel.name.startswith("rms_norm") for kernel in record.kernels)
    assert record.fallbacks == ()
