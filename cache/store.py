"""Store: the cache directory, its layout, and the atomic publication of entries.

::

    <root>/CACHEDIR.TAG  README
    <root>/v1/entries/<lookup-key>/<entry-key>/manifest.json
    <root>/v1/pieces/<piece-key>.json       sealed pieces by what made them; overwritten freely
    <root>/v1/blobs/sha256/<2 hex>/<hex>    content-addressed, never changed
    <root>/v1/plans/<entry-key>/            capture plans: mutable, outside what is signed
    <root>/v1/locks/  v1/tmp/<uuid>/  v1/quarantine/
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, layout, locks, strict
from pwcc.cache.blobs import MAX_BLOB_BYTES, Blobs
from pwcc.cache.entries import MANIFEST, EntryRef, check_keys, key_names
from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.ids import KEY_PATTERN, BlobDigest, EntryKey, LookupKey, PieceKey
from pwcc.cache.manifest import Manifest

__all__ = ["EntryRef", "Publication", "Store", "default_root"]

MAX_PIECE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class Publication:
    """Where an entry lies after publishing; ``won`` is False when another process had published it."""

    path: Path
    won: bool


def default_root() -> Path:
    """Return the user's cache directory for pwcc; it need not exist."""
    import platformdirs

    return platformdirs.user_cache_path("pwcc")


class Store:
    """A cache directory.

    Guarantees: an entry appears whole or not at all, also after a crash; blobs are verified by SHA-256
    whenever they are read; a reader writes nothing and needs no write permission; nothing in it holds
    its own location, so a copy of the directory is the same store.

    Limits: one file system (renames must be atomic; NFS is fine for reading, and for writing as far as
    its rename is). It is as trusted as its writers: digests find damage, not malice. Nothing here
    deletes what others may use.

    OSErrors surface as StoreError with the file and a next step.
    """

    def __init__(self, root: Path) -> None:
        """Use :meth:`open` or :meth:`create`."""
        self.root = root
        base = root / layout.VERSION
        self._entries, self._pieces, self._locks = base / "entries", base / "pieces", base / "locks"
        self._tmp, self._quarantine = base / "tmp", base / "quarantine"
        self.blobs = Blobs(base / "blobs" / "sha256", tmp=self._tmp)
        self.plans = base / "plans"

    @classmethod
    def open(cls, root: Path) -> Store:
        """Open an existing store for reading; writes nothing.

        Raises:
            NotAStore: no such directory, or it is not a pwcc cache. NewerFormat: of a later pwcc.
        """
        with atomic.os_errors("opening the cache directory", root):
            layout.check(root)
        return cls(root)

    @classmethod
    def create(cls, root: Path) -> Store:
        """Open a store for writing and make what is missing of it; safe to race.

        Raises:
            NotAStore: the path is a file, or a directory that holds something else.
        """
        with atomic.os_errors("creating the cache directory", root):
            layout.create(root)
        return cls(root)

    # Blobs: see blobs.Blobs

    def blob_path(self, digest: BlobDigest) -> Path:
        """Return where a blob lies, whether or not it exists."""
        return self.blobs.path(digest)

    def put_blob(self, data: bytes) -> BlobDigest:
        """Store ``data`` once and return its digest; an existing file is kept if it holds them."""
        return self.blobs.put(data)

    def has_blob(self, digest: BlobDigest, *, size: int | None = None) -> bool:
        """Return whether the blob's file exists, and has ``size`` bytes if given; reads no content."""
        return self.blobs.has(digest, size=size)

    def read_blob(self, digest: BlobDigest, *, max_bytes: int = MAX_BLOB_BYTES) -> bytes:
        """Return a blob's verified bytes.

        Raises:
            CorruptEntry: missing, larger than ``max_bytes``, or of another digest than its name.
        """
        return self.blobs.read(digest, max_bytes=max_bytes)

    # Entries

    def entry_ref(self, lookup: LookupKey, entry: EntryKey) -> EntryRef:
        """Return where an entry lies, whether or not it exists."""
        if not (KEY_PATTERN.fullmatch(lookup) and KEY_PATTERN.fullmatch(entry)):
            raise CorruptEntry(f"expected keys of 32 hex digits, got {lookup[:40]!r}, {entry[:40]!r}")
        return EntryRef(lookup, entry, self._entries / lookup / entry)

    def entries(self) -> Iterator[EntryRef]:
        """Yield every entry in key order; names that are no keys are skipped."""
        for name in key_names(self._entries):
            yield from self.candidates(LookupKey(name))

    def candidates(self, lookup: LookupKey) -> list[EntryRef]:
        """Return the entries under one lookup key, in key order."""
        folder = self._entries / lookup
        return [EntryRef(lookup, EntryKey(name), folder / name) for name in key_names(folder)]

    def read_manifest_bytes(self, ref: EntryRef) -> bytes:
        """Return the manifest as it lies on disk (what a signature covers).

        Raises:
            CorruptEntry: missing or larger than 64 MiB.
        """
        with atomic.os_errors("reading a manifest", ref.manifest):
            try:
                return strict.read_bounded(ref.manifest)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise CorruptEntry("expected a manifest, found none", where=str(ref.manifest)) from None

    def read_manifest(self, ref: EntryRef) -> Manifest:
        """Return an entry's manifest, whose keys must be its directory's names.

        Raises:
            NewerFormat, CorruptEntry: see ``Manifest.parse``.
        """
        where = str(ref.manifest)
        manifest = Manifest.parse(self.read_manifest_bytes(ref), where=where)
        check_keys(ref, manifest.lookup_key, manifest.entry_key)
        return manifest

    def publish(self, manifest: Manifest) -> Publication:
        """Make an entry visible, all at once; its blobs must have been put before.

        A published entry is never replaced, unless it is unreadable or lacks blobs: then it moves to
        quarantine first.

        Raises:
            CorruptEntry: a blob of the manifest is missing, or the manifest breaks its own rules.
        """
        data = manifest.serialise()
        ref = self.entry_ref(manifest.lookup_key, manifest.entry_key)
        self._check_blobs(manifest, str(ref.manifest))
        with atomic.os_errors("publishing an entry", ref.path), atomic.staging_directory(self._tmp) as staged:
            self.blobs.flush_names(manifest.blobs)  # a manifest must not outlive the names of its blobs
            atomic.write_new(staged / MANIFEST, data)
            atomic.fsync_directory(staged)
            ref.path.parent.mkdir(exist_ok=True)
            won = _rename_new(staged, ref.path)
            if not won and not self._is_intact(ref):
                os.rename(ref.path, self._quarantine / uuid.uuid4().hex)  # noqa: PTH104
                won = _rename_new(staged, ref.path)
            atomic.fsync_directory(ref.path.parent)
            atomic.fsync_directory(self._entries)
        return Publication(ref.path, won)

    def _check_blobs(self, manifest: Manifest, where: str) -> None:
        for digest, size in manifest.blobs.items():
            if not self.has_blob(digest, size=size):
                raise CorruptEntry(f"expected blob {digest} of {size} bytes, found none", where=where)

    def _is_intact(self, ref: EntryRef) -> bool:
        try:
            self._check_blobs(self.read_manifest(ref), str(ref.manifest))
        except CorruptEntry:
            return False
        return True

    # Piece records and locks

    def put_piece(self, key: PieceKey, record: bytes) -> None:
        """Remember a sealed-piece record (JSON bytes) under the key of what made it."""
        path = self._piece_path(key)
        with atomic.os_errors("storing a piece record", path):
            atomic.write_replace(path, record, tmp=self._tmp)

    def get_piece(self, key: PieceKey) -> bytes | None:
        """Return a piece record, or None. The caller parses it and checks its blobs."""
        path = self._piece_path(key)
        with atomic.os_errors("reading a piece record", path):
            try:
                return strict.read_bounded(path, max_bytes=MAX_PIECE_BYTES)
            except FileNotFoundError:
                return None

    def _piece_path(self, key: PieceKey) -> Path:
        if not KEY_PATTERN.fullmatch(key):
            raise StoreError(f"expected a piece key of 32 hex digits, got {key[:80]!r}")
        return self._pieces / f"{key}.json"

    def lock(self, name: str, *, timeout_s: float = -1) -> AbstractContextManager[bool]:
        """Return a context manager that holds the lock ``name`` (an entry key or a plain name).

        It yields False where the file system has no locks; see :func:`locks.file_lock`.
        """
        return locks.file_lock(self._locks / f"{strict.as_name(name, 'lock')}.lock", timeout_s=timeout_s)


def _rename_new(staged: Path, path: Path) -> bool:
    """Rename a directory to a name that must not be taken; return whether it was free."""
    try:
        os.rename(staged, path)  # noqa: PTH104 - one seam for tests to break
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True
