"""Store: content-addressed blobs, written whole and verified whenever they are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import DIGEST_PATTERN, BlobDigest, blob_digest

MAX_BLOB_BYTES: Final = 4 * 2**30  # constants are the only blobs beyond a few MiB


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

        The bytes are on the device when this returns; the file's name is after :meth:`flush_names`.
        """
        digest = blob_digest(data)
        path = self.path(digest)
        if not self._holds(path, data):
            with atomic.os_errors("storing a blob", path):
                path.parent.mkdir(exist_ok=True)
                atomic.write_replace(path, data, tmp=self._tmp)
        return digest

    def has(self, digest: BlobDigest, *, size: int | None = None) -> bool:
        """Return whether the blob's file exists, and has ``size`` bytes if given; reads no content."""
        try:
            found = self.path(digest).stat()
        except OSError:
            return False
        return size is None or found.st_size == size

    def _holds(self, path: Path, data: bytes) -> bool:
        """Compare in full: whoever puts a blob has just made it, and a damaged file must be replaced by it."""
        try:
            return path.stat().st_size == len(data) and path.read_bytes() == data
        except OSError:
            return False

    def read(self, digest: BlobDigest, *, max_bytes: int = MAX_BLOB_BYTES) -> bytes:
        """Return a blob's verified bytes.

        Raises:
            CorruptEntry: missing, larger than ``max_bytes``, or of another digest than its name.
        """
        path = self.path(digest)
        with atomic.os_errors("reading a blob", path):
            try:
                data = strict.read_bounded(path, max_bytes=max_bytes)
            except FileNotFoundError:
                raise CorruptEntry(
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
