"""Artifact: what a compile did, as values: its plan, counters, stages, progress events and final report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pwcc.cache.strict import Json


@dataclass
class CompileCounters:
    """Counts of one compile, passed explicitly. Every field starts at 0.

    ``pieces`` counts as the field does: all segments that the graph falls into, the eager ones around
    splitting operations included (2 x layers + 1); ``compiled_pieces`` those that Inductor compiles.
    ``autotunes`` counts pieces that were compiled with tuning, ``tuning_runs`` how often a kernel was timed to
    choose one.
    """

    graphs_seen: int = 0
    pieces: int = 0
    compiled_pieces: int = 0
    unique_pieces: int = 0
    splits: int = 0
    variants: int = 0
    compiles: int = 0
    piece_cache_hits: int = 0
    autotunes: int = 0
    tuning_runs: int = 0
    kernels_sealed: int = 0
    blobs_written: int = 0


@dataclass(frozen=True)
class PlannedPiece:
    """One unique piece of a plan: its name, structural digest, how often it is used, its operations."""

    name: str
    digest: str
    uses: int
    ops: tuple[str, ...]


@dataclass(frozen=True)
class CompilePlan:
    """What a compile will do: split points and pieces in program order, unique pieces, variants."""

    model: str
    device: str
    splitting_ops: tuple[str, ...]
    splits: int
    pieces: tuple[str, ...]
    unique: tuple[PlannedPiece, ...]
    variants: tuple[str, ...]
    size_mode: str
    parameters: int
    parameter_bytes: int

    def to_json(self) -> dict[str, Json]:
        """Return the plan for ``--json``."""
        return _json(self)

    def warnings(self) -> tuple[str, ...]:
        """Return what a user should hear loudly: that nothing was split though it was asked for."""
        if self.splits or not self.splitting_ops:
            return ()
        return (
            f"no split point: the graph holds none of {', '.join(self.splitting_ops)}; the model was compiled "
            "as one piece. If it has attention, route it through torch.ops.pwcc.attention or name your own op "
            "with --splitting-ops",
        )


@dataclass(frozen=True)
class HitDifference:
    """One part of an entry that came out otherwise when it was compiled again, and the first lines of it."""

    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class HitCheck:
    """What ``--verify-hit`` found: the blobs compared, those that differ, and the errors of pieces that do.

    ``errors`` are relative, per piece; ``tuned`` tells that only programs and numbers were asked to agree.
    ``retraced`` says how the trace itself came out otherwise, the first difference of each kind: then an input
    changed that the key does not see, unless the entry's own record was altered.
    """

    ok: bool
    compared: int
    differences: tuple[HitDifference, ...]
    errors: dict[str, float]
    tuned: bool
    retraced: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompileReport:
    """The outcome of ``precompile``.

    ``hit`` tells that an entry was already there and nothing was compiled. ``seconds`` maps each stage
    (``trace``, ``split``, ``compile``, ``tune``, ``seal``, ``check``, ``publish``, ``total``) to wall seconds;
    compile and tune are summed over workers. ``bytes`` is the size of the entry's blobs. ``build_observed``
    tells that the model's construction was watched. ``verified`` is what ``verify_hit`` found, None where it
    was not asked for or there was no hit.
    """

    hit: bool
    entry_key: str
    lookup_key: str
    path: Path
    plan: CompilePlan
    counters: CompileCounters
    seconds: dict[str, float]
    bytes: int
    kernels: int
    warnings: tuple[str, ...] = field(default=())
    verified: HitCheck | None = None
    build_observed: bool = True

    def to_json(self) -> dict[str, Json]:
        """Return the report for ``--json``."""
        return _json(self)


@dataclass(frozen=True)
class Progress:
    """One progress event: a stage's name, units done and in total (0 when unknown), and a detail."""

    stage: str
    done: int = 0
    total: int = 0
    detail: str = ""


OnProgress = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Ignore progress."""


def _json(value: object) -> dict[str, Json]:
    def convert(item: object) -> Json:
        if isinstance(item, Path):
            return str(item)
        if isinstance(item, dict):
            return {str(key): convert(part) for key, part in item.items()}
        if isinstance(item, (list, tuple)):
            return [convert(part) for part in item]
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        return str(item)

    found = convert(asdict(value))  # type: ignore[call-overload]
    return found if isinstance(found, dict) else {}
