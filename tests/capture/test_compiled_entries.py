"""Entries that were really compiled, through graphs: the reference decoder and a Hugging Face one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import pwcc
from pwcc.cache.store import Store
from pwcc.capture.fake import FakeBackend
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan_store import load_plan, save_plan
from pwcc.capture.planning import plan_for
from pwcc.capture.runner import GraphRunner
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.models.llama import Llama, LlamaConfig
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.forward_context import RunMode, forward_context
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from tests.conftest import Warm

pytestmark = pytest.mark.slow


def serve(model: nn.Module, runner: GraphRunner, cache: PagedKVCache, vocab: int, steps: int) -> set[RunMode]:
    """Random continuous batching; every batch's logits must equal the eager model's on the same cache."""
    source = random.Random(7)
    blocks = BlockAllocator(num_blocks=cache.num_blocks, block_size=cache.block_size)
    running = [blocks.allocate(5)]
    new = [(running[0], 5)]
    used = set()
    for _ in range(steps):
        positions = torch.tensor([p for s, n in new for p in range(s.length - n, s.length)])
        ids = (positions * 31 + 7) % vocab
        metadata = AttentionMetadata.build(new, block_size=cache.block_size)
        got = runner(ids, positions, metadata)
        with forward_context(metadata=metadata, cache=cache), torch.no_grad():
            torch.testing.assert_close(got, model(ids, positions), rtol=1e-3, atol=1e-4)
        assert runner.last is not None
        used.add(runner.last.mode)
        for sequence in [s for s in running if s.length > 25]:
            running.remove(sequence)
            blocks.free(sequence)
        for sequence in running:
            blocks.append(sequence)
        new = [(s, 1) for s in running]
        if (len(running) < 4 and source.random() < 0.5) or not running:
            running.append(blocks.allocate(source.randint(1, 9)))
            new.append((running[-1], running[-1].length))
    return used


@pytest.mark.parametrize("mode", [CaptureMode.FULL, CaptureMode.FULL_AND_PIECEWISE])
def test_llama(llama: Warm, mode: CaptureMode) -> None:
    torch.manual_seed(1)
    model = Llama(LlamaConfig(layers=2)).eval()
    compiled = pwcc.load(model, cache_dir=llama.root)
    plan = plan_for(compiled, mode=mode, sizes=(1, 2, 4, 8, 16), max_num_seqs=4, max_seq_len=32)
    cache = PagedKVCache(layers=2, num_blocks=64, kv_heads=2, head_dim=32, block_size=4)
    runner = GraphRunner(compiled, plan, cache=cache, backend=FakeBackend(), debug=True)
    used = serve(model, runner, cache, 512, 40)
    assert used == {RunMode.FULL, mode.mixed}
    assert runner.plan.measured


def test_hugging_face(qwen3: Warm) -> None:
    directory = qwen3.model[1]
    model = build(ModelRef.parse(directory), device="cpu", weights="random").module
    compiled = pwcc.load(model, cache_dir=qwen3.root)
    plan = plan_for(compiled, sizes=(2, 4, 8, 16), max_num_seqs=4, max_seq_len=32)
    cache = PagedKVCache(layers=2, num_blocks=64, kv_heads=2, head_dim=16, block_size=4)
    runner = GraphRunner(compiled, plan, cache=cache, debug=True)
    assert serve(model, runner, cache, 128, 20) == {RunMode.FULL, RunMode.PIECEWISE}


def test_a_saved_plan_serves_again(llama: Warm, tmp_path: Path) -> None:
    store = Store.create(llama.copy(tmp_path / "cache"))
    model = Llama(LlamaConfig(layers=2)).eval()
    compiled = pwcc.load(model, cache_dir=store.root)
    cache = PagedKVCache(layers=2, num_blocks=8, kv_heads=2, head_dim=32)
    runner = GraphRunner(compiled, plan_for(compiled, sizes=(1, 2)), cache=cache)
    runner.capture()
    save_plan(store, runner.plan)
    again = load_plan(store, compiled.manifest.entry_key)
    assert again == runner.plan
    assert again is not None
    report = GraphRunner(compiled, again, cache=cache).capture()
    assert [row.measured.size for row in report.rows] == [2, 1, 2, 1]
