"""Serve the Artifact noun: the paged KV cache behind ``pwcc::attention``, and the description of a batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from pwcc.compile.ops.blocks import NULL_BLOCK, SequenceBlocks

PADDING_SLOT = NULL_BLOCK
"""Slot of a padding token: the first one of the null block, which no sequence owns."""


class PagedKVCache:
    """Keys and values of every layer, in blocks of ``block_size`` tokens.

    ``keys[layer]`` and ``values[layer]``: ``[num_blocks, block_size, kv_heads, head_dim]``, the layout that
    FlashAttention's and FlashInfer's paged kernels read. Slot ``s`` is token ``s % block_size`` of block
    ``s // block_size``. Block 0 is the null block: padding writes there and unused block-table entries point
    there, so every index is valid without a check on the device. All memory starts as zeros, because a masked
    position still multiplies its value by 0, and 0 * NaN would not be 0.

    Bytes: ``2 * layers * num_blocks * block_size * kv_heads * head_dim * dtype.itemsize``.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(layers, kv_heads, head_dim, block_size) < 1 or num_blocks < 2:
            raise ValueError(
                "PagedKVCache expects positive sizes and num_blocks >= 2 (block 0 is the null block), got "
                f"layers={layers} num_blocks={num_blocks} block_size={block_size} kv_heads={kv_heads} "
                f"head_dim={head_dim}"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        # One allocation per kind: a captured graph's addresses then depend on two pointers only.
        shape = (layers, num_blocks, block_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device).unbind(0)
        self.values = torch.zeros(shape, dtype=dtype, device=device).unbind(0)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` and ``v`` ``[tokens, kv_heads, head_dim]`` at ``slots`` ``[tokens]``, without a sync."""
        self.keys[layer].flatten(0, 1)[slots] = k
        self.values[layer].flatten(0, 1)[slots] = v

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Gather ``block_table`` ``[..., blocks]`` as keys and values ``[..., tokens, kv_heads, head_dim]``."""
        return (
            self.keys[layer][block_table].flatten(-4, -3),
            self.values[layer][block_table].flatten(-4, -3),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What one batch of flat tokens means to the KV cache.

    Tokens of sequence ``i`` are rows ``query_start_loc[i]`` to ``query_start_loc[i + 1]``; they are the last
    ones of the ``seq_lens[i]`` tokens the sequence has after this call. Rows past the last start are padding.
    A padding sequence has length 0 and a block table of null blocks. The integers are host values, so no
    kernel needs to ask the device for them; a captured graph holds for the values it was captured with.
    """

    slot_mapping: Tensor
    """int64 ``[tokens]``: where each token's key and value go; ``PADDING_SLOT`` for padding."""
    block_table: Tensor
    """int32 ``[seqs, max_blocks]``: each sequence's blocks in order, padded with the null block."""
    query_start_loc: Tensor
    """int32 ``[seqs + 1]``."""
    seq_lens: Tensor
    """int32 ``[seqs]``: tokens in the cache once this call has written its own."""
    max_query_len: int
    max_seq_len: int

    @classmethod
    def build(
        cls,
        batch: Seq[tuple[SequenceBlocks, int]],
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        pad_tokens_to: int = 0,
        pad_seqs_to: int = 0,
        pad_blocks_to: int = 0,
    ) -> AttentionMetadata:
        """Describe ``batch``: pairs of a sequence (already grown by ``append``) and its new token count.

        The ``pad_*`` arguments are the smallest extents of the tensors, for a graph captured at a fixed size.
        Raise ``ValueError`` for an empty batch or a sequence with fewer tokens than claimed as new.
        """
        if not batch:
            raise ValueError("AttentionMetadata.build expects at least one sequence, got none")
        slots: list[int] = []
        starts = [0]
        for sequence, new_tokens in batch:
            if not 0 < new_tokens <= sequence.length:
                raise ValueError(
                    f"expected 1 to {sequence.length} new tokens (the sequence's length), got {new_tokens}"
                )
            slots.extend(sequence.slots(sequence.length - new_tokens, sequence.length, block_size))
            starts.append(len(slots))
        lengths = [sequence.length for sequence, _ in batch]
        tables = [list(sequence.blocks) for sequence, _ in batch]
        extra_seqs = max(0, pad_seqs_to - len(batch))
        width = max(pad_blocks_to, *(len(table) for table in tables))
        slots += [PADDING_SLOT] * (pad_tokens_to - len(slots))
        table_rows = [table + [NULL_BLOCK] * (width - len(table)) for table in tables + [[]] * extra_seqs]
        return cls(
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_table=torch.tensor(table_rows, dtype=torch.int32, device=device),
            query_start_loc=torch.tensor(starts + starts[-1:] * extra_seqs, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths + [0] * extra_seqs, dtype=torch.int32, device=device),
            max_query_len=max(new_tokens for _, new_tokens in batch),
            max_seq_len=max(lengths),
        )
