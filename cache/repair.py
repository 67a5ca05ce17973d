"""Store: what a verification may put right: damaged entries set aside, damaged blobs and leftovers removed.

Nothing intact is removed, not even an orphan (that is ``pwcc gc``'s work). A writer may put good bytes
where damaged ones were found; so everything is looked at once more after it was moved away, and put back
when it is good.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path

from pwcc.cache import atomic, folders, layout, owners, sweep
from pwcc.cache.blob_check import State, check_blob
from pwcc.cache.entry_check import check_entry
from pwcc.cache.errors import StoreError
from pwcc.cache.findings import Finding, Kind, Verification
from pwcc.cache.ids import DIGEST_PATTERN, BlobDigest, EntryKey
from pwcc.cache.store import EntryRef, Store

_Refs = dict[EntryKey, list[EntryRef]]  # one that was copied by hand lies under two lookup keys
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP)  # other than what belongs there


def repair(store: Store, found: Verification) -> Verification:
    """Repair what can be, and return the report with what was done.

    Raises:
        UntrustedStore: a folder of the cache is a symbolic link; nothing was changed.
        StoreError: the cache cannot be written. What was repaired until then stays so.
    """
    layout.require_real(store.root)
    refs: _Refs = {}
    for ref in store.entries():
        refs.setdefault(ref.entry_key, []).append(ref)
    done: dict[EntryRef, str | None] = {}
    findings = []
    for finding in sorted(found.findings, key=lambda item: item.entry is not None):  # blobs, then entries
        findings.append(replace(finding, repaired=_repair_or_leave(store, finding, refs, done)))
    return replace(found, findings=tuple(findings))


def _repair_or_leave(
    store: Store, finding: Finding, refs: _Refs, done: dict[EntryRef, str | None]
) -> str | None:
    """Repair one finding; where something else is in the way, it is left to a person and the others go on."""
    try:
        return _repair(store, finding, refs, done)
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in _IN_THE_WAY:
            return None
        raise


def _repair(store: Store, finding: Finding, refs: _Refs, done: dict[EntryRef, str | None]) -> str | None:
    path = Path(finding.where)
    base = store.root / layout.VERSION
    with atomic.os_errors("repairing", path):
        if finding.kind is Kind.BLOB and DIGEST_PATTERN.fullmatch(path.name):
            removed = _remove_blob(store, path)
            if finding.entry is None:
                return removed
        if finding.kind in (Kind.BLOB, Kind.ENTRY) and path.parent in (
            base / "pieces",
            store.plans / str(finding.entry),
        ):
            return _remove_record(store, path)
        copies = [] if finding.entry is None else refs.get(finding.entry, [])
        if finding.kind in (Kind.BLOB, Kind.ENTRY) and copies:
            meant = [ref for ref in copies if path.is_relative_to(ref.path)] or copies
            for ref in meant:
                if ref not in done:
                    done[ref] = _set_aside(store, ref, finding.message)
            return next((done[ref] for ref in meant if done[ref] is not None), None)
        if finding.kind in (Kind.BLOB, Kind.ENTRY) and path.parent in (
            base / "blobs" / "sha256",
            base / "entries",
        ):
            return None if folders.is_real(path) else _move_aside(store, path)
        if finding.kind is Kind.LEFTOVER and path.parent == base / "tmp":
            return "removed" if path.name in _swept(store) or not path.exists() else None
    return None


def _remove_record(store: Store, path: Path) -> str:
    """Remove a damaged record; a folder of its name is set aside, since something may lie in it."""
    if folders.is_real(path):
        return _move_aside(store, path)
    path.unlink(missing_ok=True)
    return "removed"


def _move_aside(store: Store, path: Path) -> str:
    try:
        os.rename(path, store.root / layout.VERSION / "quarantine" / uuid.uuid4().hex)  # noqa: PTH104
    except FileNotFoundError:
        return "gone"
    return "set aside in quarantine"


def _remove_blob(store: Store, path: Path) -> str | None:
    if not folders.is_real(path.parent):
        return None  # nothing is removed through a link
    aside = store.tmp / owners.staging_name()
    try:
        os.rename(path, aside)  # noqa: PTH104 - one seam for tests to break
    except FileNotFoundError:
        return "gone"
    if check_blob(BlobDigest(path.name), aside).state is State.DAMAGED:
        if aside.is_dir() and not aside.is_symlink():
            with contextlib.suppress(OSError):
                aside.rmdir()
        else:
            aside.unlink()
        return "removed"
    with contextlib.suppress(FileExistsError):
        os.link(aside, path, follow_symlinks=False)  # a writer made it good meanwhile
    aside.unlink()
    return "a writer has put the right bytes there"


def _set_aside(store: Store, ref: EntryRef, reason: str) -> str | None:
    def is_damaged(moved: EntryRef) -> bool:
        _, found = check_entry(
            store, moved, lambda digest: check_blob(digest, store.blob_path(digest)), facts={}, trusted={}
        )
        return any(finding.kind in (Kind.ENTRY, Kind.BLOB) for finding in found)

    if not ref.path.exists():
        return "gone"
    return "set aside in quarantine" if store.quarantine(ref, reason, is_damaged=is_damaged) else None


def _swept(store: Store) -> tuple[str, ...]:
    return sweep.sweep(store.tmp, now=time.time(), budget_s=float("inf")).removed
