"""Artifact: the numerics check of sealed decode attention kernels, at compile time and by ``--check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pwcc.cache.errors import NumericsError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.operators import DecodeAttention
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import ForwardContext
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.ops.paged_attention import attend_vectorised
from pwcc.compile.runtime.decode import DecodeKernels, Form
from pwcc.compile.runtime.kernels import ReadBlob
from pwcc.compile.runtime.piece import PieceLoader
from pwcc.compile.runtime.samples import relative_error

# One attention, rounded once to its dtype; a wrong kernel is off by O(1).
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
_LENGTHS = (1, 2, 17, 64, 130, 300)  # below, at and beyond one tile of keys
_BLOCK = 16
# The same batch, described as it is and as part of a graph for long contexts, where keys are split.
_MAX_LENGTHS = (max(_LENGTHS), 4096)


def decode_errors(kernels: DecodeKernels, device: torch.device) -> Iterator[tuple[Form, float, float]]:
    """Yield each form, its relative error against float32 attention, and the tolerance."""
    for form in kernels.forms:
        for max_length in _MAX_LENGTHS:
            yield form, _error(kernels, form, device, max_length), TOLERANCE[form[0]]


def require_decode(found: Sequence[DecodeAttention], read_blob: ReadBlob, device: torch.device) -> None:
    """Load kernels that were just sealed and compare them, before anyone can use them.

    Raises:
        NumericsError: one is beyond its tolerance.
    """
    loader = PieceLoader(read_blob, device)
    calls = {k.piece: loader.load(_record(read_blob, k.piece)).call for k in found}
    kernels = DecodeKernels.of(found, calls)
    if kernels is None:
        return
    for form, error, tolerance in decode_errors(kernels, device):
        if not error <= tolerance:
            raise NumericsError(
                f"expected decode attention {form} within {tolerance:.2g} of float32, got {error:.2g}",
                hint="please report it, with the versions of torch and Triton and the GPU",
            )


def _record(read_blob: ReadBlob, digest: BlobDigest) -> SealedPiece:
    return SealedPiece.from_bytes(read_blob(digest), where="decode attention")


def _error(kernels: DecodeKernels, form: Form, device: torch.device, max_length: int) -> float:
    name, heads, kv_heads, head_dim, window, softcap, sinks = form
    dtype = getattr(torch, name)
    generator = torch.Generator(device).manual_seed(0)

    def sample(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(like)

    seqs, blocks = len(_LENGTHS), -(-max(_LENGTHS) // _BLOCK)
    cache = PagedKVCache(
        layers=1,
        num_blocks=1 + seqs * blocks,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=_BLOCK,
        dtype=dtype,
        device=device,
    )
    wide = PagedKVCache(
        layers=1,
        num_blocks=1 + seqs * blocks,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=_BLOCK,
        device=device,
    )
    cache.keys[0].copy_(sample(*cache.keys[0].shape))
    cache.values[0].copy_(sample(*cache.values[0].shape))
    wide.keys[0].copy_(cache.keys[0])
    wide.values[0].copy_(cache.values[0])
    table = 1 + torch.arange(seqs * blocks, device=device, dtype=torch.int32).view(seqs, blocks)
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=device)
    last = (lengths - 1).long()
    metadata = AttentionMetadata(
        slot_mapping=table.gather(1, (last // _BLOCK)[:, None])[:, 0].long() * _BLOCK + last % _BLOCK,
        block_table=table,
        query_start_loc=torch.arange(seqs + 1, dtype=torch.int32, device=device),
        seq_lens=lengths,
        max_query_len=1,
        max_seq_len=max_length,
    )
    q, k, v = sample(seqs, heads, head_dim), sample(seqs, kv_heads, head_dim), sample(seqs, kv_heads, head_dim)
    logits = None if sinks is None else sample(heads, like=getattr(torch, sinks))
    params = AttentionParams(0, head_dim**-0.5, 100 if window else None, 20.0 if softcap else None, logits)
    got = torch.full_like(q, float("nan"))
    with torch.no_grad():
        kernels(ForwardContext(metadata=metadata, cache=cache), q, k, v, got, params)
        wide.write(0, metadata.slot_mapping, k.float(), v.float())
        wanted = torch.empty(q.shape, device=device)
        attend_vectorised(metadata, wide, q.float(), wanted, params)
    stored = torch.equal(wide.keys[0], cache.keys[0].float()) and torch.equal(
        wide.values[0], cache.values[0].float()
    )
    return relative_error([got.float()], [wanted]) if stored else float("inf")
