"""Store: one compile of a model at a time: wait for another process that does it, and say for whom."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from pwcc.cache.errors import LockTimeout, MissingBlob
from pwcc.cache.failpoints import failpoint
from pwcc.cache.store import Store
from pwcc.compile.report import OnProgress, Progress

T = TypeVar("T")

SILENCE_S: Final = 1.0  # how long to wait without a word
REPORT_S: Final = 15.0  # between words
ATTEMPTS: Final = 3
NO_LOCKS: Final = (
    "the file system of the cache has no locks: another process may compile the same model at the same time; "
    "what is published is whole all the same"
)


@contextlib.contextmanager
def taking_turns(store: Store, key: str, tell: OnProgress, *, timeout_s: float | None) -> Iterator[bool]:
    """Hold the lock of a lookup key; yield False where the file system has no locks.

    Waits for ``timeout_s`` seconds, without limit if None. A holder that dies blocks nobody.

    Raises:
        LockTimeout: another process held the lock for longer; says which, as far as is known.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    pause = SILENCE_S
    with contextlib.ExitStack() as held:
        while True:
            left = pause if end is None else max(0.0, end - time.monotonic())
            try:
                locked = held.enter_context(store.lock(key, timeout_s=min(pause, left)))
                break
            except LockTimeout as error:
                if end is not None and time.monotonic() >= end:
                    who = _who(store, key)
                    raise LockTimeout(
                        f"another process compiled this model for longer than {timeout_s:g} s ({who})",
                        where=error.where,
                        hint=error.hint,
                    ) from None
                tell(
                    Progress(
                        "lock",
                        detail=f"waiting for another process that compiles this model: {_who(store, key)}",
                    )
                )
                pause = REPORT_S
        failpoint("compile.locked")
        yield locked


def _who(store: Store, key: str) -> str:
    holder = store.lock_holder(key)
    return "unknown" if holder is None else holder.describe(time.time())


def keeping_up(compile_: Callable[[], T], tell: OnProgress) -> T:
    """Return ``compile_()``; again, at most twice, where the cache was emptied under it before it published.

    What is still there is not compiled again.

    Raises:
        MissingBlob: that happened three times.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return compile_()
        except MissingBlob as error:
            tell(
                Progress(
                    "compile", detail=f"the cache lost files ({error.message}); trying again, {attempt} of 2"
                )
            )
    return compile_()
