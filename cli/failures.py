"""How a command ends when it fails: one message on stderr, the error as JSON if asked, an exit code.

Exit codes: 0 ok, 1 failure, 2 usage, 3 miss, 4 an entry matches but this host lacks something it
requires, 130 interrupted, 141 the reader of stdout left.
"""

from __future__ import annotations

import traceback
from typing import Final

from pwcc.cache.errors import CacheMiss, PwccError
from pwcc.cache.strict import Json
from pwcc.cli import output
from pwcc.cli.invocation import Invocation

INTERRUPTED: Final = 130


def report(error: Exception, invocation: Invocation) -> int:
    """Print ``error`` as the invocation asks and return the exit code."""
    code = error.exit_code if isinstance(error, PwccError) else 1
    if invocation.debug:
        output.word("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, PwccError | OSError):  # a full disk or a missing permission is nobody's bug
        output.word(f"error: {error}")
    else:
        output.word(f"error: {type(error).__name__}: {_first_line(error)}")
        output.word("this is a bug in pwcc: run with --debug and report what it prints")
    if invocation.json:
        output.data_json({"error": _as_json(error, code)})
    return code


def report_interrupt() -> int:
    """Say that nothing was left behind and return the exit code."""
    output.word("interrupted, nothing was published")
    return INTERRUPTED


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
