"""Artifact: the winners of an entry's tuning, for a compile that tunes nothing that was tuned before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pwcc.cache import tuning
from pwcc.cache.errors import UsageError
from pwcc.cache.ids import EntryKey
from pwcc.cache.inspection import MIN_PREFIX, SHORT, find
from pwcc.cache.layers import require_trust
from pwcc.cache.store import Store
from pwcc.cache.tuning import EntryTuning, PieceTuning

_HINT: Final = "--autotune-from takes KEY or DIR/KEY; pwcc inspect DIR lists keys"


@dataclass(frozen=True)
class Pins:
    """The compilers' own files of an earlier entry's tuning; what they decide is not timed again."""

    entry: EntryKey
    files: Mapping[str, str] = field(repr=False)


def find_pins(given: str, store: Store, *, trust: bool = False) -> Pins:
    """Return the winners of the entry that ``given`` names: ``KEY`` in ``store``, or ``DIR/KEY`` elsewhere.

    KEY is a prefix of an entry's key, at least 4 hex digits.

    Raises:
        UsageError: no such entry or several, an entry without tuning results, or a store in which only what is
            signed may be used: these results are not. StoreError, UntrustedStore: the other directory.
    """
    directory, slash, prefix = given.rpartition("/")
    if slash:
        restricted, store = store.is_restricted, Store.open(Path(directory or "/"))
        require_trust(store, trust=trust)
    else:
        restricted = store.is_restricted
    if restricted:
        raise UsageError(
            "--autotune-from reads tuning results, which nobody signs, and signatures are required here",
            hint="tune anew with --autotune, or compile without --require-signature",
        )
    found = find(store, prefix) if set(prefix.lower()) <= set("0123456789abcdef") else []
    if len(found) != 1:
        what = f"{len(found)} of them" if found else "none"
        raise UsageError(
            f"expected one entry whose key begins with {prefix!r} (at least {MIN_PREFIX} digits), got {what}",
            where=str(store.root),
            hint=_HINT,
        )
    key = found[0].entry_key
    held = tuning.read(store, key)
    if held is None or not held.files:
        raise UsageError(
            f"entry {key[:SHORT]} holds no tuning results",
            where=str(store.root),
            hint="they are written by compiles for CUDA, and do not travel in an archive: copy the directory",
        )
    return Pins(key, held.files)


def entry_tuning(key: EntryKey, pieces: Mapping[str, PieceTuning | None]) -> EntryTuning | None:
    """Return an entry's tuning results by piece and variant; None where no piece has any, as on CPU."""
    tuned = {name: result for name, result in pieces.items() if result is not None}
    return EntryTuning(key, tuned) if tuned else None


def untuned_warnings(pins: Pins | None, made: Sequence[tuple[str, PieceTuning | None]]) -> tuple[str, ...]:
    """Return one warning per piece that had to time something although winners were given; names what."""
    if pins is None:
        return ()
    found: list[str] = []
    for piece, result in made:
        if result is None or not result.runs:
            continue
        timed = [choice.name for choice in result.choices if choice.kind == "kernel" and choice.candidates]
        named = ", ".join(timed) or "an operation or a fusion"
        found.append(
            f"{piece}: entry {pins.entry[:SHORT]} has no winner for {named}, which was tuned here "
            f"({result.runs} timing runs)"
        )
    return tuple(found)
