"""Serve the Artifact noun: which cache blocks belong to which sequence, kept on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

from pwcc.cache.errors import PwccError

NULL_BLOCK = 0
"""Never handed out: padding reads and writes it."""


class OutOfBlocks(PwccError):
    """The KV cache has fewer free blocks than a sequence needs; free one or wait."""


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One sequence's tokens in the cache: how many, and in which blocks, in order."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)

    def slots(self, start: int, stop: int, block_size: int) -> list[int]:
        """Return the slots of tokens ``start`` to ``stop``."""
        return [self.blocks[t // block_size] * block_size + t % block_size for t in range(start, stop)]


class BlockAllocator:
    """Hands out blocks 1 to ``num_blocks - 1``. Not thread-safe: one scheduler owns it.

    Workflow: ``allocate(prompt)`` once, ``append(sequence)`` per decode step, ``free(sequence)`` at the end.
    It does not share blocks between sequences and does not evict.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"BlockAllocator expects num_blocks >= 2 (block 0 is the null block) and block_size >= 1, "
                f"got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def free_blocks(self) -> int:
        """How many blocks can still be handed out."""
        return len(self._free)

    def allocate(self, tokens: int) -> SequenceBlocks:
        """Start a sequence of ``tokens`` tokens. Raise ``OutOfBlocks``, taking nothing, if it does not fit."""
        sequence = SequenceBlocks()
        self.append(sequence, tokens)
        return sequence

    def append(self, sequence: SequenceBlocks, tokens: int = 1) -> None:
        """Grow ``sequence`` by ``tokens``. Raise ``OutOfBlocks``, changing nothing, if it does not fit."""
        if tokens < 1:
            raise ValueError(f"expected at least one token to append, got {tokens}")
        length = sequence.length + tokens
        needed = -(-length // self.block_size) - len(sequence.blocks)
        if needed > len(self._free):
            raise OutOfBlocks(
                f"a sequence of {length} tokens needs {needed} more blocks of {self.block_size}, "
                f"{len(self._free)} of {self.num_blocks - 1} are free",
                hint="free a finished sequence, or build the cache with a larger num_blocks",
            )
        sequence.blocks.extend(self._free.pop() for _ in range(needed))
        sequence.length = length

    def free(self, sequence: SequenceBlocks) -> None:
        """Take the sequence's blocks back and empty it; a second call does nothing."""
        self._free.extend(reversed(sequence.blocks))
        sequence.blocks.clear()
        sequence.length = 0
