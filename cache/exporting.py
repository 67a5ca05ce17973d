"""Store: entries written as one archive, every byte verified on its way; same entries, same bytes.

What travels: manifests, signatures and blobs. What stays: pins, stamps of last use, piece records, and
capture plans, which are made again on the host that serves, and change there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pwcc.cache import archive, atomic, compression, holds, owners, signing
from pwcc.cache.compression import Writer
from pwcc.cache.entries import MANIFEST
from pwcc.cache.errors import CorruptEntry, UsageError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.store import EntryRef, Store


@dataclass(frozen=True)
class Exported:
    """What an archive holds: entries, signatures, blobs, and the bytes of the tar before compression."""

    entries: tuple[EntryRef, ...]
    signatures: int
    blobs: int
    bytes: int


@dataclass(frozen=True)
class _Entry:
    """One entry, read and checked: its files by their names in the archive, and the blobs it needs."""

    ref: EntryRef
    files: tuple[tuple[str, bytes], ...]
    blobs: dict[BlobDigest, int]


def export_file(store: Store, refs: Sequence[EntryRef], path: Path) -> Exported:
    """Write entries to ``path``, which appears whole or not at all; ``.zst`` at its end asks for zstd.

    Raises:
        UsageError: no entry, a folder, an ending other than .tar or .tar.zst, or zstd without its package.
        CorruptEntry: a manifest, signature or blob is not what it must be. StoreError: cannot write.
    """
    if not path.name.endswith((".tar", ".tar.zst")):
        raise UsageError(f"expected a file name that ends in .tar or .tar.zst, got {path.name!r}")
    if path.is_dir():
        raise UsageError(f"expected a file to write, got a folder: {path}")
    with _replacing(path) as stream:
        return export_stream(store, refs, stream, zstd=path.name.endswith(".zst"))


def export_stream(store: Store, refs: Sequence[EntryRef], sink: Writer, *, zstd: bool = False) -> Exported:
    """Write entries to an open stream; what was written before an error is no whole archive.

    Raises: as :func:`export_file`.
    """
    if not refs:
        raise UsageError("expected at least one entry to export")
    refs = sorted(set(refs), key=lambda ref: (ref.lookup_key, ref.entry_key))
    if len(refs) > archive.MAX_ENTRIES:
        raise UsageError(f"expected at most {archive.MAX_ENTRIES} entries in one archive, got {len(refs)}")
    held = [holds.hold(ref.path) for ref in refs]  # a collection leaves them alone meanwhile
    entries = [_read(store, ref) for ref in refs]
    if sum(len(data) for entry in entries for _, data in entry.files) > archive.MAX_MANIFESTS:
        raise UsageError("the manifests are too large for one archive", hint="export them in several")
    blobs = _union(entries)
    with compression.compressed(sink) if zstd else contextlib.nullcontext(sink) as out:
        tar = _Tar(out)
        tar.add(archive.INDEX, archive.index_bytes([(ref.lookup_key, ref.entry_key) for ref in refs]))
        for entry in entries:
            for name, data in entry.files:
                tar.add(name, data)
        for digest, size in sorted(blobs.items()):
            tar.add(f"blobs/{digest}", _blob(store, digest, size))
        tar.end()
    del held
    signatures = sum(len(entry.files) - 1 for entry in entries)
    return Exported(tuple(refs), signatures, len(blobs), tar.bytes)


class _Tar:
    """Writes members one after the other and counts bytes."""

    def __init__(self, sink: Writer) -> None:
        self._sink = sink
        self.bytes = 0

    def add(self, name: str, data: bytes) -> None:
        self._write(archive.header(name, len(data)))
        self._write(data)
        self._write(archive.padding(len(data)))

    def end(self) -> None:
        self._write(archive.END)

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self.bytes += len(data)


def _read(store: Store, ref: EntryRef) -> _Entry:
    data = store.read_manifest_bytes(ref)
    manifest = store.read_manifest(ref)
    if manifest.serialise() != data:
        raise CorruptEntry("expected a manifest in canonical form", where=str(ref.manifest))
    top = f"entries/{ref.lookup_key}/{ref.entry_key}"
    return _Entry(ref, ((f"{top}/{MANIFEST}", data), *_signatures(ref, top)), dict(manifest.blobs))


def _signatures(ref: EntryRef, top: str) -> Iterable[tuple[str, bytes]]:
    for key in signing.names(ref.path):
        signature = signing.read(ref.path, key)
        if signature is not None:
            yield f"{top}/{signing.FOLDER}/{key}{signing.SUFFIX}", signature.to_bytes()


def _union(entries: Iterable[_Entry]) -> dict[BlobDigest, int]:
    found: dict[BlobDigest, int] = {}
    for entry in entries:
        for digest, size in entry.blobs.items():
            if found.setdefault(digest, size) != size:
                raise CorruptEntry(
                    f"expected blob {digest} of {found[digest]} bytes, another entry says {size}",
                    where=str(entry.ref.manifest),
                )
    return found


def _blob(store: Store, digest: BlobDigest, size: int) -> bytes:
    data = store.read_blob(digest, max_bytes=size)
    if len(data) != size:
        raise CorruptEntry(f"expected a blob of {size} bytes, got {len(data)}", where=digest)
    return data


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside ``path`` that takes its place when the block ends well."""
    staged = path.parent / f".{owners.staging_name()}.tmp"
    with atomic.os_errors("writing the archive", path):
        try:
            with staged.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            staged.replace(path)
            atomic.fsync_directory(path.parent.resolve())
        finally:
            staged.unlink(missing_ok=True)
