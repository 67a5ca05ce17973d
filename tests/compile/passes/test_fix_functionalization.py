"""Writes to a graph input: which become writes in place, that the numbers stay, and what Inductor makes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pwcc.cache.errors import UnsealableError
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.passes.base import PassContext
from pwcc.compile.passes.fix_functionalization import FixFunctionalization
from pwcc.compile.passes.manager import PassRun
from pwcc.compile.passes.registry import resolve
from pwcc.compile.piece_compiler import MemoryBlobs, PieceTask, compile_piece
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.rebuild import Variant
from pwcc.compile.sealing.profile import cpu_profile
from pwcc.compile.torch_private.graph_values import value_of
from pwcc.compile.torch_private.symbols import new_unbacked_size
from tests.compile.one_piece import one_piece

HEADS, WIDTH, BLOCKS = 2, 4, 16
Q = torch.arange(3.0 * HEADS * WIDTH).reshape(3, HEADS, WIDTH) / 10
CACHE = torch.arange(4.0 * BLOCKS * HEADS * WIDTH).reshape(2, 2, BLOCKS, HEADS, WIDTH) / 100
SLOTS = torch.tensor([5, 2, 7])
CONTEXT = PassContext(torch.device("cpu"), 1, 100, static=False)

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def functional(layer: Layer, mode: str = "fake") -> fx.GraphModule:
    """Return the functional graph of a layer, with a ``copy_`` to its cache at the end.

    ``unbacked``: nothing is known of the token count, as in a dynamic variant.
    """
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows: Any = new_unbacked_size(env, 1, 8) if mode == "unbacked" else Q.shape[0]
        inputs = (
            torch.empty(rows, *Q.shape[1:]),
            torch.empty(CACHE.shape),
            torch.empty(rows, dtype=torch.int64),
        )
        traced: fx.GraphModule = make_fx(functionalize(layer, remove="mutations_and_views"))(*inputs)
    replaced = {
        torch.ops.aten.select_copy.int: torch.ops.aten.select.int,
        torch.ops.aten.slice_copy.Tensor: torch.ops.aten.slice.Tensor,
        torch.ops.aten.unbind_copy.int: torch.ops.aten.unbind.int,
        torch.ops.aten.view_copy.default: torch.ops.aten.view.default,
        torch.ops.aten.t_copy.default: torch.ops.aten.t.default,
    }
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.copy.default:  # AOTAutograd writes it out too
            node.target = torch.ops.aten.expand.default
            node.args = (node.args[1], list(node.meta["val"].shape))
        node.target = replaced.get(node.target, node.target)
        if node.op == "call_function" and not node.users and node.target is not torch.ops.aten.copy_.default:
            continue
        if node.op == "call_function":
            _refresh(node)
    traced.graph.eliminate_dead_code()
    return traced


def _refresh(node: Any) -> None:
    """Give a node the fake value of its new operation: views share memory."""
    if node.target not in (torch.ops.aten.copy_.default, operator.getitem):
        node.meta["val"] = value_of(node.target, node.args)
    elif node.target is operator.getitem:
        node.meta["val"] = node.args[0].meta["val"][node.args[1]]


def run(module: fx.GraphModule) -> int:
    passes = PassRun([("fix_functionalization", FixFunctionalization())], CONTEXT)
    passes(module.graph)
    module.recompile()
    return passes.counts[0].matches


def same_as_eager(module: Callable[..., Any], layer: Layer) -> bool:
    """Tell whether a graph returns and writes what the layer does."""
    one, other = CACHE.clone(), CACHE.clone()
    expected, got = layer(Q.clone(), one, SLOTS), module(Q.clone(), other, SLOTS)
    return torch.equal(expected, got) and torch.equal(one, other)


def whole_copies(module: fx.GraphModule) -> list[str]:
    """Return the operations that make a new tensor as large as one layer's keys or more."""
    return [
        str(node.target)
        for node in module.graph.nodes
        if "scatter" in str(node.target) or node.target is torch.ops.aten.index_put.default
    ]


def by_index(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    for layer in range(2):
        cache[layer, 0, slots] = q
        cache[layer, 1, slots] = q * 2
        read = cache[layer].reshape(-1, HEADS * WIDTH)  # products' results are in memory
        q = q + torch.mm(read[:1], torch.mm(read.t(), read)).view(1, HEADS, WIDTH)
    return q


def by_slice(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    for layer in range(2):
        cache[layer, 0, : q.shape[0]] = q
        cache[layer, 1, 2 : q.shape[0] + 2] = q * 2
    return q + cache.sum((0, 1, 2))


def by_unbind(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    keys, values = cache[1].unbind(0)
    keys[: q.shape[0]] = q
    values.index_put_((slots,), q * 3)
    return q + keys.sum(0)


def whole_layer(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache[1] = q.sum(0)
    return q + cache[0].sum((0, 1))


def added_up(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache[0, 0].index_put_((torch.zeros_like(slots),), q, accumulate=True)
    return q + cache.sum((0, 1, 2))


@pytest.mark.parametrize(
    ("layer", "writes", "mode"),
    [
        (by_index, 4, "fake"),
        (by_index, 4, "unbacked"),
        (by_slice, 4, "fake"),
        (by_unbind, 2, "fake"),
        (whole_layer, 1, "fake"),
        (whole_layer, 1, "unbacked"),
        (added_up, 1, "fake"),
        (added_up, 1, "unbacked"),
    ],
)
def test_writes_become_writes_in_place(layer: Layer, writes: int, mode: str) -> None:
    module = functional(layer, mode)
    assert same_as_eager(module, layer)
    assert whole_copies(module)
    assert run(module) == writes
    assert whole_copies(module) == []
    assert same_as_eager(module, layer)


def shifted(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache[0, 0, 1:] = cache[0, 0, :-1] + 1
    return q + 1


def read_later(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    before = cache[0, 0] + 0
    cache[0, 0, slots] = q
    return before[: q.shape[0]] + cache[0, 0, : q.shape[0]]


def between(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    cache[0, 0] = cache[1, 1]
    return q + 1


@pytest.mark.parametrize("layer", [shifted, between], ids=["shift", "copy within"])
def test_a_value_that_is_read_from_the_input_is_not_written_over_it(layer: Layer) -> None:
    module = functional(layer)
    assert run(module) == 0
    assert same_as_eager(module, layer)


def test_an_older_version_that_is_read_later_keeps_its_copy() -> None:
    """In a functional graph a reader may stand anywhere; after a write in place it would read new values."""
    module = functional(read_later)
    aten = torch.ops.aten
    reader = next(node for node in module.graph.nodes if node.target is aten.add.Tensor)
    written = [node for node in module.graph.nodes if node.target is aten.select_scatter.default][-1]
    written.append(reader)
    module.recompile()
    assert same_as_eager(module, read_later)
    assert run(module) == 0
    assert same_as_eager(module, read_later)


def test_a_version_that_is_returned_stays_a_tensor_of_its_own() -> None:
    def layer(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        cache[0, 0, slots] = q
        return cache.view(cache.shape)

    module = functional(layer)
    assert run(module) == 0
    other = CACHE.clone()
    assert module(Q, other, SLOTS) is not other


def test_a_custom_operator_in_the_chain_leaves_it_to_inductor() -> None:
    def layer(q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        cache[0, 0, slots] = q
        return q + 1

    module = functional(layer)
    scatter = next(n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default).args[1]
    with module.graph.inserting_after(scatter):
        other = module.graph.call_function(torch.ops.aten.mul.Tensor, (scatter, 2))
        other.meta["val"] = scatter.meta["val"]
    next(n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default).update_arg(1, other)
    assert run(module) == 0


class Decoder(torch.nn.Module):
    """Two layers that write a stacked KV cache through views, and another by an in-place operator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 2, 64, HEADS, WIDTH))
        self.register_buffer("other", torch.zeros(2, 64, HEADS, WIDTH))
        self.proj = torch.nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)

    cache: Tensor
    other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        slots = torch.arange(x.shape[0], device=x.device)
        for layer in range(2):
            q = self.proj(x).view(-1, HEADS, WIDTH)
            self.cache[layer, 0, slots] = q
            self.cache[layer, 1, slots] = q * 2
            torch.ops.pwccpass.store(q, self.other[layer], 0)
            out = torch.empty_like(q)
            torch.ops.pwccpass.mix(q, self.cache[layer], out)
            x = out.view(-1, HEADS * WIDTH)
        return x


BIG = 64 * HEADS * WIDTH  # elements of one layer's keys


def buffers(source: str) -> list[int]:
    """Return the elements of every buffer that a wrapper allocates whose size is known; symbols count as 3."""
    shapes = re.findall(r"empty_strided_cpu\(\(([^)]*)\)", source)
    return [_product(shape) for shape in shapes]


def _product(text: str) -> int:
    total = 1
    for part in text.split(","):
        if part.strip():
            total *= int(re.sub(r"[a-z]\w*", "3", part.strip()))
    return total


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_inductor_copies_no_cache(tmp_path: Path) -> None:
    """With the pass a decoder's wrapper allocates nothing as large as a layer's keys; without, it does."""
    graph = whole_piece(Decoder().eval())
    plain, _ = wrapper(graph, "none", Variant(3, 3, static=True), tmp_path)
    assert max(buffers(plain)) >= BIG
    fixed, counts = wrapper(graph, "default", Variant(1, 64), tmp_path)
    assert max(buffers(fixed)) < BIG
    assert counts == {"noop": counts["noop"], "fix_functionalization": 4}
    calls = [line for line in fixed.splitlines() if "pwccpass" in line and "_op_" in line and "(" in line]
    assert len([line for line in calls if line.lstrip().startswith("_op_")]) == 4
    # a layer: the projection, its double, the operator's out; nothing is copied for an operator to write
    assert len(buffers(fixed)) <= 2 * 3 + 2


def wrapper(graph: PieceGraph, passes: str, variant: Variant, scratch: Path) -> tuple[str, dict[str, int]]:
    """Return the sealed program of a piece, whose numbers were checked, and the matches of each pass."""
    task = PieceTask("p0", graph, variant, "cpu", cpu_profile("native"), passes=resolve(passes))
    blobs = MemoryBlobs()
    result = compile_piece(task, blobs, scratch=scratch)
    record = SealedPiece.from_bytes(blobs.read_blob(result.sealed), where="piece")
    source = blobs.read_blob(record.source).decode()
    return source, {count.name: count.matches for count in record.passes}


def whole_piece(model: torch.nn.Module) -> PieceGraph:
    """Return the model as one piece."""
    return one_piece(model, f"x:float32[n,{HEADS * WIDTH}]")


class Buffers(torch.nn.Module):
    """An in-place operator on the second half of ``[2, n, width]``: the half begins at ``n * width``."""

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(2, x.shape[0], HEADS * WIDTH)
        torch.ops.pwccpass.store(x, buffer[1], 0)
        return buffer.sum(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_view_whose_offset_depends_on_a_size_is_refused(tmp_path: Path) -> None:
    task = PieceTask("p0", whole_piece(Buffers().eval()), Variant(1, 64), "cpu", cpu_profile("native"))
    with pytest.raises(UnsealableError, match=r"pwccpass.store.* depends on a size"):
        compile_piece(task, MemoryBlobs(), scratch=tmp_path)
