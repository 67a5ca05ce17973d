"""Store: what is kept about an entry outside what is digested: one JSON file an entry, replaced as a whole.

It is neither signed, exported nor needed to load the entry, and may be missing at any time.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pwcc.cache import atomic, folders, layout, strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import KEY_PATTERN, EntryKey
from pwcc.cache.store import Store
from pwcc.cache.strict import Fields, Json


@dataclass(frozen=True)
class Sidecar:
    """The files ``v1/<folder>/<entry-key>.json`` of a store; ``what`` names their content in messages."""

    folder: str
    what: str
    schema: int
    max_bytes: int

    def path_of(self, store: Store, key: EntryKey) -> Path:
        """Return where an entry's file lies, whether or not it exists."""
        if not KEY_PATTERN.fullmatch(key):
            raise CorruptEntry(f"expected an entry key of 32 hex digits, got {key[:40]!r}")
        return store.root / layout.VERSION / self.folder / f"{key}.json"

    def write(self, store: Store, key: EntryKey, content: Mapping[str, Json]) -> Path:
        """Write an entry's file, whole or not at all, over what is there. Return its path.

        Raises:
            StoreError: the store cannot be written.
        """
        path = self.path_of(store, key)
        body = {"schema": self.schema, "entry_key": key, **content}
        with atomic.os_errors(f"writing {self.what}", path):
            folders.make(path.parent)
            atomic.write_replace(path, strict.canonical(body), tmp=store.tmp)
        return path

    def read(self, store: Store, key: EntryKey) -> Fields | None:
        """Return the fields of an entry's file that are left to parse, or None where there is no such file.

        Raises:
            CorruptEntry: the file is damaged or of another entry. StoreError: it cannot be read.
        """
        path = self.path_of(store, key)
        with atomic.os_errors(f"reading {self.what}", path):
            try:
                data = strict.read_bounded(path, max_bytes=self.max_bytes)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return None
                raise
        fields = Fields(strict.loads(data, where=str(path), max_bytes=self.max_bytes), str(path))
        fields.int_("schema", low=1, high=self.schema)
        if fields.key("entry_key") != key:
            raise CorruptEntry(f"expected {self.what} of entry {key}", where=str(path), hint="remove the file")
        return fields

    def forget(self, store: Store, key: EntryKey) -> None:
        """Remove an entry's file, if there is any. Raises StoreError where the directory cannot be changed."""
        path = self.path_of(store, key)
        with atomic.os_errors(f"removing {self.what}", path):
            path.unlink(missing_ok=True)
