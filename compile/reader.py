"""Artifact: the blobs of one entry, each read once and verified; what is run is made of these very bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pwcc.cache.errors import MissingBlob, StoreError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import EntryRef, Store
from pwcc.compile.runtime import program_code

_PAUSE_S: Final = 0.02  # a collection that meets a writer takes a blob away and puts it back


class EntryReader:
    """Reads an entry's blobs; a failure names the entry and what to do about it."""

    def __init__(self, store: Store, ref: EntryRef, manifest: Manifest) -> None:
        self._read_listed = store.reader(manifest)
        self._ref = ref
        self._held: dict[BlobDigest, bytes] = {}
        self.records: dict[BlobDigest, SealedPiece] = {}

    @property
    def count(self) -> int:
        """Blobs read."""
        return len(self._held)

    @property
    def size(self) -> int:
        """Bytes read."""
        return sum(len(data) for data in self._held.values())

    def fetch(self, manifest: Manifest) -> None:
        """Read what loading needs: programs, records, kernels, constants; not factors or piece graphs.

        One after the other: the blobs are small, and handing the interpreter lock between threads cost
        more than hashing them (9 ms serial, 20 ms with four threads, for 90 blobs on 16 cores).
        """
        for program in manifest.programs:
            self.read(program.stitch)
            self.read(program.calling)
        for digest in manifest.piece_records():
            record = SealedPiece.from_bytes(self.read(digest), where=f"piece {digest[:12]}")
            self.records[digest] = record
            _, is_code = record.program(program_code.MAGIC)
            code = None if record.code is None else record.code.blob
            for blob in record.blobs:
                if blob != (record.source if is_code else code):
                    self.read(blob)

    def _read(self, digest: BlobDigest) -> bytes:
        try:
            try:
                return self._read_listed(digest)
            except MissingBlob:
                time.sleep(_PAUSE_S)
                return self._read_listed(digest)
        except StoreError as error:
            error.hint = error.hint or f"entry {self._ref.entry_key} cannot be read: run pwcc verify"
            raise

    def read(self, digest: BlobDigest) -> bytes:
        """Return a blob's verified bytes."""
        if digest not in self._held:
            self._held[digest] = self._read(digest)
        return self._held[digest]

    def outliving(self, *kept: BlobDigest) -> Callable[[BlobDigest], bytes]:
        """Return a function that reads the entry's blobs later on, holding only ``kept`` in memory.

        A server goes on when its cache was removed; what it needs again must not be on disk alone.
        """
        held = {digest: self.read(digest) for digest in kept}
        later = self._read_listed

        def read(digest: BlobDigest) -> bytes:
            return held[digest] if digest in held else later(digest)

        return read
