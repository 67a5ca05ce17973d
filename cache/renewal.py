"""Store: what a compile under ``PWCC_RECACHE`` replaces: the entry that lies where its own is to be."""

from __future__ import annotations

from pathlib import Path

from pwcc.cache.errors import StoreError
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.switches import RECACHE


def set_aside_other(store: Store, manifest: Manifest) -> Path | None:
    """Set the entry of a manifest's keys aside, if there is one with other contents; return where it lies.

    A published entry is never overwritten; it moves to quarantine, where readers that hold it go on. None
    where there is none, where it is the same byte for byte, or in a lower layer.
    """
    wanted = manifest.serialise()

    def differs(ref: EntryRef) -> bool:
        try:
            return store.read_manifest_bytes(ref) != wanted
        except StoreError:
            return True

    ref = store.entry_ref(manifest.lookup_key, manifest.entry_key)
    if not ref.path.is_dir() or not differs(ref):
        return None
    return store.quarantine(ref, f"replaced under {RECACHE}", is_damaged=differs)
