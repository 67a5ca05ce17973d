"""Store: the atomic publication of one entry: blobs first, then a folder with its manifest, by one rename."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, folders, quarantine
from pwcc.cache.blobs import Blobs
from pwcc.cache.entries import MANIFEST, EntryRef
from pwcc.cache.errors import MissingBlob
from pwcc.cache.failpoints import failpoint
from pwcc.cache.manifest import Manifest

PUT_BACK_S: Final = 0.05  # a collection needs some microseconds between its two looks at a file


@dataclass(frozen=True)
class Publication:
    """Where an entry lies after publishing; ``won`` is False when another process had published it."""

    path: Path
    won: bool


@dataclass(frozen=True)
class Publisher:
    """The folders of a store that a publication touches.

    A crash at any point leaves the old state or the new one: the folder is complete and flushed before it
    gets its name, and its blobs before that.
    """

    blobs: Blobs
    entries: Path
    tmp: Path
    quarantine: Path

    def place(
        self, ref: EntryRef, data: bytes, manifest: Manifest, *, is_intact: Callable[[EntryRef, bytes], bool]
    ) -> bool:
        """Make the entry visible; return whether it is this one that is. OSError passes through.

        Raises:
            MissingBlob: a blob is not there.
        """
        with atomic.staging_directory(self.tmp) as staged:
            failpoint("publish.staged")
            self._renew(manifest, ref)
            failpoint("publish.checked")
            self.blobs.flush_names(manifest.blobs)  # a manifest must not outlive the names of its blobs
            atomic.write_new(staged / MANIFEST, data)
            atomic.fsync_directory(staged)
            failpoint("publish.written")
            folders.make(ref.path.parent)
            won = atomic.rename_new(staged, ref.path)
            if not won and not is_intact(ref, data):
                quarantine.set_aside(self.quarantine, ref, "a compile replaced it: it was damaged")
                failpoint("publish.quarantined")
                won = atomic.rename_new(staged, ref.path)
            failpoint("publish.renamed")
            if won:
                self._keep_or_withdraw(ref, manifest)
            atomic.fsync_directory(ref.path.parent)
            atomic.fsync_directory(self.entries)
            failpoint("publish.flushed")
        return won

    def _renew(self, manifest: Manifest, ref: EntryRef) -> None:
        """Touch every blob, then check them: what a collection took before the touch is seen here.

        Once more if one is missing, since a collection puts back what was touched meanwhile.
        """
        for digest in manifest.blobs:
            self.blobs.touch(digest)
        try:
            self.check_blobs(manifest, ref)
        except MissingBlob:
            time.sleep(PUT_BACK_S)
            self.check_blobs(manifest, ref)

    def _keep_or_withdraw(self, ref: EntryRef, manifest: Manifest) -> None:
        """Look once more, now that collections see the entry.

        One that began before may have taken blobs whose grace age passed while this writer was stopped
        between touching them and the rename. It takes none that are touched from here on.
        """
        try:
            self._renew(manifest, ref)
        except MissingBlob:
            reason = "withdrawn: a collection took blobs while it was published"
            quarantine.set_aside(self.quarantine, ref, reason)
            raise

    def check_blobs(self, manifest: Manifest, ref: EntryRef) -> None:
        """Raise MissingBlob unless every blob of the manifest is there in its size."""
        for digest, size in manifest.blobs.items():
            if not self.blobs.has(digest, size=size):
                raise MissingBlob(
                    f"expected blob {digest} of {size} bytes, found none",
                    where=str(ref.manifest),
                    hint="the cache was changed while it was written; compile again",
                )
