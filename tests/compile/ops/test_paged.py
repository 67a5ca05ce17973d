import pytest
import torch
from torch import Tensor

from pwcc.compile.ops.attention import attention
from pwcc.compile.ops.blocks import NULL_BLOCK, BlockAllocator, OutOfBlocks, SequenceBlocks
from pwcc.compile.ops.dense import AttentionParams, dense_causal_attention
from pwcc.compile.ops.forward_context import ForwardContext, forward_context
from pwcc.compile.ops.paged import PADDING_SLOT, AttentionMetadata, PagedKVCache
from pwcc.compile.ops.paged_attention import attend_vectorised, paged_attention

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4

VARIANTS = [
    AttentionParams(0, 0.3),
    AttentionParams(0, 0.3, window=3),
    AttentionParams(0, 0.3, softcap=2.0),
    AttentionParams(0, 0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    AttentionParams(0, 0.3, window=5, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    AttentionParams(0, 0.3, window=5, chunk=4),
]


def vectorised(
    context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
) -> None:
    """The GPU path, run on the CPU."""
    assert context.metadata is not None
    assert context.cache is not None
    context.cache.write(params.layer, context.metadata.slot_mapping, k, v)
    attend_vectorised(context.metadata, context.cache, q, out, params)


def cache(num_blocks: int = 32, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PagedKVCache:
    return PagedKVCache(
        layers=2,
        num_blocks=num_blocks,
        block_size=BLOCK,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        device=device,
        dtype=dtype,
    )


class Stream:
    """One sequence's full q, k, v, and the dense answer for all of it."""

    def __init__(self, tokens: int, seed: int, params: AttentionParams, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        made = (torch.randn(tokens, size, DIM, generator=generator).to(device) for size in sizes)
        self.q, self.k, self.v = made
        self.answer = torch.empty_like(self.q)
        dense_causal_attention(self.q, self.k, self.v, self.answer, params)
        self.sequence = SequenceBlocks()

    def rows(self, new: int) -> slice:
        return slice(self.sequence.length - new, self.sequence.length)


def run_schedule(kernel: object, params: AttentionParams, device: str = "cpu", pad: int = 0) -> None:
    """Prefill, chunked prefill, decode and mixed batches must all give the dense answers."""
    streams = [Stream(tokens, seed, params, device) for seed, tokens in enumerate((14, 9, 11))]
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    kv = cache(device=device)
    schedule = [
        [(0, 6)],  # one prompt without history
        [(0, 3), (1, 5)],  # a chunk with history beside a prompt
        [(0, 1), (1, 1)],  # decode
        [(2, 7), (1, 1), (0, 1)],  # mixed
        [(0, 1), (1, 1), (2, 1)],
        [(2, 3)],  # one chunk with history
    ]
    for batch in schedule:
        for index, new in batch:
            allocator.append(streams[index].sequence, new)
        rows = [streams[index].rows(new) for index, new in batch]
        q, k, v = (
            torch.cat([getattr(streams[index], name)[row] for (index, _), row in zip(batch, rows, strict=True)])
            for name in "qkv"
        )
        expected = torch.cat([streams[i].answer[row] for (i, _), row in zip(batch, rows, strict=True)])
        tokens = q.shape[0]
        q, k, v = (torch.cat([t, t.new_ones(pad, *t.shape[1:])]) for t in (q, k, v))
        metadata = AttentionMetadata.build(
            [(streams[index].sequence, new) for index, new in batch],
            block_size=BLOCK,
            device=device,
            pad_tokens_to=tokens + pad,
            pad_seqs_to=len(batch) + pad,
            pad_blocks_to=6 if pad else 0,
        )
        out = torch.full_like(q, float("nan"))
        with forward_context(metadata=metadata, cache=kv, kernel=kernel):  # type: ignore[arg-type]
            attention(q, k, v, out, *params)
        torch.testing.assert_close(out[:tokens], expected, atol=2e-5, rtol=1e-5)
        assert out.isfinite().all()  # padding rows too
    for stream in streams:
        allocator.free(stream.sequence)
    assert allocator.free_blocks == 31


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("params", VARIANTS, ids=["plain", "window", "softcap", "sinks", "all", "chunk"])
@pytest.mark.parametrize("kernel", [paged_attention, vectorised], ids=["reference", "vectorised"])
def test_paged_equals_dense_for_every_kind_of_batch(kernel: object, params: AttentionParams, pad: int) -> None:
    run_schedule(kernel, params, pad=pad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("params", VARIANTS, ids=["plain", "window", "softcap", "sinks", "all", "chunk"])
def test_paged_equals_dense_on_gpu(params: AttentionParams) -> None:
    on_gpu = params._replace(sinks=None if params.sinks is None else params.sinks.cuda())
    run_schedule(paged_attention, on_gpu, device="cuda")
    run_schedule(paged_attention, on_gpu, device="cuda", pad=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_decode_is_captured_in_a_cuda_graph_and_follows_new_metadata() -> None:
    params = AttentionParams(1, 0.3)
    stream = Stream(9, 0, params, "cuda")
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    kv = cache(device="cuda")
    allocator.append(stream.sequence, 6)

    def metadata(new: int) -> AttentionMetadata:
        return AttentionMetadata.build(
            [(stream.sequence, new)],
            block_size=BLOCK,
            device="cuda",
            pad_blocks_to=4,
            pad_seqs_to=2,
            pad_tokens_to=2,
        )

    with forward_context(metadata=metadata(6), cache=kv):
        attention(stream.q[:6], stream.k[:6], stream.v[:6], torch.empty_like(stream.q[:6]), *params)
    static = metadata(1)  # what the graph reads; the last prompt token's row is written again, harmlessly
    q, k, v = (getattr(stream, name)[5:7].clone() for name in "qkv")
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with forward_context(metadata=static, cache=kv):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            attention(q, k, v, out, *params)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            attention(q, k, v, out, *params)
    for token in range(6, 9):
        allocator.append(stream.sequence)
        fresh = metadata(1)
        for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens"):
            getattr(static, name).copy_(getattr(fresh, name))
        for buffer, name in ((q, "q"), (k, "k"), (v, "v")):
            buffer[0].copy_(getattr(stream, name)[token])
        graph.replay()
        torch.testing.assert_close(out[0], stream.answer[token], atol=2e-5, rtol=1e-5)


def test_layers_do_not_share_memory_and_padding_writes_to_the_null_block() -> None:
    kv = cache()
    slots = torch.tensor([BLOCK * 3 + 1, PADDING_SLOT])
    kv.write(1, slots, torch.ones(2, KV_HEADS, DIM), 2 * torch.ones(2, KV_HEADS, DIM))
    assert kv.keys[0].count_nonzero() == 0
    assert kv.keys[1].shape == (32, BLOCK, KV_HEADS, DIM)
    touched = kv.values[1].flatten(2).any(-1).nonzero().tolist()
    assert touched == [[NULL_BLOCK, 0], [3, 1]]
    keys, values = kv.read(1, torch.tensor([[3, 0]]))
    assert keys.shape == values.shape == (1, 2 * BLOCK, KV_HEADS, DIM)
    assert (values[0, 1] == 2).all()


def test_metadata_describes_the_batch() -> None:
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    first, second = allocator.allocate(6), allocator.allocate(1)
    metadata = AttentionMetadata.build([(first, 2), (second, 1)], block_size=4, pad_tokens_to=5, pad_seqs_to=3)
    assert metadata.slot_mapping.tolist() == [2 * 4 + 0, 2 * 4 + 1, 3 * 4, PADDING_SLOT, PADDING_SLOT]
    assert metadata.block_table.tolist() == [[1, 2], [3, 0], [0, 0]]
    assert metadata.query_start_loc.tolist() == [0, 2, 3, 3]
    assert metadata.seq_lens.tolist() == [6, 1, 0]
    assert (metadata.max_query_len, metadata.max_seq_len) == (2, 6)
    with pytest.raises(ValueError, match="at least one sequence"):
        AttentionMetadata.build([], block_size=4)
    with pytest.raises(ValueError, match="1 to 6 new tokens"):
        AttentionMetadata.build([(first, 7)], block_size=4)


def test_allocator_takes_nothing_when_it_cannot_give_all() -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=4)
    first = allocator.allocate(7)
    assert first.blocks == [1, 2]
    assert allocator.free_blocks == 1
    allocator.append(first)  # fills block 2
    assert allocator.free_blocks == 1
    with pytest.raises(OutOfBlocks, match="16 tokens needs 2 more blocks of 4, 1 of 3 are free"):
        allocator.append(first, 8)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(5)
    assert (first.length, allocator.free_blocks) == (8, 1)
    allocator.append(first)
    assert first.blocks == [1, 2, 3]
    allocator.free(first)
    allocator.free(first)
    assert (first.length, allocator.free_blocks) == (0, 3)
    assert NULL_BLOCK not in allocator.allocate(12).blocks
    with pytest.raises(ValueError, match="at least one token"):
        allocator.append(first, 0)


@pytest.mark.parametrize("bad", [{"num_blocks": 1}, {"num_blocks": 4, "kv_heads": 0}])
def test_sizes_that_cannot_work_are_refused(bad: dict[str, int]) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 8} | bad
    with pytest.raises(ValueError, match="positive sizes"):
        PagedKVCache(**sizes)  # type: ignore[arg-type]
