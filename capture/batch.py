"""Graph: the batch description that graphs read: attention metadata in buffers of the runner's."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from pwcc.capture.buffers import Copies
from pwcc.capture.checks import require_fitting
from pwcc.capture.plan import GraphKey
from pwcc.compile.ops.blocks import NULL_BLOCK
from pwcc.compile.ops.dense import AttentionParams, dense_causal_attention
from pwcc.compile.ops.forward_context import BatchDescriptor, ForwardContext, RunMode
from pwcc.compile.ops.paged import PADDING_SLOT, AttentionMetadata

DEFAULT_BLOCK_SIZE: Final = 16
"""Tokens of a block where neither a KV cache nor the caller says it."""


def is_decode(metadata: AttentionMetadata) -> bool:
    """Whether each sequence has exactly one token."""
    return metadata.max_query_len == 1 and metadata.slot_mapping.shape[0] == metadata.seq_lens.shape[0]


def without_metadata(
    context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
) -> None:
    """Attend over the tokens as one sequence without history; the kernel of models without a cache.

    Padding rows come last and attention is causal, so that they change no row before them.
    """
    dense_causal_attention(q, k, v, out, params)


class StaticBatch:
    """Metadata buffers at the largest extents, and views of them per recording.

    What a graph sees is fixed at capture: ``[size]`` slots, as many sequences as the descriptor allows, a block
    table wide enough for ``max_seq_len`` tokens. A batch is copied to the front; the rest is padding: null
    slots, null blocks, sequences of length 0 that start where the last one ends. The host integers of the
    captured metadata are upper bounds, so that a graph holds for every batch within them.
    """

    def __init__(
        self,
        *,
        largest: int,
        max_num_seqs: int,
        max_seq_len: int,
        block_size: int | None,
        device: torch.device,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_seq_len = max_seq_len
        self._block_size = block_size
        self._width = -(-max_seq_len // (block_size or DEFAULT_BLOCK_SIZE))
        self._slots = torch.full((largest,), PADDING_SLOT, dtype=torch.int64, device=device)
        self._table = torch.full((largest, self._width), NULL_BLOCK, dtype=torch.int32, device=device)
        self._starts = torch.zeros(largest + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(largest, dtype=torch.int32, device=device)
        self._views: dict[BatchDescriptor, AttentionMetadata] = {}
        self._tokens = self._seqs = self._columns = 0
        self._end = 0

    def require(self, metadata: AttentionMetadata, count: int) -> None:
        """Refuse metadata that does not describe ``count`` tokens; see ``checks.require_fitting``."""
        require_fitting(metadata, count, device=self._slots.device, block_size=self._block_size)

    def holds(self, metadata: AttentionMetadata) -> bool:
        """Whether full graphs hold for this batch's sequences."""
        return metadata.max_seq_len <= self._max_seq_len and metadata.seq_lens.shape[0] <= self._max_num_seqs

    def captured(self, key: GraphKey) -> AttentionMetadata:
        """Return the static metadata that a recording is captured with."""
        batch = key.batch
        found = self._views.get(batch)
        if found is None:
            size = batch.num_tokens
            seqs = size if batch.uniform_decode else min(size, self._max_num_seqs)
            found = self._views[batch] = AttentionMetadata(
                slot_mapping=self._slots[:size],
                block_table=self._table[:seqs],
                query_start_loc=self._starts[: seqs + 1],
                seq_lens=self._lengths[:seqs],
                max_query_len=1 if batch.uniform_decode else size,
                max_seq_len=self._max_seq_len,
            )
        return found

    def idle(self, key: GraphKey) -> AttentionMetadata:
        """Return metadata of padding alone, in the cheapest form: one token a sequence, one block wide."""
        seen = self.captured(GraphKey(RunMode.FULL, BatchDescriptor(key.batch.num_tokens, True)))
        return AttentionMetadata(
            slot_mapping=seen.slot_mapping,
            block_table=seen.block_table[:, :1],
            query_start_loc=seen.query_start_loc,
            seq_lens=seen.seq_lens,
            max_query_len=1,
            max_seq_len=1,
        )

    def load(self, key: GraphKey, metadata: AttentionMetadata) -> tuple[AttentionMetadata, Copies]:
        """Return what a batch's attention sees, and the copies that bring it there.

        For full graphs everything goes to the static buffers. Between graphs per piece a decode batch that fits
        does too, padded to the pieces' size so that the decode kernel runs; one with longer sequences is padded
        in tensors of its own; any other batch keeps its tensors and only gets padded slots.
        """
        tokens, size = metadata.slot_mapping.shape[0], key.batch.num_tokens
        copies: Copies = [(self._slots[:tokens], metadata.slot_mapping)]
        if self._tokens > tokens:
            self._slots[tokens : self._tokens].fill_(PADDING_SLOT)
        self._tokens = tokens
        whole = key.mode is RunMode.FULL or (key.batch.uniform_decode and self._fits(metadata))
        if not whole:
            return self._live(metadata, size, size - tokens if key.batch.uniform_decode else 0), copies
        copies += self._sequences(metadata)
        seen = self.captured(key)
        if key.mode is RunMode.FULL:
            return seen, copies
        live = AttentionMetadata(
            slot_mapping=seen.slot_mapping,
            block_table=seen.block_table[:, : min(metadata.block_table.shape[1], self._width)],
            query_start_loc=seen.query_start_loc,
            seq_lens=seen.seq_lens,
            max_query_len=1,
            max_seq_len=metadata.max_seq_len,
        )
        return live, copies

    def _live(self, metadata: AttentionMetadata, size: int, more: int) -> AttentionMetadata:
        """Return a batch's own metadata with static slots, and ``more`` padding sequences."""
        table, starts, lengths = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        if more:
            table = pad(table, (0, 0, 0, more), value=NULL_BLOCK)
            starts = pad(starts, (0, more), value=size - more)
            lengths = pad(lengths, (0, more), value=0)
        return AttentionMetadata(
            slot_mapping=self._slots[:size],
            block_table=table,
            query_start_loc=starts,
            seq_lens=lengths,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )

    def _fits(self, metadata: AttentionMetadata) -> bool:
        return metadata.max_seq_len <= self._max_seq_len

    def _sequences(self, metadata: AttentionMetadata) -> Copies:
        seqs, columns = metadata.seq_lens.shape[0], min(metadata.block_table.shape[1], self._width)
        if self._seqs > seqs:
            self._lengths[seqs : self._seqs].fill_(0)
            self._table[seqs : self._seqs].fill_(NULL_BLOCK)
        if self._columns > columns:
            self._table[:seqs, columns : self._columns].fill_(NULL_BLOCK)
        end = metadata.slot_mapping.shape[0]
        if self._seqs != seqs or self._end != end:
            self._starts[seqs + 1 :].fill_(end)
        self._seqs, self._columns, self._end = seqs, columns, end
        return [
            (self._starts[: seqs + 1], metadata.query_start_loc),
            (self._lengths[:seqs], metadata.seq_lens),
            (self._table[:seqs, :columns], metadata.block_table[:, :columns]),
        ]

    def clear(self) -> None:
        """Make every row padding, so that a warm-up touches no sequence's keys and values."""
        self._slots.fill_(PADDING_SLOT)
        self._table.fill_(NULL_BLOCK)
        self._starts.fill_(0)
        self._lengths.fill_(0)
        self._tokens = self._seqs = self._columns = self._end = 0
