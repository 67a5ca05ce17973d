"""Store: everything that lies in a cache, as a collection must know it: entries, piece records, blobs.

Read as data and without full parses: ten thousand entries in a few seconds. Of a manifest only the blob
list is parsed, after the digest of the file has been compared with the one it states.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import about, activity, atomic, costs, folders, last_use, layout, pins, strict, tuning
from pwcc.cache.entries import check_keys
from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.ids import DIGEST_PATTERN, KEY_PATTERN, BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.retention import Held
from pwcc.cache.store import MAX_PIECE_BYTES, EntryRef, Store

PINNED: Final = "pinned"
READ: Final = "a reader holds it"
_BLOBS: Final = b'{"blobs":{'


@dataclass(frozen=True)
class File:
    """A file of the store: its size in bytes, and when it last changed, in seconds since the epoch.

    ``changed_s`` is the later of content and inode time: a copy that kept the content's time is new here.
    """

    path: Path
    bytes: int
    changed_s: float


@dataclass(frozen=True)
class PieceFile:
    """A piece record and the blobs that it names; none when it is damaged, or could not be read."""

    file: File
    blobs: Mapping[BlobDigest, int]
    readable: bool = True


@dataclass(frozen=True)
class Survey:
    """What lies in a store. ``unreadable`` are entries whose blobs are unknown, with the reason.

    ``complete`` is False when one of them, or a piece record, may be intact, only not readable here:
    then no blob may be called an orphan. A damaged entry can be loaded by nobody, so its blobs do not count.
    """

    entries: tuple[Held, ...]
    unreadable: tuple[tuple[EntryRef, str], ...]
    complete: bool
    pieces: tuple[PieceFile, ...]
    blobs: Mapping[BlobDigest, File]

    @property
    def bytes(self) -> int:
        """Bytes of all blobs, piece records and entries' own files."""
        files = [*self.blobs.values(), *(piece.file for piece in self.pieces)]
        return sum(file.bytes for file in files) + sum(held.own_bytes for held in self.entries)


def survey(store: Store, *, readers: bool = True) -> Survey:
    """Look at everything in a store; writes nothing. ``readers`` tells whether to look for readers too.

    Blobs are listed before entries, so that an entry published meanwhile makes no blob look unused.

    Raises:
        StoreError: a folder cannot be listed.
    """
    blobs = dict(_blobs(store))
    pieces = tuple(_pieces(store))
    pinned, used = pins.pinned(store), last_use.stamps(store)
    entries: list[Held] = []
    unreadable: list[tuple[EntryRef, str]] = []
    complete = all(piece.readable for piece in pieces)
    for ref in store.entries():
        found: Mapping[BlobDigest, int] = {}
        try:
            found = blobs_of(store.read_manifest_bytes(ref), ref)
        except CorruptEntry as error:
            if not os.path.lexists(ref.path):
                continue
            unreadable.append((ref, error.message))
        except StoreError as error:
            complete = False
            unreadable.append((ref, error.message))
        written, own = _own_files(store, ref)
        protected = PINNED if ref.entry_key in pinned else None
        if protected is None and readers and activity.is_read(ref):
            protected = READ
        entries.append(
            Held(
                ref=ref,
                used_s=max(written, used.get(ref.entry_key, 0.0)),
                own_bytes=own,
                blobs=found,
                protected=protected,
            )
        )
    return Survey(tuple(entries), tuple(unreadable), complete, pieces, blobs)


def blobs_of(data: bytes, ref: EntryRef) -> Mapping[BlobDigest, int]:
    """Return the blobs that a manifest lists, with their sizes in bytes.

    Raises:
        NewerFormat, CorruptEntry: as ``Manifest.parse``, as far as the blob list is concerned.
    """
    where = str(ref.manifest)
    head, body = about.split(data, where=where)
    check_keys(ref, head.lookup_key, head.entry_key)
    end = body.find(b"}", len(_BLOBS))
    if not body.startswith(_BLOBS) or end < 0:  # not in canonical form: the slow way
        return Manifest.parse(data, where=where).blobs
    return _sizes(strict.loads(body[: end + 1] + b"}", where=where), where)


def _sizes(value: object, where: str) -> dict[BlobDigest, int]:
    found = value.get("blobs") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise CorruptEntry("expected an object 'blobs'", where=where)
    for digest, size in found.items():
        if not DIGEST_PATTERN.fullmatch(digest) or strict.as_int(size, where) < 0:
            raise CorruptEntry("expected digests with sizes in 'blobs'", where=where)
    return found


def _own_files(store: Store, ref: EntryRef) -> tuple[float, int]:
    """Return when the manifest was written (the folder, where there is none) and the entry's own bytes."""
    written, total = 0.0, 0
    for path in (ref.path, ref.manifest):
        with contextlib.suppress(OSError):
            written = path.lstat().st_mtime
    for folder in (ref.path, store.plans / ref.entry_key):
        total += sum(file.bytes for file in _tree(folder))
    for beside in (tuning.FILES.path_of(store, ref.entry_key), costs.FILES.path_of(store, ref.entry_key)):
        with contextlib.suppress(OSError):
            total += beside.lstat().st_size
    return written, total


def _pieces(store: Store) -> Iterator[PieceFile]:
    for file in _files(store.root / layout.VERSION / "pieces"):
        if not KEY_PATTERN.fullmatch(file.path.name.removesuffix(".json")):
            continue
        blobs: Mapping[BlobDigest, int] = {}
        readable = True
        try:
            data = atomic.read_file(file.path, max_bytes=MAX_PIECE_BYTES)
            blobs = _sizes(strict.loads(data, where=file.path.name), file.path.name)
        except FileNotFoundError:
            continue
        except (StoreError, OSError) as error:
            readable = isinstance(error, CorruptEntry)
        yield PieceFile(file, blobs, readable)


def _blobs(store: Store) -> Iterator[tuple[BlobDigest, File]]:
    top = store.root / layout.VERSION / "blobs" / "sha256"
    with atomic.os_errors("listing blobs", top):
        prefixes = sorted(os.listdir(top)) if folders.is_real(top) else []  # noqa: PTH208
    for name in prefixes:
        if len(name) == 2:
            for file in _files(top / name):
                if DIGEST_PATTERN.fullmatch(file.path.name):
                    yield BlobDigest(file.path.name), file


def _files(folder: Path) -> Iterator[File]:
    """Yield the plain files of a folder; what vanishes meanwhile is left out."""
    if not folders.is_real(folder):
        return
    with atomic.os_errors("listing a folder", folder):
        try:
            with os.scandir(folder) as items:
                for item in items:
                    with contextlib.suppress(FileNotFoundError):
                        if item.is_file(follow_symlinks=False):
                            found = item.stat(follow_symlinks=False)
                            changed = max(found.st_mtime, found.st_ctime)
                            yield File(Path(item.path), found.st_size, changed)
        except (FileNotFoundError, NotADirectoryError):
            return


def _tree(folder: Path) -> Iterator[File]:
    if not folders.is_real(folder):
        return
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                yield from _tree(Path(item.path))
            else:
                found = item.stat(follow_symlinks=False)
                yield File(Path(item.path), found.st_size, found.st_mtime)
