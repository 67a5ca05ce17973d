"""Store: where entries lie, and which names in a listing are entries."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.ids import KEY_PATTERN, EntryKey, LookupKey

MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, order=True)
class EntryRef:
    """One entry's place: its keys and its directory."""

    lookup_key: LookupKey
    entry_key: EntryKey
    path: Path

    @property
    def manifest(self) -> Path:
        """The manifest file."""
        return self.path / MANIFEST


def check_keys(ref: EntryRef, lookup: LookupKey, entry: EntryKey) -> None:
    """Raise CorruptEntry unless a manifest's keys are the names of the directories it lies in."""
    if (lookup, entry) != (ref.lookup_key, ref.entry_key):
        raise CorruptEntry(
            f"expected the manifest of {ref.lookup_key}/{ref.entry_key}, got that of {lookup}/{entry}",
            where=str(ref.manifest),
            hint="the entry was moved or renamed by hand",
        )


def key_names(folder: Path) -> list[str]:
    """Return the sorted names in ``folder`` that are keys; none when it does not exist or is a link.

    Raises:
        StoreError: the folder cannot be listed.
    """
    if os.path.islink(folder):  # noqa: PTH114 - half the time
        return []
    try:
        with os.scandir(folder) as found:
            return sorted(item.name for item in found if KEY_PATTERN.fullmatch(item.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"listing entries failed: {error.strerror}", where=str(folder)) from error
