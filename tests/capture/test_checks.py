"""Metadata, options and a KV cache that do not fit are refused by name, and nothing has run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pwcc.cache.errors import ArgumentError, CaptureMemoryError, UsageError
from pwcc.capture.checks import memory_for
from pwcc.capture.modes import CaptureMode
from pwcc.capture.planning import plan_for
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.ops.paged_attention import paged_attention
from tests.capture.toy import BLOCK, HEAD_DIM, HEADS, LAYERS, World


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: {"block_table": m.block_table[:1]}, r"block_table \[1, 3\]"),
        (lambda m: {"block_table": torch.cat([m.block_table] * 2)}, r"block_table \[6, 3\]"),
        (lambda m: {"block_table": m.block_table[0]}, r"block_table \[3\]"),
        (lambda m: {"block_table": m.block_table[:, :0]}, "0 blocks of 4 tokens"),
        (lambda m: {"block_table": m.block_table[:, :2]}, "2 blocks of 4 tokens"),
        (lambda m: {"block_table": m.block_table.float()}, "block_table: expected int32 or int64"),
        (lambda m: {"seq_lens": m.seq_lens[:1]}, r"seq_lens \[1\]"),
        (lambda m: {"seq_lens": m.seq_lens[:, None]}, r"seq_lens \[3, 1\]"),
        (lambda m: {"seq_lens": m.seq_lens.float()}, "seq_lens: expected int32 or int64"),
        (lambda m: {"seq_lens": m.seq_lens.to("meta")}, "got int32 on meta"),
        (lambda m: {"query_start_loc": m.query_start_loc[:-1]}, r"query_start_loc \[3\]"),
        (lambda m: {"query_start_loc": m.query_start_loc.double()}, "query_start_loc: expected int32"),
        (lambda m: {"slot_mapping": m.slot_mapping[:, None]}, r"slot_mapping \[3, 1\]"),
        (lambda m: {"slot_mapping": m.slot_mapping[:2]}, "metadata of 3 tokens, as the arguments have, got 2"),
        (lambda m: {"slot_mapping": m.slot_mapping.float()}, "slot_mapping: expected int32 or int64"),
        (lambda m: {"max_query_len": 0}, "max_query_len that covers 3 tokens in 3 sequences, got 0"),
        (lambda m: {"max_seq_len": 0}, "max_seq_len from 1"),
        (lambda m: {"max_seq_len": 13}, "got 13"),
    ],
)
def test_metadata_that_does_not_fit(world: World, change: Any, said: str) -> None:
    runner = world.runner()
    ids, positions, metadata = world.step(world.start(2, 8, 4))
    wanted = runner(ids, positions, metadata)
    calls = runner.stats.tokens
    with pytest.raises(ArgumentError, match=said):
        runner(ids, positions, replace(metadata, **change(metadata)))
    assert runner.stats.tokens == calls
    assert torch.equal(runner(ids, positions, metadata), wanted)


def test_one_sequence_of_many_tokens_is_no_decode_batch(cpu: World) -> None:
    ids, positions, metadata = cpu.prompts(5)
    with pytest.raises(ArgumentError, match="covers 5 tokens in 1 sequences, got 1"):
        cpu.runner()(ids, positions, replace(metadata, max_query_len=1))


def test_a_kernel_with_a_cache_of_its_own_has_blocks_of_its_own(cpu: World) -> None:
    """Without a cache and a block size nobody knows what a block table holds."""

    def kernel(context: Any, *args: Any) -> None:
        paged_attention(replace(context, cache=cpu.cache), *args)

    ids, positions, metadata = cpu.prompts(5)
    runner = cpu.runner(CaptureMode.PIECEWISE, cache=None, kernel=kernel)
    narrow = replace(metadata, max_seq_len=1000)
    assert torch.equal(runner(ids, positions, narrow), runner(ids, positions, metadata))
    with pytest.raises(ArgumentError, match="max_seq_len"):
        cpu.runner(CaptureMode.PIECEWISE, cache=None, kernel=kernel, block_size=4)(ids, positions, narrow)


def test_metadata_may_be_int64(cpu: World) -> None:
    runner = cpu.runner()
    ids, positions, metadata = cpu.step(cpu.start(2, 8))
    names = ("block_table", "query_start_loc", "seq_lens")
    wide: AttentionMetadata = replace(metadata, **{name: getattr(metadata, name).long() for name in names})
    assert torch.equal(runner(ids, positions, wide), runner(ids, positions, metadata))


def test_metadata_that_is_none_is_called_so(cpu: World) -> None:
    ids, positions, _ = cpu.prompts(2)
    with pytest.raises(ArgumentError, match="expected metadata beside the arguments, got none"):
        cpu.runner()(ids, positions, None)
    with pytest.raises(ArgumentError, match="at most 2 arguments"):
        cpu.runner()(ids, positions, None, None)


@pytest.mark.parametrize(
    "other",
    [
        {"layers": LAYERS - 1},
        {"kv_heads": HEADS + 1},
        {"kv_heads": 1},  # torch would broadcast
        {"head_dim": HEAD_DIM * 2},
        {"dtype": torch.float64},
    ],
)
def test_a_cache_of_another_shape_is_refused_at_capture(cpu: World, other: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK}
    runner = cpu.runner(cache=PagedKVCache(num_blocks=8, **{**shape, **other}))
    with pytest.raises(ArgumentError, match=r"expected a KV cache of .* layers of 2 heads x 16 float32"):
        runner.capture()
    assert runner.report is None
    cpu.runner(cache=PagedKVCache(num_blocks=8, **{**shape, "layers": LAYERS + 1})).capture()


BUFFER = torch.zeros(40, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputs": "foo"}, "outputs to be one of owned, static, got 'foo'"),
        ({"inputs": {"input_ids": "persist"}}, "expected 'copy' or a buffer, got 'persist'"),
        ({"inputs": {"input_ids": BUFFER, "positions": BUFFER}}, "share memory"),
        ({"inputs": {"input_ids": BUFFER[:16], "positions": BUFFER[15:]}}, "share memory"),
        ({"fill": {"input_ids": float("nan")}}, r"fill\['input_ids'\]: expected a value of int64, got nan"),
        ({"fill": {"input_ids": 1.5}}, "got 1.5"),
        ({"fill": {"input_ids": 2**70}}, "expected a value of int64"),
        ({"fill": {"input_ids": "x"}}, "got 'x'"),
        ({"block_size": 0}, "at least 1, got 0"),
        ({"block_size": -1}, "at least 1, got -1"),
        ({"block_size": 2 * BLOCK}, "block size of the KV cache, 4, got 8"),
    ],
)
def test_options_that_do_not_fit(cpu: World, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cpu.runner(**options)


def test_options_that_do_fit(cpu: World) -> None:
    inputs = {"input_ids": BUFFER[:16], "positions": BUFFER[16:32]}
    cpu.runner(inputs=inputs, fill={"positions": 1}, block_size=BLOCK, outputs="static").capture()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": [1.5]}, "sizes that are integers, got 1.5"),
        ({"sizes": ["1"]}, "sizes that are integers, got '1'"),
        ({"mode": "NOPE"}, "expected a capture mode, got 'NOPE'"),
        ({"max_seq_len": 10**12}, "limits are integers from 1 to 2147483647"),
        ({"max_seq_len": 1.5}, "limits are integers"),
        ({"instantiate": "x"}, "instantiate is one of eager, lazy"),
        ({"on_failure": "x"}, "on_failure is one of fallback, raise"),
        ({"attention": "x"}, "attention to be one of always, decode, never"),
    ],
)
def test_plan_options_that_do_not_fit(cpu: World, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_for(cpu.compiled, **options)


def test_no_room_is_one_sentence(cpu: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no memory for 8 GiB")

    monkeypatch.setattr("pwcc.capture.runner.StaticBatch", full)
    with pytest.raises(CaptureMemoryError, match="block tables of 16 sequences of 32 tokens: no memory for 8"):
        cpu.runner()
    with pytest.raises(CaptureMemoryError, match="out of memory for a thing"), memory_for("a thing", hint=""):
        torch.empty(2**62)
