"""Graph: capture plans in a store: ``v1/plans/<entry-key>/<name>.json``, mutable and outside what is signed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, folders, strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import KEY_PATTERN, EntryKey
from pwcc.cache.store import Store
from pwcc.capture.plan import MAX_BYTES, CapturePlan

DEFAULT_NAME: Final = "default"


def plan_path(store: Store, entry_key: EntryKey, name: str = DEFAULT_NAME) -> Path:
    """Return where a plan lies, whether or not it exists."""
    if not KEY_PATTERN.fullmatch(entry_key):
        raise CorruptEntry(f"expected an entry key of 32 hex digits, got {entry_key[:40]!r}")
    return store.plans / entry_key / f"{strict.as_name(name, 'plan name')}.json"


def save_plan(store: Store, plan: CapturePlan, name: str = DEFAULT_NAME) -> Path:
    """Write a plan, whole or not at all, over one of that name; the last writer wins. Return its file.

    Raises:
        StoreError: the store cannot be written; says why. The caller may go on without.
    """
    path = plan_path(store, plan.entry_key, name)
    with atomic.os_errors("saving a capture plan", path):
        folders.make(path.parent, parents=True)
        atomic.write_replace(path, plan.to_bytes() + b"\n", tmp=path.parent)
    return path


def load_plan(store: Store, entry_key: EntryKey, name: str = DEFAULT_NAME) -> CapturePlan | None:
    """Return the plan of that name, or None. Plans are not signed: they choose sizes, never code.

    Raises:
        CorruptEntry: it is damaged, or of another entry. StoreError: it cannot be read.
    """
    path = plan_path(store, entry_key, name)
    with atomic.os_errors("reading a capture plan", path):
        try:
            data = strict.read_bounded(path, max_bytes=MAX_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
    plan = CapturePlan.from_bytes(data, where=str(path))
    if plan.entry_key != entry_key:
        raise CorruptEntry(
            f"expected a plan for entry {entry_key}, got one for {plan.entry_key}",
            where=str(path),
            hint="remove the file, and capture again",
        )
    return plan
