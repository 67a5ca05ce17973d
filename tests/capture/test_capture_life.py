"""A plan's life: order, warm-up, failures by policy, the lock, lazy and background capture, memory limits."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.cache.errors import CaptureError, CaptureLockedError, CaptureMemoryError
from pwcc.capture.collector import collector_frozen
from pwcc.capture.dispatch import Fall
from pwcc.capture.estimate import fitting_plan
from pwcc.capture.fake import FakeBackend
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import GraphKey
from pwcc.capture.report import CaptureRow, MemoryEstimate, ModeEstimate
from pwcc.compile.ops.forward_context import (
    BatchDescriptor,
    ForwardContext,
    RunMode,
    use_forward_context,
)
from tests.capture.toy import World, compiled_of, first, last, middle, wait_for


def same(got: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_largest_first_one_pool_and_the_report_adds_up(world: World) -> None:
    rows: list[CaptureRow] = []
    runner = world.runner(on_progress=rows.append)
    report = runner.capture()
    assert [(row.measured.mode.value, row.measured.size) for row in rows] == [
        *(("PIECEWISE", size) for size in (16, 8, 4, 2, 1)),
        *(("FULL", size) for size in (8, 4, 2, 1)),
    ]
    assert report.rows == rows
    assert (report.done, report.failed, runner.plan.measured) == (True, (), tuple(r.measured for r in rows))
    totals = report.totals()
    assert totals[RunMode.PIECEWISE].graphs == 20  # 3 layers and the end, 5 sizes
    assert totals[RunMode.FULL].graphs == 4
    assert totals[RunMode.FULL].seconds == pytest.approx(sum(r.measured.seconds for r in rows[5:]))
    if isinstance(runner._backend, FakeBackend):
        assert totals[RunMode.PIECEWISE].nodes == 20
        assert len(runner._backend._pools) == 1
    else:
        assert (totals[RunMode.FULL].nodes or 5) > 4


def test_every_size_is_warmed_up_before_it_is_captured(cpu: World) -> None:
    events: list[tuple[str, int]] = []
    backend = FakeBackend()
    record = backend.record

    def recording(call: Callable[..., Any], inputs: Any, **options: Any) -> Any:
        events.append(("record", inputs[1].shape[0] if isinstance(inputs[0], int) else inputs[0].shape[0]))
        return record(call, inputs, **options)

    def counting(args: list[Any]) -> tuple[Tensor, ...]:
        events.append(("run", args[1].shape[0]))
        return first(args)

    cpu.compiled = compiled_of(cpu.model, cpu.device, pieces=(counting, middle, last))
    backend.record = recording  # type: ignore[method-assign]
    cpu.runner(backend=backend).capture()
    for size in (1, 2, 4, 8, 16):
        assert events.index(("run", size)) < events.index(("record", size))


@pytest.mark.parametrize("order", ["ascending", "random"])
def test_any_order_gives_the_same_answers(world: World, order: str) -> None:
    plan = world.plan()
    sizes = list(plan.sizes)
    if order == "random":
        random.Random(1).shuffle(sizes)
    from pwcc.capture.runner import GraphRunner

    runner = GraphRunner(
        world.compiled, replace(plan, order=tuple(sizes)), cache=world.cache, backend=world.backend()
    )
    sequences = world.start(3, 4)
    assert runner.check([world.batch([(s, s.length) for s in sequences]), world.step(sequences)]) < 1e-4


def test_a_failure_falls_back_by_default_and_releases_its_memory(cpu: World) -> None:
    backend = FakeBackend(fail_at=11)  # four graphs a size: the third fails at its last piece, then all do
    runner = cpu.runner(backend=backend)
    report = runner.capture()
    assert [row.measured.size for row in report.rows if row.error is None] == [16, 8]
    assert [row.error for row in report.failed] == ["out of memory: fake: out of memory"] * 7
    assert len(backend.graphs) == 8
    assert (runner.stats.captures, runner.stats.failures) == (2, 7)
    sizes = {3: (RunMode.NONE, Fall.NOT_READY), 7: (RunMode.PIECEWISE, None)}
    for length, expected in sizes.items():
        batch = cpu.prompts(length)
        assert same(runner(*batch), runner.without_graphs(*batch))
        assert runner.last is not None
        assert (runner.last.mode, runner.last.fall) == expected


def test_a_failure_raises_advice_when_asked_and_releases_all(cpu: World) -> None:
    backend = FakeBackend(fail_at=11)
    runner = cpu.runner(backend=backend, plan={"on_failure": "raise"})
    with pytest.raises(
        CaptureMemoryError, match=r"PIECEWISE at 4 tokens(.|\n)*captured before it: sizes 8, 16;"
    ):
        runner.capture()
    assert backend.graphs == []
    assert runner.report is None


def test_a_model_that_cannot_be_captured_says_so(cpu: World) -> None:
    def failing(args: list[Any]) -> tuple[Tensor, ...]:
        if args[1].shape[0] == 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        return first(args)

    cpu.compiled = compiled_of(cpu.model, cpu.device, pieces=(failing, middle, last))
    report = cpu.runner(CaptureMode.PIECEWISE).capture()
    assert [row.measured.size for row in report.failed] == [4]
    with pytest.raises(CaptureError, match="not permitted"):
        cpu.runner(CaptureMode.PIECEWISE, plan={"on_failure": "raise"}).capture()


def test_a_capture_outside_the_plan_is_an_error(world: World) -> None:
    runner = world.runner()
    runner.capture()
    with pytest.raises(CaptureLockedError, match="captured already"):
        runner.capture()
    table = runner._capture.table
    assert table.locked
    for key in (GraphKey(RunMode.FULL, BatchDescriptor(64)), GraphKey(RunMode.PIECEWISE, BatchDescriptor(4))):
        with pytest.raises(CaptureLockedError, match="after the plan was done"):
            table.capture(key)
    # what holds graphs trusts the context: a decision that nothing was captured for is an error, not a capture
    context = ForwardContext(mode=RunMode.FULL, batch=BatchDescriptor(3))
    with use_forward_context(context), pytest.raises(CaptureLockedError, match="no graph is captured"):
        table()


def test_lazy_sizes_are_captured_at_first_use(world: World) -> None:
    runner = world.runner(plan={"lazy_sizes": (4,)})
    report = runner.capture()
    assert report.pending == (4,)
    assert 4 not in {row.measured.size for row in report.rows}
    batch = world.prompts(3)
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert runner.last.batch == BatchDescriptor(4)
    assert [row.measured.size for row in report.rows].count(4) == 1
    runner(*batch)
    assert [row.measured.size for row in report.rows].count(4) == 1


def test_a_lazy_capture_that_fails_serves_the_batch_otherwise(cpu: World) -> None:
    backend = FakeBackend()
    runner = cpu.runner(CaptureMode.PIECEWISE, backend=backend, plan={"lazy_sizes": (4,)})
    runner.capture()
    backend._fail_at = 0
    batch = cpu.prompts(3)
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert runner.last.fall is Fall.NOT_READY


def test_a_background_capture_serves_from_the_dynamic_variant_meanwhile(world: World) -> None:
    gate = threading.Event()
    runner = world.runner(
        plan={"background": True}, on_progress=lambda row: gate.wait(20) if row.measured.size == 16 else None
    )
    report = runner.capture()
    assert not report.done
    gate.set()
    batch = world.prompts(3)
    for _ in range(3):
        assert same(runner(*batch), runner.without_graphs(*batch))
    runner.join(60)
    wait_for(lambda: report.done)
    assert len(report.rows) == 9
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert runner.last.mode is RunMode.PIECEWISE


def test_a_background_capture_before_its_first_graph(cpu: World) -> None:
    runner = cpu.runner(plan={"background": True})
    with runner._lock:  # the thread waits for it, so nothing is captured yet
        runner.capture()
        batch = cpu.prompts(3)
        assert same(runner(*batch), runner.without_graphs(*batch))
        assert runner.last is not None
        assert runner.last.fall is Fall.NOT_READY
    runner.join(60)
    runner(*batch)
    assert runner.last.mode is RunMode.PIECEWISE


def test_a_failure_in_the_background_is_told_by_join(cpu: World) -> None:
    runner = cpu.runner(backend=FakeBackend(fail_at=5), plan={"background": True, "on_failure": "raise"})
    runner.capture()
    with pytest.raises(CaptureMemoryError):
        runner.join(60)
    batch = cpu.prompts(3)
    assert same(runner(*batch), runner.without_graphs(*batch))


def test_threads_may_share_a_runner(cpu: World) -> None:
    runner = cpu.runner()
    runner.capture()
    work = [cpu.prompts(length, seed=length) for length in (2, 3, 5, 9)]
    expected = [runner.without_graphs(*batch) for batch in work]
    wrong: list[int] = []

    def serve(index: int) -> None:
        wrong.extend(index for _ in range(15) if not same(runner(*work[index]), expected[index]))

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_estimate_is_not_below_what_a_capture_takes(cpu: World) -> None:
    runner = cpu.runner()
    found = runner.estimate()
    assert runner._backend.memory_used() == 0  # the throwaway pool is gone
    report = runner.capture(estimated=found)
    assert report.estimate is found
    assert report.bytes <= found.total_bytes
    assert {mode: row.count for mode, row in found.per_mode.items()} == {RunMode.PIECEWISE: 5, RunMode.FULL: 4}


def test_an_estimate_that_does_not_fit_says_so(cpu: World) -> None:
    backend = FakeBackend(limit_bytes=100)
    with pytest.raises(CaptureMemoryError, match="while estimating PIECEWISE at 16"):
        cpu.runner(backend=backend).estimate()
    assert backend.graphs == []


def test_a_memory_limit_drops_sizes_but_never_the_largest(cpu: World) -> None:
    runner = cpu.runner(CaptureMode.PIECEWISE)
    found = runner.estimate()
    one = found.per_mode[RunMode.PIECEWISE]
    report = runner.capture(max_bytes=one.first + 2 * one.second, estimated=found)
    assert runner.plan.sizes == (1, 2, 16)
    assert report.dropped == (4, 8)
    assert report.bytes <= one.first + 2 * one.second
    assert "left out to fit" in runner.plan.notes[-1]
    batch = cpu.prompts(3)
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert runner.last.batch.num_tokens == 16
    with pytest.raises(CaptureMemoryError, match="alone take about"):
        cpu.runner(CaptureMode.PIECEWISE).capture(max_bytes=one.first - 1, estimated=found)


def test_static_sizes_are_dropped_last(cpu: World) -> None:
    found = MemoryEstimate({RunMode.PIECEWISE: ModeEstimate(100, 10, 5)})
    plan = fitting_plan(cpu.plan(), found, max_bytes=120, preferred=(8,))
    assert plan.sizes == (1, 8, 16)


def test_the_collector_is_held_still_and_put_back() -> None:
    frozen = gc.get_freeze_count()
    with collector_frozen():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    gc.disable()
    try:
        with collector_frozen(collect=False):
            assert gc.get_freeze_count() == frozen
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_collected_per_graph(cpu: World) -> None:
    runs: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            runs.append(phase)

    runner = cpu.runner()
    gc.callbacks.append(seen)
    try:
        runner.capture()
    finally:
        gc.callbacks.remove(seen)
    assert len(runs) == 1


def test_recapture_and_close_release(cpu: World) -> None:
    backend = FakeBackend()
    runner = cpu.runner(backend=backend)
    runner.capture()
    count = len(backend.graphs)
    runner.recapture()
    assert len(backend.graphs) == count
    runner.close()
    assert backend.graphs == []


def test_a_size_that_does_not_even_warm_up_is_a_failed_size(cpu: World) -> None:
    def hungry(args: list[Any]) -> tuple[Tensor, ...]:
        if args[1].shape[0] == 16:
            raise torch.OutOfMemoryError("no memory for 16")
        return first(args)

    cpu.compiled = compiled_of(cpu.model, cpu.device, pieces=(hungry, middle, last))
    with pytest.raises(CaptureMemoryError, match="while estimating PIECEWISE at 16"):
        cpu.runner().estimate()
    runner = cpu.runner()
    report = runner.capture()
    assert [row.error for row in report.failed] == ["out of memory: no memory for 16"]
    batch = cpu.prompts(7)
    assert same(runner(*batch), runner.without_graphs(*batch))
    with pytest.raises(CaptureMemoryError, match="no memory for 16"):
        cpu.runner(plan={"on_failure": "raise"}).capture()
