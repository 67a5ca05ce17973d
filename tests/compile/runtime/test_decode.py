from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import ForwardContext
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.ops.paged_attention import paged_attention
from pwcc.compile.runtime.decode import TILE, DecodeKernels, split_keys

Recorder = tuple[DecodeKernels, list[list[Any]]]
FORM = ("float32", 4, 2, 16, False, False, None)


def context(
    seqs: int = 2, queries: int = 1, block_size: int = 16, dtype: torch.dtype = torch.float32
) -> ForwardContext:
    cache = PagedKVCache(
        layers=2, num_blocks=1 + seqs, kv_heads=2, head_dim=16, block_size=block_size, dtype=dtype
    )
    metadata = AttentionMetadata(
        slot_mapping=torch.arange(block_size, block_size + seqs * queries),
        block_table=torch.arange(1, 1 + seqs, dtype=torch.int32)[:, None],
        query_start_loc=torch.arange(0, seqs * queries + 1, queries, dtype=torch.int32),
        seq_lens=torch.full((seqs,), queries, dtype=torch.int32),
        max_query_len=queries,
        max_seq_len=queries,
    )
    return ForwardContext(metadata=metadata, cache=cache)


def tensors(rows: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.randn(rows, 4, 16),
        torch.randn(rows, 2, 16),
        torch.randn(rows, 2, 16),
        torch.empty(rows, 4, 16),
    )


@pytest.fixture
def recorder() -> Recorder:
    calls: list[list[Any]] = []

    def record(args: list[object]) -> tuple[object, ...]:
        calls.append(list(args))
        return ()

    return DecodeKernels({FORM: record}), calls


def test_a_decode_batch_of_a_sealed_form_runs_the_sealed_kernel(recorder: Recorder) -> None:
    kernels, calls = recorder
    batch, (q, k, v, out) = context(), tensors()
    kernels(batch, q, k, v, out, AttentionParams(1, 0.25))
    (args,) = calls
    assert args[0] is q
    assert args[9] is out
    assert batch.cache is not None
    assert args[3].data_ptr() == batch.cache.keys[1].data_ptr()
    assert args[10:] == [0.25, 0.0, 0, 4, 1, TILE]


@pytest.mark.parametrize(
    "case",
    ["prefill", "form", "window", "stride", "alignment", "cache dtype", "block size", "no metadata rows"],
)
def test_everything_else_takes_the_default_kernel_and_gives_its_answer(recorder: Recorder, case: str) -> None:
    kernels, calls = recorder
    batch, (q, k, v, out) = context(), tensors()
    params = AttentionParams(0, 0.25)
    if case == "prefill":
        batch, (q, k, v, out) = context(queries=3), tensors(6)
    elif case == "form":
        q, out = torch.randn(2, 8, 16), torch.empty(2, 8, 16)
    elif case == "window":
        params = AttentionParams(0, 0.25, 1)
    elif case == "stride":
        q = torch.randn(2, 16, 4).transpose(1, 2)
    elif case == "alignment":
        q = torch.randn(2 * 4 * 16 + 1)[1:].view(2, 4, 16)
    elif case == "cache dtype":
        batch = context(dtype=torch.float64)
    elif case == "block size":
        batch = context(block_size=12)
    elif case == "no metadata rows":
        q, k, v, out = tensors(3)  # a padded row that no sequence owns
    wanted = torch.empty_like(out)
    if case == "cache dtype":
        with pytest.raises(RuntimeError):  # the default's own complaint, not a wrong answer
            kernels(batch, q, k, v, out, params)
    else:
        if case == "no metadata rows":
            slots = torch.tensor([16, 17, 0])
            object.__setattr__(batch.metadata, "slot_mapping", slots)
        kernels(batch, q, k, v, out, params)
        paged_attention(batch, q, k, v, wanted, params)
        assert torch.equal(out, wanted)
    assert not calls


@given(st.integers(1, 100_000), st.integers(1, 5_000))
def test_splits_cover_every_key_and_none_is_empty(length: int, programs: int) -> None:
    splits, chunk = split_keys(length, programs)
    assert chunk % TILE == 0
    assert splits * chunk >= length
    assert (splits - 1) * chunk < length


def test_few_long_sequences_are_split_and_many_or_short_ones_are_not() -> None:
    assert split_keys(4096, 8)[0] > 8
    assert split_keys(4096, 512)[0] == 1
    assert split_keys(100, 8)[0] == 1
