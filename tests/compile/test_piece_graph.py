"""A piece's canonical form: what makes two pieces one, and what a hostile file may not do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.piece_graph import (
    ENTER,
    EXIT,
    PieceGraph,
    PieceNode,
    SymbolInput,
    TensorInput,
    interpret,
)

CPU = torch.device("cpu")
TraceModel = Callable[..., Any]


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


class Layer(nn.Module):
    def __init__(self, width: int = 8, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width, dtype=dtype)
        self.norm = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(F.rms_norm(x, (x.shape[-1],), self.norm, self.eps))
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)


class Renamed(nn.Module):
    """The same operations as :class:`Layer` under other names, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 1e-6
        self.gain = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(3, 3)
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, (hidden.shape[-1],), self.gain, self.epsilon)

        projected: Tensor = self.linear(normed)
        root = torch.rsqrt(projected.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return projected * root


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = attend(layer(x))
        return x


def digests(traced: TraceModel, *layers: nn.Module, **options: Any) -> list[str]:
    (item,) = traced(Stack(*layers), **options)
    return [piece.graph.digest for piece in item.program.pieces]


def test_equal_layers_are_one_piece(traced: TraceModel) -> None:
    (item,) = traced(Stack(*(Layer() for _ in range(5))))
    assert len(item.program.pieces) == 5
    (only,) = item.program.unique
    assert only.symbols == ("s0",)
    assert b"layers" not in only.to_bytes()


def test_names_order_and_lines_do_not_matter(traced: TraceModel) -> None:
    first, second = digests(traced, Layer(), Renamed())
    assert first == second


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Plus(Times):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor


class Method(Times):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(self.factor)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Layer(eps=1e-6), Layer(eps=1e-5)),
        (Times(2.0), Times(3.0)),
        (Times(2.0), Times(2)),
        (Times(1), Times(True)),
        (Times(2.0), Plus(2.0)),
        (Times(2.0), Method(2.0)),
        (Times(float("inf")), Times(float("-inf"))),
    ],
)
def test_another_constant_or_operation_is_another_piece(
    one: nn.Module, other: nn.Module, traced: TraceModel
) -> None:
    first, second = digests(traced, one, other)
    assert first != second


def test_dtype_width_and_stride_make_another_piece(traced: TraceModel) -> None:
    plain = digests(traced, Layer())
    half = digests(traced, Layer(dtype=torch.bfloat16), declarations=("x:bfloat16[n,8]",))
    wide = digests(traced, Layer(16), declarations=("x:float32[n,16]",))
    transposed = Layer()
    transposed.proj.weight = nn.Parameter(torch.ones(8, 8).t())
    strided = digests(traced, transposed)
    assert len({*plain, *half, *wide, *strided}) == 4


def test_round_trip_keeps_bytes_and_digest(traced: TraceModel) -> None:
    (item,) = traced(Stack(Layer(), Times(float("inf"))))
    for graph in item.program.unique:
        again = PieceGraph.from_bytes(graph.to_bytes(), where="test")
        assert again == graph
        assert again.to_bytes() == graph.to_bytes()
        assert again.digest == graph.digest


# --- running ---------------------------------------------------------------------------------------


def node(target: str, *args: object, op: str = "call_function", **kwargs: object) -> PieceNode:
    return PieceNode(op, target, list(args), {"dict": [[key, value] for key, value in kwargs.items()]})


def graph(*nodes: PieceNode, outputs: tuple[object, ...] = ()) -> PieceGraph:
    inputs = (SymbolInput("s0"), TensorInput("bfloat16", "cpu", ("s0", 4), (4, 1)))
    return PieceGraph(inputs, nodes, outputs)


V = [{"v": index} for index in range(9)]
SAMPLE = graph(
    node("operator.mul", V[1], {"s": "2*s0 + 1"}),
    node("float", V[2], op="call_method"),
    node("torch.cat", [V[1], V[3]], dim=0),
    node("operator.getitem", V[4], {"tuple": [{"slice": [None, {"s": "s0"}, None]}, {"ellipsis": True}]}),
    node("to", V[5], op="call_method", dtype={"dtype": "bfloat16"}),
    outputs=(V[6], V[3]),
)


def test_interpreting() -> None:
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    first, second = interpret(SAMPLE, [3, x], device=CPU)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(first, x)
    assert second.eq(7).all()
    wide, _ = interpret(SAMPLE, [3, x.float()], device=CPU, upcast=True)
    assert isinstance(wide, Tensor)
    assert wide.dtype == torch.float32


def test_products_of_8_bit_matrices_are_widened_after() -> None:
    """With one scale a row, CUDA computes no float32 result, so the reference must not ask for one."""
    one = TensorInput("float32", "cpu", (1,), (1,))
    rows, columns = (TensorInput("float8_e4m3fn", "cpu", (16, 16), stride) for stride in ((16, 1), (1, 16)))
    call = node("torch._scaled_mm", V[0], V[1], scale_a=V[2], scale_b=V[2], out_dtype={"dtype": "bfloat16"})
    product = PieceGraph((rows, columns, one), (call,), (V[3],))
    values = torch.randn(16, 16).to(torch.float8_e4m3fn)
    (wide,) = interpret(product, [values, values.t(), torch.tensor([0.3])], device=CPU, upcast=True)
    assert isinstance(wide, Tensor)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, wide.bfloat16().float())


REGION: list[object] = ["cpu", {"dtype": "bfloat16"}, True, False]
CAST = PieceGraph(
    (TensorInput("float32", "cpu", (4, 4), (4, 1)),),
    (node(ENTER, *REGION), node("torch.mm", V[0], V[0]), node(EXIT, V[1]), node("torch.mm", V[0], V[0])),
    (V[2], V[4]),
)


def test_region_holds_for_the_operations_inside() -> None:
    inside, outside = interpret(CAST, [torch.ones(4, 4)], device=CPU)
    assert isinstance(inside, Tensor)
    assert isinstance(outside, Tensor)
    assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)
    wide, _ = interpret(CAST, [torch.ones(4, 4)], device=CPU, upcast=True)
    assert isinstance(wide, Tensor)
    assert wide.dtype == torch.float32


@pytest.mark.parametrize("nodes", [CAST.nodes[:2], (*CAST.nodes[:1], node("torch.mm", V[0], 3))])
def test_region_ends_with_the_piece(nodes: tuple[PieceNode, ...]) -> None:
    with contextlib.suppress(CorruptEntry):
        interpret(PieceGraph(CAST.inputs, nodes, ()), [torch.ones(4, 4)], device=CPU)
    assert not torch.is_autocast_enabled("cpu")


def test_region_that_the_piece_is_not_in() -> None:
    with pytest.raises(CorruptEntry, match="not in"):
        interpret(PieceGraph(CAST.inputs, (node(EXIT, V[0]),), ()), [torch.ones(4, 4)], device=CPU)


def test_sizes_with_ranges_of_their_own() -> None:
    inputs = (SymbolInput("s0"), SymbolInput("s1", 2, 9), TensorInput("float32", "cpu", ("s0", "s1"), (9, 1)))
    made = PieceGraph(inputs, (), ())
    assert PieceGraph.from_bytes(made.to_bytes(), where="test") == made
    assert made.bounds == {"s1": (2, 9)}
    assert [made.sizes_at(tokens) for tokens in (1, 4, 64)] == [(1, 2), (4, 4), (64, 9)]
    assert made.digest != PieceGraph((inputs[0], SymbolInput("s1", 2, 8), inputs[2]), (), ()).digest
    assert SymbolInput("s0").to_json() == {"kind": "symbol", "symbol": "s0"}


@pytest.mark.parametrize("change", [{"low": 3}, {"low": 3, "high": 2}, {"low": -1, "high": 2}, {"high": 2}])
def test_other_ranges_are_corrupt(change: dict[str, int]) -> None:
    value = json.loads(SAMPLE.to_bytes())
    value["inputs"][0].update(change)
    with pytest.raises(CorruptEntry):
        PieceGraph.from_bytes(json.dumps(value).encode(), where="test")


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (graph(node("torch.empty_like", V[1]), node("operator.mul", V[1], 2), outputs=(V[2], V[3])), (1,)),
        (graph(node("torch.empty_like", V[1]), node("view", V[2], -1, op="call_method"), outputs=(V[3],)), ()),
        (
            graph(
                node("torch.empty_like", V[1]),
                node("view", V[2], -1, op="call_method"),
                node("fill_", V[3], 1.0, op="call_method"),
                outputs=(V[2], V[3], V[4]),
            ),
            (0, 1, 2),
        ),
        (
            graph(node("new_empty", V[1], 3, op="call_method"), node("operator.add", V[2], 1), outputs=(V[2],)),
            (0,),
        ),
        (
            graph(
                node("torch.ops.aten.empty_like.default", V[1]), node("operator.mul", V[1], 2), outputs=(V[2],)
            ),
            (),
        ),
        (graph(node("view", V[1], -1, op="call_method"), outputs=(V[2], V[1])), (0, 1)),
    ],
)
def test_outputs_that_are_only_allocated(made: PieceGraph, written: tuple[int, ...]) -> None:
    assert made.written_outputs == written


# --- hostile files ---------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]
GETATTR = "builtins.getattr"


def first_node(*values: object) -> Change:
    return lambda c: c["nodes"].__setitem__(0, list(values))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("outputs"),
        lambda c: c.update(extra=1),
        lambda c: c.update(schema=2),
        lambda c: c.update(nodes={}),
        lambda c: c["inputs"].reverse(),
        lambda c: c["inputs"].append(c["inputs"][0]),
        lambda c: c["inputs"][0].update(symbol="max"),
        lambda c: c["inputs"][0].update(symbol="a b"),
        lambda c: c["inputs"][0].update(kind="module"),
        lambda c: c["inputs"][1].update(dtype="load"),
        lambda c: c["inputs"][1].update(shape=["s0"]),
        lambda c: c["inputs"][1].update(shape=["s9", 4]),
        lambda c: c["inputs"][1].update(shape=["__import__('os')", 4]),
        lambda c: c["inputs"][1].update(offset=1.5),
        lambda c: c["inputs"][1].update(offset="s0.real"),
        lambda c: c["outputs"].append({"v": 99}),
        lambda c: c["outputs"].append({"v": -1}),
        lambda c: c["outputs"].append(3),
        lambda c: c["outputs"].append({"dtype": "int64"}),
        first_node("call_function", "operator.mul", [{"v": 2}, 2], {"dict": []}),
        first_node("call_function", "operator.mul", [{"v": 99}, 2], {"dict": []}),
        first_node("call_function", "operator.mul", [{"code": "x"}], {"dict": []}),
        first_node("call_function", "operator.mul", {"tuple": []}, {"dict": []}),
        first_node("call_function", "operator.mul", [], []),
        first_node("call_function", "operator.mul", [], {"tuple": []}),
        first_node("call_function", 3, [], {"dict": []}),
        first_node("call_module", "operator.mul", [], {"dict": []}),
        first_node("call_function", "operator.mul", []),
        first_node("call_method", "float", [], {"dict": []}),
        first_node("call_method", "__reduce__", [{"v": 1}], {"dict": []}),
        first_node("call_method", "numpy", [{"v": 1}], {"dict": []}),
        first_node("call_method", "untyped_storage", [{"v": 1}], {"dict": []}),
        first_node("call_method", "_make_subclass", [{"v": 1}], {"dict": []}),
        first_node("call_function", GETATTR, [{"v": 1}, "__class__"], {"dict": []}),
        first_node("call_function", GETATTR, [{"v": 1}, "numpy"], {"dict": []}),
        first_node("call_function", GETATTR, [{"v": 1}, {"v": 1}], {"dict": []}),
        first_node("call_function", GETATTR, [{"v": 1}], {"dict": []}),
        first_node("call_function", GETATTR, [{"v": 1}, "T", None], {"dict": []}),
    ],
)
def test_another_form_is_corrupt(change: Change) -> None:
    value = json.loads(SAMPLE.to_bytes())
    change(value)
    with pytest.raises(CorruptEntry):
        PieceGraph.from_bytes(json.dumps(value).encode(), where="test")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b'{"schema": NaN}', b"\xff", b"[" * 200])
def test_other_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptEntry):
        PieceGraph.from_bytes(data, where="test")


@pytest.mark.parametrize(
    "made",
    [
        graph(node("os.system", "true")),
        graph(node(ENTER, *REGION[:3])),
        graph(node(ENTER, *REGION, extra=1)),
        graph(node(ENTER, "nowhere", *REGION[1:])),
        graph(node("builtins.eval", "1")),
        graph(node("torch.load", "file")),
        graph(node("torch.hub.load", "a", "b")),
        graph(node("torch.utils.cpp_extension.load", "a", [])),
        graph(node("torch.from_file", "file", True, 4)),
        graph(node("torch.ops.aten.save.default", V[1], "file")),
        graph(node("operator.attrgetter", "real")),
        graph(node("operator.methodcaller", "numpy")),
        graph(node("torch.ops.nosuch.op", V[1])),
        graph(node("torch.cat", V[1])),
        graph(node("torch.zeros", -1)),
        graph(node("operator.getitem", V[1], 99)),
        graph(node("operator.mul", V[1], 2, out=3)),
        graph(node("torch.mm", V[1], V[1])),
        graph(node("view", V[0], 1, op="call_method")),
        graph(node("operator.getitem", V[1], 0), node("tolist", V[0], op="call_method")),
    ],
)
def test_what_can_not_run_is_corrupt_not_a_crash(made: PieceGraph) -> None:
    with pytest.raises(CorruptEntry):
        interpret(made, [3, torch.ones(3, 4, dtype=torch.bfloat16)], device=CPU)


def test_inputs_must_fit() -> None:
    with pytest.raises(CorruptEntry, match="expected 2 inputs of a piece, got 1"):
        interpret(SAMPLE, [3], device=CPU)
