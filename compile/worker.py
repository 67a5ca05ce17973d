"""Artifact: a compile worker process: one task per line on stdin, one answer per line on stdout."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from pwcc.cache.errors import PwccError
from pwcc.compile.piece_compiler import MemoryBlobs, PieceTask, compile_piece
from pwcc.compile.torch_private.inductor import private_caches, warm_up
from pwcc.compile.workers import encode_answer, encode_failure


def main() -> int:
    """Serve tasks until stdin closes. Arguments: scratch, tuning lock, parent process, device."""
    scratch, tune_lock, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4]
    threading.Thread(target=_end_with, args=(int(sys.argv[3]),), daemon=True).start()
    # Compilers print; the answers' channel must hold nothing else.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with private_caches(scratch):
        warm_up(device)
    with answers:
        for line in sys.stdin.buffer:
            blobs = MemoryBlobs()
            try:
                result = compile_piece(PieceTask.from_bytes(line), blobs, scratch=scratch, tune_lock=tune_lock)
                answer = encode_answer(result, blobs.blobs)
            except PwccError as error:
                answer = encode_failure(error)
            answers.write(answer + b"\n")
            answers.flush()
    return 0


def _end_with(parent: int) -> None:
    """End this process and its compilers, its group, once the parent is gone: a task can take minutes."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    status = main()
    # Not sys.exit: Inductor's own pool takes seconds to shut down at exit, and nothing is left to save.
    os._exit(status)
