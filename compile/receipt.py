"""Artifact: the receipt of a load: what was done between entry and return, measured and not just claimed.

Imports only the standard library, and measures whether or not torch or a compiler is loaded yet.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, cast

from pwcc.cache.telemetry import span
from pwcc.compile.torch_private.counters import CompilerCounts, CounterWindow

if TYPE_CHECKING:
    from pwcc.cache.strict import Json

COMPILER_ROOTS: Final = ("torch._dynamo", "torch._inductor", "triton", "sympy")
MAX_EVIDENCE: Final = 64  # lines; enough to find a cause, and a receipt stays printable

_PROCESS_EVENTS: Final = frozenset(
    ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")
)
# Event -> index of the path that it changes. shutil's and tempfile's own events are left out: what they
# announce is done through these.
_FILE_EVENTS: Final = {
    "open": 0,
    "os.chmod": 0,
    "os.chown": 0,
    "os.link": 1,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.removexattr": 0,
    "os.rename": 1,
    "os.rmdir": 0,
    "os.setxattr": 0,
    "os.symlink": 1,
    "os.truncate": 0,
    "os.utime": 0,
    "sqlite3.connect": 0,
}
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROBE: Final = "pwcc.receipt.probe"


@dataclass(frozen=True)
class LoadReceipt:
    """What a load did. The six counters are 0 on every good load; :class:`LoadObserver` tells what they count.

    ``modules_added`` names the compiler's modules (``COMPILER_ROOTS``) that came into ``sys.modules``;
    ``modules_total`` counts all that came. ``bytecode_files`` are caches of imported modules that Python
    itself wrote or tried to write; they say nothing about the load and are counted apart. ``audited`` is
    False when this process refuses audit hooks, so that processes and files could not be counted.
    ``damaged`` has a line for every entry that was passed over because of its files, and set aside after
    the measured block. ``steps_ms`` keeps the order of the steps; ``evidence`` says what was counted, at
    most 64 lines.
    """

    dynamo_frames: int
    inductor_compiles: int
    triton_compiles: int
    autotune_runs: int
    processes_started: int
    files_written: int
    modules_added: tuple[str, ...]
    modules_total: int
    bytecode_files: int
    audited: bool
    entry_key: str
    blobs: int
    bytes: int
    variants: int
    pieces: int
    steps_ms: dict[str, float]
    total_ms: float
    evidence: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Tell whether nothing was traced, compiled, tuned, started or written, and no compiler imported."""
        return self.audited and not self.modules_added and not any(self._counters().values())

    def to_json(self) -> dict[str, Json]:
        """Return the receipt for ``--json``: every field, and ``clean``; milliseconds to the microsecond."""
        values = asdict(self)
        for name in ("modules_added", "evidence", "damaged"):
            values[name] = list(values[name])
        values["steps_ms"] = {name: round(ms, 3) for name, ms in self.steps_ms.items()}
        values["total_ms"] = round(self.total_ms, 3)
        return {"clean": self.is_clean, **values}

    def lines(self) -> tuple[str, ...]:
        """Return the receipt for a human, one fact group per line, evidence last."""
        counted = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self._counters().items())
        steps = ", ".join(f"{name} {ms:.1f}" for name, ms in self.steps_ms.items())
        compiler = str(len(self.modules_added) or "none")
        found = [
            f"{self.pieces} pieces, {self.variants} variants, {self.blobs} blobs, {self.bytes} bytes",
            counted,
            f"modules added {self.modules_total}, {compiler} of a compiler",
            f"{self.total_ms:.1f} ms" + (f": {steps}" if steps else ""),
        ]
        if not self.audited:
            found.append("processes and files not measured: this process refuses audit hooks")
        found += [f"not used: {line}" for line in self.damaged]
        return (*found, *(f"counted: {line}" for line in self.evidence))

    def _counters(self) -> dict[str, int]:
        return {
            "dynamo_frames": self.dynamo_frames,
            "inductor_compiles": self.inductor_compiles,
            "triton_compiles": self.triton_compiles,
            "autotune_runs": self.autotune_runs,
            "processes_started": self.processes_started,
            "files_written": self.files_written,
        }


class LoadObserver:
    """Measures what happens in this process while its ``with`` block runs, in all threads.

    Work of other threads counts too, since a load could hand work to them; evidence names the thread.
    Observers nest and run at the same time in several threads; each sees everything. Every hook but the
    audit hook is gone when the block ends, however it ends. An audit hook cannot be removed, so there is
    one for the process, installed by the first observer; without an active observer it costs about 90 ns
    per audited operation (``id()``, ``open()``, ...). A block costs about 0.1 ms.

    Counted:

    - *imports*: the difference of ``sys.modules``; names of compiler modules that were only asked for
      (seen by a finder in front of ``sys.meta_path`` that finds nothing) are evidence, not a fault.
    - *processes*: ``subprocess``, ``os.fork``, ``forkpty``, ``posix_spawn``, ``system`` and ``exec``, also
      attempts that fail; where more, the children that this thread has at the end and had not at the
      start (``multiprocessing``'s spawn and native code raise no audit event; needs Linux).
    - *files*: distinct paths opened for writing, made, renamed to, linked, truncated, removed or changed
      in mode, owner, times or attributes, also attempts that fail. Not: paths under ``/proc`` (memory
      files are reopened there), device nodes (``/dev/null``), descriptors that are already open, Python's
      bytecode caches (counted apart), ``mkfifo``, and writes by native code.
    - *compilers*: see :class:`~pwcc.compile.torch_private.counters.CompilerCounts`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: dict[str, float] = {}
        self._events: list[_Event] = []
        self._finder = _Finder(self)
        self._start: float | None = None
        self._measured: _Measured | None = None
        self._audited = False

    def __enter__(self) -> LoadObserver:
        if self._start is not None:
            raise RuntimeError("expected a new LoadObserver: this one has measured its block")
        self._thread = threading.get_native_id()
        self._children = _children()
        self._modules = frozenset(sys.modules)
        self._counters = CounterWindow()
        try:
            self._audited = _activate(self)
            sys.meta_path.insert(0, self._finder)
        except BaseException:
            self._release()
            raise
        self._start = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._measured = self._measure()
        finally:
            self._release()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step. Steps keep the order of their first start; a repeated name adds up."""
        self._steps.setdefault(name, 0.0)
        start = self._clock()
        try:
            with span(f"load.{name}"):
                yield
        finally:
            self._steps[name] += (self._clock() - start) * 1000

    def receipt(
        self, *, entry_key: str, blobs: int = 0, bytes: int = 0, variants: int = 0, pieces: int = 0
    ) -> LoadReceipt:
        """Return what was measured: over the whole block, or so far while it still runs.

        Raises:
            RuntimeError: the block has not been entered.
        """
        found = self._measured or self._measure()
        return LoadReceipt(
            **asdict(found.counts),
            processes_started=found.processes,
            files_written=found.files,
            modules_added=found.compiler_modules,
            modules_total=found.modules,
            bytecode_files=found.bytecode_files,
            audited=self._audited,
            entry_key=entry_key,
            blobs=blobs,
            bytes=bytes,
            variants=variants,
            pieces=pieces,
            steps_ms=dict(self._steps),
            total_ms=found.total_ms,
            evidence=found.evidence,
        )

    def _note(self, event: _Event) -> None:
        self._events.append(event)

    def _imports(self, name: str) -> None:
        if is_compiler_module(name):
            self._note(_Event("import", (name,), threading.get_ident()))
        self._counters.attach()

    def _release(self) -> None:
        _deactivate(self)
        # A new list: an import in another thread may be iterating over the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self._finder]
        self._counters.close()

    def _measure(self) -> _Measured:
        if self._start is None:
            raise RuntimeError("expected a LoadObserver whose with block was entered")
        total_ms = (self._clock() - self._start) * 1000
        added = sorted(set(sys.modules) - self._modules)
        events = tuple(self._events)
        processes = _processes(events)
        files, bytecode = _files(events)
        children = _children() - self._children if threading.get_native_id() == self._thread else frozenset()
        compiler = tuple(name for name in added if is_compiler_module(name))
        where = {thread.ident: f" [thread {thread.name}]" for thread in threading.enumerate()}
        where = defaultdict(lambda: " [ended thread]", where) | {threading.get_ident(): ""}
        evidence = [
            *(f"started {_subject(event)}{where[event.thread]}" for event in processes),
            *(f"child process {child}" for child in sorted(children) if len(children) > len(processes)),
            *(f"wrote {_printable(path)}{where[event.thread]}" for path, event in files.items()),
            *_asked(events, added),
        ]
        return _Measured(
            self._counters.counts(),
            max(len(processes), len(children)),
            len(files),
            bytecode,
            compiler,
            len(added),
            total_ms,
            tuple(evidence[:MAX_EVIDENCE]),
        )


def is_compiler_module(name: str) -> bool:
    """Tell whether ``name`` is a module of Dynamo, Inductor, Triton or sympy."""
    return any(name == root or name.startswith(root + ".") for root in COMPILER_ROOTS)


class _Event(NamedTuple):
    """An audit event or import: its name, its first arguments, and the thread that raised it."""

    name: str
    arguments: tuple[object, ...]
    thread: int


class _Measured(NamedTuple):
    """What one observer measured."""

    counts: CompilerCounts
    processes: int
    files: int
    bytecode_files: int
    compiler_modules: tuple[str, ...]
    modules: int
    total_ms: float
    evidence: tuple[str, ...]


class _Finder:
    """A finder that tells its observer what is asked for and finds nothing."""

    def __init__(self, observer: LoadObserver) -> None:
        self._observer = observer

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Note ``name``; return None."""
        self._observer._imports(name)
        return None


_Callback = Callable[[str, tuple[object, ...]], object]
_IGNORE: Final = cast(_Callback, {}.get)  # any C function that takes two arguments and never raises


class _Hook:
    """The audit hook. Its ``__call__`` is exchanged, since Dynamo sees the frame of a Python function.

    It would count that frame (``counters["frames"]``) in the first traced function of a process that has
    loaded something long before, wherever an audited ``id()`` happens inside.
    """

    __call__: ClassVar[_Callback] = _IGNORE


# An audit hook is for the process and for good, so what it serves is one per process as well.
_lock = threading.Lock()
_active: tuple[LoadObserver, ...] = ()
_probes: list[None] = []
_hooked: bool | None = None  # None until the first attempt: two hooks would count everything twice


def _notice(name: str, arguments: tuple[object, ...]) -> None:
    """Note an audit event. Must not raise: an exception would stop the audited operation."""
    if name == "open":
        flags = arguments[2] if len(arguments) > 2 else 0
        if not isinstance(flags, int) or not flags & _WRITE_FLAGS:
            return
    elif name == _PROBE:
        _probes.append(None)
        return
    elif name not in _FILE_EVENTS and name not in _PROCESS_EVENTS:
        return
    event = _Event(name, arguments[:2], threading.get_ident())
    for observer in _active:
        observer._note(event)


def _activate(observer: LoadObserver) -> bool:
    """Send events to ``observer``; tell whether they come (a hook of the process may refuse ours)."""
    global _active, _hooked  # noqa: PLW0603 - see above
    with _lock:
        _active = (*_active, observer)
        _Hook.__call__ = staticmethod(_notice)
        if _hooked is None:
            _hooked = False
            sys.addaudithook(cast(_Callback, _Hook()))
            sys.audit(_PROBE)
            _hooked = bool(_probes)
        return _hooked


def _deactivate(observer: LoadObserver) -> None:
    global _active  # noqa: PLW0603 - see above
    with _lock:
        _active = tuple(kept for kept in _active if kept is not observer)
        if not _active:
            _Hook.__call__ = _IGNORE


def _children() -> frozenset[int]:
    """Return the processes that the calling thread has started and not waited for; empty if unknown."""
    try:
        descriptor = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return frozenset()
    try:
        found = b""
        while data := os.read(descriptor, 65536):
            found += data
    except OSError:
        return frozenset()
    finally:
        os.close(descriptor)
    return frozenset(map(int, found.split()))


def _processes(events: Sequence[_Event]) -> list[_Event]:
    """Return the started processes: ``Popen`` may go on to ``posix_spawn`` the same program, one process."""
    found: list[_Event] = []
    opened: dict[int, tuple[str, tuple[object, ...]]] = {}
    for event in events:
        if event.name not in _PROCESS_EVENTS:
            continue
        program = (_subject(event), event.arguments[1:])
        if event.name == "subprocess.Popen":
            opened[event.thread] = program
        elif event.name == "os.posix_spawn" and opened.pop(event.thread, None) == program:
            continue
        found.append(event)
    return found


def _files(events: Sequence[_Event]) -> tuple[dict[str, _Event], int]:
    """Return the changed paths with the event that first named each, and the number of bytecode caches."""
    files: dict[str, _Event] = {}
    bytecode: set[str] = set()
    for event in events:
        path = _path(event)
        if path is None:
            continue
        if _is_bytecode(path):
            if ".pyc" in path:
                bytecode.add(path.rpartition(".pyc")[0])
        else:
            files.setdefault(path, event)
    return files, len(bytecode)


def _path(event: _Event) -> str | None:
    """Return the path that a file event changes, None where it is no file on disk."""
    index = _FILE_EVENTS.get(event.name, -1)
    if not 0 <= index < len(event.arguments):
        return None
    subject = event.arguments[index]
    if not isinstance(subject, (str, bytes, os.PathLike)):  # os.symlink passes on a path object as it is
        return None  # a descriptor: the event that opened it has been seen, or it is a memory file
    path = os.fsdecode(subject)
    if path.startswith("/proc/") or (path.startswith("/dev/") and not path.startswith("/dev/shm/")):  # noqa: S108
        return None
    return None if event.name == "sqlite3.connect" and path in ("", ":memory:") else path


def _is_bytecode(path: str) -> bool:
    if sys.pycache_prefix is not None and path.startswith(sys.pycache_prefix):
        return True
    folder, _, name = path.rpartition("/")
    return name == "__pycache__" or (".pyc" in name and folder.endswith("__pycache__"))


def _subject(event: _Event) -> str:
    subject = event.arguments[0] if event.arguments else event.name
    return _printable(os.fsdecode(subject) if isinstance(subject, bytes) else str(subject))


def _printable(text: str) -> str:
    """Return ``text`` fit for a line of UTF-8 output: names of files can hold anything."""
    return text if text.isprintable() else ascii(text)


def _asked(events: Sequence[_Event], added: Sequence[str]) -> list[str]:
    """Return a line for every compiler module that was asked for but is not loaded now."""
    known = set(added)
    asked = dict.fromkeys(_subject(event) for event in events if event.name == "import")
    return [f"asked for module {name}" for name in asked if name not in known]
