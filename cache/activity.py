"""Store: who is at work in a cache now: readers that hold an entry, writers that hold a lock.

Both are advisory and best effort. Where a file system has no locks, a reader is not seen (a loaded entry
lives on without its files), and writers are taken to be at work, so that nothing of theirs is collected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pwcc.cache import holds, layout
from pwcc.cache.store import EntryRef, Store

_HELD: Final = {errno.EAGAIN, errno.EACCES}
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def without_readers(ref: EntryRef) -> Iterator[bool]:
    """Keep readers from marking an entry inside the block; yield False where one has marked it already."""
    try:
        descriptor = os.open(ref.path, _FLAGS | os.O_DIRECTORY)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor) is not False
    finally:
        os.close(descriptor)


def is_read(ref: EntryRef) -> bool:
    """Return whether a reader is seen to hold an entry; see :mod:`pwcc.cache.holds`."""
    return holds.is_held(ref.path) is True


@contextlib.contextmanager
def writing(store: Store) -> Iterator[None]:
    """Be seen as a writer inside the block, beside others; best effort. A compile is seen by its lock."""
    path = store.root / layout.VERSION / "locks" / "import.lock"
    try:
        descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def writers_at_work(store: Store) -> bool:
    """Return whether a compile or import holds a lock of this store, or whether that cannot be known."""
    folder = store.root / layout.VERSION / "locks"
    try:
        with os.scandir(folder) as found:
            return any(_is_taken(Path(item.path)) for item in found if item.name.endswith(".lock"))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _is_taken(path: Path) -> bool:
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return _lock(descriptor) is not True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Try to lock alone; return whether it worked, None where the file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True
