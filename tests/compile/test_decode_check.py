from typing import Any

import pytest
import torch

from pwcc.cache.errors import NumericsError
from pwcc.cache.ids import BlobDigest, blob_digest
from pwcc.compile.decode_check import TOLERANCE, decode_errors, require_decode
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import ForwardContext
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.ops.paged_attention import attend_vectorised, paged_attention
from pwcc.compile.runtime.decode import DecodeKernels, Form
from pwcc.compile.runtime.piece import PieceLoader

FORM = ("float32", 4, 2, 32, True, False, "float32")


class Blobs(dict[BlobDigest, bytes]):
    def put(self, data: bytes) -> BlobDigest:
        digest = blob_digest(data)
        self[digest] = data
        return digest


def reference(args: list[Any]) -> tuple[()]:
    """What a sealed kernel does, by the default kernel."""
    q, k, v, keys, values, slots, table, lengths, sinks, out, scale, softcap, window, shift, _, _ = args
    blocks, block_size, kv_heads, head_dim = keys.shape
    assert block_size == 1 << shift
    cache = PagedKVCache(
        layers=1, num_blocks=blocks, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    cache.keys, cache.values = (keys,), (values,)
    seqs = lengths.shape[0]
    metadata = AttentionMetadata(
        slot_mapping=slots,
        block_table=table,
        query_start_loc=torch.arange(seqs + 1, dtype=torch.int32),
        seq_lens=lengths,
        max_query_len=1,
        max_seq_len=int(lengths.max()),
    )
    params = AttentionParams(0, scale, window or None, softcap or None, sinks)
    paged_attention(ForwardContext(metadata=metadata, cache=cache), q, k, v, out, params)
    return ()


def test_a_right_kernel_passes() -> None:
    errors = list(decode_errors(DecodeKernels({FORM: reference}), torch.device("cpu")))
    assert len(errors) == 2
    assert all(error <= tolerance == TOLERANCE["float32"] for _, error, tolerance in errors)


@pytest.mark.parametrize("fault", ["output", "cache", "nothing"])
def test_a_wrong_kernel_is_found(fault: str) -> None:
    def wrong(args: list[Any]) -> tuple[()]:
        given = list(args)
        if fault != "nothing":
            reference(args)
        if fault == "output":
            given[9][3] *= 1.01
        elif fault == "cache":
            given[3][5, 0, 0, 0] += 1
        return ()

    errors = list(decode_errors(DecodeKernels({FORM: wrong}), torch.device("cpu")))
    assert not any(error <= tolerance for _, error, tolerance in errors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "form",
    [
        ("bfloat16", 32, 8, 128, False, False, None),
        ("float16", 8, 8, 64, True, False, None),
        ("bfloat16", 16, 1, 256, False, True, None),
        ("float32", 6, 2, 80, True, True, "float32"),
        ("bfloat16", 64, 8, 64, True, False, "bfloat16"),
    ],
    ids=str,
)
def test_sealed_kernels_agree_with_float32_attention_on_the_device(form: Form) -> None:
    from pwcc.compile.sealing.decode import DecodeForm, seal_decode

    blobs = Blobs()
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    found = seal_decode(DecodeForm(*form), capability, blobs.put)
    device = torch.device("cuda", 0)
    require_decode([found], blobs.__getitem__, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_decode_holds_for_other_lengths_and_queries() -> None:
    from pwcc.cache.sealed import SealedPiece
    from pwcc.compile.sealing.decode import DecodeForm, seal_decode

    blobs = Blobs()
    device = torch.device("cuda", 0)
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    found = seal_decode(DecodeForm("bfloat16", 32, 8, 128, False, False, None), capability, blobs.put)
    call = (
        PieceLoader(blobs.__getitem__, device)
        .load(SealedPiece.from_bytes(blobs[found.piece], where="test"))
        .call
    )
    kernels = DecodeKernels.of([found], {found.piece: call})
    assert kernels is not None
    seqs, blocks = 3, 128
    cache = PagedKVCache(
        layers=1, num_blocks=1 + seqs * blocks, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=device
    )
    cache.keys[0].normal_()
    cache.values[0].normal_()
    table = 1 + torch.arange(seqs * blocks, device=device, dtype=torch.int32).view(seqs, blocks)
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    slots = torch.zeros(seqs, dtype=torch.int64, device=device)
    metadata = AttentionMetadata(
        slot_mapping=slots,
        block_table=table,
        query_start_loc=torch.arange(seqs + 1, dtype=torch.int32, device=device),
        seq_lens=lengths,
        max_query_len=1,
        max_seq_len=blocks * 16,
    )
    q, k, v = (torch.randn(seqs, h, 128, device=device, dtype=torch.bfloat16) for h in (32, 8, 8))
    out, wanted = torch.empty_like(q), torch.empty_like(q)
    params = AttentionParams(0, 128**-0.5)
    context = ForwardContext(metadata=metadata, cache=cache)
    kernels(context, q, k, v, out, params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels(context, q, k, v, out, params)
    for now in ([5, 700, 2048], [1, 64, 65]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        last = lengths.long() - 1
        slots.copy_(table.gather(1, (last // 16)[:, None])[:, 0].long() * 16 + last % 16)
        q.normal_()
        graph.replay()
        attend_vectorised(metadata, cache, q, wanted, params)
        torch.testing.assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_an_error_beyond_tolerance_stops_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from pwcc.compile import decode_check

    class Loader:
        def __init__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(decode_check, "PieceLoader", Loader)
    monkeypatch.setattr(DecodeKernels, "of", lambda *_: DecodeKernels({FORM: lambda args: ()}))
    with pytest.raises(NumericsError, match="expected decode attention"):
        require_decode([], Blobs().__getitem__, torch.device("cpu"))
