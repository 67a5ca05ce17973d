"""What stands between graphs: ops that write, ops that return, and those that cannot be there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.cache.errors import CaptureError, MovedInputError
from pwcc.capture.fake import FakeBackend, FakeGraph, FakePool, tensors_in
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import GraphKey
from pwcc.compile.ops.forward_context import BatchDescriptor, RunMode
from tests.capture.toy import World, compiled_of

RETURNING = """
def bind(pieces, operation, constant, weights):
    p0, p1, = pieces
    o0 = operation('torch.ops.aten.cumsum.default')
    o1 = operation('torch.ops.aten.max.dim')
    o2 = operation('operator.getitem')
    w0, w1, w2, w3, w4, = weights
    def run(arguments, sizes):
        a0, a1, = arguments
        s0, = sizes
        v0, = p0([s0, a0, w0])
        v1 = o0(v0, 0)
        v2 = o1(v0, 1, True)
        v3 = o2(v2, 0)
        del v0, v2
        v4, = p1([s0, v1, v3, w4])
        return (v4,)
    return run
"""
VIEWING = RETURNING.replace("o0(v0, 0)", "o0(v0)").replace("cumsum.default", "detach.default")


def embedding(args: list[Any]) -> tuple[Tensor, ...]:
    return (args[2][args[1]],)


def ending(args: list[Any]) -> tuple[Tensor, ...]:
    return ((args[1] + args[2]) @ args[3],)


def returning(world: World, stitch: str = RETURNING) -> None:
    world.compiled = compiled_of(world.model, world.device, pieces=(embedding, ending), stitch=stitch, splits=1)


@pytest.mark.parametrize("mode", [CaptureMode.PIECEWISE, CaptureMode.FULL])
def test_what_an_op_returns_is_put_where_the_next_graph_reads_it(world: World, mode: CaptureMode) -> None:
    returning(world)
    runner = world.runner(mode, cache=None, debug=True)
    for seed, count in enumerate((3, 4, 3)):
        ids = (torch.arange(count, device=world.device) * 5 + seed) % 48
        positions = torch.arange(count, device=world.device)
        wanted = world.compiled(ids, positions)
        assert torch.allclose(runner(ids, positions), wanted, atol=1e-4)
        assert runner.last is not None
        assert runner.last.mode == mode.value


def test_an_op_that_returns_a_view_is_refused(world: World) -> None:
    returning(world, VIEWING)
    runner = world.runner(CaptureMode.PIECEWISE, cache=None, plan={"on_failure": "raise", "sizes": (4,)})
    with pytest.raises(CaptureError, match=r"aten\.detach\.default returns a view of its input"):
        runner.capture()


def test_an_op_that_replaces_its_output_is_named(cpu: World) -> None:
    """The next graph would read the old memory; the address check names the value."""

    def kernel(context: object, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: Any, /) -> None:
        if moving and params.layer == 1:
            out.set_(torch.zeros_like(out))  # type: ignore[call-overload]
        else:
            out.copy_(q)

    moving = False
    runner = cpu.runner(CaptureMode.PIECEWISE, kernel=kernel, debug=True)
    batch = cpu.prompts(4)
    runner(*batch)
    moving = True
    runner(*batch)
    with pytest.raises(MovedInputError, match="value 3 of piece 1"):
        runner(*batch)


def test_graphs_are_per_position_and_the_ops_are_live(world: World) -> None:
    runner = world.runner(CaptureMode.PIECEWISE)
    runner.capture()
    recording = runner._capture.table.recordings[GraphKey(RunMode.PIECEWISE, BatchDescriptor(8))]
    assert len(recording.graphs) == 4  # the middle piece has one per layer
    names = {item.name for item in recording.watched if item.kind == "weight"}
    assert names == {"embed", "head", "layers.0", "layers.1", "layers.2"}
    assert {item.name for item in recording.watched if item.kind == "argument"} == {"input_ids", "positions"}


def graph_of(call: Any, *inputs: object, pool: FakePool | None = None, owner: object = 1) -> FakeGraph:
    return FakeGraph(call, inputs, pool or FakePool(poison=True), owner)


def test_a_fake_graph_reads_the_addresses_of_its_capture() -> None:
    x = torch.ones(3)
    graph = graph_of(lambda args: (args[0] * args[1],), x, 2)
    (output,) = tensors_in(graph.outputs)
    x.fill_(5)
    graph.replay()
    assert output.tolist() == [10, 10, 10]  # written into the captured output
    x.data = torch.zeros(3)  # moved: the graph still reads the old memory
    graph.replay()
    assert output.tolist() == [10, 10, 10]


def test_a_fake_pool_poisons_what_other_recordings_left() -> None:
    pool = FakePool(poison=True)
    graphs = [graph_of(lambda args: (args[0] + 1,), torch.ones(2), pool=pool, owner=i) for i in (1, 2)]
    for graph in graphs:
        pool.graphs.add(graph)
    outputs = [tensors_in(graph.outputs)[0] for graph in graphs]
    graphs[0].replay()
    assert outputs[0].tolist() == [2, 2]
    graphs[1].replay()
    assert torch.isnan(outputs[0]).all()
    assert outputs[1].tolist() == [2, 2]


def test_a_released_fake_graph_refuses() -> None:
    graph = graph_of(lambda args: (args[0],), torch.ones(1))
    graph.release()
    with pytest.raises(RuntimeError, match="released"):
        graph.replay()


def test_the_fake_limit_is_an_out_of_memory_error() -> None:
    backend = FakeBackend(limit_bytes=2000)
    pool = backend.new_pool()
    kept, _ = backend.record(lambda args: (torch.ones(100),), [], pool=pool, owner=1, instantiate="eager")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        backend.record(lambda args: (torch.ones(100),), [], pool=pool, owner=1, instantiate="eager")
    assert backend.is_out_of_memory(caught.value)
    assert backend.graphs == [kept]  # the one that failed is released
