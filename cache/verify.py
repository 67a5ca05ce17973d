"""Store: a whole cache, or one entry, verified as data, and repaired by setting aside what is damaged.

Every manifest is parsed strictly, every blob hashed once. Nothing is imported, executed or unpickled, and
without ``repair`` nothing is written. A repair never removes what is intact: a damaged blob is looked at
again after it was moved away, and an entry is moved, not deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pwcc.cache import atomic, folders, layout, ownership, strict, sweep
from pwcc.cache.blob_check import Checked, State, check_blob, check_blobs
from pwcc.cache.blobs import PREFIX_PATTERN
from pwcc.cache.entries import check_keys
from pwcc.cache.entry_check import check_entry
from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.findings import Finding, Kind, Verification
from pwcc.cache.ids import DIGEST_PATTERN, KEY_PATTERN, BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.signing_keys import KeyId
from pwcc.cache.store import MAX_PIECE_BYTES, EntryRef, Store

GRACE_S: Final = 300.0  # blobs younger than this may be of a compile that has not published yet
OnProgress = Callable[[int, int], None]
_PIECE_KINDS: Final = {State.MISSING: Kind.LEFTOVER, State.UNREADABLE: Kind.UNREADABLE}


def verify(
    store: Store,
    refs: Sequence[EntryRef] | None = None,
    *,
    now: float,
    facts: Mapping[str, object] | None = None,
    trusted: Mapping[KeyId, str] | None = None,
    threads: int | None = None,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Verification:
    """Verify a whole cache, or only the entries ``refs`` and their blobs. Writes nothing.

    Args:
        store: the cache.
        refs: the entries; None is all of them, and everything else in the cache.
        now: the time, in seconds since the epoch; tells an orphan from a blob that is being published.
        facts: this host's facts by requirement kind; kinds that are not there are not checked.
        trusted: trusted signing keys and their names, for the state of signatures.
        threads: how many hash at a time; None is one per processor, at most 8.
        on_progress: called with bytes hashed and bytes in all.

    Raises:
        StoreError: a folder cannot be listed.
    """
    started = time.perf_counter()
    run = _Run(store, now, facts or {}, trusted or {})
    if refs is None:
        run.everything(threads, on_progress)
    else:
        run.blobs(run.named_by(refs), threads, on_progress)
        run.entries(refs)
    return Verification(
        findings=tuple(run.findings),
        entries=run.count,
        blobs=len(run.checked),
        bytes=sum(item.size for item in run.checked.values()),
        seconds=time.perf_counter() - started,
        quarantined=len(store.quarantined()),
    )


def is_damaged(store: Store, ref: EntryRef) -> bool:
    """Tell whether an entry's files are not what they must be; False also where that cannot be known."""
    try:
        data = store.read_manifest_bytes(ref)
        manifest = Manifest.parse(data, where=str(ref.manifest))
        check_keys(ref, manifest.lookup_key, manifest.entry_key)
        read = store.reader(manifest)
        for digest, size in manifest.blobs.items():
            if len(read(digest)) != size:
                return True
    except CorruptEntry:
        return True
    except StoreError:
        return False
    return False


@dataclass
class _Run:
    """One verification: what was found so far."""

    store: Store
    now: float
    facts: Mapping[str, object]
    trusted: Mapping[KeyId, str]
    findings: list[Finding] = field(default_factory=list)
    checked: dict[BlobDigest, Checked] = field(default_factory=dict)
    of_entries: set[BlobDigest] = field(default_factory=set)
    of_pieces: set[BlobDigest] = field(default_factory=set)
    count: int = 0

    def say(self, kind: Kind, where: object, message: str) -> None:
        self.findings.append(Finding(kind, str(where), message))

    def everything(self, threads: int | None, on_progress: OnProgress) -> None:
        """Blobs are listed before entries: what is published meanwhile is then no orphan."""
        for concern in ownership.concerns(self.store.root):
            self.say(
                Kind.TRUST, self.store.root, f"expected a cache that only you or root can write, got {concern}"
            )
        self.fixed_folders()
        with atomic.os_errors("listing blobs", self.store.root):
            listed = [
                (digest, Path(item.path), item.stat(follow_symlinks=False))
                for digest, item in self.store.blobs.all()
            ]
        self.blobs([(digest, path, found.st_size) for digest, path, found in listed], threads, on_progress)
        self.entries(list(self.store.entries()))
        self.pieces()
        for digest, path, found in listed:
            checked = self.checked[digest]
            if digest in self.of_entries:
                continue  # said by the check of the entry
            if checked.state is State.DAMAGED:
                self.say(Kind.BLOB, path, checked.message)
            elif checked.state is State.UNREADABLE:
                self.say(Kind.UNREADABLE, path, checked.message)
            elif (
                checked.state is State.GOOD
                and digest not in self.of_pieces
                and self.now - found.st_mtime > GRACE_S
            ):
                self.say(Kind.LEFTOVER, path, "expected a blob that an entry or piece names, got an orphan")
        self.foreign_names()
        self.leftovers()

    def blobs(
        self, listed: Sequence[tuple[BlobDigest, Path, int]], threads: int | None, on_progress: OnProgress
    ) -> None:
        total, done = sum(size for _, _, size in listed), 0
        for digest, checked in check_blobs(listed, threads=threads):
            self.checked[digest] = checked
            done += checked.size
            on_progress(done, total)

    def named_by(self, refs: Sequence[EntryRef]) -> list[tuple[BlobDigest, Path, int]]:
        found: dict[BlobDigest, int] = {}
        for ref in refs:
            try:
                found |= Manifest.parse(self.store.read_manifest_bytes(ref), where=str(ref.manifest)).blobs
            except StoreError:
                continue  # said by the check of the entry
        return [(digest, self.store.blob_path(digest), size) for digest, size in found.items()]

    def find_blob(self, digest: BlobDigest) -> Checked:
        """Return what was found of a blob; one that was written after the listing is looked at now."""
        found = self.checked.get(digest)
        if found is None or found.state is not State.GOOD:
            self.checked[digest] = found = check_blob(digest, self.store.blob_path(digest))
        return found

    def entries(self, refs: Sequence[EntryRef]) -> None:
        for ref in refs:
            manifest, found = check_entry(
                self.store, ref, self.find_blob, facts=self.facts, trusted=self.trusted
            )
            if found and not os.path.lexists(ref.path):
                continue  # removed or replaced meanwhile
            self.count += 1
            self.findings += found
            if manifest is not None:
                self.of_entries |= manifest.blobs.keys()
                self.plans(manifest)

    def plans(self, manifest: Manifest) -> None:
        folder = self.store.plans / manifest.entry_key
        for path in self.files(folder):
            try:
                strict.loads(atomic.read_file(path, max_bytes=strict.MAX_BYTES), where=str(path))
            except FileNotFoundError:
                continue
            except (CorruptEntry, OSError) as error:
                kind, message = Kind.UNREADABLE, str(error)
                if isinstance(error, CorruptEntry):
                    kind, message = Kind.ENTRY, error.message
                elif error.strerror:
                    message = error.strerror
                self.findings.append(Finding(kind, str(path), f"capture plan: {message}", manifest.entry_key))

    def pieces(self) -> None:
        """Piece records are a memory of past compiles: a bad one is passed over there, and said here."""
        for path in self.files(self.store.root / layout.VERSION / "pieces"):
            if not (path.suffix == ".json" and KEY_PATTERN.fullmatch(path.stem)):
                self.say(Kind.LEFTOVER, path, "expected a piece record, got another name")
                continue
            try:
                named = _piece_blobs(atomic.read_file(path, max_bytes=MAX_PIECE_BYTES), str(path))
            except CorruptEntry as error:
                self.say(Kind.ENTRY, path, f"piece record: {error.message}")
                continue
            except OSError as error:
                self.say(Kind.UNREADABLE, path, f"piece record: {error.strerror}")
                continue
            self.of_pieces |= named.keys()
            for digest, size in named.items():
                checked = self.find_blob(digest)
                if checked.state is not State.GOOD or checked.size != size:
                    what = checked.message or f"expected {size} bytes in blob {digest}, got {checked.size}"
                    kind = _PIECE_KINDS.get(checked.state, Kind.BLOB)
                    self.say(kind, path, f"piece record: {what}")

    def fixed_folders(self) -> None:
        """What is no folder where one must be. A link is said by the check of owners; one may be missing."""
        for part in layout.FIXED:
            path = self.store.root / layout.VERSION / part
            if os.path.lexists(path) and not (path.is_symlink() or folders.is_real(path)):
                self.say(Kind.ENTRY, path, "expected a folder, got a file, pipe or device")

    def foreign_names(self) -> None:
        top = self.store.root / layout.VERSION / "blobs" / "sha256"
        for folder in self.items(top):
            if not PREFIX_PATTERN.fullmatch(folder.name):
                self.say(Kind.LEFTOVER, folder.path, "expected folders of two hex digits, got another name")
            elif folder.is_symlink():
                self.say(Kind.TRUST, folder.path, "expected a folder, got a symbolic link")
            elif not folder.is_dir(follow_symlinks=False):
                self.say(Kind.BLOB, folder.path, "expected a folder of blobs, got a file, pipe or device")
            for item in self.items(Path(folder.path)) if PREFIX_PATTERN.fullmatch(folder.name) else ():
                if not (DIGEST_PATTERN.fullmatch(item.name) and item.name.startswith(folder.name)):
                    self.say(Kind.LEFTOVER, item.path, "expected a blob, got another name")
        for lookup in self.items(self.store.root / layout.VERSION / "entries"):
            is_key = KEY_PATTERN.fullmatch(lookup.name)
            if is_key and lookup.is_symlink():
                self.say(Kind.TRUST, lookup.path, "expected a folder, got a symbolic link")
            elif is_key and not lookup.is_dir(follow_symlinks=False):
                self.say(Kind.ENTRY, lookup.path, "expected a folder of entries, got a file, pipe or device")
            items = self.items(Path(lookup.path)) if is_key else [lookup]
            for item in items:
                if not KEY_PATTERN.fullmatch(item.name):
                    self.say(Kind.LEFTOVER, item.path, "expected an entry, got another name")
                elif item.is_symlink():
                    self.say(Kind.TRUST, item.path, "expected a folder, got a symbolic link")

    def items(self, folder: Path) -> list[os.DirEntry[str]]:
        """List a folder by name; nothing where it is missing or a link. That it cannot be read is a finding."""
        if not folders.is_real(folder):
            return []
        try:
            with os.scandir(folder) as found:
                return sorted(found, key=lambda item: item.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.say(Kind.UNREADABLE, folder, f"expected a readable folder, got {error.strerror}")
            return []

    def files(self, folder: Path) -> Iterator[Path]:
        return (Path(item.path) for item in self.items(folder))

    def leftovers(self) -> None:
        tmp = self.store.root / layout.VERSION / "tmp"
        for name in sweep.sweep(tmp, now=self.now, budget_s=float("inf"), remove=False).removed:
            self.say(Kind.LEFTOVER, tmp / name, "a writer that is gone left it")


def _piece_blobs(data: bytes, where: str) -> dict[BlobDigest, int]:
    value = strict.loads(data, where=where)
    found = value.get("blobs") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise CorruptEntry("expected an object 'blobs'", where=where)
    return {strict.as_digest(name, where): strict.as_int(size, where) for name, size in found.items()}
