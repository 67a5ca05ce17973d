"""Graph: the recordings of a plan: captured in order, found by the forward context, locked when done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pwcc.cache.errors import CaptureError, CaptureLockedError, CaptureMemoryError
from pwcc.capture.backend import GraphBackend
from pwcc.capture.plan import CapturePlan, GraphKey, Measured
from pwcc.capture.recorder import Recorder, Subject
from pwcc.capture.recording import Recording
from pwcc.capture.report import CaptureRow
from pwcc.compile.ops.forward_context import ForwardContext, current_forward_context, use_forward_context

Prepare = Callable[[GraphKey], tuple[Subject, ForwardContext]]
"""Returns what to record, its inputs all padding, and the forward context that it is recorded in."""
Addresses = Callable[[GraphKey], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]
"""Returns where arguments and weights lie now, by name."""


class GraphTable:
    """Holds the recordings of one plan in one pool and replays the one that the forward context names.

    Lifecycle: :meth:`capture` per key of the plan, then :meth:`lock`. After the lock a key that the plan left
    for later (lazy) may still be captured; any other capture is an error, since it would stall a running
    server. A call trusts the context's mode and batch blindly: deciding is the dispatcher's business. It checks
    addresses at the first replay of every recording, with ``debug`` at every one.
    """

    def __init__(
        self,
        plan: CapturePlan,
        backend: GraphBackend,
        *,
        prepare: Prepare,
        addresses: Addresses,
        observed: Callable[[GraphKey, tuple[object, ...]], None] = lambda key, outputs: None,
        debug: bool = False,
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._prepare = prepare
        self._addresses = addresses
        self._observed = observed
        self._debug = debug
        self._pool: object | None = None
        self._planned = frozenset(plan.graph_keys())
        self._recordings: dict[GraphKey, Recording] = {}
        self._failed: set[GraphKey] = set()
        self._locked = False

    @property
    def locked(self) -> bool:
        """Whether the plan is done."""
        return self._locked

    @property
    def recordings(self) -> Mapping[GraphKey, Recording]:
        """What is captured."""
        return self._recordings

    def lock(self) -> None:
        """The plan is done: from now on only its lazy keys may be captured."""
        self._locked = True

    def __call__(self) -> tuple[object, ...]:
        """Replay what the current forward context names and return the outputs, valid until the next replay.

        Raises:
            CaptureLockedError: nothing is captured for it and nothing is planned.
            MovedInputError: a captured input lies elsewhere.
        """
        context = current_forward_context()
        if context is None or context.batch is None:
            raise CaptureError("expected a forward context with a batch descriptor", hint="call the runner")
        key = GraphKey.of(context.mode, context.batch)
        recording = self._recordings.get(key)
        if recording is None:
            raise CaptureLockedError(
                f"no graph is captured for {describe(key)}",
                hint="capture is part of the plan: add the size to its sizes and capture again",
            )
        if self._debug or not recording.replays:
            recording.check(*self._addresses(key))
        recording.replay()
        return recording.outputs

    def capture(self, key: GraphKey) -> CaptureRow:
        """Warm up and capture one recording of the plan; the caller holds the collector.

        Returns its row; a failure is in the row, with all its memory released, unless the plan says ``raise``.

        Raises:
            CaptureLockedError: the plan does not hold the key, or is done with it.
            CaptureMemoryError, CaptureError: it failed, and the plan says ``raise``.
        """
        if key not in self._planned or key in self._recordings or (self._locked and key in self._failed):
            state = "after the plan was done" if self._locked else "outside the plan"
            raise CaptureLockedError(
                f"a capture of {describe(key)} {state}",
                hint="add the size to the plan's sizes (or lazy sizes) and make a new runner",
            )
        if self._pool is None:
            self._pool = self._backend.new_pool()
        before, started = self._backend.memory_used(), time.perf_counter()
        made = self._attempt(key, self._pool)
        if isinstance(made, Exception):
            return self._fail(key, made, time.perf_counter() - started)
        self._recordings[key] = made
        return CaptureRow(self._measured(key, made, started, before))

    def _attempt(self, key: GraphKey, pool: object) -> Recording | Exception:
        """Record, or return why not; the failed frames, which hold tensors, are gone when this returns."""
        try:
            return self.record(key, pool)
        except Exception as error:  # noqa: BLE001  whatever fails in a model or driver, the policy decides
            return without_frames(error)

    def record(self, key: GraphKey, pool: object) -> Recording:
        """Warm up and record into ``pool``, without a place in the table."""
        with torch.inference_mode(False), torch.no_grad(), self._backend.session():
            subject, context = self._prepare(key)
            with use_forward_context(context):
                recorder = Recorder(subject, self._backend, pool=pool, instantiate=self._plan.instantiate)
                self._observed(key, recorder.warm_up())
                return recorder.record(key)

    def _measured(self, key: GraphKey, recording: Recording, started: float, before: int) -> Measured:
        return Measured(
            key.mode,
            key.batch.num_tokens,
            key.batch.uniform_decode,
            time.perf_counter() - started,
            max(0, self._backend.memory_used() - before),
            len(recording.graphs),
            recording.nodes,
        )

    def _fail(self, key: GraphKey, error: Exception, seconds: float) -> CaptureRow:
        self._failed.add(key)
        memory = self._backend.is_out_of_memory(error)
        self._backend.release_unused()
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if self._plan.on_failure == "raise":
            raise self._advice(key, text, memory=memory) from error
        measured = Measured(key.mode, key.batch.num_tokens, key.batch.uniform_decode, seconds, 0, 0, None)
        return CaptureRow(measured, error=f"{'out of memory: ' if memory else ''}{text}")

    def _advice(self, key: GraphKey, text: str, *, memory: bool) -> CaptureError:
        if not memory:
            return CaptureError(
                f"capturing {describe(key)} failed: {text}",
                hint="use mode PIECEWISE if an attention kernel cannot be captured, NONE otherwise",
            )
        fits = sorted({done.batch.num_tokens for done in self._recordings if done.mode is key.mode})
        listed = ", ".join(map(str, fits)) or "none"
        return CaptureMemoryError(
            f"out of memory while capturing {describe(key)}: {text}",
            hint=f"captured before it: sizes {listed}; give fewer or smaller sizes, a limit of memory, "
            "or a smaller KV cache",
        )

    def forget(self) -> None:
        """Release every recording and the pool, so that the plan may be captured again."""
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._failed.clear()
        self._pool = None
        self._locked = False
        self._backend.release_unused()


def without_frames(error: Exception) -> Exception:
    """Return an error without its tracebacks, whose frames hold the tensors of a failed capture."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def describe(key: GraphKey) -> str:
    """Name a recording in words."""
    kind = " (decode)" if key.batch.uniform_decode else ""
    return f"{key.mode} at {key.batch.num_tokens} tokens{kind}"
