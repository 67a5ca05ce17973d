"""Serve: which tokens of which requests the next step runs, with bounds on queue, batch and KV blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pwcc.cache.errors import PwccError
from pwcc.compile.ops.blocks import BlockAllocator, OutOfBlocks, SequenceBlocks


class Refused(PwccError):
    """A request that can never run here: it is empty, too long, or holds tokens the model does not know."""


class Busy(PwccError):
    """The waiting queue is full, or the server is about to end; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended: ``length``, ``stop``, ``cancelled`` or ``error`` with a message."""

    reason: str
    message: str = ""


Event = int | End
"""What a request's listener hears: each new token, then its end."""


@dataclass(slots=True, eq=False)
class Request:
    """One generation; ``blocks.length`` says how many of its tokens the KV cache holds."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    listener: Callable[[Event], None]
    stop: frozenset[int] = frozenset()
    output: list[int] = field(default_factory=list)
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks)
    end: End | None = None

    @property
    def pending(self) -> int:
        """How many of its tokens are not in the KV cache yet: 1 while it decodes."""
        return len(self.prompt) + len(self.output) - self.blocks.length

    def next_tokens(self, count: int) -> list[int]:
        """Return the last ``count`` tokens that ``blocks`` was grown by."""
        if count == 1 and self.output and not self.pending:
            return self.output[-1:]
        tokens = [*self.prompt, *self.output]
        return tokens[self.blocks.length - count : self.blocks.length]

    def finish(self, end: End) -> None:
        """End the request once; later calls change nothing."""
        if self.end is None:
            self.end = end
            self.listener(end)


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step; ``blocks`` are grown by ``count`` already."""

    request: Request
    count: int


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    admitted: int = 0
    preempted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """Continuous batching: each step advances every running request, and admits waiting ones into what is left.

    A decoding request takes one token of a step; a prompt takes as many as fit, so that a long one spreads over
    several steps beside the others' decodes. Requests run in the order they came. Out of KV blocks, the request
    admitted last gives its blocks up and waits again at the front; its tokens are computed anew later. The one
    admitted first always goes on, so every accepted request ends. Not thread-safe: the engine's thread owns it.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        vocab: int,
        max_num_seqs: int,
        max_tokens: int,
        max_waiting: int,
        max_seq_len: int | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_tokens or max_waiting < 1:
            raise ValueError(
                f"expected 1 <= max_num_seqs <= max_tokens and max_waiting >= 1, got {max_num_seqs}, "
                f"{max_tokens} and {max_waiting}"
            )
        self.blocks, self.vocab = blocks, vocab
        self.max_num_seqs, self.max_tokens, self.max_waiting = max_num_seqs, max_tokens, max_waiting
        cached = (blocks.num_blocks - 1) * blocks.block_size
        self.longest = min(cached, max_seq_len or cached)
        """The most tokens, prompt and answer, that one request may have in the KV cache."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()

    @property
    def idle(self) -> bool:
        """Tell whether nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raise ``Refused`` for a request that cannot run, whatever else does."""
        if not prompt:
            raise Refused("expected at least one token in the prompt, got none")
        wrong = next((token for token in prompt if not 0 <= token < self.vocab), None)
        if wrong is not None:
            raise Refused(f"expected token ids from 0 to {self.vocab - 1}, got {wrong}")
        if max_new_tokens < 1:
            raise Refused(f"expected max_new_tokens of at least 1, got {max_new_tokens}")
        # The last token is only returned, never stored.
        if len(prompt) + max_new_tokens - 1 > self.longest:
            raise Refused(
                f"expected at most {self.longest + 1} tokens, prompt and answer, "
                f"got {len(prompt)} + {max_new_tokens}",
                hint="ask for fewer tokens, or start the server with a larger --num-blocks or --max-seq-len",
            )

    def submit(self, request: Request) -> None:
        """Queue a checked request. Raise ``Busy`` when ``max_waiting`` requests wait already."""
        if len(self.waiting) >= self.max_waiting:
            self.stats.refused += 1
            raise Busy(f"{self.max_waiting} requests wait already", hint="try again later")
        self.waiting.append(request)

    def next_batch(self) -> list[Work]:
        """Return the next step's work, at most ``max_tokens`` tokens of ``max_num_seqs`` requests."""
        batch: list[Work] = []
        budget = self.max_tokens
        for request in list(self.running):
            if budget and request in self.running and (count := self._grow(request, budget)):
                batch.append(Work(request, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            needed = -(-request.pending // self.blocks.block_size)
            if needed > self.blocks.free_blocks:
                break
            self.running.append(self.waiting.popleft())
            self.stats.admitted += 1
            count = self._grow(request, budget)
            batch.append(Work(request, count))
            budget -= count
        return batch

    def advance(self, batch: Sequence[Work], tokens: Sequence[int]) -> None:
        """Take the step's next token per work; one that ends mid-prompt has no meaning and is dropped."""
        for work, token in zip(batch, tokens, strict=True):
            request = work.request
            self.stats.prompt_tokens += work.count if not request.output else 0
            if request.pending or request.end:
                continue
            request.output.append(token)
            self.stats.generated_tokens += 1
            request.listener(token)
            if token in request.stop:
                self.end(request, End("stop"))
            elif len(request.output) == request.max_new_tokens:
                self.end(request, End("length"))

    def end(self, request: Request, end: End) -> None:
        """End a request in any state and free its blocks; one that ended already stays as it is."""
        self.blocks.free(request.blocks)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.end is None:
            self.stats.finished[end.reason] = self.stats.finished.get(end.reason, 0) + 1
        request.finish(end)

    def _grow(self, request: Request, budget: int) -> int:
        """Give a running request blocks for its next tokens; 0 when it had to give up its own."""
        count = min(budget, request.pending)
        while True:
            try:
                self.blocks.append(request.blocks, count)
            except OutOfBlocks:
                victim = self.running.pop()
                self.blocks.free(victim.blocks)
                self.waiting.appendleft(victim)
                self.stats.preempted += 1
                if victim is request:
                    return 0
            else:
                return count
