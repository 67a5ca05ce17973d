"""Random batches as a server makes them: prompts, decodes and both at once; sequences grow, end, come anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from pwcc.compile.ops.blocks import BlockAllocator, OutOfBlocks, SequenceBlocks
from pwcc.compile.ops.paged import AttentionMetadata

KINDS = {"decode": 5, "prefill": 3, "mixed": 4}


@dataclass(frozen=True)
class Batch:
    """One call of a model: ids and positions ``[tokens]``, and what they mean to the KV cache."""

    kind: str
    ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


@dataclass
class Traffic:
    """An endless source of batches of 1 to ``max_tokens`` tokens; equal seeds give equal batches.

    ``decode``: one token for each of some sequences. ``prefill``: new sequences. ``mixed``: both, and further
    tokens of sequences that are there (a prompt in chunks).
    """

    seed: str
    blocks: BlockAllocator
    vocab: int
    max_tokens: int
    max_num_seqs: int
    max_seq_len: int
    device: torch.device
    live: list[SequenceBlocks] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def next(self) -> Batch:
        """Return the next batch; its sequences are grown already."""
        self._end_some()
        kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
        kind = kind if self._able() else "prefill"
        budget = self.rng.randint(1, self.max_tokens)
        pairs: list[tuple[SequenceBlocks, int]] = []
        if kind != "prefill":
            pairs = self._decode(budget if kind == "decode" else self.rng.randint(1, budget))
            if kind == "mixed" and self.rng.random() < 0.5:
                pairs = self._chunk(pairs, budget)
        if kind != "decode":
            pairs += self._prompts(budget - sum(count for _, count in pairs), self.max_num_seqs - len(pairs))
        if not pairs:  # no block was free
            self.finish()
            return self.next()
        self.rng.shuffle(pairs)
        return self._batch(kind, pairs)

    def finish(self) -> None:
        """End every sequence."""
        for sequence in self.live:
            self.blocks.free(sequence)
        self.live.clear()

    def _able(self) -> list[SequenceBlocks]:
        return [sequence for sequence in self.live if sequence.length < self.max_seq_len]

    def _decode(self, count: int) -> list[tuple[SequenceBlocks, int]]:
        able = self._able()
        chosen = self.rng.sample(able, min(count, len(able), self.max_num_seqs))
        return [(sequence, 1) for sequence in chosen if self._grow(sequence, 1)]

    def _chunk(self, pairs: list[tuple[SequenceBlocks, int]], budget: int) -> list[tuple[SequenceBlocks, int]]:
        """Give the first of the sequences more tokens than one, as far as there is room."""
        if not pairs:
            return pairs
        sequence, count = pairs[0]
        room = min(budget - len(pairs), self.max_seq_len - sequence.length)
        more = self.rng.randint(0, max(0, room))
        if not more or not self._grow(sequence, more):
            return pairs
        return [(sequence, count + more), *pairs[1:]]

    def _prompts(self, budget: int, seqs: int) -> list[tuple[SequenceBlocks, int]]:
        pairs: list[tuple[SequenceBlocks, int]] = []
        # Many short prompts, or few long ones: large decode batches need many sequences.
        longest = self.rng.choice((1, 3, 16, self.max_seq_len // 2))
        while budget > 0 and len(pairs) < seqs:
            length = self.rng.randint(1, max(1, min(budget, longest)))
            sequence = SequenceBlocks()
            if not self._grow(sequence, length):
                break
            self.live.append(sequence)
            pairs.append((sequence, length))
            budget -= length
        return pairs

    def _grow(self, sequence: SequenceBlocks, count: int) -> bool:
        try:
            self.blocks.append(sequence, count)
        except OutOfBlocks:
            return False
        return True

    def _end_some(self) -> None:
        scarce = self.blocks.free_blocks < self.blocks.num_blocks // 4
        share = self.rng.choice((0.5, 1.0)) if scarce else self.rng.choice((0, 0, 0.02, 0.1))
        for sequence in self.rng.sample(self.live, int(share * len(self.live))):
            self.blocks.free(sequence)
            self.live.remove(sequence)

    def _batch(self, kind: str, pairs: list[tuple[SequenceBlocks, int]]) -> Batch:
        positions = [p for seq, count in pairs for p in range(seq.length - count, seq.length)]
        ids = [self.rng.randrange(self.vocab) for _ in positions]
        return Batch(
            kind,
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            AttentionMetadata.build(pairs, block_size=self.blocks.block_size, device=self.device),
        )
