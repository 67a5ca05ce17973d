"""Compiles in worker processes, and every way in which one can end early: nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.cache.ids import blob_digest
from pwcc.cache.store import Store
from pwcc.compile.numerics import NumericsRecord
from pwcc.compile.passes.registry import resolve
from pwcc.compile.piece_compiler import MemoryBlobs, PieceResult, PieceTask
from pwcc.compile.piece_graph import PieceGraph, PieceNode, SymbolInput, TensorInput
from pwcc.compile.rebuild import Variant
from pwcc.compile.sealing.profile import cpu_profile
from pwcc.compile.workers import (
    OnDone,
    Workers,
    default_jobs,
    default_threads,
    encode_answer,
    encode_failure,
    parse_answer,
    run_tasks,
)
from tests.conftest import Machine


def task(*targets: str, name: str = "p7", lines: tuple[str | None, ...] = (), cpu: bool = False) -> PieceTask:
    """A piece that applies functions to its input, one after the other; ``cpu``: one that can be compiled."""
    x = TensorInput("float32", "cpu", ("s0", 4), (4, 1), 0)
    nodes = [PieceNode("call_function", t, [{"v": 1 + i}], {"dict": []}) for i, t in enumerate(targets)]
    graph = PieceGraph((SymbolInput("s0"), x), tuple(nodes), ({"v": 1 + len(nodes)},))
    options = cpu_profile("x86-64-v3") if cpu else {}
    return PieceTask(
        name, graph, Variant(1, 64), "cpu", options, "x86-64-v3", lines=lines or (None,) * len(nodes)
    )


RESULT = PieceResult(
    sealed=blob_digest(b"record"),
    numerics=(NumericsRecord(8, 1, 1e-7, 1e-7, 1e-7, 2e-7),),
    guards=(),
    blobs={blob_digest(b"record"): 6, blob_digest(b"kernel"): 6},
    kernels=1,
    seconds=1.5,
    tune_seconds=0.25,
)


# The wire


def test_a_task_survives_the_pipe() -> None:
    sent = replace(
        task("torch.relu", "torch.neg", lines=("model.py:3: x = relu(x)", None)),
        passes=resolve("default"),
        custom_ops=("rms_norm",),
        dump="/somewhere",
    )
    data = sent.to_bytes()
    assert b"\n" not in data  # one task per line
    assert PieceTask.from_bytes(data) == sent


def test_an_answer_carries_its_blobs() -> None:
    held, kept = {blob_digest(b"record"): b"record", blob_digest(b"kernel"): b"kernel"}, MemoryBlobs()
    line = encode_answer(RESULT, held)
    assert b"\n" not in line
    assert parse_answer(line, kept) == RESULT
    assert kept.blobs == held


def test_an_answer_with_a_wrong_blob_is_refused() -> None:
    held = {blob_digest(b"record"): b"record", blob_digest(b"kernel"): b"other"}
    with pytest.raises(CorruptEntry, match="a worker sent a blob that is not"):
        parse_answer(encode_answer(RESULT, held), MemoryBlobs())


def test_a_failure_keeps_its_type_line_and_report() -> None:
    sent = UnsealableError("piece p1: a workspace argument", where="model.py:7", hint="do without")
    with pytest.raises(UnsealableError) as caught:
        parse_answer(encode_failure(sent), MemoryBlobs())
    assert (caught.value.message, caught.value.where, caught.value.hint) == (
        sent.message,
        sent.where,
        sent.hint,
    )
    assert "UnsealableError" in caught.value.__notes__[0]


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"not json"])
def test_a_line_that_is_no_answer(line: bytes) -> None:
    with pytest.raises(CorruptEntry):
        parse_answer(line, MemoryBlobs())


@pytest.mark.parametrize(("tasks", "device"), [(0, "cpu"), (1, "cpu"), (3, "cpu"), (5, "cuda")])
def test_few_tasks_take_no_workers(tasks: int, device: str) -> None:
    assert default_jobs(tasks, device) == 1


def test_jobs_are_bounded_by_cores() -> None:
    assert 1 <= default_jobs(10_000, "cpu") <= max(1, len(os.sched_getaffinity(0)) // 2)


# Real workers


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def ignore(_index: int, _result: PieceResult) -> None:
    """No progress."""


def run(tasks: list[PieceTask], store: Store, scratch: Path, on_done: OnDone = ignore) -> list[PieceResult]:
    with Workers(2, scratch, device="cpu", threads=1) as workers:
        return run_tasks(tasks, store, workers=workers, scratch=scratch, on_done=on_done)


def test_no_worker_is_started_for_one_job(scratch: Path) -> None:
    with Workers(1, scratch, device="cpu", threads=1) as workers:
        assert workers.start() == []


def test_workers_start_before_their_tasks_are_known_and_end_with_the_context(scratch: Path) -> None:
    """So that they import the compiler while the parent traces; a run takes those that are there."""
    with Workers(2, scratch, device="cpu", threads=1) as workers:
        started = workers.start()
        assert children_of(os.getpid(), "pwcc.compile.worker") == [process.pid for process in started]
        assert workers.start() == started
    assert [process.returncode for process in started] == [0, 0]


def test_workers_are_killed_if_the_trace_fails(scratch: Path) -> None:
    workers = Workers(2, scratch, device="cpu", threads=1)
    started = workers.start()
    with pytest.raises(UnsealableError), workers:
        raise UnsealableError("no graph")
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_few_kernels_on_a_gpu_are_compiled_without_a_pool() -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_threads(4, "cuda", tuned=False) == 1
    assert default_threads(1, "cuda", tuned=True) == cores
    assert default_threads(1, "cpu", tuned=False) == cores
    assert default_threads(10 * cores, "cpu", tuned=False) == 1


@pytest.mark.slow
def test_a_failed_worker_names_the_piece_the_operation_and_the_line(store: Store, scratch: Path) -> None:
    """And the other worker's task, which would take longer, is not waited for."""
    bad = task("torch.neg", "torch.ops.aten.no_such_operation", name="p1", lines=(None, "model.py:9: y = f(x)"))
    with pytest.raises(
        CorruptEntry, match=r"piece p1 \(n=1\.\.64\): the operation .* does not exist"
    ) as caught:
        run([bad, task("torch.relu", name="p2")], store, scratch)
    assert caught.value.where is not None
    assert "model.py:9" in caught.value.where
    assert children_of(os.getpid(), "pwcc.compile.worker") == []


@pytest.mark.slow
def test_a_progress_callback_that_fails_ends_the_run(store: Store, scratch: Path) -> None:
    """Not only a worker's failure does: here the store that keeps a finished piece is full."""

    def full(_index: int, _result: PieceResult) -> None:
        raise OSError(28, "No space left on device")

    tasks = [task(target, name=target, cpu=True) for target in ("torch.relu", "torch.neg")]
    with pytest.raises(OSError, match="No space left"):
        run(tasks, store, scratch, on_done=full)
    assert children_of(os.getpid(), "pwcc.compile.worker") == []


# The program, ended early


def children_of(parent: int, text: str) -> list[int]:
    """Processes below ``parent`` whose command line holds ``text``."""
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if int(fields[1]) == parent and fields[0] != "Z" and text in command:
                found.append(int(status.parent.name))
    return found


def processes_in(folder: Path) -> list[str]:
    """Command lines of living processes that name ``folder`` or have it as their temporary directory."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            about = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in about:
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


Compiling = subprocess.Popen[str]


@pytest.fixture
def compiling(machine: Machine, tmp_path: Path) -> Iterator[Callable[..., Compiling]]:
    """Start a compile of 3 pieces and return when their compilation has begun."""
    running: list[Compiling] = []

    def start(*argv: str) -> Compiling:
        model = ["--model", "llama-tiny", "--arg", "layers=2", "--device", "cpu", "--cpu-baseline", "x86-64-v3"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pwcc", "compile", *model, "--cache-dir", str(tmp_path / "cache"), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(machine.env),
            cwd=machine.folder("work"),
            start_new_session=True,
        )
        running.append(process)
        until(process.stderr, r"compile 0 of 3")
        return process

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(stream: IO[str] | None, pattern: str) -> None:
    assert stream is not None
    seen: list[str] = []
    for line in stream:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail(f"{pattern} was not printed: {''.join(seen)}")


def wait_for(condition: Callable[[], object], *, timeout_s: float = 60) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "timed out"
        time.sleep(0.02)


def expect_nothing_left(machine: Machine, cache: Path) -> None:
    """No entry, no staged file, no temporary file, no process; finished pieces may stay."""
    assert list((cache / "v1/entries").rglob("*")) == []
    assert list((cache / "v1/tmp").iterdir()) == []
    for part in ("home", "tmp", "caches"):
        assert [path for path in machine.folder(part).rglob("*") if path.is_file()] == [], part
    wait_for(lambda: processes_in(machine.root) == [], timeout_s=10)


@pytest.mark.slow
def test_a_killed_worker_fails_the_command(
    compiling: Callable[..., Compiling], machine: Machine, tmp_path: Path
) -> None:
    process = compiling("--jobs", "2")
    wait_for(lambda: len(children_of(process.pid, "pwcc.compile.worker")) == 2)
    began = time.monotonic()
    os.kill(children_of(process.pid, "pwcc.compile.worker")[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode == 1
    assert re.search(r"error: piece p\d \(n=1\.\.8192\): the compile worker was killed by SIGKILL", err)
    assert "use fewer --jobs" in err
    expect_nothing_left(machine, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_it_at_once_and_leaves_nothing(
    compiling: Callable[..., Compiling],
    machine: Machine,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    said: str,
    jobs: str,
) -> None:
    process = compiling("--jobs", jobs)
    # with a compiler at work, wherever it runs
    wait_for(lambda: any("cc1plus" in command for command in processes_in(machine.root)))
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert time.monotonic() - began < 30
    assert f"{said}, nothing was published" in err
    assert "Traceback" not in err
    expect_nothing_left(machine, tmp_path / "cache")


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(
    compiling: Callable[..., Compiling], machine: Machine, tmp_path: Path
) -> None:
    process = compiling("--jobs", "2")
    wait_for(lambda: len(children_of(process.pid, "pwcc.compile.worker")) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: processes_in(machine.root) == [])
    assert list((tmp_path / "cache/v1/entries").rglob("*")) == []
