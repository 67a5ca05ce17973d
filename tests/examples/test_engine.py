"""The engine serves many threads, survives a failing step, says when it is broken, and ends cleanly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pwcc.cache.errors import PwccError
from pwcc.compile.ops.blocks import BlockAllocator

Start = Callable[..., Any]


def next_tokens(batch: Sequence[Any]) -> list[int]:
    return [sum([*work.request.prompt, *work.request.output]) % 97 for work in batch]


@pytest.fixture
def start(scheduling: Any, engines: Any) -> Iterator[Start]:
    started: list[Any] = []

    def engine(step: Callable[[Sequence[Any]], Sequence[int]] = next_tokens, *, waiting: int = 50) -> Any:
        blocks = BlockAllocator(num_blocks=33, block_size=4)
        limits = {"vocab": 100, "max_num_seqs": 4, "max_tokens": 16, "max_waiting": waiting}
        started.append(engines.Engine(step, scheduling.Scheduler(blocks, **limits)))
        return started[-1]

    yield engine
    for one in started:
        one.close(5)


def test_many_threads_each_get_their_own_answer(start: Start) -> None:
    engine = start()

    def ask(first: int) -> tuple[list[int], list[int]]:
        tokens = [first, 1, 2]
        for _ in range(6):
            tokens.append(sum(tokens) % 97)
        return engine.generate([first, 1, 2], 6).tokens, tokens[3:]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(30)))
    assert all(got == expected for got, expected in answers)
    load = engine.load()
    assert (load.generated_tokens, load.prompt_tokens) == (180, 90)
    assert load.finished == {"length": 30}
    assert (load.waiting, load.running, load.free_blocks) == (0, 0, 32)


def test_a_failing_step_ends_its_requests_and_no_others(start: Start) -> None:
    def step(batch: Sequence[Any]) -> list[int]:
        if any(work.request.prompt == (13,) for work in batch):
            raise PwccError("size 13 is outside the compiled range")
        return next_tokens(batch)

    engine = start(step)
    answer = engine.generate([13], 3)
    assert (answer.end.reason, answer.end.message) == ("error", "size 13 is outside the compiled range")
    assert engine.generate([1], 3).end.reason == "length"
    assert engine.broken is None


def test_an_unexpected_failure_breaks_the_engine_loudly(start: Start, scheduling: Any) -> None:
    def step(_batch: Sequence[Any]) -> list[int]:
        raise RuntimeError("CUDA error: an illegal memory access")

    engine = start(step)
    assert "illegal memory access" in engine.generate([1], 3).end.message
    assert "illegal memory access" in engine.broken
    with pytest.raises(scheduling.Busy, match="illegal memory access"):
        engine.submit([1], 1, print)


def test_cancel_frees_what_it_held(start: Start) -> None:
    go = threading.Event()

    def step(batch: Sequence[Any]) -> list[int]:
        go.wait(5)
        return next_tokens(batch)

    engine = start(step)
    events: list[object] = []
    request = engine.submit([1], 50, events.append)
    engine.cancel(request)
    go.set()
    until(lambda: request.end is not None)
    assert request.end.reason == "cancelled"
    assert engine.load().free_blocks == 32


def test_closing_finishes_what_runs_and_refuses_more(start: Start, scheduling: Any) -> None:
    engine = start()
    events: list[object] = []
    request = engine.submit([1], 30, events.append)
    assert engine.close(5)
    assert request.end.reason == "length"
    with pytest.raises(scheduling.Busy, match="about to end"):
        engine.submit([1], 1, events.append)


def test_closing_cancels_what_takes_too_long(start: Start) -> None:
    def step(batch: Sequence[Any]) -> list[int]:
        time.sleep(0.05)
        return next_tokens(batch)

    engine = start(step)
    events: list[Any] = []
    request = engine.submit([1], 100, events.append)
    assert not engine.close(0.2)
    assert request.end.reason == "cancelled"


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)
