"""Artifact: run piece compiles here or in worker processes; each task once, the first failure ends all.

A worker is ``python -m pwcc.compile.worker``: it reads one task per line on stdin and answers one JSON
line per task. It rebuilds the piece from its canonical graph, so nothing is pickled; it is no fork, so
it works with CUDA, from threads, from a notebook and without a ``__main__`` guard.
"""

from __future__ import annotations

import base64
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, PieceCompileError, PwccError
from pwcc.cache.ids import BlobDigest
from pwcc.compile.children import ending, failure_of, failure_to_json
from pwcc.compile.passes.registry import is_builtin
from pwcc.compile.piece_compiler import Blobs, PieceResult, PieceTask, compile_piece
from pwcc.compile.torch_private.inductor import fresh_workers

# One worker holds torch, Inductor and g++ or Triton: 1.2 GiB seen at the peak of a CPU compile.
WORKER_BYTES = 2 * 2**30
# Fewer tasks than this per worker do not repay it.
TASKS_PER_WORKER = 3
MAX_GPU_WORKERS = 4
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"

OnDone = Callable[[int, PieceResult], None]


def default_jobs(tasks: int, device_type: str) -> int:
    """Return how many processes to use by cores, memory and work; 1 means: compile in this process.

    Started with the trace, a worker has imported torch and Inductor before its first piece is known. On CUDA
    each holds a context and the weights of one piece beside the model's, so their number is small.
    """
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = MAX_GPU_WORKERS if device_type != "cpu" else cores
    return max(1, min(cores // 2, free // WORKER_BYTES, tasks // TASKS_PER_WORKER, most))


def default_threads(jobs: int, device_type: str, *, tuned: bool) -> int:
    """Return how many kernels each of ``jobs`` workers compiles at once.

    A pool of compilers takes seconds to start; Triton's few kernels of a piece are done before, unless a tuned
    one has dozens of candidates.
    """
    return 1 if device_type != "cpu" and not tuned else max(1, len(os.sched_getaffinity(0)) // jobs)


def run_tasks(
    tasks: Sequence[PieceTask], blobs: Blobs, *, workers: Workers, scratch: Path, on_done: OnDone
) -> list[PieceResult]:
    """Compile every task and return the results in order, in ``workers`` where there are any.

    Raises:
        PwccError: the first failure, after the workers were stopped.
    """
    portable = [index for index, task in enumerate(tasks) if _is_portable(task)]
    results: dict[int, PieceResult] = {}
    if workers.jobs > 1 and len(portable) > 1:
        results = _Run(tasks, portable, blobs, workers, on_done).results()
    with fresh_workers(scratch):
        for index in range(len(tasks)):
            if index not in results:
                results[index] = compile_piece(tasks[index], blobs, scratch=scratch)
                on_done(index, results[index])
    return [results[index] for index in range(len(tasks))]


def _is_portable(task: PieceTask) -> bool:
    """Tell whether a worker has the task's operations and passes; what the user's modules bring it has not."""
    if not all(map(is_builtin, task.passes)):
        return False
    if any(target.startswith("pwcc.") for target in task.graph.ops):
        return False
    custom = (target.split(".")[2] for target in task.graph.ops if target.startswith("torch.ops."))
    return all(namespace in ("aten", "prims") for namespace in custom)


def python() -> list[str]:
    """Return how to start this interpreter so that it imports from the working directory only if this one does.

    Python puts that directory in front for ``-m``; it may be a cache that somebody else filled.
    """
    here = {"", ".", str(Path.cwd())} & set(sys.path)
    return [sys.executable] if here else [sys.executable, "-P"]


class Workers:
    """Worker processes of one compile; a context, after which none is left.

    ``jobs`` is how many there may be; 1 is none: pieces are compiled in this process then. ``threads`` is how
    many compilers of kernels each of them runs at once. :meth:`start` may be called before any task is known,
    so that their imports overlap with the trace.
    """

    def __init__(self, jobs: int, scratch: Path, *, device: str, threads: int) -> None:
        self.jobs = jobs
        self._scratch = scratch
        self._device = device
        self._threads = threads
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finished = True

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not self._finished:  # a failure, or an interrupt while they work
            self.kill()
        self._stop()

    def start(self, count: int | None = None) -> list[subprocess.Popen[bytes]]:
        """Start workers that do not run yet, ``count`` at most and never more than ``jobs``; return those."""
        wanted = 0 if self.jobs < 2 else min(self.jobs, count or self.jobs)
        while len(self._processes) < wanted:
            self._processes.append(self._start(len(self._processes)))
        return self._processes[:wanted]

    def kill(self) -> None:
        """End them and their compilers now, whatever they are at."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a run is under way; one that ends early leaves workers that must be killed."""
        self._finished = False
        yield
        self._finished = True

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        """Return the last lines that a worker wrote."""
        log = self._scratch / f"worker-{self._processes.index(process)}" / "stderr"
        with suppress(OSError):
            return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        return ""

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        own = self._scratch / f"worker-{number}"
        own.mkdir()
        lock = self._scratch / "tune.lock"
        arguments = [str(self._scratch), str(lock), str(os.getpid()), self._device]
        command = [*python(), "-m", "pwcc.compile.worker", *arguments]
        with (own / "stderr").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 (our own module)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # so that its compilers end with it
                env={**os.environ, COMPILE_THREADS: str(self._threads)},
            )

    def _stop(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes = []


class _Run:
    """Feeds tasks to worker processes through one thread per worker. Made for one run."""

    def __init__(
        self,
        tasks: Sequence[PieceTask],
        wanted: Sequence[int],
        blobs: Blobs,
        workers: Workers,
        on_done: OnDone,
    ) -> None:
        self._tasks = tasks
        self._wanted = wanted
        self._blobs = blobs
        self._workers = workers
        self._on_done = on_done
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._results: dict[int, PieceResult] = {}
        self._failure: Exception | None = None

    def results(self) -> dict[int, PieceResult]:
        """Compile all; raise the first failure, after every worker was stopped."""
        for index in self._wanted:
            self._waiting.put(index)
        with self._workers.working():
            threads = [
                threading.Thread(target=self._feed, args=(process,), daemon=True)
                for process in self._workers.start(len(self._wanted))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
        return self._results

    def _feed(self, process: subprocess.Popen[bytes]) -> None:
        while self._failure is None:
            try:
                index = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                result = self._ask(process, self._tasks[index])
                with self._lock:
                    self._on_done(index, result)
                    self._results[index] = result
            except Exception as error:  # noqa: BLE001 (handed to the caller's thread)
                with self._lock:
                    self._failure = self._failure or error
                self._workers.kill()  # the others may be minutes from their next answer
                return

    def _ask(self, process: subprocess.Popen[bytes], task: PieceTask) -> PieceResult:
        if process.stdin is None or process.stdout is None:
            raise PieceCompileError("a compile worker has no pipes")
        try:
            process.stdin.write(task.to_bytes() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            error = PieceCompileError(
                f"piece {task.name} ({task.variant}): the compile worker {ending(process.wait())}",
                hint="if it was killed for memory, use fewer --jobs; --debug shows the last it wrote",
            )
            error.add_note("the worker's stderr ended with:\n" + self._workers.log_of(process))
            raise error
        return parse_answer(line, self._blobs)


def encode_answer(result: PieceResult, blobs: dict[BlobDigest, bytes]) -> bytes:
    """Return a worker's answer: the result and its blobs."""
    held: dict[str, strict.Json] = {digest: base64.b64encode(blobs[digest]).decode() for digest in result.blobs}
    return strict.canonical({"result": result.to_json(), "blobs": held})


def encode_failure(error: PwccError) -> bytes:
    """Return a worker's answer for an expected failure."""
    return strict.canonical(failure_to_json(error))


def parse_answer(line: bytes, blobs: Blobs) -> PieceResult:
    """Store a worker's blobs and return its result, or raise the failure that it reports."""
    value = strict.loads(line, where="worker", max_bytes=4 * 2**30)
    if not isinstance(value, dict):
        raise CorruptEntry("expected an object from a worker")
    if "error" in value:
        raise failure_of(value)
    for digest, text in value["blobs"].items():
        if blobs.put_blob(base64.b64decode(text)) != digest:
            raise CorruptEntry(f"a worker sent a blob that is not {digest[:12]}")
    return PieceResult.parse(strict.canonical(value["result"]), "worker")
