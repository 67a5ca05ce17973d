"""Graph: the life of a plan: captured at once, in the background or at first use; locked; captured anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from pwcc.cache.errors import CaptureLockedError
from pwcc.cache.telemetry import finished, span
from pwcc.capture.backend import GraphBackend
from pwcc.capture.collector import collector_frozen
from pwcc.capture.dispatch import Dispatch, Dispatcher
from pwcc.capture.estimate import estimate, fitting_plan
from pwcc.capture.graphs import GraphTable
from pwcc.capture.plan import CapturePlan, GraphKey
from pwcc.capture.report import CaptureReport, CaptureRow, MemoryEstimate
from pwcc.capture.stats import GraphStats


class PlanCapture:
    """Owns a plan's dispatcher and graph table, and fills them by the plan's options.

    ``make_table(plan)`` returns an empty table, ``observe(plan)`` runs what must run once before anything is
    captured, ``lock`` is the runner's: a background capture holds it per recording, and calls go on between.
    """

    def __init__(
        self,
        plan: CapturePlan,
        backend: GraphBackend,
        *,
        lock: AbstractContextManager[bool],
        make_table: Callable[[CapturePlan], GraphTable],
        observe: Callable[[CapturePlan], None],
        stats: GraphStats,
        on_progress: Callable[[CaptureRow], None] | None = None,
    ) -> None:
        self._backend = backend
        self._lock = lock
        self._make_table = make_table
        self._observe = observe
        self._stats = stats
        self._on_progress = on_progress
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.report: CaptureReport | None = None
        self._adopt(plan)

    def _adopt(self, plan: CapturePlan) -> None:
        self.plan = plan
        self.table = self._make_table(plan)
        self.dispatcher = Dispatcher(plan)
        self._lazy: set[GraphKey] = set()

    def estimate(self) -> MemoryEstimate:
        """See ``estimate.estimate``; the caller holds the lock."""
        with collector_frozen():
            return estimate(self.plan, self.table, self._backend)

    def capture(
        self, *, max_bytes: int | None, estimated: MemoryEstimate | None, preferred: Sequence[int]
    ) -> CaptureReport:
        """See ``GraphRunner.capture``; the caller holds the lock. ``preferred`` sizes are dropped last."""
        if self.report is not None:
            raise CaptureLockedError("the plan is captured already", hint="recapture() captures it anew")
        sizes = self.plan.sizes
        if max_bytes is not None:
            estimated = estimated or self.estimate()
            self._adopt(fitting_plan(self.plan, estimated, max_bytes=max_bytes, preferred=preferred))
        lazy = set(self.plan.lazy_sizes)
        keys = list(self.plan.graph_keys())
        self._lazy = {key for key in keys if key.batch.num_tokens in lazy}
        for key in self._lazy:
            self.dispatcher.enable(key)
        now = [key for key in keys if key not in self._lazy]
        report = self.report = CaptureReport(
            self._backend.name,
            estimate=estimated,
            dropped=tuple(size for size in sizes if size not in self.plan.sizes),
            pending=self.plan.lazy_sizes,
        )
        if self.plan.background:
            self._failure = None
            self._thread = threading.Thread(
                target=self._behind, args=(now, report), name="pwcc-capture", daemon=True
            )
            self._thread.start()
            return report
        try:
            with collector_frozen(), span("capture", graphs=len(now), backend=self._backend.name):
                started, before = time.perf_counter(), self._backend.memory_used()
                self._observe(self.plan)
                for key in now:
                    self._one(key, report)
                self._finish(report, started, before)
        except Exception:
            self.table.forget()
            self._adopt(self.plan)
            self.report = None
            raise
        return report

    def _behind(self, keys: Sequence[GraphKey], report: CaptureReport) -> None:
        started, before = time.perf_counter(), self._backend.memory_used()
        try:
            with self._lock, collector_frozen(collect=False):
                self._observe(self.plan)
            for key in keys:
                with self._lock, collector_frozen(collect=False):
                    if self.report is not report:
                        return  # closed or captured anew meanwhile
                    self._one(key, report)
                time.sleep(0.001)  # a waiting call takes the lock
        except Exception as error:  # noqa: BLE001  told by join(); serving goes on without the rest
            self._failure = error
        with self._lock:
            if self.report is report:
                self._finish(report, started, before)
                finished("capture", report.seconds, graphs=len(keys), backend=self._backend.name)

    def _finish(self, report: CaptureReport, started: float, before: int) -> None:
        report.seconds = time.perf_counter() - started
        report.bytes = max(0, self._backend.memory_used() - before)
        self.table.lock()
        self._measure(report)
        report.done = True

    def _measure(self, report: CaptureReport) -> None:
        self.plan = replace(self.plan, measured=tuple(row.measured for row in report.rows if row.error is None))

    def _one(self, key: GraphKey, report: CaptureReport) -> None:
        try:
            row = self.table.capture(key)
        except Exception:
            self._stats.failures += 1
            self.dispatcher.disable(key)
            raise
        report.rows.append(row)
        if row.error is None:
            self._stats.captures += 1
            self.dispatcher.enable(key)
        else:
            self._stats.failures += 1
            self.dispatcher.disable(key)
        if self._on_progress is not None:
            self._on_progress(row)

    def dispatch(self, count: int, decode: bool, *, full: bool) -> Dispatch:
        """Return how a batch runs, capturing first what is captured at first use; the caller holds the lock."""
        while True:
            chosen = self.dispatcher.dispatch(count, decode, full=full)
            key = GraphKey.of(chosen.mode, chosen.batch)
            if key not in self._lazy or self.report is None:
                return chosen
            self._lazy.discard(key)
            with collector_frozen(collect=False):
                self._one(key, self.report)
            self._measure(self.report)

    def join(self, timeout_s: float | None) -> None:
        """See ``GraphRunner.join``; the caller does not hold the lock."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def reset(self) -> None:
        """Release everything; the plan may be captured anew. The caller holds the lock."""
        self.table.forget()
        self._adopt(self.plan)
        self.report = None

    def close(self) -> None:
        """Release everything for good. The caller holds the lock."""
        self.reset()
        self.table.lock()
        self.report = CaptureReport(self._backend.name, done=True)
