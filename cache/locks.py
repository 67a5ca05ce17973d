"""Store: advisory locks, so that two processes do not compile the same entry at the same time.

A lock only saves work: publishing is atomic without it. Where a file system has no locks the block
runs without one, and says so through the value it yields.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pwcc.cache.atomic import os_errors
from pwcc.cache.errors import StoreError

NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS}


@contextlib.contextmanager
def file_lock(path: Path, *, timeout_s: float = -1) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; yield True when held, False where there are no locks.

    ``timeout_s`` is in seconds; -1 waits without limit.

    Raises:
        StoreError: another process held the lock for longer than ``timeout_s``, or the lock file cannot be
            opened.
    """
    import filelock  # 30 ms that a command which only reads must not pay

    # No mode is passed: with one, filelock would set it against the umask.
    if hasattr(filelock.UnixFileLock, "fallback_to_soft"):
        # Since 3.30 a missing flock would be replaced by a lock file that outlives a crash.
        lock = filelock.UnixFileLock(path, timeout=timeout_s, fallback_to_soft=False)
    else:
        lock = filelock.UnixFileLock(path, timeout=timeout_s)
    held = False
    with os_errors("taking a lock", path):
        try:
            lock.acquire()
            held = True
        except filelock.Timeout:  # an OSError too
            raise StoreError(
                f"another process held the lock for more than {timeout_s:g} s",
                where=str(path),
                hint="wait for the other compile to end, or raise the timeout",
            ) from None
        except NotImplementedError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    try:
        yield held
    finally:
        if held:
            lock.release()
