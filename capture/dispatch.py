"""Graph: the dispatcher, which says for each batch how it runs and to which size it is padded."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pwcc.capture.plan import CapturePlan, GraphKey
from pwcc.compile.ops.forward_context import BatchDescriptor, RunMode

__all__ = ["BatchDescriptor", "Dispatch", "Dispatcher", "Fall", "RunMode"]


class Fall(StrEnum):
    """Why a batch ran without a graph, or with graphs per piece though the plan has a full one for it."""

    MODE = "mode"
    """The plan's mode has no graph for this kind of batch."""
    ABOVE_LARGEST = "above_largest"
    """More tokens than the largest captured size: the dynamic variant runs."""
    WASTE = "waste"
    """Padding would pass the plan's waste limit."""
    NOT_READY = "not_ready"
    """The graph is not captured: its capture failed, or it is still to come in the background."""
    TOO_LONG = "too_long"
    """A sequence is longer, or there are more of them, than full graphs hold for."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One decision: ``batch`` holds the padded token count, in mode NONE the true one."""

    mode: RunMode
    batch: BatchDescriptor
    fall: Fall | None = None


class Dispatcher:
    """Decides by what is captured: exact FULL, then non-uniform FULL, then PIECEWISE, then NONE.

    Workflow: graphs become known with :meth:`enable` as they are captured (or, if lazy, when they are
    planned); :meth:`dispatch` is a tuple look-up and a dictionary look-up. It captures nothing and holds no
    graph; what holds them trusts its decision. Not thread-safe by itself: the runner holds its lock.
    """

    def __init__(self, plan: CapturePlan) -> None:
        self._table = plan.table()
        self._mode = plan.mode
        self._ready: set[GraphKey] = set()
        self._decisions: dict[tuple[int, bool, bool], Dispatch] = {}

    @property
    def largest(self) -> int:
        """The largest captured size; 0 if there is none."""
        return self._table.largest

    @property
    def ready(self) -> frozenset[GraphKey]:
        """The graphs that may be dispatched to."""
        return frozenset(self._ready)

    def enable(self, key: GraphKey) -> None:
        """From now on dispatch to this graph."""
        self._ready.add(key)
        self._decisions.clear()

    def disable(self, key: GraphKey) -> None:
        """No longer dispatch to this graph."""
        self._ready.discard(key)
        self._decisions.clear()

    def dispatch(self, num_tokens: int, uniform_decode: bool, *, full: bool = True) -> Dispatch:
        """Return how a batch runs; ``full`` False says that its sequences are beyond what full graphs hold."""
        padded = self._table.padded(num_tokens)
        if not padded:
            above = num_tokens > self._table.largest
            fall = Fall.MODE if not self._table.sizes else Fall.ABOVE_LARGEST if above else Fall.WASTE
            return Dispatch(RunMode.NONE, BatchDescriptor(num_tokens, uniform_decode), fall)
        found = self._decisions.get((padded, uniform_decode, full))
        if found is None:
            found = self._decisions[padded, uniform_decode, full] = self._decide(padded, uniform_decode, full)
        if found.mode is RunMode.NONE:
            return Dispatch(RunMode.NONE, BatchDescriptor(num_tokens, uniform_decode), found.fall)
        return found

    def _decide(self, padded: int, uniform: bool, full: bool) -> Dispatch:
        exact, mixed = BatchDescriptor(padded, uniform), BatchDescriptor(padded, False)
        wanted = self._mode.decode if uniform else self._mode.mixed
        fall: Fall | None = None
        if wanted is RunMode.FULL:
            fall = Fall.NOT_READY if full else Fall.TOO_LONG
            for batch in (exact, mixed):
                if full and GraphKey(RunMode.FULL, batch) in self._ready:
                    return Dispatch(RunMode.FULL, batch)
        if GraphKey(RunMode.PIECEWISE, mixed) in self._ready:
            # Pieces do not see the batch, so one graph serves both kinds; attention does, and is told.
            return Dispatch(RunMode.PIECEWISE, exact, fall)
        if fall is None:
            fall = Fall.MODE if wanted is RunMode.NONE else Fall.NOT_READY
        return Dispatch(RunMode.NONE, exact, fall)
