"""Store: a collection: entries beyond the limits go, then piece records and blobs that nothing needs.

Safe beside compiles, imports, loads and other collections (see :mod:`pwcc.cache.removal`), and after a
crash at any point: an entry is never there without its blobs. What is found without a user is only
collected when it did not change for a *grace age* before the collection began: it may be of a compile that
has not published yet. That age is short when no process holds a compile's lock, and a day when one does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from pwcc.cache import activity, last_use, layout, pins, removal
from pwcc.cache.amounts import size_text
from pwcc.cache.ids import BlobDigest
from pwcc.cache.retention import Limits, Verdict, decide
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.strict import Json
from pwcc.cache.survey import PINNED, File, PieceFile, Survey, survey

GRACE_S: Final = 300.0  # clocks of hosts that share a cache may differ by this much
BUSY_GRACE_S: Final = 86400.0  # no compile takes longer
QUARANTINE_S: Final = 30 * 86400.0  # for a person to look at what was damaged
SWEEP_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a collection did, or would do (``dry_run``). All sizes in bytes.

    ``verdicts`` hold one reason per entry, kept ones too. ``blobs`` and ``pieces`` count what was removed.
    ``waiting`` are blobs and records without a user that are younger than ``grace_s`` seconds, and their
    bytes. ``after`` is what is left, waiting ones included. ``notes`` say what a person should know.
    """

    verdicts: tuple[Verdict, ...]
    pieces: int
    blobs: int
    waiting: int
    waiting_bytes: int
    before: int
    after: int
    grace_s: float
    dry_run: bool
    notes: tuple[str, ...]

    @property
    def removed(self) -> tuple[Verdict, ...]:
        """Verdicts of the entries that went."""
        return tuple(verdict for verdict in self.verdicts if verdict.remove)

    def to_json(self) -> dict[str, Json]:
        """Return the report for ``--json``: keys in full, no paths."""
        entries: list[Json] = [
            {
                "entry_key": verdict.held.ref.entry_key,
                "lookup_key": verdict.held.ref.lookup_key,
                "removed": verdict.remove,
                "reason": verdict.reason,
                "freed_bytes": verdict.freed,
                "used_s": verdict.held.used_s,
            }
            for verdict in self.verdicts
        ]
        return {
            "dry_run": self.dry_run,
            "entries": entries,
            "removed_entries": len(self.removed),
            "removed_pieces": self.pieces,
            "removed_blobs": self.blobs,
            "waiting_files": self.waiting,
            "waiting_bytes": self.waiting_bytes,
            "grace_s": self.grace_s,
            "bytes_before": self.before,
            "bytes_after": self.after,
            "notes": list(self.notes),
        }


def collect(
    store: Store,
    limits: Limits,
    *,
    now: float,
    grace_s: float | None = None,
    dry_run: bool = False,
    asked: Collection[EntryRef] = (),
    force: bool = False,
) -> Collected:
    """Remove what the limits and ``asked`` let go, and what nothing needs any more.

    Args:
        store: the cache, opened for writing unless ``dry_run``.
        limits: see :mod:`pwcc.cache.retention`.
        now: the time, in seconds since the epoch. A file or use of a later time counts as new.
        grace_s: seconds for which a file without a user is kept; None is 300 s, a day while a compile runs.
        dry_run: say what would be done, and change nothing.
        asked: entries to remove whatever the limits are; then only what they leave behind is collected.
        force: remove asked entries also when they are pinned, or a reader holds them.

    Raises:
        UntrustedStore: a folder of the cache is a symbolic link; nothing was removed.
        StoreError: a folder cannot be listed or changed. What was removed until then stays removed; the
            store is consistent, and the next collection goes on.
    """
    layout.require_real(store.root)
    if grace_s is None:
        grace_s = BUSY_GRACE_S if activity.writers_at_work(store) else GRACE_S
    bounded = limits != Limits()
    found = survey(store, readers=bounded or bool(asked))
    entries = tuple(
        replace(held, protected=None) if force and held.ref in asked else held for held in found.entries
    )
    verdicts = decide(entries, limits, now=now, asked=asked)
    if not dry_run:
        verdicts = [_carry_out(store, verdict, force=force) for verdict in verdicts]
    left = _Leftovers(store, found, verdicts, before_s=now - grace_s, narrow=bool(asked), dry_run=dry_run)
    if found.complete:
        left.collect()
    if not dry_run:
        _tidy(store, found, now=now)
    freed = left.freed + sum(verdict.held.own_bytes for verdict in verdicts if verdict.remove)
    after = found.bytes - freed
    return Collected(
        verdicts=tuple(verdicts),
        pieces=left.pieces,
        blobs=left.blobs,
        waiting=left.waiting,
        waiting_bytes=left.waiting_bytes,
        before=found.bytes,
        after=after,
        grace_s=grace_s,
        dry_run=dry_run,
        notes=tuple(_notes(found, limits, after, left)),
    )


def _carry_out(store: Store, verdict: Verdict, *, force: bool) -> Verdict:
    if not verdict.remove:
        return verdict
    if not force and pins.is_pinned(store, verdict.held.ref.entry_key):  # since the survey
        return replace(verdict, remove=False, reason=PINNED, freed=0)
    stays = removal.remove_entry(store, verdict.held.ref, force=force)
    return verdict if stays is None else replace(verdict, remove=False, reason=stays, freed=0)


def _tidy(store: Store, found: Survey, *, now: float) -> None:
    """Remove what crashed writers left, stamps of entries that are gone, and what was set aside long ago."""
    store.sweep(budget_s=SWEEP_S)
    known = {held.ref.entry_key for held in found.entries}
    for key in last_use.stamps(store).keys() - known:
        last_use.forget(store, key)
    removal.remove_set_aside(store, before_s=now - QUARANTINE_S)


class _Leftovers:
    """Piece records and blobs that no remaining entry needs; counts what became of them.

    ``narrow`` limits this to what the removed entries used.
    """

    def __init__(
        self,
        store: Store,
        found: Survey,
        verdicts: Collection[Verdict],
        *,
        before_s: float,
        narrow: bool,
        dry_run: bool,
    ) -> None:
        self.pieces = self.blobs = self.waiting = self.waiting_bytes = self.freed = 0
        self._found = found
        self._before_s = before_s
        self._dry_run = dry_run
        self._tmp = store.tmp
        self._live = {digest for verdict in verdicts if not verdict.remove for digest in verdict.held.blobs}
        gone = {digest for verdict in verdicts if verdict.remove for digest in verdict.held.blobs}
        self._scope = gone if narrow else None

    def collect(self) -> None:
        """Remove piece records before the blobs that they name, so that none names a blob that is gone."""
        for piece in self._found.pieces:
            if self._is_orphan(piece) and self._remove(piece.file):
                self.pieces += 1
            else:
                self._live.update(piece.blobs)
        for digest, file in self._found.blobs.items():
            if digest not in self._live and self._in_scope(digest) and self._remove(file):
                self.blobs += 1

    def _is_orphan(self, piece: PieceFile) -> bool:
        """A record is of use while the entries keep all its blobs; it costs nothing but itself then."""
        if not piece.blobs:
            return self._scope is None
        return any(digest not in self._live and self._in_scope(digest) for digest in piece.blobs)

    def _in_scope(self, digest: BlobDigest) -> bool:
        return self._scope is None or digest in self._scope

    def _remove(self, file: File) -> bool:
        old = file.changed_s < self._before_s
        if old and not self._dry_run:
            old = removal.remove_old(file.path, tmp=self._tmp, before_s=self._before_s)
        if old:
            self.freed += file.bytes
        else:
            self.waiting += 1
            self.waiting_bytes += file.bytes
        return old


def _notes(found: Survey, limits: Limits, after: int, left: _Leftovers) -> list[str]:
    notes = [f"{ref.entry_key[:12]} cannot be read: {reason}" for ref, reason in found.unreadable[:5]]
    if len(found.unreadable) > 5:
        notes.append(f"and {len(found.unreadable) - 5} more that cannot be read; see pwcc verify")
    hidden = sum(not piece.readable for piece in found.pieces)
    if hidden:
        notes.append(f"{hidden} of {len(found.pieces)} piece records cannot be read; they were kept")
    if not found.complete:
        notes.append("no blob was collected: what cannot be read here may need any of them")
    elif limits.max_bytes is not None and after > limits.max_bytes:
        why = "files too new to collect" if left.waiting_bytes else "entries that are pinned or in use"
        notes.append(f"still {size_text(after - limits.max_bytes)} over the limit: {why} make up the rest")
    return notes
