"""Artifact: a compile beside a serving process: a child that compiles, a thread that takes what it made.

The child gets the module without its weights (see :mod:`pwcc.compile.module_transfer`), compiles into the
cache, and names each entry in one line; the thread loads that entry here and hands it over. No request waits
for either. The child ends with this process, and this process does not wait for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import PieceCompileError
from pwcc.cache.store import default_root
from pwcc.cache.telemetry import logger_of
from pwcc.compile.children import ending, failure_of
from pwcc.compile.input_forms import Spec
from pwcc.compile.levels import CompileConfig
from pwcc.compile.load import load
from pwcc.compile.module_transfer import Parcel, pack
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.workers import python

if TYPE_CHECKING:
    from pwcc.compile.compiled_model import CompiledModel

logger = logging.getLogger("pwcc")


@dataclass(frozen=True)
class Task:
    """What to compile: the forward's inputs, and an entry per tuple of static sizes."""

    inputs: tuple[Spec, ...]
    stages: tuple[tuple[int, ...], ...]
    config: CompileConfig


class Background:
    """One compile beside this process. ``on_entry`` and ``on_end`` are called in its thread.

    ``on_entry(self, compiled)`` for each entry, in the task's order; ``on_end(self, None or the error)``
    once, unless it was stopped.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        *,
        on_entry: Callable[[Background, CompiledModel], None],
        on_end: Callable[[Background, Exception | None], None],
    ) -> None:
        self._module = module
        self._task = task
        self._on_entry = on_entry
        self._on_end = on_end
        self._modes = numeric_state()  # those of the calling thread: what a load for its calls is looked up by
        self._thread = threading.Thread(target=self._run, name="pwcc-compile", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._home = os.getpid()

    def start(self) -> None:
        """Start; returns at once."""
        _living.add(self)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def stop(self) -> None:
        """End the child and its compilers; nothing is reported any more. Entries that it published stay."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is not None and os.getpid() == self._home:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._compile()
        except Exception as caught:  # noqa: BLE001 (reported: nobody waits for this thread)
            error = caught
        finally:
            _living.discard(self)
        if not self._stopped:
            self._on_end(self, error)

    def _compile(self) -> None:
        config = self._task.config
        root = Path(config.cache_dir) if config.cache_dir is not None else default_root()
        sent = replace(self._task, config=replace(config, cache_dir=root.absolute()))
        message = pack(Parcel(self._module, sent.inputs, sent.stages, sent.config, self._modes))
        with tempfile.TemporaryFile() as log:
            with self._lock:
                if self._stopped:
                    return
                self._process = process = subprocess.Popen(  # noqa: S603 (our own module)
                    [*python(), "-m", "pwcc.compile.background_worker", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    process_group=0,  # so that its compilers end with it
                )
            try:
                self._converse(process, message, sent, log)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with suppress(OSError):
                            pipe.close()

    def _converse(self, process: subprocess.Popen[bytes], message: bytes, task: Task, log: IO[bytes]) -> None:
        if process.stdin is None or process.stdout is None:
            raise PieceCompileError("the process of a compile has no pipes")
        with suppress(OSError):  # it ended: what it wrote says why
            process.stdin.write(message)
            process.stdin.close()
        for _ in task.stages:
            line = process.stdout.readline()
            if self._stopped:
                return
            if not line:
                raise _died(process, log)
            answer = strict.loads(line, where="the process of a compile")
            if not isinstance(answer, dict):
                raise PieceCompileError("the process of a compile gave no answer")
            if "error" in answer:
                raise failure_of(answer)
            options = task.config.load_options()
            compiled = load(self._module, entry=str(answer["entry"]), **options)
            if self._stopped:
                return
            logger_of("compile").info("entry %s, made by a process beside, serves from now on", answer["entry"])
            self._on_entry(self, compiled)


def _died(process: subprocess.Popen[bytes], log: IO[bytes]) -> PieceCompileError:
    how = ending(process.wait())
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-20:]
    error = PieceCompileError(
        f"the process of a compile {how}",
        hint="if it was killed for memory, compile beforehand: pwcc compile, or pwcc.precompile",
    )
    error.add_note("its stderr ended with:\n" + "\n".join(lines))
    return error


_living: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for running in list(_living):
        running.stop()
