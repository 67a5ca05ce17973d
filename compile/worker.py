"""Artifact: a compile worker process: one task per line on stdin, one answer per line on stdout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pwcc.cache.errors import PwccError
from pwcc.compile.children import answers_channel, end_with
from pwcc.compile.piece_compiler import MemoryBlobs, PieceTask, compile_piece
from pwcc.compile.torch_private.inductor import private_caches, warm_up
from pwcc.compile.workers import encode_answer, encode_failure


def main() -> int:
    """Serve tasks until stdin closes. Arguments: scratch, tuning lock, parent process, device."""
    scratch, tune_lock, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4]
    end_with(int(sys.argv[3]))
    answers = answers_channel()
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


if __name__ == "__main__":
    status = main()
    # Not sys.exit: Inductor's own pool takes seconds to shut down at exit, and nothing is left to save.
    os._exit(status)
