"""How a command ends when it fails: one message on stderr, the error as JSON if asked, an exit code.

Exit codes: 0 ok, 1 failure, 2 usage, 3 miss, 4 an entry matches but this host lacks something it
requires, 129 hung up, 130 interrupted, 141 the reader of stdout left, 143 terminated.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from pwcc.cache.errors import CacheMiss, PwccError
from pwcc.cache.strict import Json
from pwcc.cli import output
from pwcc.cli.invocation import Invocation

INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGHUP, signal.SIGTERM)
TERMINATED: Final = tuple(128 + number for number in _SIGNALS)


def report(error: Exception, invocation: Invocation) -> int:
    """Print ``error`` as the invocation asks and return the exit code."""
    code = error.exit_code if isinstance(error, PwccError) else 1
    if invocation.debug:
        output.word("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, PwccError | OSError):  # a full disk or a missing permission is nobody's bug
        output.word(f"error: {error}")
    else:
        output.word(f"error: {type(error).__name__}: {_first_line(error)}")
        for note in getattr(error, "__notes__", ()):
            output.word(str(note))
        output.word("this is a bug in pwcc: run with --debug and report what it prints")
    if invocation.json:
        output.data_json({"error": _as_json(error, code)})
    return code


def report_interrupt(code: int = INTERRUPTED) -> int:
    """Say that nothing was left behind and return the exit code."""
    output.word(f"{'interrupted' if code == INTERRUPTED else 'terminated'}, nothing was published")
    return code


@contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGHUP and SIGTERM unwind the stack as Ctrl-C does, so that no process or file is left behind.

    Signals that the caller has had ignored stay so (nohup).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _as_json(error: Exception, code: int) -> dict[str, Json]:
    found: dict[str, Json] = {"type": type(error).__name__, "exit_code": code}
    if isinstance(error, PwccError):
        found |= {"message": error.message, "where": error.where, "hint": error.hint}
    else:
        found |= {"message": str(error), "where": None, "hint": None}
    if isinstance(error, CacheMiss):
        found["reasons"] = list(error.reasons)
    return found
