"""Graph: what a plan will take of the device's memory, measured on a sample, and the sizes that fit a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from pwcc.cache.errors import CaptureMemoryError
from pwcc.capture.backend import GraphBackend
from pwcc.capture.graphs import GraphTable, describe, without_frames
from pwcc.capture.plan import CapturePlan, GraphKey
from pwcc.capture.recording import Recording
from pwcc.capture.report import MemoryEstimate, ModeEstimate
from pwcc.compile.ops.forward_context import RunMode

GRAPH_BYTES: Final = 64 * 1024  # the driver hands out memory in steps of 2 MiB: one more graph may show none


def estimate(plan: CapturePlan, table: GraphTable, backend: GraphBackend) -> MemoryEstimate:
    """Capture the two largest recordings of each mode in a throwaway pool and extrapolate.

    The caller holds the collector. Afterwards everything is released.

    Raises:
        CaptureMemoryError: not even these fit.
    """
    modes: dict[RunMode, ModeEstimate] = {}
    for mode in (RunMode.PIECEWISE, RunMode.FULL):
        keys = [key for key in plan.graph_keys() if key.mode is mode]
        if keys:
            largest = sorted(keys, key=lambda key: (-key.batch.num_tokens, key.batch.uniform_decode))[:2]
            first, *rest = _sample(largest, table, backend)
            modes[mode] = ModeEstimate(first, rest[0] if rest else 0, len(keys))
    return MemoryEstimate(modes)


def _sample(keys: Sequence[GraphKey], table: GraphTable, backend: GraphBackend) -> list[int]:
    pool, recordings, found = backend.new_pool(), list[Recording](), list[int]()
    failure: Exception | None = None
    for key in keys:
        before = backend.memory_used()
        try:
            recordings.append(table.record(key, pool))
        except Exception as error:
            if not backend.is_out_of_memory(error):
                raise
            failure = without_frames(error)
            break
        taken = backend.memory_used() - before
        found.append(taken if taken > 0 else GRAPH_BYTES * len(recordings[-1].graphs))
    for recording in recordings:
        recording.release()
    backend.release_unused()
    if failure is not None:
        raise CaptureMemoryError(
            f"out of memory while estimating {describe(keys[len(found)])}",
            hint="lower the largest size, --max-num-seqs or --max-seq-len, or make the KV cache smaller",
        ) from failure
    return found


def fitting_plan(
    plan: CapturePlan, found: MemoryEstimate, *, max_bytes: int, preferred: Iterable[int] = ()
) -> CapturePlan:
    """Return the plan with as many of its sizes as fit ``max_bytes``; the largest is never lost.

    After the largest come ``preferred`` sizes (those with a variant of their own), then the powers of two, then
    the others from small to large. What is dropped is noted: its batches are padded to the next size.

    Raises:
        CaptureMemoryError: not even the largest size fits; says how much it needs.
    """
    if found.total_bytes <= max_bytes or not plan.sizes:
        return plan
    first = sum(mode.first for mode in found.per_mode.values())
    if first > max_bytes:
        raise CaptureMemoryError(
            f"graphs of {plan.sizes[-1]} tokens alone take about {first} bytes, and {max_bytes} are given",
            hint=f"give at least {first}, or lower the largest size",
        )
    further = max(1, (found.total_bytes - first) // max(1, len(plan.sizes) - 1))
    count = 1 + (max_bytes - first) // further
    wanted = set(preferred)
    ranked = sorted(plan.sizes[:-1], key=lambda size: (size not in wanted, size & (size - 1) != 0, size))
    kept = tuple(sorted([plan.sizes[-1], *ranked[: count - 1]]))
    dropped = sorted(set(plan.sizes) - set(kept))
    return replace(
        plan,
        sizes=kept,
        order=tuple(size for size in plan.order if size in kept),
        lazy_sizes=tuple(size for size in plan.lazy_sizes if size in kept),
        notes=(*plan.notes, f"left out to fit {max_bytes} bytes: sizes {', '.join(map(str, dropped))}"),
    )
