"""Serve the Artifact noun: the Triton kernels of paged decode attention, sealed into entries for CUDA.

Imported where an entry is built or tested, never where it is served: a serving host launches the cubins that
``sealing/decode.py`` makes of these functions. One query token per sequence; the cache write is part of the
kernel, so one launch does what the default kernel does in about fourteen.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def paged_decode(  # noqa: PLR0915 - one kernel is one function
    q,
    k,
    v,
    keys,
    values,
    slots,
    table,
    lengths,
    sinks,
    out,
    partial,
    scale,
    softcap,
    window,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    table_stride,
    block_shift,
    chunk,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend one sequence's query heads of one key head over one chunk of its keys.

    Grid ``(kv_heads, splits, seqs)``. ``q``, ``out``: ``[seqs, heads, head_dim]``; ``k``, ``v``: ``[seqs,
    kv_heads, head_dim]``; ``keys``, ``values``: one layer of the cache, ``[blocks, block_size, kv_heads,
    head_dim]`` with ``block_size == 1 << block_shift``; ``slots`` int64 ``[seqs]``; ``table`` int32 ``[seqs,
    table_stride]``; ``lengths`` int32 ``[seqs]``, this token included. Split 0 writes ``k`` and ``v`` to the
    cache and takes the token's own score from them, so that no program reads what another writes. With
    ``SPLIT``, ``partial`` (float32 ``[seqs, kv_heads, splits, ROWS, WIDTH + 2]``) holds sums, maximum and
    denominator for :func:`paged_decode_combine`; without, ``out`` is written. A length of 0 (padding) attends
    to its own token only.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    rows = tl.arange(0, ROWS)
    inside = columns < HEAD_DIM
    query_mask = (rows[:, None] < GROUP) & inside[None, :]
    length = tl.load(lengths + sequence)
    query_at = (head * GROUP + rows[:, None]) * HEAD_DIM + columns[None, :]
    query = tl.load(q + sequence * q_stride + query_at, mask=query_mask, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    if split == 0:
        slot = tl.load(slots + sequence)
        new_key = tl.load(k + sequence * k_stride + head * HEAD_DIM + columns, mask=inside, other=0.0)
        new_value = tl.load(v + sequence * v_stride + head * HEAD_DIM + columns, mask=inside, other=0.0)
        at = (slot * KV_HEADS + head) * HEAD_DIM + columns
        tl.store(keys + at, new_key, mask=inside)
        tl.store(values + at, new_value, mask=inside)
        own = tl.sum(query.to(tl.float32) * new_key[None, :].to(tl.float32), 1) * scale
        if SOFTCAP:
            own = softcap * (1.0 - 2.0 / (tl.exp(2.0 * own / softcap) + 1.0))
        highest = own
        total = total + 1.0
        sums = sums + new_value[None, :].to(tl.float32)
        if SINKS:
            sink = tl.load(sinks + head * GROUP + rows, mask=rows < GROUP, other=float("-inf")).to(tl.float32)
            raised = tl.maximum(highest, sink)
            shrink = tl.exp(highest - raised)
            total = total * shrink + tl.exp(sink - raised)
            sums = sums * shrink[:, None]
            highest = raised
    low = split * chunk
    high = low + chunk
    if split == splits - 1:
        high = length - 1
    high = tl.minimum(high, length - 1)
    if WINDOW:
        low = tl.maximum(low, (length - window) // TILE * TILE)
    offsets = tl.arange(0, TILE)
    block_size = 1 << block_shift
    for start in range(low, high, TILE):
        position = start + offsets
        seen = position < high
        if WINDOW:
            seen = seen & (position >= length - window)
        block = tl.load(table + sequence * table_stride + (position >> block_shift), mask=seen, other=0)
        place = block.to(tl.int64) * block_size + (position & (block_size - 1))
        at = (place * KV_HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
        mask = seen[:, None] & inside[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        score = tl.where(seen[None, :], score, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(highest - base)
        value = tl.load(values + at, mask=mask, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        highest = raised
    if SPLIT:
        index = (sequence * KV_HEADS + head) * splits + split
        at_row = partial + (index * ROWS + rows) * (WIDTH + 2)
        tl.store(at_row[:, None] + columns[None, :], sums)
        tl.store(at_row + WIDTH, highest)
        tl.store(at_row + WIDTH + 1, total)
    else:
        result = sums / total[:, None]
        tl.store(out + sequence * out_stride + query_at, result.to(out.dtype.element_ty), mask=query_mask)


@triton.jit
def paged_decode_combine(
    partial,
    out,
    out_stride,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Join the chunks of :func:`paged_decode` into ``out``. Grid ``(kv_heads * GROUP, seqs)``."""
    query_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    head = query_head // GROUP
    row = query_head % GROUP
    columns = tl.arange(0, WIDTH)
    step = ROWS * (WIDTH + 2)
    at = partial + ((sequence * KV_HEADS + head) * splits * ROWS + row) * (WIDTH + 2)
    highest = tl.load(at + WIDTH)
    total = tl.load(at + WIDTH + 1)
    sums = tl.load(at + columns)
    for _ in range(1, splits):
        at += step
        other = tl.load(at + WIDTH)
        raised = tl.maximum(highest, other)
        mine = tl.exp(highest - raised)
        theirs = tl.exp(other - raised)
        total = total * mine + tl.load(at + WIDTH + 1) * theirs
        sums = sums * mine + tl.load(at + columns) * theirs
        highest = raised
    at_out = out + sequence * out_stride + query_head * HEAD_DIM + columns
    tl.store(at_out, (sums / total).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
