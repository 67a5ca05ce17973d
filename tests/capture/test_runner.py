"""The runner: every batch, mode and size answers as the compiled variants do; nothing leaks between calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.cache.errors import ArgumentError, CaptureError, MovedInputError, SizeError, UsageError
from pwcc.cache.ids import EntryKey
from pwcc.capture.dispatch import Fall
from pwcc.capture.fake import FakeBackend
from pwcc.capture.modes import CaptureMode
from pwcc.capture.runner import GraphRunner
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import BatchDescriptor, ForwardContext, RunMode
from pwcc.compile.ops.paged import AttentionMetadata
from pwcc.compile.ops.paged_attention import attend_vectorised, paged_attention
from tests.capture.toy import KEY, VOCAB, World, compiled_of, first, last, leaking, middle

MODES = list(CaptureMode)
Batch = tuple[Tensor, Tensor, AttentionMetadata]


def same(got: Tensor, wanted: Tensor) -> bool:
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_prefill_decode_and_mixed_batches_equal_the_compiled_variants(world: World, mode: CaptureMode) -> None:
    runner = world.runner(mode, debug=True)
    sequences = world.start(5, 3, 1)
    prefill = world.batch([(s, s.length) for s in sequences])
    assert same(runner(*prefill), runner.without_graphs(*prefill))
    decode = world.step(sequences)
    assert same(runner(*decode), runner.without_graphs(*decode))
    (late,) = world.start(6)
    for sequence in sequences:
        world.blocks.append(sequence)
    mixed = world.batch([*((s, 1) for s in sequences), (late, 6)])
    assert same(runner(*mixed), runner.without_graphs(*mixed))
    assert runner.check([prefill, decode, mixed]) < 1e-4


def batches(world: World, count: int, seed: int) -> Iterator[Batch]:
    """Random batches of growing and ending sequences, prefill, decode and mixed, up to 16 tokens."""
    source = random.Random(seed)
    running = world.start(2)
    yield world.batch([(running[0], 2)])
    for index in range(count):
        new = []
        room = source.randint(1, 16)
        for sequence in list(running):
            if sequence.length > 20 or source.random() < 0.1:
                running.remove(sequence)
                world.blocks.free(sequence)
            elif room > 0 and source.random() < 0.8:
                world.blocks.append(sequence)
                new.append((sequence, 1))
                room -= 1
        if not new or (room and len(new) < 8 and source.random() < 0.4):
            length = source.randint(1, max(1, room))
            (sequence,) = world.start(length)
            running.append(sequence)
            new.append((sequence, length))
        yield world.batch(new[:8], seed=index)


@pytest.mark.parametrize("mode", MODES)
def test_random_batches(world: World, mode: CaptureMode) -> None:
    runner = world.runner(mode)
    for batch in batches(world, 40, seed=MODES.index(mode)):
        assert same(runner(*batch), runner.without_graphs(*batch)), runner.last
    if mode is not CaptureMode.NONE:
        assert runner.stats.padding > 0


def test_modes_route_as_their_table_says(world: World) -> None:
    sequences = world.start(2, 3)
    mixed, decode = world.batch([(s, s.length) for s in sequences]), world.step(sequences)
    used = {}
    for mode in CaptureMode:
        runner = world.runner(mode)
        runner(*mixed)
        first_used = runner.last
        runner(*decode)
        assert first_used is not None
        assert runner.last is not None
        used[mode] = (runner.last.mode, first_used.mode)
    assert used == {mode: (mode.decode, mode.mixed) for mode in CaptureMode}


def test_decode_is_captured_with_one_token_per_sequence(cpu: World) -> None:
    seen: list[tuple[RunMode, int, int]] = []

    def kernel(
        context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        assert context.metadata is not None
        seen.append((context.mode, context.metadata.max_query_len, context.metadata.seq_lens.shape[0]))
        paged_attention(context, q, k, v, out, params)

    runner = cpu.runner(CaptureMode.FULL_DECODE_ONLY, kernel=kernel)
    runner.capture()
    full = {item for item in seen if item[0] is RunMode.FULL}
    assert full == {(RunMode.FULL, 1, size) for size in (1, 2, 4, 8)}


def test_the_gpu_kernel_agrees_in_every_mode(cpu: World) -> None:
    """On a CPU the default kernel loops over sequences; the form for GPUs must hold in graphs as well."""

    def kernel(
        context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        assert context.metadata is not None
        assert context.cache is not None
        context.cache.write(params.layer, context.metadata.slot_mapping, k, v)
        attend_vectorised(context.metadata, context.cache, q, out, params)

    for mode in CaptureMode:
        runner = cpu.runner(mode, kernel=kernel)
        reference = cpu.runner(CaptureMode.NONE)
        for batch in batches(cpu, 10, seed=5):
            assert same(runner(*batch), reference(*batch)), (mode, runner.last)


def test_padding_never_reaches_a_sequence(world: World) -> None:
    """Capture and padded calls write the null block and no block that a sequence owns."""
    sequences = world.start(5, 2)
    prompt = world.batch([(s, s.length) for s in sequences])
    runner = world.runner(CaptureMode.PIECEWISE)
    runner.without_graphs(*prompt)
    before = [keys[1:].clone() for keys in world.cache.keys]
    runner.capture()
    world.runner(CaptureMode.FULL).capture()
    assert all(torch.equal(keys[1:], old) for keys, old in zip(world.cache.keys, before, strict=True))
    runner(*prompt)  # 7 tokens in 8
    assert all(
        torch.allclose(keys[1:], old, atol=1e-5) for keys, old in zip(world.cache.keys, before, strict=True)
    )


def test_a_smaller_batch_after_a_larger_one_does_not_see_it(world: World) -> None:
    """Rows, sequences and block-table columns of the batch before are padding again."""
    runner = world.runner(CaptureMode.FULL)
    large, small = world.start(9, 6, 1), world.start(1)
    runner(*world.batch([(s, s.length) for s in large]))
    runner(*world.step(large))
    for keys, values in zip(world.cache.keys, world.cache.values, strict=True):
        for block in {b for s in large for b in s.blocks}:
            keys[block].fill_(float("nan"))
            values[block].fill_(float("nan"))
    assert torch.isfinite(runner(*world.batch([(small[0], 1)]))).all()
    assert torch.isfinite(runner(*world.step(small))).all()


def test_an_output_that_is_kept_does_not_change(world: World) -> None:
    runner = world.runner()
    sequences = world.start(3, 2)
    kept = runner(*world.batch([(s, s.length) for s in sequences]))
    copy = kept.clone()
    for _ in range(3):
        runner(*world.step(sequences))
    runner(*world.prompts(4, seed=3))
    assert torch.equal(kept, copy)


def test_static_outputs_are_opted_into_and_do_change(world: World) -> None:
    runner = world.runner(outputs="static")
    first_batch, second = world.prompts(3), world.prompts(3, seed=9)
    kept = runner(*first_batch)
    copy = kept.clone()
    again = runner(*second)
    assert again.data_ptr() == kept.data_ptr()
    assert not torch.equal(kept, copy)


def test_sizes_above_the_largest_use_the_dynamic_variant(world: World) -> None:
    runner = world.runner()
    batch = world.prompts(17)
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert (runner.last.mode, runner.last.fall) == (RunMode.NONE, Fall.ABOVE_LARGEST)
    with pytest.raises(SizeError):
        runner(*world.prompts(65))


def test_a_batch_beyond_full_graphs_falls_to_pieces(world: World) -> None:
    runner = world.runner()
    (long,) = world.start(33)
    runner.without_graphs(*world.batch([(long, 33)]))
    batch = world.step([long])  # 34 tokens, and graphs hold for 32
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert (runner.last.mode, runner.last.fall) == (RunMode.PIECEWISE, Fall.TOO_LONG)


@pytest.mark.parametrize("max_seq_len", [8, 32])
def test_between_pieces_a_padded_decode_batch_is_still_a_decode_batch(cpu: World, max_seq_len: int) -> None:
    """As many sequences as rows, so that a decode kernel runs, also where sequences pass max_seq_len."""
    seen: set[tuple[int, int, int, int]] = set()

    def kernel(
        context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        assert context.metadata is not None
        starts, table = context.metadata.query_start_loc, context.metadata.block_table
        seen.add((q.shape[0], context.metadata.seq_lens.shape[0], starts.shape[0] - 1, table.shape[0]))
        paged_attention(context, q, k, v, out, params)

    runner = cpu.runner(CaptureMode.PIECEWISE, kernel=kernel, plan={"max_seq_len": max_seq_len})
    sequences = cpu.start(9, 2, 3)
    runner(*cpu.batch([(s, s.length) for s in sequences]))
    seen.clear()
    batch = cpu.step(sequences)
    got = runner(*batch)
    assert seen == {(4, 4, 4, 4)}
    assert same(got, runner.without_graphs(*batch))


def test_rows_that_depend_on_padding_are_found(world: World) -> None:
    world.compiled = compiled_of(world.model, world.device, pieces=(first, middle, leaking))
    runner = world.runner(CaptureMode.PIECEWISE)
    fits, padded = world.prompts(4), world.prompts(3)
    assert runner.check([fits]) < 1e-4
    with pytest.raises(CaptureError, match="disagree"):
        runner.check([padded])


def test_a_moved_persistent_input_is_named(world: World) -> None:
    ids = torch.zeros(16, dtype=torch.int64, device=world.device)
    runner = world.runner(inputs={"input_ids": ids})
    given, positions, metadata = world.prompts(3)
    ids[:3] = given
    got = runner(ids[:3], positions, metadata)
    assert same(got, runner.without_graphs(given, positions, metadata))
    with pytest.raises(MovedInputError, match="'input_ids' is persistent"):
        runner(given, positions, metadata)
    with pytest.raises(ArgumentError, match="at least 16 rows"):
        world.runner(inputs={"input_ids": ids[:8]})
    with pytest.raises(UsageError, match="input_id"):
        world.runner(inputs={"input_id": ids})


def test_a_moved_weight_is_named_at_the_first_replay(world: World) -> None:
    runner = world.runner()
    runner.capture()
    world.model.layers[1].data = world.model.layers[1].data.clone()
    with pytest.raises(MovedInputError, match=r"weight 'layers\.1'"):
        runner(*world.prompts(3))


def test_debug_checks_every_replay_and_recapture_follows(world: World) -> None:
    runner, debug = world.runner(CaptureMode.PIECEWISE), world.runner(CaptureMode.PIECEWISE, debug=True)
    batch = world.prompts(3)
    before = runner(*batch)
    debug(*batch)
    old = world.model.head.data  # kept alive: nothing notices but the check
    world.model.head.data = old * 2
    assert same(runner(*batch), before)  # stale, as a real graph is
    with pytest.raises(MovedInputError, match="weight 'head'"):
        debug(*batch)
    debug.recapture()
    assert same(debug(*batch), before * 2)


def test_replaced_weights_are_noticed_without_debug(world: World) -> None:
    runner = world.runner()
    batch = world.prompts(3)
    runner(*batch)
    state = {name: tensor * 2 for name, tensor in world.model.state_dict().items()}
    world.model.load_state_dict(state, assign=True)
    with pytest.raises(MovedInputError, match="weight"):
        runner(*batch)
    runner.recapture()
    assert same(runner(*batch), runner.without_graphs(*batch))


def test_weights_written_in_place_are_seen(world: World) -> None:
    runner = world.runner()
    batch = world.prompts(3)
    before = runner(*batch)
    world.model.head.mul_(3)
    assert same(runner(*batch), before * 3)


def test_arguments_are_checked_before_anything_runs(world: World) -> None:
    runner = world.runner()
    ids, positions, metadata = world.prompts(3)
    for wrong in ((ids.int(), positions, metadata), (ids, positions[:2], metadata), (ids, metadata)):
        with pytest.raises(ArgumentError):
            runner(*wrong)
    with pytest.raises(ArgumentError, match="metadata of 2 tokens"):
        runner(ids[:2], positions[:2], metadata)
    with pytest.raises(ArgumentError, match="expected metadata"):
        runner(ids, positions)
    assert runner.stats.tokens == 0


@pytest.mark.parametrize(("size", "mode"), [(3, RunMode.PIECEWISE), (17, RunMode.NONE)])
def test_an_error_while_it_runs_names_the_entry_once(cpu: World, size: int, mode: RunMode) -> None:
    full = False

    def kernel(*args: Any, **options: Any) -> None:
        if full:
            raise torch.OutOfMemoryError("no memory for 8 GiB")
        paged_attention(*args, **options)

    runner = cpu.runner(CaptureMode.PIECEWISE, kernel=kernel)
    runner.capture()
    full = True
    with pytest.raises(torch.OutOfMemoryError, match="8 GiB") as caught:
        runner(*cpu.prompts(size))
    assert runner.last is not None
    assert runner.last.mode is mode
    assert caught.value.__notes__ == [f"while running pwcc entry {KEY} (toy)"]


def test_a_plan_of_another_entry_is_refused(cpu: World) -> None:
    from dataclasses import replace

    plan = replace(cpu.plan(), entry_key=EntryKey("f" * 32))
    with pytest.raises(UsageError, match="the plan is of entry"):
        GraphRunner(cpu.compiled, plan)


def test_it_works_in_inference_mode_and_after_it(world: World) -> None:
    runner = world.runner()
    batch = world.prompts(3)
    with torch.inference_mode():
        inside = runner(*batch)
    assert same(runner(*batch), inside)


def test_a_model_without_a_cache_attends_over_its_tokens(world: World) -> None:
    runner = world.runner(CaptureMode.FULL, cache=None)
    ids, positions, _ = world.prompts(5)
    assert same(runner(ids, positions), world.compiled(ids, positions))
    assert runner.last is not None
    assert (runner.last.mode, runner.last.batch) == (RunMode.FULL, BatchDescriptor(8))


def test_pad_multiple_and_fill(cpu: World) -> None:
    runner = cpu.runner(CaptureMode.PIECEWISE, plan={"pad_multiple": 4}, fill={"input_ids": VOCAB - 1})
    batch = cpu.prompts(3)
    assert same(runner(*batch), runner.without_graphs(*batch))
    assert runner.last is not None
    assert runner.last.batch.num_tokens == 4
    assert runner.plan.sizes == (4, 8, 16)


def test_stats_count_every_call(world: World) -> None:
    runner = world.runner()
    for length in (3, 3, 16, 20):
        runner(*world.prompts(length))
    assert dict(runner.stats.hits) == {
        (RunMode.PIECEWISE, 4): 2,
        (RunMode.PIECEWISE, 16): 1,
        (RunMode.NONE, 0): 1,
    }
    assert (runner.stats.tokens, runner.stats.padding) == (42, 2)
    assert runner.stats.captures == 9
    text = runner.stats.prometheus()
    assert 'pwcc_graph_calls_total{mode="PIECEWISE",size="4"} 2' in text.splitlines()
    assert 'pwcc_graph_falls_total{reason="above_largest"} 1' in text.splitlines()


def test_no_memory_grows_over_calls(world: World) -> None:
    runner = world.runner()
    sequences = world.start(1, 1, 1)
    backend = runner._backend
    runner(*world.step(sequences))
    before, graphs = backend.memory_used(), runner.stats.captures
    for _ in range(20):
        runner(*world.step(sequences))
    assert runner.stats.captures == graphs
    if isinstance(backend, FakeBackend):
        assert backend.memory_used() == before
    runner.close()
    if isinstance(backend, FakeBackend):
        assert backend.graphs == []
    batch = world.step(sequences)
    assert same(runner(*batch), runner.without_graphs(*batch))


@pytest.mark.parametrize("mode", [CaptureMode.PIECEWISE, CaptureMode.FULL])
def test_a_state_that_pieces_write_survives_capture(world: World, mode: CaptureMode) -> None:
    def counting(args: list[Any]) -> tuple[Tensor, ...]:
        args[3].add_(1)
        return first(args)

    world.compiled = compiled_of(world.model, world.device, pieces=(counting, middle, last))
    writing = world.compiled.programs[0].variants[0].pieces[0].record
    vars(writing)["mutated"] = (3,)
    before = world.model.embed.clone()
    runner = world.runner(mode)
    runner.capture()
    assert torch.equal(world.model.embed, before)
    runner(*world.prompts(2))
    assert torch.equal(world.model.embed, before + 1)
