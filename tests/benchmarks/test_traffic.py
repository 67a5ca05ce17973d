"""Random traffic: batches that a server could make, all kinds and sizes, and no block lost."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pwcc.compile.ops.blocks import BlockAllocator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module: Any = importlib.import_module("traffic")
    yield lambda seed, blocks=400, seqs=32: module.Traffic(
        seed=seed,
        blocks=BlockAllocator(num_blocks=blocks, block_size=4),
        vocab=50,
        max_tokens=40,
        max_num_seqs=seqs,
        max_seq_len=32,
        device=torch.device("cpu"),
    )
    sys.modules.pop("traffic")


def test_batches_are_what_their_metadata_says(make: Any) -> None:
    traffic = make("1")
    kinds: Counter[str] = Counter()
    sizes: set[int] = set()
    for _ in range(600):
        batch = traffic.next()
        meta = batch.metadata
        tokens = len(batch.ids)
        assert tokens == len(batch.positions) == len(meta.slot_mapping) == int(meta.query_start_loc[-1])
        assert 1 <= tokens <= 40
        assert len(meta.seq_lens) <= 32
        assert int(meta.seq_lens.max()) <= 32
        assert len(set(meta.slot_mapping.tolist())) == tokens
        assert 0 not in meta.slot_mapping // 4
        for i, length in enumerate(meta.seq_lens.tolist()):
            start, stop = meta.query_start_loc[i : i + 2].tolist()
            assert batch.positions[start:stop].tolist() == list(range(length - (stop - start), length))
        if batch.kind == "decode":
            assert meta.max_query_len == 1
        kinds[batch.kind] += 1
        sizes.add(tokens)
    assert min(kinds[kind] for kind in ("decode", "prefill", "mixed")) > 100
    assert sizes == set(range(1, 41))


def test_sequences_grow_end_and_give_their_blocks_back(make: Any) -> None:
    traffic = make("2", blocks=60)
    most = 0
    for _ in range(600):
        traffic.next()
        held = sum(len(sequence.blocks) for sequence in traffic.live)
        assert held + traffic.blocks.free_blocks == 59
        most = max(most, max((sequence.length for sequence in traffic.live), default=0))
    assert most > 20
    traffic.finish()
    assert traffic.blocks.free_blocks == 59


def test_equal_seeds_give_equal_batches(make: Any) -> None:
    one, two, other = make("a"), make("a"), make("b")
    for _ in range(50):
        first, second = one.next(), two.next()
        assert first.ids.equal(second.ids)
        assert first.metadata.block_table.equal(second.metadata.block_table)
    assert not one.next().ids.equal(other.next().ids)
