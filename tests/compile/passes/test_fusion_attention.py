"""Attention and FP8 quantisation: what is matched and what is not, its numbers, and a compile."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pwcc.compile.ops.attention  # noqa: F401  registers the operators
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import ForwardContext, forward_context
from pwcc.compile.ops.fused.formulas import FP8, quantised
from pwcc.compile.passes.base import PassContext
from pwcc.compile.passes.fusion_attention import AttentionStaticQuant
from pwcc.compile.passes.manager import PassRun
from pwcc.compile.passes.registry import resolve
from pwcc.compile.piece_compiler import MemoryBlobs, PieceTask, compile_piece
from pwcc.compile.rebuild import Variant
from pwcc.compile.sealing.profile import cpu_profile
from tests.compile.one_piece import one_piece

aten = torch.ops.aten
HEADS, WIDTH = 2, 8
PASSES = "noop,attention_fp8,fix_functionalization"


class Block(nn.Module):
    """Attention whose output is quantised by one scale, as in front of an FP8 projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(0.01))

    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3 * HEADS, WIDTH).split(HEADS, 1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        torch.ops.pwcc.attention(q.contiguous(), k, v, out, 0, WIDTH**-0.5)
        rows = out.view(-1, HEADS * WIDTH).float()
        return (rows / self.scale).clamp(-448, 448).to(FP8).float() * self.scale


def graph(*, rows_used: bool = False, symmetric: bool = True, slice_of_out: bool = False) -> fx.GraphModule:
    """Return the graph after functionalisation, made by hand for 3 tokens."""
    made = fx.Graph()
    with FakeTensorMode():
        q, k, v = (torch.empty(3, HEADS, WIDTH) for _ in "qkv")
        scale = torch.empty(())
        nodes: list[Any] = []
        for name, value in zip(("q", "k", "v", "scale"), (q, k, v, scale), strict=True):
            nodes.append(made.placeholder(name))
            nodes[-1].meta["val"] = value

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = made.call_function(target, args, kwargs)
            values, named = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
            node.meta["val"] = target(*values, **named)
            return node

        empty = call(
            aten.empty.memory_format, [3, HEADS, WIDTH], dtype=torch.float32, device=torch.device("cpu")
        )
        view = {"_out_slice_dim": 0, "_out_slice_start": 0, "_out_slice_end": 3} if slice_of_out else {}
        given = dict(q=nodes[0], k=nodes[1], v=nodes[2], layer=0, scale=0.5, _out_base_index=0, **view)
        attend = made.call_function(
            torch.ops.higher_order.auto_functionalized_v2,
            (torch.ops.pwcc.attention.default,),
            {**given, "_all_bases": [empty]},
        )
        attend.meta["val"] = (None, torch.empty_like(empty.meta["val"]))
        out = call(operator.getitem, attend, 1)
        rows = call(aten.view.default, out, [3, HEADS * WIDTH])
        low = -448.0 if symmetric else -400.0
        clamped = call(aten.clamp.default, call(aten.div.Tensor, rows, nodes[3]), low, 448.0)
        result = call(torch.ops.prims.convert_element_type.default, clamped, FP8)
    made.output((result, rows) if rows_used else (result,))
    return fx.GraphModule(nn.Module(), made)


def run(module: fx.GraphModule) -> int:
    passes = PassRun(
        [("attention_fp8", AttentionStaticQuant())], PassContext(torch.device("cpu"), 3, 3, static=True)
    )
    passes(module.graph)
    module.recompile()
    return passes.counts[0].matches


def test_attention_and_quantisation_become_one_operator() -> None:
    module = graph()
    q, k, v = (torch.randn(3, HEADS, WIDTH) for _ in "qkv")
    scale = torch.tensor(0.02)
    (expected,) = module(q, k, v, scale)
    assert run(module) == 1
    targets = [str(node.args[0]) for node in module.graph.nodes if "auto_functionalized" in str(node.target)]
    assert targets == ["pwcc.attention_static_fp8_quant.default"]
    (got,) = module(q, k, v, scale)
    assert (got.dtype, got.shape) == (FP8, expected.shape)
    difference = (got.float() - expected.float()).abs()
    assert (difference <= expected.float().abs() / 8).all()  # one place of 3 bits: a reciprocal for a division
    assert (difference > 0).float().mean() < 0.1


@pytest.mark.parametrize(
    "other", [{"rows_used": True}, {"symmetric": False}, {"slice_of_out": True}], ids=lambda o: next(iter(o))
)
def test_what_is_not_matched(other: dict[str, bool]) -> None:
    assert run(graph(**other)) == 0


def test_the_contexts_kernel_is_used_or_asked_for_eight_bits() -> None:
    q = torch.randn(3, HEADS, WIDTH)
    scale = torch.tensor(0.5)
    asked: list[str] = []

    def kernel(
        context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams
    ) -> None:
        asked.append("wide")
        out.copy_(q * params.scale)

    def eight_bits(*args: Any) -> None:
        asked.append("eight bits")
        args[4].copy_(quantised(args[1] * args[5].scale, args[6]))

    def call() -> Tensor:
        out = torch.empty(q.shape, dtype=FP8)
        with forward_context(kernel=kernel):
            torch.ops.pwcc.attention_static_fp8_quant(q, q, q, out, scale, 0, 3.0)
        return out

    wide = call()
    kernel.quantised = eight_bits  # type: ignore[attr-defined]
    assert torch.equal(call().float(), wide.float())
    assert torch.equal(wide.float(), quantised(q * 3, scale).float())
    assert asked == ["wide", "eight bits"]


@pytest.mark.parametrize("wrong", ["out", "scale"])
def test_wrong_dtypes_are_refused(wrong: str) -> None:
    with FakeTensorMode():
        q = torch.empty(3, HEADS, WIDTH)
        out = torch.empty(q.shape, dtype=torch.float32 if wrong == "out" else FP8)
        scale = torch.empty((), dtype=torch.float64 if wrong == "scale" else torch.float32)
        with pytest.raises(ValueError, match="expects out of"):
            torch.ops.pwcc.attention_static_fp8_quant(q, q, q, out, scale, 0, 1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_piece_that_holds_attention(tmp_path: Path) -> None:
    graph_ = one_piece(Block().eval(), f"x:float32[n,{HEADS * WIDTH}]")
    task = PieceTask("p0", graph_, Variant(1, 64), "cpu", cpu_profile("native"), passes=resolve(PASSES))
    blobs = MemoryBlobs()
    result = compile_piece(task, blobs, scratch=tmp_path)
    record = SealedPiece.from_bytes(blobs.read_blob(result.sealed), where="piece")
    assert {count.name: count.matches for count in record.passes}["attention_fp8"] == 1
    assert record.fallbacks == ("pwcc::attention_static_fp8_quant.default",)
