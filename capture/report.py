"""Graph: what a capture did, per recording and in total, and what it was estimated to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pwcc.cache.strict import Json
from pwcc.capture.plan import Measured
from pwcc.compile.ops.forward_context import RunMode


@dataclass(frozen=True, slots=True)
class ModeEstimate:
    """One mode: bytes of its largest recording, of a further one, and how many there will be."""

    first: int
    second: int
    count: int

    @property
    def bytes(self) -> int:
        """``first + (count - 1) * second``: later, smaller recordings live in the memory of the first."""
        return self.first + max(self.count - 1, 0) * self.second if self.count else 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Device memory that a plan will take, measured on its two largest sizes per mode in a throwaway pool."""

    per_mode: Mapping[RunMode, ModeEstimate]

    @property
    def total_bytes(self) -> int:
        """The sum over modes, which is the upper bound: modes share one pool."""
        return sum(mode.bytes for mode in self.per_mode.values())

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "total_bytes": self.total_bytes,
            "modes": {
                mode.value: {"first": row.first, "second": row.second, "count": row.count, "bytes": row.bytes}
                for mode, row in self.per_mode.items()
            },
        }


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """One recording: what it took, or why it was given up."""

    measured: Measured
    error: str | None = None


@dataclass
class CaptureReport:
    """What a capture did. ``rows`` grow while it runs in the background; ``done`` says that it ended.

    ``dropped`` are sizes left out because they would not fit a memory limit, ``pending`` those captured when
    first used. ``seconds`` is the whole capture, ``bytes`` the device memory it took (freed parts included
    nowhere: it is the driver's free memory before less after).
    """

    backend: str
    rows: list[CaptureRow] = field(default_factory=list)
    estimate: MemoryEstimate | None = None
    dropped: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    done: bool = False

    @property
    def failed(self) -> tuple[CaptureRow, ...]:
        """The recordings that were given up."""
        return tuple(row for row in self.rows if row.error is not None)

    def totals(self) -> dict[RunMode, Measured]:
        """Return per mode the sums; ``size`` is the largest size and ``nodes`` None if any is unknown."""
        found: dict[RunMode, Measured] = {}
        for row in self.rows:
            if row.error is not None:
                continue
            one = row.measured
            sum_ = found.get(one.mode)
            if sum_ is None:
                found[one.mode] = one
                continue
            known = sum_.nodes is not None and one.nodes is not None
            found[one.mode] = Measured(
                one.mode,
                max(sum_.size, one.size),
                sum_.uniform_decode and one.uniform_decode,
                sum_.seconds + one.seconds,
                sum_.bytes + one.bytes,
                sum_.graphs + one.graphs,
                (sum_.nodes or 0) + (one.nodes or 0) if known else None,
            )
        return found

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "backend": self.backend,
            "rows": [{**row.measured.to_json(), "error": row.error} for row in self.rows],
            "totals": {mode.value: total.to_json() for mode, total in self.totals().items()},
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "dropped": list(self.dropped),
            "pending": list(self.pending),
            "seconds": self.seconds,
            "bytes": self.bytes,
            "done": self.done,
        }
