"""Store: advisory locks, so that two processes do not compile the same entry at the same time.

A lock only saves work: publishing is atomic without it. Where a file system has no locks the block
runs without one, and says so through the value it yields. The kernel drops the locks of a process that
dies, so a dead holder blocks nobody. Readers take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import owners, strict
from pwcc.cache.atomic import os_errors, read_file
from pwcc.cache.errors import LockTimeout, StoreError
from pwcc.cache.owners import Owner

NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class Holder:
    """Who took a lock, and when by its own clock (seconds since the epoch)."""

    owner: Owner
    since: int

    def describe(self, now: float) -> str:
        """Return words for a person: the process where it is of this host, and how long it has held."""
        who = f"process {self.owner.pid}" if self.owner.is_local else "a process of another host"
        seconds = int(now) - self.since
        return who if seconds < 0 else f"{who}, for {seconds} s"  # below 0: the clocks disagree


@contextlib.contextmanager
def file_lock(path: Path, *, timeout_s: float = -1) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; yield True when held, False where there are no locks.

    ``timeout_s`` is in seconds; -1 waits without limit. Who holds it is written beside the lock, for
    :func:`holder`.

    Raises:
        LockTimeout: another process held the lock for longer than ``timeout_s``. StoreError: the lock file
            cannot be opened.
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
        _require_plain(path)  # filelock would empty what a link names
        try:
            lock.acquire()
            held = True
        except filelock.Timeout:  # an OSError too
            found = holder(path)
            who = "another process" if found is None else found.describe(time.time())
            raise LockTimeout(
                f"another process held the lock for more than {timeout_s:g} s ({who})",
                where=str(path),
                hint="wait for the other compile to end, or raise --lock-timeout",
            ) from None
        except NotImplementedError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    try:
        if held:
            _sign(path)
        yield held
    finally:
        if held:
            with contextlib.suppress(OSError):
                _holder_path(path).unlink()
            lock.release()


def holder(path: Path) -> Holder | None:
    """Return who holds the lock ``path``, as far as it is written there; best effort."""
    try:
        data = read_file(_holder_path(path), max_bytes=4096)
        fields = strict.Fields(strict.loads(data, where="holder"), "holder")
        owner, since = owners.parse(fields.str_("owner")), fields.int_("since")
    except (OSError, StoreError):
        return None
    if owner is None or owner.is_alive() is False:
        return None
    return Holder(owner, since)


def _sign(path: Path) -> None:
    data = strict.canonical({"owner": str(owners.current()), "since": int(time.time())})
    place = _holder_path(path)
    with contextlib.suppress(OSError):  # a new file: what lies there may be a crashed holder's, or a link
        place.unlink(missing_ok=True)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def _require_plain(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise StoreError("expected a lock file, got a link, folder, pipe or device", where=str(path))


def _holder_path(path: Path) -> Path:
    return path.with_suffix(".holder")
