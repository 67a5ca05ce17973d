"""Store: a reader's mark on the entry that it uses, so that ``pwcc gc`` leaves the entry alone.

A mark is a shared lock on a read-only descriptor of the entry's folder. It writes nothing, is best effort
(no lock, no mark, no error), and ends with the process. One process holds one descriptor per entry,
however often it loads it, and at most :data:`MAX_HOLDS`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Final

MAX_HOLDS: Final = 256
_TRIES: Final = 5
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Identity = tuple[int, int]

_lock = threading.Lock()
_holds: weakref.WeakValueDictionary[_Identity, Hold] = weakref.WeakValueDictionary()


class Hold:
    """One entry's folder, open; marked where the file system has locks. Ends when nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        """Take over ``descriptor``."""
        self.is_marked = False
        self._finish = weakref.finalize(self, os.close, descriptor)
        self._finish.atexit = False  # the kernel closes it, and a fork's exit must not
        for _ in range(_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # a collection looks whether somebody reads; that takes microseconds
                time.sleep(0.001)
            except OSError:
                return
            else:
                self.is_marked = True
                return


def hold(path: Path) -> Hold | None:
    """Mark the entry's folder ``path`` as in use for as long as the answer lives.

    None where it cannot be opened, or where this process holds too many. Never raises an OSError.
    """
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
        with _lock:
            known = _holds.get((found.st_dev, found.st_ino))
            if known is not None:
                return known
            if len(_holds) >= MAX_HOLDS:
                return None
            descriptor = os.open(path, _FLAGS)
            found = os.fstat(descriptor)
            made = Hold(descriptor)
            _holds[found.st_dev, found.st_ino] = made
            return made
    except OSError:
        return None


def is_held(path: Path) -> bool | None:
    """Tell whether a process of any user marks the folder as in use; None where that cannot be known.

    A folder that is not there is not held.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        os.close(descriptor)
    return False
