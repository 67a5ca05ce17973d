"""Store: remove what crashed processes left in ``v1/tmp``, and nothing that a living one still writes.

A leftover is removed when it is old enough and its owner is gone. The owner is gone when it was a process
of this host that no longer runs, or when nobody holds the lock on the file and it is older than
:data:`FOREIGN_AGE_S` (another host's clock and locks may not be seen from here). Removing one too many
would only make its writer fail or try again: nothing below ``tmp`` is ever read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import folders, owners

FOREIGN_AGE_S: Final = 86400.0
FUTURE_S: Final = 3600.0  # clocks of hosts that share a cache may differ by this much
BUDGET_S: Final = 0.05  # of a sweep in passing


@dataclass(frozen=True)
class Swept:
    """What a sweep did: names removed, names kept, and whether it stopped because its time was up."""

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    complete: bool = True


def sweep(
    tmp: Path,
    *,
    now: float,
    budget_s: float = BUDGET_S,
    remove: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Swept:
    """Remove leftovers below ``tmp`` for at most ``budget_s`` seconds; never raises an OSError.

    ``now`` is in seconds since the epoch. With ``remove=False`` it only says what it would remove.
    """
    end = clock() + budget_s
    removed: list[str] = []
    kept: list[str] = []
    if not folders.is_real(tmp):
        return Swept()
    try:
        names = sorted(os.listdir(tmp))  # noqa: PTH208 - names, not paths
    except OSError:
        return Swept()
    for name in names:
        if clock() > end:
            return Swept(tuple(removed), tuple(kept), complete=False)
        path = tmp / name
        if is_abandoned(path, now=now) and (not remove or _remove(path)):
            removed.append(name)
        else:
            kept.append(name)
    return Swept(tuple(removed), tuple(kept))


def is_abandoned(path: Path, *, now: float) -> bool:
    """Tell whether nobody will finish what lies at ``path``."""
    try:
        age = now - path.lstat().st_mtime
    except OSError:
        return False
    owner = owners.parse(path.name)
    alive = None if owner is None else owner.is_alive()
    if alive is False:
        return True  # no age needed: the process that made it has ended, and its number is not in use
    if alive:
        return False
    # A time far in the future says nothing about the age: the clock was wrong, then or now.
    old = age >= FOREIGN_AGE_S or age < -FUTURE_S
    return old and not _is_locked(path)


def _is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock on a file or folder; False where there are no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    return not os.path.lexists(path)
