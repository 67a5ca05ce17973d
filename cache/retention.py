"""Store: which entries a collection removes, as a pure function of what is there, the limits and the clock.

No file is touched here. Two rules, in this order:

1. *Retention.* ``max_age_s`` lets an entry go when it was last used longer ago. ``keep_last`` lets an entry
   go when that many entries of its lookup key were used later. With both, an entry goes only when both let
   it go: the last N of a model stay however old they are.
2. *Size.* ``max_bytes`` is a hard limit for what is left: the entries last used longest ago go until the
   rest fits. A blob that several entries share counts once, and is freed with the last of them.

A pinned entry, and one that a reader holds, never goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pwcc.cache.entries import EntryRef
from pwcc.cache.ids import BlobDigest, LookupKey


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a cache may hold; None is no limit. Sizes in bytes, ages in seconds."""

    max_bytes: int | None = None
    max_age_s: float | None = None
    keep_last: int | None = None


@dataclass(frozen=True, kw_only=True)
class Held:
    """One entry of a cache, as far as retention is concerned.

    ``used_s`` is when it was last used, in seconds since the epoch; ``own_bytes`` are files that belong to
    it alone (manifest, signatures, plans); ``blobs`` maps each of its blobs to its bytes. ``protected``
    says why it must stay, if it must.
    """

    ref: EntryRef
    used_s: float
    own_bytes: int
    blobs: Mapping[BlobDigest, int]
    protected: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What happens to one entry and why; ``freed`` counts the bytes that nothing else needs then."""

    held: Held
    remove: bool
    reason: str
    freed: int = 0


def decide(
    entries: Sequence[Held], limits: Limits, *, now: float, asked: Collection[EntryRef] = ()
) -> list[Verdict]:
    """Return one verdict per entry, those last used longest ago first.

    ``asked`` are entries that a person named: they go whatever the limits are. Use that lies in the future
    (a clock was set back) counts as now. Where the last use is equal, key order decides, so that two
    processes decide alike.
    """
    ordered = sorted(entries, key=lambda held: (min(held.used_s, now), held.ref.lookup_key, held.ref.entry_key))
    reasons = _retention(ordered, limits, now, frozenset(asked))
    books = _Books(ordered)
    freed = {ref: books.remove(held) for held in ordered if (ref := held.ref) in reasons}
    if limits.max_bytes is not None:
        for held in ordered:
            if books.total <= limits.max_bytes:
                break
            if held.ref not in reasons and held.protected is None:
                reasons[held.ref] = f"over the size limit; last used {_days(now - held.used_s)} ago"
                freed[held.ref] = books.remove(held)
    return [
        Verdict(held, True, reasons[held.ref], freed[held.ref])
        if held.ref in reasons
        else Verdict(held, False, held.protected or "within the limits")
        for held in ordered
    ]


def total_bytes(entries: Sequence[Held]) -> int:
    """Return what the entries take together, in bytes; shared blobs count once."""
    return _Books(entries).total


def _retention(
    ordered: Sequence[Held], limits: Limits, now: float, asked: frozenset[EntryRef]
) -> dict[EntryRef, str]:
    reasons: dict[EntryRef, str] = {}
    later: Counter[LookupKey] = Counter()
    for held in reversed(ordered):
        rank = later[held.ref.lookup_key]
        later[held.ref.lookup_key] += 1
        lets_go: list[str | None] = []
        if limits.max_age_s is not None:
            age = now - held.used_s
            lets_go.append(f"last used {_days(age)} ago" if age > limits.max_age_s else None)
        if limits.keep_last is not None:
            kept = limits.keep_last
            lets_go.append(f"not among the last {kept} of its lookup key" if rank >= kept else None)
        if held.protected is not None:
            continue
        if held.ref in asked:
            reasons[held.ref] = "asked for"
        elif lets_go and all(lets_go):
            reasons[held.ref] = "; ".join(filter(None, lets_go))
    return reasons


class _Books:
    """Counts who needs each blob, so that a shared one is counted once and freed by its last user."""

    def __init__(self, entries: Sequence[Held]) -> None:
        self._users: Counter[BlobDigest] = Counter()
        self._sizes: dict[BlobDigest, int] = {}
        for held in entries:
            self._users.update(held.blobs.keys())
            self._sizes.update(held.blobs)
        self.total = sum(held.own_bytes for held in entries) + sum(self._sizes.values())

    def remove(self, held: Held) -> int:
        freed = held.own_bytes
        for digest in held.blobs:
            self._users[digest] -= 1
            if not self._users[digest]:
                freed += self._sizes[digest]
        self.total -= freed
        return freed


def _days(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
