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
from pwcc.compile.piece_compiler import Blobs, PieceResult, PieceTask, compile_piece
from pwcc.compile.torch_private.inductor import fresh_workers

# One worker holds torch, Inductor and g++ or Triton: 1.2 GiB seen at the peak of a CPU compile.
WORKER_BYTES = 2 * 2**30
# A worker costs 5 to 9 s until its first piece is out; fewer tasks than this per worker do not repay it.
TASKS_PER_WORKER = 4

OnDone = Callable[[int, PieceResult], None]


def default_jobs(tasks: int, device_type: str) -> int:
    """Return how many processes to use by cores, memory and work; 1 means: compile in this process.

    On CUDA the parent already has warm imports and a context, and pieces take 0.1 to 2 s each, so
    workers only pay from many tasks on.
    """
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    per_worker = TASKS_PER_WORKER if device_type == "cpu" else 2 * TASKS_PER_WORKER
    return max(1, min(cores // 2, free // WORKER_BYTES, tasks // per_worker))


def run_tasks(
    tasks: Sequence[PieceTask], blobs: Blobs, *, jobs: int, scratch: Path, on_done: OnDone
) -> list[PieceResult]:
    """Compile every task and return the results in order.

    Raises:
        PwccError: the first failure, after the other workers were stopped.
    """
    portable = [index for index, task in enumerate(tasks) if _is_portable(task)]
    results: dict[int, PieceResult] = {}
    if jobs > 1 and len(portable) > 1:
        pool = _Pool(tasks, portable, blobs, min(jobs, len(portable)), scratch, on_done)
        results = pool.run()
    with fresh_workers(scratch):
        for index in range(len(tasks)):
            if index not in results:
                results[index] = compile_piece(tasks[index], blobs, scratch=scratch)
                on_done(index, results[index])
    return [results[index] for index in range(len(tasks))]


def _is_portable(task: PieceTask) -> bool:
    """Tell whether a worker has the task's operations; a library that the model imported it has not."""
    custom = (target.split(".")[2] for target in task.graph.ops if target.startswith("torch.ops."))
    return all(namespace in ("aten", "prims") for namespace in custom)


def python() -> list[str]:
    """Return how to start this interpreter so that it imports from the working directory only if this one does.

    Python puts that directory in front for ``-m``; it may be a cache that somebody else filled.
    """
    here = {"", ".", str(Path.cwd())} & set(sys.path)
    return [sys.executable] if here else [sys.executable, "-P"]


class _Pool:
    """Feeds tasks to worker processes through one thread per worker. Made for one run."""

    def __init__(
        self,
        tasks: Sequence[PieceTask],
        wanted: Sequence[int],
        blobs: Blobs,
        jobs: int,
        scratch: Path,
        on_done: OnDone,
    ) -> None:
        self._tasks = tasks
        self._wanted = wanted
        self._blobs = blobs
        self._jobs = jobs
        self._scratch = scratch
        self._on_done = on_done
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._results: dict[int, PieceResult] = {}
        self._failure: Exception | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self) -> dict[int, PieceResult]:
        for index in self._wanted:
            self._waiting.put(index)
        with self._workers() as workers:
            threads = [threading.Thread(target=self._feed, args=(worker,), daemon=True) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results

    @contextmanager
    def _workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        try:
            for number in range(self._jobs):
                self._started.append(self._start(number))
            yield self._started
        finally:
            if len(self._results) < len(self._wanted):  # a failure, or an interrupt while they work
                self._kill()
            for worker in self._started:
                if worker.stdin is not None:
                    with suppress(OSError):
                        worker.stdin.close()
                worker.wait()
                if worker.stdout is not None:
                    worker.stdout.close()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        own = self._scratch / f"worker-{number}"
        own.mkdir()
        arguments = [str(own), str(self._scratch / "tune.lock"), str(os.getpid())]
        command = [*python(), "-m", "pwcc.compile.worker", *arguments]
        with (own / "stderr").open("wb") as log:
            return subprocess.Popen(  # noqa: S603 (our own module)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,  # so that its compilers end with it
            )

    def _kill(self) -> None:
        for worker in self._started:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def _feed(self, worker: subprocess.Popen[bytes]) -> None:
        while self._failure is None:
            try:
                index = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                result = self._ask(worker, self._tasks[index])
                with self._lock:
                    self._on_done(index, result)
                    self._results[index] = result
            except Exception as error:  # noqa: BLE001 (handed to the caller's thread)
                with self._lock:
                    self._failure = self._failure or error
                self._kill()  # the others may be minutes from their next answer
                return

    def _ask(self, worker: subprocess.Popen[bytes], task: PieceTask) -> PieceResult:
        if worker.stdin is None or worker.stdout is None:
            raise PieceCompileError("a compile worker has no pipes")
        try:
            worker.stdin.write(task.to_bytes() + b"\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except OSError:
            line = b""
        if not line:
            error = PieceCompileError(
                f"piece {task.name} ({task.variant}): the compile worker {_ending(worker.wait())}",
                hint="if it was killed for memory, use fewer --jobs; --debug shows the last it wrote",
            )
            log = self._scratch / f"worker-{self._started.index(worker)}" / "stderr"
            error.add_note("the worker's stderr ended with:\n" + _tail(log))
            raise error
        return parse_answer(line, self._blobs)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _tail(log: Path) -> str:
    with suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    return ""


def encode_answer(result: PieceResult, blobs: dict[BlobDigest, bytes]) -> bytes:
    """Return a worker's answer: the result and its blobs."""
    held: dict[str, strict.Json] = {digest: base64.b64encode(blobs[digest]).decode() for digest in result.blobs}
    return strict.canonical({"result": result.to_json(), "blobs": held})


def encode_failure(error: PwccError) -> bytes:
    """Return a worker's answer for an expected failure."""
    return strict.canonical(
        {
            "error": type(error).__name__,
            "message": error.message,
            "where": error.where,
            "hint": error.hint,
            "report": "".join(_report(error)),
        }
    )


def _report(error: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception(error)


def parse_answer(line: bytes, blobs: Blobs) -> PieceResult:
    """Store a worker's blobs and return its result, or raise the failure that it reports."""
    value = strict.loads(line, where="worker", max_bytes=4 * 2**30)
    if not isinstance(value, dict):
        raise CorruptEntry("expected an object from a worker")
    if "error" in value:
        raise _failure(value)
    for digest, text in value["blobs"].items():
        if blobs.put_blob(base64.b64decode(text)) != digest:
            raise CorruptEntry(f"a worker sent a blob that is not {digest[:12]}")
    return PieceResult.parse(strict.canonical(value["result"]), "worker")


def _failure(value: dict[str, object]) -> PwccError:
    from pwcc.cache import errors

    kind = getattr(errors, str(value["error"]), PieceCompileError)
    where, hint = value["where"], value["hint"]
    error: PwccError = kind(
        str(value["message"]),
        where=None if where is None else str(where),
        hint=None if hint is None else str(hint),
    )
    error.add_note(str(value["report"]))
    return error
