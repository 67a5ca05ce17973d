"""Store: when an entry was last used, as the time of an empty file outside the entry, in ``v1/used/``.

Stamps are opt-in (``PWCC_TRACK_USE=1``, ``pwcc.load(track_use=True)``) because a load otherwise writes
nothing. They are best effort: a read-only cache, a full disk or another user's file is no error. Without a
stamp the time at which the manifest was published or copied counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pwcc.cache import folders, layout
from pwcc.cache.ids import KEY_PATTERN, EntryKey
from pwcc.cache.store import Store

VARIABLE: Final = "PWCC_TRACK_USE"


def tracking(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` asks for stamps: PWCC_TRACK_USE is set, to other than 0 or nothing."""
    return environ.get(VARIABLE, "0") not in ("", "0")


def record(store: Store, key: EntryKey, *, asked: bool = False) -> None:
    """Stamp an entry that was just used, if the caller or the environment asks for it."""
    if asked or tracking(os.environ):
        stamp(store, key)


def folder(store: Store) -> Path:
    """Return where stamps lie, whether or not it exists."""
    return store.root / layout.VERSION / "used"


def stamp(store: Store, key: EntryKey) -> bool:
    """Record that an entry is used now, by the file system's clock; return whether that worked."""
    path = folder(store) / key
    with contextlib.suppress(OSError):
        folders.make(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)
        return True
    return False


def stamps(store: Store) -> dict[EntryKey, float]:
    """Return the time of every stamp, in seconds since the epoch."""
    found: dict[EntryKey, float] = {}
    with contextlib.suppress(OSError), os.scandir(folder(store)) as names:
        for item in names:
            if KEY_PATTERN.fullmatch(item.name):
                with contextlib.suppress(OSError):
                    found[EntryKey(item.name)] = item.stat(follow_symlinks=False).st_mtime
    return found


def forget(store: Store, key: EntryKey) -> None:
    """Remove an entry's stamp, best effort."""
    with contextlib.suppress(OSError):
        (folder(store) / key).unlink()
