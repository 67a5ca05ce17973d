"""Artifact: what the processes that compile beside another one have in common, on both ends of their pipes."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from typing import IO

from pwcc.cache.errors import PieceCompileError, PwccError
from pwcc.cache.strict import Json

# --- the child's end


def end_with(parent: int) -> None:
    """End this process and its compilers, its group, once the parent is gone: a task can take minutes."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def answers_channel() -> IO[bytes]:
    """Return stdout for answers, and send compilers' own prints to stderr: the channel holds nothing else."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def failure_to_json(error: PwccError) -> dict[str, Json]:
    """Return an expected failure as the parent reads it with :func:`failure_of`."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "where": error.where,
        "hint": error.hint,
        "report": "".join(traceback.format_exception(error)),
    }


# --- the parent's end


def failure_of(answer: Mapping[str, object]) -> PwccError:
    """Return the error that a child reported, with its own report as a note."""
    from pwcc.cache import errors

    kind = getattr(errors, str(answer["error"]), PieceCompileError)
    where, hint = answer.get("where"), answer.get("hint")
    error: PwccError = kind(
        str(answer["message"]),
        where=None if where is None else str(where),
        hint=None if hint is None else str(hint),
    )
    error.add_note(str(answer.get("report", "")))
    return error


def ending(code: int) -> str:
    """Say how a child ended, by its exit code as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended with status {code}"
    return f"was killed by {signal.Signals(-code).name}"
