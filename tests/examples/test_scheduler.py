"""Every accepted request ends, within the bounds on batch, queue and blocks, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pwcc.compile.ops.blocks import BlockAllocator

Make = Callable[..., Any]


@pytest.fixture
def make(scheduling: Any) -> Make:
    def scheduler(*, blocks: int = 8, size: int = 4, **limits: int) -> Any:
        defaults = {"vocab": 100, "max_num_seqs": 4, "max_tokens": 8, "max_waiting": 3}
        allocator = BlockAllocator(num_blocks=blocks + 1, block_size=size)
        return scheduling.Scheduler(allocator, **{**defaults, **limits})

    return scheduler


def request(scheduling: Any, prompt: Sequence[int], new: int, *, stop: Sequence[int] = ()) -> Any:
    events: list[object] = []
    return scheduling.Request(tuple(prompt), new, events.append, frozenset(stop))


def heard(one: Any) -> list[object]:
    found: list[object] = one.listener.__self__
    return found


def token_of(work: Any) -> int:
    """A model whose next token is the sum of all tokens so far, so that a wrong history shows."""
    return int(sum([*work.request.prompt, *work.request.output])) % 97


def step(scheduler: Any) -> list[Any]:
    batch: list[Any] = scheduler.next_batch()
    for work in batch:
        assert (
            work.request.next_tokens(work.count)
            == (
                [*work.request.prompt, *work.request.output][
                    work.request.blocks.length - work.count : work.request.blocks.length
                ]
            )
        )
    assert sum(work.count for work in batch) <= scheduler.max_tokens
    assert len(batch) <= scheduler.max_num_seqs
    scheduler.advance(batch, [token_of(work) for work in batch])
    return batch


def alone(prompt: Sequence[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(sum(tokens) % 97)
    return tokens[len(prompt) :]


def test_one_request(make: Make, scheduling: Any) -> None:
    scheduler = make()
    one = request(scheduling, [1, 2, 3], 3)
    scheduler.submit(one)
    while not scheduler.idle:
        step(scheduler)
    assert heard(one) == [*alone([1, 2, 3], 3), scheduling.End("length")]
    assert scheduler.blocks.free_blocks == 8


def test_a_stop_token_ends_and_is_returned(make: Make, scheduling: Any) -> None:
    scheduler = make()
    answer = alone([5, 6], 9)
    one = request(scheduling, [5, 6], 9, stop=[answer[2]])
    scheduler.submit(one)
    while not scheduler.idle:
        step(scheduler)
    assert heard(one) == [*answer[:3], scheduling.End("stop")]


def test_a_long_prompt_is_spread_beside_decodes(make: Make, scheduling: Any) -> None:
    scheduler = make()
    short, long = request(scheduling, [1], 6), request(scheduling, range(1, 20), 1)
    scheduler.submit(short)
    step(scheduler)
    scheduler.submit(long)
    counts = []
    while not scheduler.idle:
        counts.append([work.count for work in step(scheduler)])
    assert counts[:3] == [[1, 7], [1, 7], [1, 5]]
    assert heard(long)[:-1] == alone(range(1, 20), 1)


def test_out_of_blocks_the_last_admitted_waits_and_is_computed_anew(make: Make, scheduling: Any) -> None:
    scheduler = make(blocks=4, size=2)
    first, second = request(scheduling, [1, 2, 3], 5), request(scheduling, [4, 5, 6], 5)
    scheduler.submit(first)
    scheduler.submit(second)
    for _ in range(30):
        if not scheduler.idle:
            step(scheduler)
    assert scheduler.stats.preempted > 0
    assert heard(first)[:-1] == alone([1, 2, 3], 5)
    assert heard(second)[:-1] == alone([4, 5, 6], 5)
    assert scheduler.blocks.free_blocks == 4


def test_the_queue_is_bounded(make: Make, scheduling: Any) -> None:
    scheduler = make(max_waiting=1)
    scheduler.submit(request(scheduling, [1], 1))
    with pytest.raises(scheduling.Busy, match="1 requests wait already"):
        scheduler.submit(request(scheduling, [1], 1))
    assert scheduler.stats.refused == 1


@pytest.mark.parametrize(
    ("prompt", "new", "said"),
    [
        ([], 1, "at least one token in the prompt"),
        ([100], 1, "from 0 to 99, got 100"),
        ([-1], 1, "got -1"),
        ([1], 0, "max_new_tokens of at least 1"),
        ([1] * 30, 4, "at most 33 tokens"),
    ],
)
def test_what_can_never_run_is_refused(
    make: Make, scheduling: Any, prompt: list[int], new: int, said: str
) -> None:
    with pytest.raises(scheduling.Refused, match=said):
        make().check(prompt, new)


def test_the_longest_request_runs(make: Make, scheduling: Any) -> None:
    scheduler = make()
    scheduler.check([1] * 30, 3)
    one = request(scheduling, [1] * 30, 3)
    scheduler.submit(one)
    while not scheduler.idle:
        step(scheduler)
    assert heard(one)[-1] == scheduling.End("length")


def test_cancelling_frees_blocks_in_every_state(make: Make, scheduling: Any) -> None:
    scheduler = make(max_num_seqs=1)
    running, waiting = request(scheduling, [1] * 5, 5), request(scheduling, [2], 5)
    scheduler.submit(running)
    scheduler.submit(waiting)
    step(scheduler)
    for one in (waiting, running, running):
        scheduler.end(one, scheduling.End("cancelled"))
    assert scheduler.idle
    assert scheduler.blocks.free_blocks == 8
    assert scheduler.stats.finished == {"cancelled": 2}
    assert heard(running)[-1] == scheduling.End("cancelled")


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_ends_right_and_loses_no_block(make: Make, scheduling: Any, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(blocks=12, size=2, max_tokens=rng.randint(4, 16), max_waiting=10**6)
    requests: list[Any] = []
    for _ in range(400):
        if len(requests) < 60 and rng.random() < 0.3:
            prompt = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
            one = request(scheduling, prompt, rng.randint(1, 25 - len(prompt)))
            scheduler.check(one.prompt, one.max_new_tokens)
            scheduler.submit(one)
            requests.append(one)
        step(scheduler)
    for _ in range(20000):
        if scheduler.idle:
            break
        step(scheduler)
    assert scheduler.idle
    assert scheduler.stats.preempted > 0
    assert scheduler.blocks.free_blocks == 12
    for one in requests:
        assert heard(one) == [*alone(one.prompt, one.max_new_tokens), scheduling.End("length")]
