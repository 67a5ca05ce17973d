"""Store: the cache directory, its layout, and the atomic publication of entries.

::

    <root>/CACHEDIR.TAG  README
    <root>/v1/entries/<lookup-key>/<entry-key>/manifest.json
    <root>/v1/pieces/<piece-key>.json       sealed pieces by what made them; overwritten freely
    <root>/v1/blobs/sha256/<2 hex>/<hex>    content-addressed, never changed
    <root>/v1/plans/<entry-key>/            capture plans: mutable, outside what is signed
    <root>/v1/pins/<entry-key>.json         what no collection takes; not signed, not exported
    <root>/v1/used/<entry-key>              empty; its time is the entry's last use, where that is tracked
    <root>/v1/locks/  v1/tmp/<owner>-<uuid>/  v1/quarantine/<uuid>/
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeVar

from pwcc.cache import atomic, folders, holds, layers, layout, locks, ownership, quarantine, strict, sweep
from pwcc.cache.blobs import MAX_BLOB_BYTES, Blobs
from pwcc.cache.entries import EntryRef, check_keys, key_names
from pwcc.cache.errors import CacheMiss, CorruptEntry, StoreError, UntrustedEntry
from pwcc.cache.ids import KEY_PATTERN, BlobDigest, EntryKey, LookupKey, PieceKey, blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.publishing import Publication, Publisher
from pwcc.cache.quarantine import Quarantined

__all__ = ["EntryRef", "Publication", "Store", "default_root", "named_root"]

CACHE_VARIABLE: Final = "PWCC_CACHE_DIR"
MAX_PIECE_BYTES: Final = 16 * 2**20


T = TypeVar("T")
Admit = Callable[[EntryRef, bytes], None]


def named_root(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the cache directory that ``PWCC_CACHE_DIR`` names; None where it is unset or empty."""
    named = environ.get(CACHE_VARIABLE)
    return Path(named) if named else None


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of ``PWCC_CACHE_DIR``, else the user's for pwcc; it need not exist."""
    if (named := named_root(environ)) is not None:
        return named
    import platformdirs

    return platformdirs.user_cache_path("pwcc")


class Store:
    """A cache directory.

    Guarantees: an entry appears whole or not at all, also after a crash; blobs are verified by SHA-256
    whenever they are read; a reader writes nothing and needs no write permission; nothing in it holds
    its own location, so a copy of the directory is the same store.

    Limits: one file system (renames must be atomic; NFS is fine for reading, and for writing as far as
    its rename is). It is as trusted as its writers: digests find damage, not malice. Nothing here
    deletes what others may use; a damaged entry moves to quarantine. A writer makes folders that were
    removed under it again, for a second per call.

    OSErrors surface as StoreError with the file and a next step. EBUSY and ESTALE are tried again first.
    """

    def __init__(self, root: Path, *, layers: Sequence[Store] = ()) -> None:
        """Use :meth:`open` or :meth:`create`; ``layers`` as :mod:`pwcc.cache.layers` says."""
        self.root = root
        self.layers = tuple(layers)
        base = root / layout.VERSION
        self._entries, self._pieces, self._locks = base / "entries", base / "pieces", base / "locks"
        self._tmp, self._quarantine = base / "tmp", base / "quarantine"
        self.blobs = Blobs(base / "blobs" / "sha256", tmp=self._tmp)
        self._publisher = Publisher(self.blobs, self._entries, self._tmp, self._quarantine)
        self.plans = base / "plans"
        self._admit: Admit | None = None

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
    def find(cls, root: Path, *, hint: str) -> Store:
        """Open a store for a caller to whom nothing there, as after a restore that found nothing, is a miss.

        Raises:
            CacheMiss: the directory does not exist or is empty; ``hint`` says what to do then.
            NotAStore, NewerFormat: as :meth:`open`, for a directory that holds something else.
        """
        with atomic.os_errors("opening the cache directory", root):
            empty = layout.is_empty(root)
        if empty:
            raise CacheMiss(
                "no entry: the cache directory is empty or does not exist", where=str(root), hint=hint
            )
        return cls.open(root)

    @classmethod
    def create(cls, root: Path) -> Store:
        """Open a store for writing and make what is missing of it; safe to race.

        Removes what crashed writers left, as far as that takes no more than 50 ms.

        Raises:
            NotAStore: the path is a file, or a directory that holds something else.
        """
        with atomic.os_errors("creating the cache directory", root):
            layout.create(root)
        store = cls(root)
        store.sweep()
        return store

    def sweep(self, *, budget_s: float = sweep.BUDGET_S) -> sweep.Swept:
        """Remove temporary files whose owners are gone, for at most ``budget_s`` seconds."""
        return sweep.sweep(self._tmp, now=time.time(), budget_s=budget_s)

    def _writing(self, what: str, path: Path, write: Callable[[], T]) -> T:
        """Return ``write()``; where a folder was removed meanwhile, make the layout again and retry.

        Whoever removes the directory may still be at it: the pauses make up a second.
        """
        with atomic.os_errors(what, path):
            for pause in (0.0, 0.05, 0.25, 0.7):
                try:
                    return write()
                except (FileNotFoundError, FileExistsError):  # the latter: a folder that was there a moment ago
                    time.sleep(pause)
                    with contextlib.suppress(FileNotFoundError, FileExistsError):
                        layout.create(self.root)
            return write()

    def require(self, admit: Admit | None) -> None:
        """Let ``admit`` see every manifest's bytes before they are parsed and before any blob is opened.

        It raises a StoreError for an entry that may not be used: see ``trust.SignaturePolicy.admit``.
        """
        self._admit = admit

    @property
    def tmp(self) -> Path:
        """Where files are made before they get their names."""
        return self._tmp

    @property
    def is_restricted(self) -> bool:
        """Whether entries must be admitted; piece records carry no signature and must then not be used."""
        return self._admit is not None

    # Blobs: see blobs.Blobs

    def blob_path(self, digest: BlobDigest) -> Path:
        """Return where a blob lies, whether or not it exists."""
        return self.blobs.path(digest)

    def put_blob(self, data: bytes) -> BlobDigest:
        """Store ``data`` once and return its digest; an existing file is kept if it holds them."""
        path = self.blobs.path(blob_digest(data))
        return self._writing("storing a blob", path, lambda: self.blobs.put(data))

    def has_blob(self, digest: BlobDigest, *, size: int | None = None) -> bool:
        """Return whether the blob's file exists, and has ``size`` bytes if given; reads no content."""
        return any(store.blobs.has(digest, size=size) for store in (self, *self.layers))

    def read_blob(self, digest: BlobDigest, *, max_bytes: int = MAX_BLOB_BYTES) -> bytes:
        """Return a blob's verified bytes, from the first layer that has them intact.

        Raises:
            CorruptEntry: missing, larger than ``max_bytes``, or of another digest than its name.
        """
        if not self.layers:
            return self.blobs.read(digest, max_bytes=max_bytes)
        return layers.read_blob(self, digest, max_bytes=max_bytes)

    def reader(self, manifest: Manifest) -> Callable[[BlobDigest], bytes]:
        """Return a function that reads the blobs of one entry, verified, and no blob that it does not list.

        What a record inside an entry names is covered by a signature of the manifest only through this list.
        """
        sizes = manifest.blobs

        def read(digest: BlobDigest) -> bytes:
            size = sizes.get(digest)
            if size is None:
                raise CorruptEntry(f"expected a blob that the manifest lists, got {digest[:80]!r}")
            return self.read_blob(digest, max_bytes=size)

        return read

    # Entries

    def entry_ref(self, lookup: LookupKey, entry: EntryKey) -> EntryRef:
        """Return where an entry lies, whether or not it exists."""
        if not (KEY_PATTERN.fullmatch(lookup) and KEY_PATTERN.fullmatch(entry)):
            raise CorruptEntry(f"expected keys of 32 hex digits, got {lookup[:40]!r}, {entry[:40]!r}")
        return EntryRef(lookup, entry, self._entries / lookup / entry)

    def entries(self) -> Iterator[EntryRef]:
        """Yield every entry in key order; names that are no keys are skipped. One in two layers counts once."""
        for name in sorted({name for store in (self, *self.layers) for name in key_names(store._entries)}):
            yield from self.candidates(LookupKey(name))

    def candidates(self, lookup: LookupKey) -> list[EntryRef]:
        """Return the entries under one lookup key, in key order; of one in two layers, the upper.

        An upper copy that cannot be used (damaged, newer, not admitted, of others) hides no lower one.
        """
        found: dict[str, list[EntryRef]] = {}
        for store in (self, *self.layers):
            folder = store._entries / lookup
            for name in key_names(folder):
                found.setdefault(name, []).append(EntryRef(lookup, EntryKey(name), folder / name))
        return [self._usable(found[name]) for name in sorted(found)]

    def _usable(self, copies: list[EntryRef]) -> EntryRef:
        """Return the uppermost copy of an entry that can be used; the uppermost where none can."""
        for ref in copies if len(copies) > 1 else ():
            if ownership.entry_concern(ref.path, ref.manifest) is None:
                with contextlib.suppress(StoreError):
                    self.read_manifest(ref)
                    return ref
        return copies[0]

    def owns(self, ref: EntryRef) -> bool:
        """Return whether an entry lies in this directory, not in a layer below it."""
        return ref.path.parent.parent == self._entries

    def read_manifest_bytes(self, ref: EntryRef) -> bytes:
        """Return the manifest as it lies on disk (what a signature covers).

        Raises:
            CorruptEntry: missing, larger than 64 MiB, or no regular file.
        """
        with atomic.os_errors("reading a manifest", ref.manifest):
            try:
                return atomic.read_file(ref.manifest, max_bytes=strict.MAX_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                raise CorruptEntry("expected a manifest, found none", where=str(ref.manifest)) from None

    def read_manifest(self, ref: EntryRef) -> Manifest:
        """Return an entry's manifest, whose keys must be its directory's names.

        Raises:
            NewerFormat, CorruptEntry: see ``Manifest.parse``.
            UntrustedEntry: see :meth:`require`.
        """
        where = str(ref.manifest)
        data = self.read_manifest_bytes(ref)
        if self._admit is not None:
            self._admit(ref, data)  # these very bytes, not the file read a second time
        manifest = Manifest.parse(data, where=where)
        check_keys(ref, manifest.lookup_key, manifest.entry_key)
        return manifest

    def publish(self, manifest: Manifest) -> Publication:
        """Make an entry visible, all at once; its blobs must have been put before.

        A published entry is never replaced, unless it is unreadable or lacks blobs: then it moves to
        quarantine first. Every blob counts as used now, so that no collection takes it.

        Raises:
            MissingBlob: a blob of the manifest is not there, or not any more: put it again, and publish.
            CorruptEntry: the manifest breaks its own rules.
        """
        data = manifest.serialise()
        ref = self.entry_ref(manifest.lookup_key, manifest.entry_key)
        layers.copy_blobs(self, manifest)
        won = self._writing(
            "publishing an entry",
            ref.path,
            lambda: self._publisher.place(ref, data, manifest, is_intact=self._is_intact),
        )
        with atomic.os_errors("publishing an entry", self.root):
            layout.mark(self.root)  # whoever removed the directory meanwhile may have taken the tag last
        return Publication(ref.path, won)

    def _is_intact(self, ref: EntryRef, expected: bytes) -> bool:
        if not folders.is_real(ref.path):
            return False
        try:
            if self.read_manifest_bytes(ref) == expected:  # ours, blob for blob, whoever signed it or did not
                return True
            self._publisher.check_blobs(self.read_manifest(ref), ref)
        except (CorruptEntry, UntrustedEntry):
            return False
        return True

    # Readers' marks and quarantine

    def hold(self, ref: EntryRef) -> holds.Hold | None:
        """Mark an entry as in use for as long as the answer lives; best effort, writes nothing."""
        return holds.hold(ref.path)

    def quarantine(self, ref: EntryRef, reason: str, *, is_damaged: Callable[[EntryRef], bool]) -> Path | None:
        """Set a damaged entry aside; return where it lies now, or None where it is left as it is.

        ``is_damaged`` is asked again after the move, about the moved folder: a writer may have put a good
        entry there meanwhile, which then goes back. None also where this process may not write, and for an
        entry of a lower layer.
        """
        if not self.owns(ref):
            return None
        try:
            place = quarantine.set_aside(self._quarantine, ref, reason)
        except OSError:
            return None
        if is_damaged(EntryRef(ref.lookup_key, ref.entry_key, place)):
            return place
        quarantine.put_back(place, ref)
        return None

    def quarantined(self, lookup: LookupKey | None = None) -> list[Quarantined]:
        """Return what was set aside, of one lookup key or of all."""
        found = quarantine.records(self._quarantine)
        return [record for record in found if lookup is None or record.lookup_key == lookup]

    # Piece records and locks

    def put_piece(self, key: PieceKey, record: bytes) -> None:
        """Remember a sealed-piece record (JSON bytes) under the key of what made it."""
        path = self._piece_path(key)
        self._writing("storing a piece record", path, lambda: atomic.write_replace(path, record, tmp=self._tmp))

    def get_piece(self, key: PieceKey) -> bytes | None:
        """Return a piece record, or None. The caller parses it and checks its blobs."""
        for store in (self, *self.layers):
            path = store._piece_path(key)
            with atomic.os_errors("reading a piece record", path):
                try:
                    return atomic.read_file(path, max_bytes=MAX_PIECE_BYTES)
                except FileNotFoundError:
                    continue
        return None

    def _piece_path(self, key: PieceKey) -> Path:
        if not KEY_PATTERN.fullmatch(key):
            raise StoreError(f"expected a piece key of 32 hex digits, got {key[:80]!r}")
        return self._pieces / f"{key}.json"

    def lock(self, name: str, *, timeout_s: float = -1) -> AbstractContextManager[bool]:
        """Return a context manager that holds the lock ``name`` (an entry key or a plain name).

        It yields False where the file system has no locks; see :func:`locks.file_lock`.
        """
        return locks.file_lock(self._lock_path(name), timeout_s=timeout_s)

    def lock_holder(self, name: str) -> locks.Holder | None:
        """Return who holds a lock, as far as is known."""
        return locks.holder(self._lock_path(name))

    def _lock_path(self, name: str) -> Path:
        return self._locks / f"{strict.as_name(name, 'lock')}.lock"
