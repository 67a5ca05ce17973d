"""Store: an archive read into a cache, every byte verified before anything of it can be seen.

The order of checks is the order of the archive: keys, manifests (parsed strictly), signatures (where one is
required, before the first blob is read), then each blob against the digest and size that a manifest states.
:func:`read_archive` does what needs no cache; what it refuses leaves nothing, not even an empty directory.
Blobs go to a staging folder of the cache and are renamed into place only after the archive has ended as it
must. A failure at any point leaves the cache as it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import activity, archive, atomic, compression, folders, signing, strict
from pwcc.cache.archive import ArchiveReader, Member, Reader
from pwcc.cache.blobs import MAX_BLOB_BYTES
from pwcc.cache.entries import MANIFEST, EntryRef, check_keys
from pwcc.cache.errors import CorruptEntry, MissingBlob, SigningUnavailable
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.signing import Signature
from pwcc.cache.signing_keys import KeyId
from pwcc.cache.store import Store
from pwcc.cache.strict import Json
from pwcc.cache.trust import SignaturePolicy

MAX_IMPORT_BYTES: Final = 64 * 2**30
_CHUNK: Final = 2**20
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ADVICE: Final = "the archive was damaged or made by hand: copy or export it again"


@dataclass(frozen=True)
class Imported:
    """What became of one entry: ``new``, or there already; ``same`` tells that its manifest is this one.

    Two compiles of the same factors may differ in their bytes; the one that is there stays. ``signatures``
    were added; ``kept`` counts those that are there and valid, and stay though the archive's differ.
    """

    ref: EntryRef
    new: bool
    same: bool
    signatures: int
    bytes: int
    kept: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return the entry for ``--json``: keys in full, no paths."""
        return {
            "entry_key": self.ref.entry_key,
            "lookup_key": self.ref.lookup_key,
            "new": self.new,
            "same": self.same,
            "signatures": self.signatures,
            "kept_signatures": self.kept,
            "bytes": self.bytes,
        }


def import_stream(
    store: Store,
    stream: Reader,
    *,
    where: str,
    policy: SignaturePolicy | None = None,
    max_bytes: int = MAX_IMPORT_BYTES,
) -> tuple[Imported, ...]:
    """Publish the entries of an archive; those that are there already stay as they are.

    Args:
        store: the cache, opened for writing.
        stream: the archive, plain or zstd, read once from begin to end.
        where: its name, for messages.
        policy: require a signature of every entry.
        max_bytes: the most that its blobs may take together.

    Raises:
        CorruptEntry: not an archive of pwcc's, damaged, or larger than allowed; nothing was published.
        UntrustedEntry: an entry lacks the signature that ``policy`` asks for; no blob was read.
        StoreError: the cache cannot be written.
    """
    return read_archive(stream, where=where, policy=policy, max_bytes=max_bytes).publish(store)


def read_archive(
    stream: Reader,
    *,
    where: str,
    policy: SignaturePolicy | None = None,
    max_bytes: int = MAX_IMPORT_BYTES,
) -> Incoming:
    """Read and check an archive up to its first blob; writes nothing. Arguments as :func:`import_stream`.

    Raises:
        CorruptEntry, UntrustedEntry: see :func:`import_stream`.
    """
    with atomic.os_errors("reading an archive", Path(where)):
        incoming = Incoming(ArchiveReader(compression.plain(stream, where=where), where=where))
        incoming.read_entries()
        if policy is not None:
            for entry in incoming.entries:
                entry.require(policy)
        incoming.require_size(max_bytes)
    return incoming


@dataclass(frozen=True)
class _Entry:
    """One entry of an archive, parsed and checked, before any of its blobs."""

    data: bytes
    manifest: Manifest
    signatures: dict[KeyId, Signature]
    where: str

    def require(self, policy: SignaturePolicy) -> None:
        def find(key: KeyId) -> bytes | None:
            found = self.signatures.get(key)
            return None if found is None else found.to_bytes()

        policy.check(self.data, find, self.signatures, where=self.where)


class Incoming:
    """An archive that was read up to its first blob; made by :func:`read_archive`."""

    def __init__(self, reader: ArchiveReader) -> None:
        self._reader = reader
        self._next: Member | None = None
        self.entries: Sequence[_Entry] = ()

    def publish(self, store: Store) -> tuple[Imported, ...]:
        """Read the blobs and publish the entries, once; raises as :func:`import_stream`."""
        with (
            atomic.os_errors("importing", store.root),
            activity.writing(store),
            atomic.staging_directory(store.tmp) as staged,
        ):
            for digest, path in self._read_blobs(store, staged).items():
                _place(store, digest, path)
            return tuple(_publish(store, entry) for entry in self.entries)

    def read_entries(self) -> None:
        """Read the index, manifests and signatures, once."""
        first = self._reader.next()
        if first is None or first.name != archive.INDEX:
            raise self._wrong(archive.INDEX, first)
        keys = archive.parse_index(self._data(first, archive.MAX_INDEX), where=self._at(first.name))
        self._next = self._reader.next()
        left = archive.MAX_MANIFESTS
        entries = []
        for lookup, key in keys:
            entry = self._entry(lookup, key, left)
            left -= len(entry.data)
            entries.append(entry)
        self.entries = entries

    def _entry(self, lookup: LookupKey, key: EntryKey, left: int) -> _Entry:
        top = f"entries/{lookup}/{key}/"
        member = self._next
        if member is None or member.name != top + MANIFEST:
            raise self._wrong(top + MANIFEST, member)
        data = self._data(member, min(left, strict.MAX_BYTES))
        where = self._at(member.name)
        manifest = Manifest.parse(data, where=where)
        check_keys(EntryRef(lookup, key, Path(top)), manifest.lookup_key, manifest.entry_key)
        if manifest.serialise() != data:
            raise CorruptEntry("expected a manifest in canonical form", where=where)
        signatures: dict[KeyId, Signature] = {}
        self._next = self._reader.next()
        while self._next is not None and self._next.name.startswith(top + signing.FOLDER):
            self._signature(self._next, signatures)
            self._next = self._reader.next()
        return _Entry(data, manifest, signatures, where)

    def _signature(self, member: Member, found: dict[KeyId, Signature]) -> None:
        where = self._at(member.name)
        signature = Signature.parse(self._data(member, signing.MAX_FILE), where=where)
        key = KeyId(member.name.rpartition("/")[2].removesuffix(signing.SUFFIX))
        if signature.key.id != key or any(key <= other for other in found):
            raise CorruptEntry("expected signatures in order, each named by its key", where=where, hint=_ADVICE)
        if len(found) >= signing.MAX_SIGNATURES:
            raise CorruptEntry(f"expected at most {signing.MAX_SIGNATURES} signatures of an entry", where=where)
        found[key] = signature

    def _read_blobs(self, store: Store, staged: Path) -> dict[BlobDigest, Path]:
        """Verify every blob; return where those lie that the store does not have yet."""
        placed: dict[BlobDigest, Path] = {}
        for digest, size in sorted(self._wanted().items()):
            member = self._next
            if member is None or member.name != f"blobs/{digest}" or member.size != size:
                raise self._wrong(f"blobs/{digest} of {size} bytes", member)
            path = None if _is_here(store, digest, size) else staged / digest
            self._blob(digest, size, path)
            if path is not None:
                placed[digest] = path
            self._next = self._reader.next()
        if self._next is not None:
            raise self._wrong("the end of the archive", self._next)
        return placed

    def _wanted(self) -> dict[BlobDigest, int]:
        """Return the blobs that must follow, and their sizes."""
        found: dict[BlobDigest, int] = {}
        for entry in self.entries:
            for digest, size in entry.manifest.blobs.items():
                if found.setdefault(digest, size) != size or size > MAX_BLOB_BYTES:
                    raise CorruptEntry(
                        f"two sizes of blob {digest}, or one beyond all limits", where=entry.where
                    )
        return found

    def require_size(self, max_bytes: int) -> None:
        """Raise CorruptEntry if the blobs take more than ``max_bytes`` together."""
        total = sum(self._wanted().values())
        if total > max_bytes:
            raise CorruptEntry(
                f"expected blobs of at most {max_bytes} bytes together, got {total}",
                where=self._reader.where,
                hint="raise --max-size if you trust the archive",
            )

    def _blob(self, digest: BlobDigest, size: int, path: Path | None) -> None:
        hasher = hashlib.sha256()
        descriptor = (
            -1 if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        )
        try:
            while chunk := self._reader.read(_CHUNK):
                hasher.update(chunk)
                left = memoryview(chunk)
                while descriptor >= 0 and left:
                    left = left[os.write(descriptor, left) :]
            if hasher.hexdigest() != digest:
                raise CorruptEntry(
                    f"expected SHA-256 {digest}, got {hasher.hexdigest()} ({size} bytes)",
                    where=self._at(f"blobs/{digest}"),
                    hint=_ADVICE,
                )
            if descriptor >= 0:
                os.fsync(descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _data(self, member: Member, limit: int) -> bytes:
        if member.size > limit:
            raise CorruptEntry(
                f"expected at most {limit} bytes, got {member.size}", where=self._at(member.name), hint=_ADVICE
            )
        return self._reader.read(member.size)

    def _wrong(self, expected: str, member: Member | None) -> CorruptEntry:
        got = "the end of the archive" if member is None else f"{member.name} of {member.size} bytes"
        return CorruptEntry(f"expected {expected}, got {got}", where=self._reader.where, hint=_ADVICE)

    def _at(self, name: str) -> str:
        return f"{self._reader.where}: {name}"


def _is_here(store: Store, digest: BlobDigest, size: int) -> bool:
    if not store.blobs.has(digest, size=size):
        return False
    store.blobs.touch(digest)
    try:
        store.blobs.read(digest, max_bytes=size)
    except CorruptEntry:
        return False
    return True


def _place(store: Store, digest: BlobDigest, path: Path) -> None:
    """Rename a verified blob to its name; one that is there, and was found damaged, is replaced."""
    os.utime(path)  # a long import must not look old to a collection
    target = store.blob_path(digest)
    folders.make(target.parent)
    os.replace(path, target)  # noqa: PTH105 - one seam for tests to break


def _publish(store: Store, entry: _Entry) -> Imported:
    try:
        won = store.publish(entry.manifest).won
    except MissingBlob as error:
        error.hint = "a collection removed it meanwhile: import again"
        raise
    ref = store.entry_ref(entry.manifest.lookup_key, entry.manifest.entry_key)
    same = won or store.read_manifest_bytes(ref) == entry.data
    added = kept = 0
    for key, signature in entry.signatures.items() if same else ():
        if signing.read_file(signing.path_of(ref.path, key)) == signature.to_bytes():
            continue
        if _may_hold(ref, key, entry.data):
            kept += 1
        else:
            signing.write(ref, signature, tmp=store.tmp)
            added += 1
    return Imported(ref, won, same, added, sum(entry.manifest.blobs.values()), kept)


def _may_hold(ref: EntryRef, key: KeyId, manifest: bytes) -> bool:
    """Return whether the signature that is there is valid, or whether that cannot be known here.

    A key has one signature of the same bytes, so that another one in an archive does not hold.
    """
    try:
        there = signing.read(ref.path, key)
        return there is not None and there.verifies(manifest)
    except SigningUnavailable:
        return True
    except CorruptEntry:
        return False
