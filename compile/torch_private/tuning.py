"""Artifact: what Inductor times while it tunes a piece, and the files in which it keeps what it chose.

Read in 2.11.0 and 2.13.0. Private names used: ``triton_heuristics.CachingAutotuner.bench`` (every timing of a
kernel's configuration, coordinate descent's too), its ``benchmark_all_configs`` and ``_dynamic_scale_rblock``
(see ``_winners_stay``), ``autotune_cache.AutotuneCache``, ``select_algorithm.get_algorithm_selector_cache``
with ``feedback_saver_fns`` (the times of an operation's choices), ``codecache.CacheBase.get_local_cache_path``
(remembers the first cache directory of a process), and the files below Inductor's cache directory:
``??/*.best_config`` (a kernel's winner), ``??/*.kernel_perf`` (whether a fusion into a template won),
``cache/*`` (times of choices, whether padding paid). Should a file's name go, nothing is pinned, which
``PieceTuning.runs`` shows; what is compiled does not change.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.tuning import Candidate, PieceTuning, TunedChoice, parse_files
from pwcc.compile.torch_private.counters import CounterWindow
from pwcc.compile.torch_private.triton_static import config_text, found_by_descent

INDUCTOR: Final = "inductor"
"""The directory of ``inductor.private_caches`` that Inductor's own files lie in."""
_PATTERNS: Final = ("*/*.best_config", "*/*.kernel_perf", "cache/*")
_MAX_FILE: Final = 16 * 2**20
_MAX_TEXT: Final = 4000


class Watch(AbstractContextManager["Watch"]):
    """Follows the tuning of one piece; may be entered several times, one after another.

    ``pins`` are files of an earlier compile: what they decide is not timed again. Without a GPU (``active``
    False) nothing is tuned, and nothing is imported, written or recorded.
    """

    def __init__(self, scratch: Path, pins: Mapping[str, str], *, active: bool) -> None:
        self._directory = scratch / INDUCTOR
        self._active = active
        self._timed: dict[str, list[Candidate]] = {}
        self._operations: list[TunedChoice] = []
        self._runs = 0
        self._entered: list[ExitStack] = []
        if active:
            write_files(self._directory, pins)

    def __enter__(self) -> Watch:
        stack = ExitStack()
        if self._active:
            window = CounterWindow()
            stack.callback(self._count, window)
            stack.enter_context(_kernels_timed(self._timed))
            stack.enter_context(_winners_stay())
            stack.enter_context(_operations_timed(self._operations))
            _forget_directory()
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().close()

    def _count(self, window: CounterWindow) -> None:
        self._runs += window.counts().autotune_runs
        window.close()

    def result(self, module: ModuleType, winners: Sequence[tuple[str, str, str]]) -> PieceTuning | None:
        """Return what was tuned; None where nothing can be.

        ``winners`` are, per kernel, its attribute of the wrapper ``module``, its symbol and its configuration.
        """
        if not self._active:
            return None
        kernels = [
            TunedChoice(
                "kernel", symbol, config, found_by_descent(module, name), tuple(self._timed.get(symbol, ()))
            )
            for name, symbol, config in winners
        ]
        return PieceTuning((*self._operations, *kernels), self._runs, read_files(self._directory))


def read_files(directory: Path) -> dict[str, str]:
    """Return the tuning files below Inductor's directory by relative path; what is no such file is left out."""
    found: dict[str, str] = {}
    for path in sorted(path for pattern in _PATTERNS for path in directory.glob(pattern)):
        name = path.relative_to(directory).as_posix()
        if not path.is_file() or path.stat().st_size > _MAX_FILE:
            continue
        try:
            found |= parse_files({name: path.read_text()}, name)
        except (CorruptEntry, UnicodeDecodeError):
            continue
    return found


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write tuning files where Inductor looks for them; one that is there already stays."""
    for name, text in files.items():
        path = directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@contextmanager
def _kernels_timed(timed: dict[str, list[Candidate]]) -> Iterator[None]:
    """Note every timing of a kernel's configuration, by the kernel's symbol, while the context lasts."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kind: Any = CachingAutotuner
    before = kind.bench

    def bench(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        took = before(self, launcher, *args, **kwargs)
        symbol = getattr(getattr(self, "fn", None), "__name__", "")
        timed.setdefault(symbol, []).append(Candidate(config_text(launcher.config), microseconds(took)))
        return took

    kind.bench = bench
    try:
        yield
    finally:
        kind.bench = before


@contextmanager
def _winners_stay() -> Iterator[None]:
    """Keep a kernel's kept winner as it is while the context lasts, where Inductor would time it anew.

    2.11 tries a smaller block beside a winner that it read, as if it had just been compiled (2.13 does not).
    Neither takes back a winner that was such a smaller block, since it is not among those listed at first.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kind: Any = CachingAutotuner
    scale, time_all = kind._dynamic_scale_rblock, kind.benchmark_all_configs

    def dynamic_scale_rblock(self: Any) -> None:
        if (self.autotune_cache_info or {}).get("autotune_cache_state") != "hit":
            scale(self)

    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = _kept_launcher(self)
        return time_all(self, *args, **kwargs) if kept is None else {kept: 0.0}

    kind._dynamic_scale_rblock, kind.benchmark_all_configs = dynamic_scale_rblock, benchmark_all_configs
    try:
        yield
    finally:
        kind._dynamic_scale_rblock, kind.benchmark_all_configs = scale, time_all


def _kept_launcher(autotuner: Any) -> Any | None:
    """Return the launcher that runs the kernel's kept winner, if one does."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    if not autotuner.filename:
        return None
    cache = AutotuneCache.create(autotuner.inductor_meta, autotuner.filename, "")
    if cache is None or cache.local_cache is None:
        return None
    files, path = cache.local_cache
    best: Any = files.get(path)
    if not isinstance(best, dict):
        return None
    for launcher in autotuner.launchers:
        config = launcher.config
        items = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        if all(best.get(name) == value for name, value in items.items()):
            if best.get("found_by_coordesc"):
                config.found_by_coordesc = True  # else the descent would begin there
            return launcher
    return None


@contextmanager
def _operations_timed(chosen: list[TunedChoice]) -> Iterator[None]:
    """Note the times of every operation's choices, while the context lasts."""
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    savers: list[Any] = get_algorithm_selector_cache().feedback_saver_fns

    def note(timings: Mapping[Any, float], name: str, inputs: Sequence[Any], *_: Any) -> None:
        choice = operation_choice(timings, name, inputs)
        if choice is not None:
            chosen.append(choice)

    savers.append(note)
    try:
        yield
    finally:
        savers.remove(note)


def operation_choice(timings: Mapping[Any, float], name: str, inputs: Sequence[Any]) -> TunedChoice | None:
    """Return the choice among an operation's kernels by Inductor's times in milliseconds, if there are any."""
    candidates = tuple(Candidate(_choice_text(choice), microseconds(ms)) for choice, ms in timings.items())
    ran = [item for item in candidates if item.us is not None]
    if not ran:
        return None
    sizes = " ".join("x".join(str(dim) for dim in item.get_size()) for item in inputs)
    winner = min(ran, key=lambda item: item.us or 0.0)
    return TunedChoice("operation", f"{name} {sizes}".strip()[:_MAX_TEXT], winner.config, candidates=candidates)


def microseconds(ms: object) -> float | None:
    """Return milliseconds as microseconds to the nanosecond; None where a candidate could not run."""
    return round(ms * 1000.0, 3) if isinstance(ms, int | float) and math.isfinite(ms) else None


def _choice_text(choice: Any) -> str:
    """Return a choice's kernel and its configuration as one printable line."""
    text = f"{choice.name} {getattr(choice, 'description', '') or ''}"
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:_MAX_TEXT]


def _forget_directory() -> None:
    """Let Inductor ask anew where its cache directory is: each compile of this process has its own."""
    codecache: Any = sys.modules.get("torch._inductor.codecache")
    path: Any = getattr(getattr(codecache, "CacheBase", None), "get_local_cache_path", None)
    if hasattr(path, "cache_clear"):
        path.cache_clear()
