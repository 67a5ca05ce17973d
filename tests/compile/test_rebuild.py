"""A rebuilt piece is the same piece: same values for every size, same symbolic sizes for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.piece_graph import PieceGraph, PieceNode, SymbolInput, TensorInput, interpret
from pwcc.compile.rebuild import Variant, rebuild
from pwcc.compile.runtime.samples import relative_error, sample_inputs

CPU = torch.device("cpu")
TraceModel = Callable[..., Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 24)
        self.emb = nn.Embedding(30, 8)
        self.table = torch.randn(50, 16)[:, ::2]

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        n = x.shape[0]
        q, k, v = self.lin(x + self.emb(ids)).chunk(3, -1)
        out = x.new_empty(n, 8)
        torch.ops.pwcctest.attend(q, out, 0.5)
        blocks = (n + 7) // 8
        y = torch.nn.functional.pad(out * k + v, (0, 0, 0, blocks * 8 - n)).view(blocks, 8, 8).sum(1)
        ramp = torch.arange(max(n, 7))[: min(n, 5)]
        return y, self.table[:n] + ramp.sum() * n / 3, x.half().float()


@pytest.fixture(scope="module")
def pieces(traced: TraceModel) -> list[PieceGraph]:
    unique = traced(Model(), ("x:float32[n,8]", "ids:int64[n]"))[-1].program.unique
    assert len(unique) == 2
    return list(unique)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 40])
@pytest.mark.parametrize("static", [True, False])
def test_same_values_as_the_canonical_graph(pieces: list[PieceGraph], size: int, static: bool) -> None:
    variant = Variant(size, size, static=True) if static else Variant(1, 40)
    for piece in pieces:
        inputs = sample_inputs(piece, size, CPU, seed=size)
        rebuilt = rebuild(piece, variant, CPU)
        got, wanted = rebuilt.graph_module(*inputs), interpret(piece, inputs, device=CPU)
        assert [item.shape for item in got] == [item.shape for item in wanted if isinstance(item, Tensor)]
        written = piece.written_outputs
        assert relative_error([got[i] for i in written], [wanted[i] for i in written]) == 0


@pytest.mark.parametrize(("variant", "backed"), [(Variant(1, 40), False), (Variant(2, 40), True)])
def test_dynamic_inputs_are_symbols_of_one_environment(
    pieces: list[PieceGraph], variant: Variant, backed: bool
) -> None:
    for piece in pieces:
        rebuilt = rebuild(piece, variant, CPU, backed=backed)
        size, *tensors = rebuilt.inputs
        assert isinstance(size, torch.SymInt)
        for item, fake in zip(piece.inputs[1:], tensors, strict=True):
            assert isinstance(item, TensorInput)
            dynamic = [isinstance(dim, torch.SymInt) for dim in fake.shape]
            assert dynamic == [isinstance(dim, str) for dim in item.shape]
            assert fake.fake_mode is rebuilt.fake_mode
        with rebuilt.fake_mode, enable_python_dispatcher():
            outputs = rebuilt.graph_module(*rebuilt.inputs)
        assert any(isinstance(dim, torch.SymInt) for output in outputs for dim in output.shape)


def test_static_inputs_are_numbers(pieces: list[PieceGraph]) -> None:
    for piece in pieces:
        rebuilt = rebuild(piece, Variant(5, 5, static=True), CPU)
        assert rebuilt.inputs[0] == 5
        assert all(isinstance(dim, int) for fake in rebuilt.inputs[1:] for dim in fake.shape)


def test_layout_and_offset_of_inputs() -> None:
    piece = PieceGraph(
        (
            SymbolInput("s0"),
            TensorInput("float32", "cpu", ("s0", 4), (1, "s0"), 0),
            TensorInput("bfloat16", "cpu", ("max(2, s0, 3)", 4), (8, 1), "4*s0 + 1"),
        ),
        (PieceNode("call_function", "operator.mul", [{"v": 1}, 2], {"dict": []}),),
        ({"v": 3},),
    )
    _, first, second = rebuild(piece, Variant(5, 5, static=True), CPU).inputs
    assert (first.shape, first.stride(), first.storage_offset()) == ((5, 4), (1, 5), 0)
    assert (second.shape, second.stride(), second.storage_offset()) == ((5, 4), (8, 1), 21)
    _, first, second = rebuild(piece, Variant(1, 9), CPU).inputs
    assert isinstance(second.storage_offset(), torch.SymInt)
    assert second.dtype == torch.bfloat16


@pytest.mark.parametrize("backed", [True, False])
@pytest.mark.parametrize(("variant", "fixed"), [(Variant(5, 5, static=True), True), (Variant(2, 40), False)])
def test_a_size_beside_the_token_count_stays_a_symbol(variant: Variant, fixed: bool, backed: bool) -> None:
    piece = PieceGraph(
        (
            SymbolInput("s0", 3, 9),
            SymbolInput("s1"),
            TensorInput("float32", "cpu", ("s0", "s1"), ("s1", 1)),
        ),
        (PieceNode("call_function", "torch.sum", [{"v": 2}, 0], {"dict": []}),),
        ({"v": 3},),
    )
    rebuilt = rebuild(piece, variant, CPU, backed=backed)
    other, tokens, fake = rebuilt.inputs
    assert isinstance(other, torch.SymInt)
    bounds = rebuilt.fake_mode.shape_env.var_to_range[other.node.expr]
    assert (int(bounds.lower), int(bounds.upper)) == (3, 9)
    assert isinstance(tokens, int) is fixed
    assert [isinstance(dim, torch.SymInt) for dim in fake.shape] == [True, not fixed]


def test_nothing_is_shared_between_rebuilds(pieces: list[PieceGraph]) -> None:
    before = pieces[0].to_bytes()
    first, second = (rebuild(pieces[0], Variant(1, 40), CPU) for _ in range(2))
    first.graph_module.graph.erase_node(next(iter(reversed(first.graph_module.graph.nodes))))
    assert len(second.graph_module.graph.nodes) == len(first.graph_module.graph.nodes) + 1
    assert first.fake_mode.shape_env is not second.fake_mode.shape_env
    assert pieces[0].to_bytes() == before


def test_lines_stay_beside_the_code(pieces: list[PieceGraph], traced: TraceModel) -> None:
    lines = [f"model.py:{index}: secret" for index in range(len(pieces[0].nodes))]
    rebuilt = rebuild(pieces[0], Variant(1, 40), CPU, lines)
    marked = [node.meta["pwcc_line"] for node in rebuilt.graph_module.graph.nodes if "pwcc_line" in node.meta]
    assert marked == lines
    assert "secret" not in rebuilt.graph_module.code


def test_size_expressions_become_nodes() -> None:
    piece = PieceGraph(
        (SymbolInput("s0"),),
        (
            PieceNode(
                "call_function",
                "torch.zeros",
                [{"s": "max(s0, 3, 2) - min(s0, 9)"}, {"s": "-(-s0//8)*8 % 5"}],
                {"dict": []},
            ),
        ),
        ({"v": 1},),
    )
    rebuilt = rebuild(piece, Variant(1, 40), CPU)
    for size in (1, 2, 8, 17, 40):
        (made,) = rebuilt.graph_module(size)
        assert made.shape == (max(size, 3, 2) - min(size, 9), -(-size // 8) * 8 % 5)
    assert isinstance(rebuilt.graph_module, fx.GraphModule)


def test_a_condition_is_no_size() -> None:
    node = PieceNode("call_function", "torch.zeros", [{"s": "s0 < 3"}], {"dict": []})
    with pytest.raises(CorruptEntry, match="expected a size"):
        rebuild(PieceGraph((SymbolInput("s0"),), (node,), ()), Variant(1, 40), CPU)


@pytest.mark.parametrize(
    ("variant", "text", "kind", "hint"),
    [
        (Variant(8, 8, static=True), "n=8", "static", 8),
        (Variant(1, 40), "n=1..40", "dynamic", 40),
        (Variant(1, 8192), "n=1..8192", "dynamic", 64),
        (Variant(100, 8192), "n=100..8192", "dynamic", 100),
    ],
)
def test_variants(variant: Variant, text: str, kind: str, hint: int) -> None:
    assert (str(variant), variant.kind, variant.hint) == (text, kind, hint)
    assert Variant.from_json(variant.to_json(), "test") == variant


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"low": 1, "high": 2},
        {"low": -1, "high": 2, "static": False},
        {"low": 1, "high": 2, "static": 0},
    ],
)
def test_other_variants_are_corrupt(value: object) -> None:
    with pytest.raises(CorruptEntry):
        Variant.from_json(value, "test")
