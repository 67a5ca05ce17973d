"""Store: pins, which keep an entry from every collection; they lie outside entries, in ``v1/pins/``.

One small JSON file per entry key. A pin is a wish of this cache's owner, not a part of the entry: it is not
signed, and neither exported nor imported.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, folders, layout, strict
from pwcc.cache.errors import StoreError, UsageError
from pwcc.cache.ids import KEY_PATTERN, EntryKey
from pwcc.cache.store import EntryRef, Store

SCHEMA: Final = 1
MAX_NOTE: Final = 500  # characters
_MAX_BYTES: Final = 16 * 1024
_SUFFIX: Final = ".json"


def folder(store: Store) -> Path:
    """Return where pins lie, whether or not it exists."""
    return store.root / layout.VERSION / "pins"


def pin(store: Store, ref: EntryRef, *, note: str = "") -> None:
    """Pin an entry; a pin that is there already gets the new note.

    Raises:
        UsageError: a note that is not printable, or longer than 500 characters. StoreError: cannot write.
    """
    if len(note) > MAX_NOTE or not note.isprintable():
        raise UsageError(f"expected a note of at most {MAX_NOTE} printable characters, got {note[:60]!r}")
    layout.require_real(store.root)
    path = _path(store, ref.entry_key)
    with atomic.os_errors("pinning an entry", path):
        folders.make(path.parent)
        data = strict.canonical({"schema": SCHEMA, "note": note})
        atomic.write_replace(path, data, tmp=store.tmp)


def unpin(store: Store, key: EntryKey) -> bool:
    """Remove a pin; return whether there was one."""
    layout.require_real(store.root)
    path = _path(store, key)
    with atomic.os_errors("removing a pin", path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
    return True


def pinned(store: Store) -> frozenset[EntryKey]:
    """Return the keys of all pinned entries. A pin counts by its name, also when its file is damaged."""
    place = folder(store)
    with atomic.os_errors("listing pins", place):
        try:
            names = os.listdir(place)  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return frozenset()
    keys = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return frozenset(EntryKey(key) for key in keys if KEY_PATTERN.fullmatch(key))


def is_pinned(store: Store, key: EntryKey) -> bool:
    """Return whether one entry is pinned now."""
    return os.path.lexists(_path(store, key))


def note_of(store: Store, key: EntryKey) -> str:
    """Return a pin's note; empty when it has none or cannot be read."""
    with contextlib.suppress(StoreError, OSError):
        data = strict.read_bounded(_path(store, key), max_bytes=_MAX_BYTES)
        fields = strict.Fields(strict.loads(data, where="pin"), "pin")
        fields.int_("schema", low=1, high=SCHEMA)
        note = fields.item("note", strict.as_text)
        fields.done()
        return note
    return ""


def _path(store: Store, key: EntryKey) -> Path:
    return folder(store) / f"{strict.as_key(key, 'pin')}{_SUFFIX}"
