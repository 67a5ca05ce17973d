"""Store: content-addressed blobs, written whole and verified whenever they are read."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, folders
from pwcc.cache.errors import CorruptEntry, MissingBlob, StoreError
from pwcc.cache.ids import DIGEST_PATTERN, BlobDigest, blob_digest

MAX_BLOB_BYTES: Final = 4 * 2**30  # constants are the only blobs beyond a few MiB
PREFIX_PATTERN: Final = re.compile(r"[0-9a-f]{2}")


class Blobs:
    """The folder ``blobs/sha256``: each file is named by the SHA-256 of its bytes and never changes."""

    def __init__(self, folder: Path, *, tmp: Path) -> None:
        self._folder = folder
        self._tmp = tmp

    def path(self, digest: BlobDigest) -> Path:
        """Return where a blob lies, whether or not it exists; raise CorruptEntry if it is no digest."""
        if not DIGEST_PATTERN.fullmatch(digest):
            raise CorruptEntry(f"expected a SHA-256 digest of 64 hex digits, got {digest[:80]!r}")
        return self._folder / digest[:2] / digest

    def put(self, data: bytes) -> BlobDigest:
        """Store ``data`` once and return its digest; an existing file is kept if it holds these bytes.

        The bytes are on the device when this returns; the file's name is after :meth:`flush_names`. A
        kept file counts as written now, so that a collector does not take it before it is published.
        OSError passes through.
        """
        digest = blob_digest(data)
        path = self.path(digest)
        if self._holds(path, data) and self.touch(digest):
            return digest
        folders.make(path.parent)
        atomic.write_replace(path, data, tmp=self._tmp)
        return digest

    def touch(self, digest: BlobDigest) -> bool:
        """Set a blob's time to now: a collector leaves young blobs alone. Return False when it is gone.

        Only a file's owner may set its time, so another user's blob is replaced by a copy. Best effort: where
        that cannot be done either, as in a read-only cache, it keeps its time.
        """
        path = self.path(digest)
        try:
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except PermissionError:
            with contextlib.suppress(OSError, StoreError):
                atomic.write_replace(path, self.read(digest), tmp=self._tmp)
        except OSError:
            return True
        return True

    def all(self) -> Iterator[tuple[BlobDigest, os.DirEntry[str]]]:
        """Yield every file that has a blob's name at a blob's place, in order. OSError passes through."""
        if not folders.is_real(self._folder):
            return
        with os.scandir(self._folder) as prefixes:
            listed = sorted((item for item in prefixes if PREFIX_PATTERN.fullmatch(item.name)), key=_name)
        for folder in listed:
            if folder.is_dir(follow_symlinks=False):
                with os.scandir(folder.path) as found:
                    for item in sorted(found, key=_name):
                        if DIGEST_PATTERN.fullmatch(item.name) and item.name.startswith(folder.name):
                            yield BlobDigest(item.name), item

    def has(self, digest: BlobDigest, *, size: int | None = None) -> bool:
        """Return whether the blob's file exists, and has ``size`` bytes if given; reads no content."""
        try:
            found = self.path(digest).lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        return size is None or found.st_size == size

    def _holds(self, path: Path, data: bytes) -> bool:
        """Compare in full: whoever puts a blob has just made it, and a damaged file must be replaced by it."""
        try:
            return path.lstat().st_size == len(data) and atomic.read_file(path, max_bytes=len(data)) == data
        except (OSError, CorruptEntry):
            return False

    def read(self, digest: BlobDigest, *, max_bytes: int = MAX_BLOB_BYTES) -> bytes:
        """Return a blob's verified bytes.

        Raises:
            CorruptEntry: missing (MissingBlob), larger than ``max_bytes``, no regular file, or of another
                digest than its name.
        """
        path = self.path(digest)
        with atomic.os_errors("reading a blob", path):
            try:
                data = atomic.read_file(path, max_bytes=max_bytes)
            except (FileNotFoundError, NotADirectoryError):
                raise MissingBlob(
                    "expected a blob, found none",
                    where=str(path),
                    hint="copy the cache again, or compile again",
                ) from None
        got = blob_digest(data)
        if got != digest:
            raise CorruptEntry(
                f"expected SHA-256 {digest}, got {got} ({len(data)} bytes)",
                where=str(path),
                hint="the file was damaged; delete it and copy the cache again, or compile again",
            )
        return data

    def flush_names(self, digests: Iterable[BlobDigest]) -> None:
        """Flush the directories that hold these blobs. OSError passes through."""
        for prefix in sorted({digest[:2] for digest in digests}):
            atomic.fsync_directory(self._folder / prefix)
        atomic.fsync_directory(self._folder)


def _name(item: os.DirEntry[str]) -> str:
    return item.name
