"""The seam to the compilers' own counters: what Dynamo, Inductor and Triton did between two moments.

Imports nothing but the standard library: a counter of a module that is not loaded is 0.

Run on torch 2.11.0 with triton 3.6.0 and torch 2.13.0 with triton 3.9.0. Private names used (all looked
up by name; one that is gone reads as 0, which the tests that inject one of each would show):

- ``torch._dynamo.utils.counters``: ``inductor.fxgraph_cache_*`` (silent when caches are disabled),
  ``inductor.async_compile_cache_*``, ``inductor.benchmarking.<class>.<method>`` (``benchmark`` and the
  ``benchmark_cpu`` that it calls count one each), ``inductor.select_algorithm_autotune``. Not
  ``frames.total``: it misses ``fullgraph_capture`` and counts frames that Dynamo looks at and skips.
- ``torch._dynamo.utils.compilation_time_metrics``: one number per finished run of a phase:
  ``_compile.compile_inner`` (every compile of torch.compile), ``bytecode_tracing`` (every attempt to
  trace, restarts too), ``compile_fx_inner`` (every graph, caches or not),
  ``AOTAutogradCache.inductor_load`` (a graph from the cache, which skips the former),
  ``CachingAutotuner.benchmark_all_configs``.
- ``torch._dynamo.convert_frame.FRAME_COUNTER``: the next frame id (also ``fullgraph_capture``; a
  recompilation keeps its id).
- ``triton.knobs.compilation.listener`` (both), ``triton.knobs.autotuning.listener`` (3.9).

``torch._dynamo.reset()`` clears or drops most of these. A window keeps the objects it saw first and adds
what their successors hold, so that a reset hides nothing that was counted before or after it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Final

_BENCHMARKS: Final[tuple[str, ...]] = ("benchmark_cpu", "benchmark_gpu")


@dataclass(frozen=True, slots=True)
class CompilerCounts:
    """What the compilers did. Work of theirs that is still running is not in it yet.

    ``inductor_compiles`` counts graphs given to Inductor, also those that it found in its own caches;
    ``triton_compiles`` kernels that Triton compiled here or in Inductor's worker pool; ``autotune_runs``
    timing runs of Inductor's benchmarker, or tuning sessions where those are more.
    """

    dynamo_frames: int = 0
    inductor_compiles: int = 0
    triton_compiles: int = 0
    autotune_runs: int = 0


class CounterWindow:
    """Counts from construction on. Call :meth:`attach` when modules were loaded, :meth:`close` at the end.

    A module that was not loaded at the start counts in full. :meth:`counts` works before and after
    ``close``; after it, only Triton's own events are no longer followed.
    """

    def __init__(self) -> None:
        self._inductor = _Group("inductor")
        self._phases = _Phases()
        self._frame_id = _frame_counter()
        self._compiled: list[None] = []
        self._tuned: list[None] = []
        self._taps = ((_COMPILATION, self._on_compile), (_AUTOTUNING, self._on_autotune))
        for tap, sink in self._taps:
            tap.add(sink)

    def attach(self) -> None:
        """Follow Triton's events from now on, if Triton was loaded since the window began. Cheap."""
        for tap, _ in self._taps:
            tap.install()

    def close(self) -> None:
        """Stop following Triton's events and put its former listeners back."""
        for tap, sink in self._taps:
            tap.discard(sink)

    def counts(self) -> CompilerCounts:
        """Return what happened since construction."""
        phase, inductor = self._phases.runs, self._inductor
        frames = max(phase("_compile.compile_inner"), _since(_frame_counter(), self._frame_id))
        graphs = max(
            phase("compile_fx_inner"),
            inductor.since("fxgraph_cache_miss") + inductor.since("fxgraph_cache_bypass"),
        )
        submitted = inductor.since("async_compile_cache_miss") - inductor.since("async_compile_cache_hit")
        return CompilerCounts(
            dynamo_frames=frames or phase("bytecode_tracing"),
            inductor_compiles=graphs + phase("AOTAutogradCache.inductor_load"),
            triton_compiles=max(len(self._compiled), submitted),
            autotune_runs=max(self._benchmarks(), self._tuning_sessions()) + len(self._tuned),
        )

    def _benchmarks(self) -> int:
        runs: dict[str, int] = dict.fromkeys(_BENCHMARKS, 0)
        for key in self._inductor.names():
            kind, _, method = key.rpartition(".")
            if kind.startswith("benchmarking."):
                runs[method] = runs.get(method, 0) + self._inductor.since(key)
        outer = [count for method, count in runs.items() if method not in _BENCHMARKS]
        return max(sum(runs[method] for method in _BENCHMARKS), *outer, 0)

    def _tuning_sessions(self) -> int:
        return self._inductor.since("select_algorithm_autotune") + self._phases.runs(
            "CachingAutotuner.benchmark_all_configs"
        )

    def _on_compile(self, event: Mapping[str, object]) -> None:
        if not event.get("cache_hit"):
            self._compiled.append(None)

    def _on_autotune(self, event: Mapping[str, object]) -> None:
        if not event.get("cache_hit"):
            self._tuned.append(None)


class _Group:
    """One Counter in ``torch._dynamo.utils.counters``, which may be cleared, or dropped and made anew."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = self._now()
        self._before = dict(self._first)

    def names(self) -> list[str]:
        """Return every key of then and now."""
        return list({**self._first, **self._now()})

    def since(self, key: str) -> int:
        """Return how often ``key`` was counted."""
        now = self._now()
        count = _since(self._first.get(key, 0), self._before.get(key, 0))
        return count if now is self._first else count + now.get(key, 0)

    def _now(self) -> Mapping[str, int]:
        found: Mapping[str, int] | None = _table("counters").get(self._name)
        return {} if found is None else found


class _Phases:
    """The lists of ``compilation_time_metrics``: one number per finished run of a phase."""

    def __init__(self) -> None:
        first: dict[str, Sized] = dict(_table("compilation_time_metrics"))
        self._first = {name: (runs, len(runs)) for name, runs in first.items()}

    def runs(self, name: str) -> int:
        """Return how many runs of phase ``name`` finished."""
        now: Sized = _table("compilation_time_metrics").get(name, ())
        first, before = self._first.get(name, ((), 0))
        count = _since(len(first), before)
        return count if now is first else count + len(now)


class _Link:
    """A listener in one of Triton's knobs that passes each event on to the listener it replaced."""

    def __init__(self, tap: _Tap, previous: Callable[..., object] | None) -> None:
        self.tap: _Tap | None = tap
        self.previous = previous

    def __call__(self, *args: object, **event: object) -> None:
        if self.tap is not None:
            self.tap.tell(event)
        if self.previous is not None:
            self.previous(*args, **event)


class _Tap:
    """Shares one place in a listener chain of Triton's among all open windows of the process.

    The place is taken while a window is open. Where someone has put a listener in front of ours
    meanwhile, ours cannot be taken out of the chain: it stays, and does nothing but pass events on.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        self._lock = threading.Lock()
        self._sinks: tuple[Callable[[Mapping[str, object]], None], ...] = ()
        self._link: _Link | None = None

    def add(self, sink: Callable[[Mapping[str, object]], None]) -> None:
        with self._lock:
            self._sinks = (*self._sinks, sink)
        self.install()

    def discard(self, sink: Callable[[Mapping[str, object]], None]) -> None:
        with self._lock:
            self._sinks = tuple(kept for kept in self._sinks if kept != sink)
            if self._sinks or self._link is None:
                return
            link, self._link, knob = self._link, None, self._knob()
            link.tap = None
            if knob is not None and knob.listener is link:
                knob.listener = link.previous

    def install(self) -> None:
        if self._link is not None:
            return
        knob = self._knob()
        if knob is None:
            return
        with self._lock:
            if self._link is None and self._sinks:
                self._link = _Link(self, knob.listener)
                knob.listener = self._link

    def tell(self, event: Mapping[str, object]) -> None:
        for sink in self._sinks:
            sink(event)

    def _knob(self) -> Any:
        knob = getattr(sys.modules.get("triton.knobs"), self._section, None)
        return knob if hasattr(knob, "listener") else None


# Triton has one listener per process and knob, so what shares it is one per process as well.
_COMPILATION: Final = _Tap("compilation")
_AUTOTUNING: Final = _Tap("autotuning")


def _since(now: int, before: int) -> int:
    """Return how far a counter came; one that is below where it was has been reset and counts in full."""
    return now - before if now >= before else now


def _table(name: str) -> Mapping[str, Any]:
    return getattr(sys.modules.get("torch._dynamo.utils"), name, {})


def _frame_counter() -> int:
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
