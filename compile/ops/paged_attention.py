"""Serve the Artifact noun: the default attention kernels over the paged KV cache, for CPU and for GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pwcc.cache.errors import UsageError
from pwcc.compile.ops.dense import (
    AttentionParams,
    attend,
    causal_visibility,
    dense_causal_attention,
    grouped,
    masked_attention,
)
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache

if TYPE_CHECKING:
    from pwcc.compile.ops.forward_context import ForwardContext


def paged_attention(
    context: ForwardContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    params: AttentionParams,
    /,
) -> None:
    """Write ``k`` and ``v`` to the cache, then attend per sequence over all it holds.

    The default ``AttentionKernel``. On CPU a loop over sequences in float32, the reference. Elsewhere a
    vectorised form that never waits for the device, so that a decode batch (``max_query_len == 1``, one token
    row per sequence) may be captured in a CUDA graph. Raise ``UsageError`` if the context lacks metadata or
    cache.
    """
    metadata, cache = context.metadata, context.cache
    if metadata is None or cache is None:
        raise UsageError(
            "the default attention kernel expects a forward context with metadata and cache",
            hint="pass both to forward_context(...), or plug a kernel of your own",
        )
    if params.bias is not None:
        raise UsageError(
            "this model adds a bias or mask of its own to attention, which covers the tokens of one call only",
            hint="run it on whole sequences without a forward context",
        )
    cache.write(params.layer, metadata.slot_mapping, k, v)
    if q.device.type == "cpu":
        _attend_per_sequence(metadata, cache, q, out, params)
        return
    alone = metadata.seq_lens.shape[0] == 1 and metadata.max_query_len == metadata.max_seq_len
    if params.plain and alone and context.mode != "FULL":  # a captured graph's host values are upper bounds
        # One prompt without history: the keys are the ones just computed. Padding rows come last and
        # attention is causal, so they change no row before them.
        dense_causal_attention(q, k, v, out, params)
        return
    attend_vectorised(metadata, cache, q, out, params)


def _attend_per_sequence(
    metadata: AttentionMetadata,
    cache: PagedKVCache,
    q: Tensor,
    out: Tensor,
    params: AttentionParams,
) -> None:
    starts = metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens.tolist()
    for index, length in enumerate(lengths):
        start, stop = starts[index], starts[index + 1]
        if start == stop:
            continue
        blocks = -(-length // cache.block_size)
        keys, values = (
            t[:length].transpose(0, 1) for t in cache.read(params.layer, metadata.block_table[index, :blocks])
        )
        positions = torch.arange(length - (stop - start), length)
        visible = causal_visibility(positions, length, params)
        queries = q[start:stop].transpose(0, 1)
        out[start:stop] = masked_attention(queries, keys, values, visible, params).transpose(0, 1)
    out[starts[-1] :] = 0  # padding rows: defined, so that what follows stays finite


def attend_vectorised(
    metadata: AttentionMetadata,
    cache: PagedKVCache,
    q: Tensor,
    out: Tensor,
    params: AttentionParams,
) -> None:
    """Attend for all sequences at once: every extent is a host value or a tensor's shape, so no host sync.

    Gathers ``[seqs, max_blocks * block_size]`` keys and values; ``max_blocks`` is the block table's width, so
    a server keeps the table as narrow as its batch. Padding rows of ``out`` get finite values of no meaning.
    """
    seqs, queries = metadata.seq_lens.shape[0], metadata.max_query_len
    if seqs > 1 and queries >= q.shape[0]:
        _attend_per_token(metadata, cache, q, out, params)
        return
    decode = queries == 1 and q.shape[0] == seqs
    starts = metadata.query_start_loc
    if decode:
        batch = q.unsqueeze(1)
    else:
        rows = starts[:-1, None] + torch.arange(queries, device=q.device)
        batch = q[rows.clamp(max=q.shape[0] - 1)]  # [seqs, queries, heads, head_dim]
    query_lens = (starts[1:] - starts[:-1]).clamp(min=1)
    # Length 0 (padding) counts as 1: a row with nothing visible would be NaN.
    first = metadata.seq_lens.clamp(min=1) - query_lens
    positions = first[:, None] + torch.arange(queries, device=q.device)
    keys, values = (t.transpose(1, 2) for t in cache.read(params.layer, metadata.block_table))
    visible = causal_visibility(positions, keys.shape[-2], params)
    result = _attend_batch(batch.transpose(1, 2), keys, values, visible, params).transpose(1, 2)
    if decode:
        out.copy_(result[:, 0])
        return
    tokens = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
    owner = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=seqs - 1)
    offset = (tokens - starts[owner]).clamp(max=queries - 1)
    out.copy_(result[owner, offset])


def _attend_per_token(
    metadata: AttentionMetadata,
    cache: PagedKVCache,
    q: Tensor,
    out: Tensor,
    params: AttentionParams,
) -> None:
    """Attend each token as a sequence of its own, for a graph in which any sequence may have all the tokens.

    Padding to ``[seqs, queries]`` would make ``seqs * tokens`` rows there. Gathers keys per token instead.
    """
    starts, seqs = metadata.query_start_loc, metadata.seq_lens.shape[0]
    tokens = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
    owner = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=seqs - 1)
    first = (metadata.seq_lens - (starts[1:] - starts[:-1]))[owner]
    positions = (first + tokens - starts[owner]).clamp(min=0)
    keys, values = (t.transpose(1, 2) for t in cache.read(params.layer, metadata.block_table[owner]))
    visible = causal_visibility(positions[:, None], keys.shape[-2], params)
    result = _attend_batch(q.unsqueeze(1).transpose(1, 2), keys, values, visible, params)
    out.copy_(result[:, :, 0])


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, params: AttentionParams) -> Tensor:
    """``q``: ``[seqs, heads, queries, head_dim]``; ``k``, ``v``: ``[seqs, kv_heads, keys, head_dim]``."""
    if params.softcap is not None or params.sinks is not None:
        return masked_attention(q, k, v, visible, params)
    group = q.shape[1] // k.shape[1]
    mask = visible.unsqueeze(1)
    if q.shape[2] == 1:
        # One query per head: the group becomes the query dimension, so no key is read or copied twice.
        packed = grouped(q, k.shape[1]).squeeze(3)
        result = attend(packed, k, v, attn_mask=mask, scale=params.scale)
        return result.flatten(1, 2).unsqueeze(2)
    if group > 1:
        # enable_gqa with a mask would fall to the math kernel, which holds all scores at once.
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return attend(q, k, v, attn_mask=mask, scale=params.scale)
