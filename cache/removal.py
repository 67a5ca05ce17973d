"""Store: how one entry, piece record or blob is removed while others read and write the same cache.

Nothing is deleted in place. An entry is first renamed away: from then on it is not there, and a crash leaves
a folder in ``v1/tmp`` for the sweep. Its blobs go later, when no other entry needs them.

A blob may be found by a writer (who then relies on it) at the very moment at which a collection has judged
it to be old. The protocol needs no lock: a writer *renews* the time of a file that it relies on, and
notices when it is gone; a remover renames the file away, looks at the time again, and puts the file back
when it was renewed meanwhile. Publishing renews every blob of the entry.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from pwcc.cache import activity, atomic, costs, last_use, layout, owners, pins, tuning
from pwcc.cache.store import EntryRef, Store

READ = "a reader holds it"


def remove_entry(store: Store, ref: EntryRef, *, force: bool = False) -> str | None:
    """Remove an entry and what lies beside it; return why it stays, or None when it is gone.

    It stays while a reader holds it, except with ``force``. One that another process removed is gone too.

    Raises:
        StoreError: the directory cannot be changed.
    """
    with activity.without_readers(ref) as free, atomic.os_errors("removing an entry", ref.path):
        if not free and not force:
            return READ
        if not _move(ref.path, aside := store.tmp / owners.staging_name()):
            return None
    _delete(aside)
    _delete(store.plans / ref.entry_key)
    tuning.FILES.forget(store, ref.entry_key)
    costs.FILES.forget(store, ref.entry_key)
    last_use.forget(store, ref.entry_key)
    pins.unpin(store, ref.entry_key)
    with contextlib.suppress(OSError):  # others of the same lookup key, or one that is just published
        ref.path.parent.rmdir()
    return None


def remove_old(path: Path, *, tmp: Path, before_s: float) -> bool:
    """Remove a file that was not written or renewed since ``before_s``; return whether it is gone.

    ``before_s`` is in seconds since the epoch.

    Raises:
        StoreError: the directory cannot be changed.
    """
    with atomic.os_errors("removing a file", path):
        try:
            if path.lstat().st_mtime >= before_s:
                return False
        except FileNotFoundError:
            return True
        aside = tmp / owners.staging_name()
        if not _move(path, aside):
            return True
        if aside.lstat().st_mtime >= before_s:  # a writer renewed it between the two looks
            _put_back(aside, path)
            return False
        aside.unlink()
    return True


def remove_set_aside(store: Store, *, before_s: float) -> int:
    """Remove what lies in quarantine since before ``before_s``, best effort; return how many names."""
    folder = store.root / layout.VERSION / "quarantine"
    count = 0
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = path.lstat()
            if max(found.st_mtime, found.st_ctime) < before_s:
                _delete(path)
                count += 1
    return count


def _move(path: Path, to: Path) -> bool:
    try:
        os.rename(path, to)  # noqa: PTH104 - one seam for tests to break
    except FileNotFoundError:
        return False
    return True


def _put_back(aside: Path, path: Path) -> None:
    """Restore a file unless a writer has made it again, which is as good and may be newer."""
    try:
        os.link(aside, path, follow_symlinks=False)
    except FileExistsError:
        aside.unlink()
    except OSError:  # a file system without links
        os.rename(aside, path)  # noqa: PTH104
    else:
        aside.unlink()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
