"""Key: the entries of a cache that come nearest to what was looked for, found with bounded work.

First every entry's head (about 0.05 ms each, see ``about.py``) is ranked by what it says of model, device
and torch; only the best few are read in full and compared factor by factor, by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from pwcc.cache import about
from pwcc.cache.about import About
from pwcc.cache.entries import EntryRef
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import FactorDigest
from pwcc.cache.store import Store
from pwcc.cache.strict import Json

MAX_SCANNED: Final = 10_000  # heads read to explain a miss: 0.5 to 1 s of it
MAX_COMPARED: Final = 16  # entries then compared in full, a few milliseconds each


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What was looked for, as far as a head can tell. ``identity`` and ``args`` are None where unknown.

    ``root`` is the class of the root module; ``device`` reads as :attr:`About.device` does.
    """

    tree_digest: FactorDigest
    root: str
    device: str
    torch: str
    identity: str | None = None
    args: Mapping[str, Json] | None = None


@dataclass(frozen=True)
class Scan:
    """Which entries come near, the nearest first, and whether every entry was looked at."""

    near: tuple[EntryRef, ...] = ()
    scanned: int = 0
    complete: bool = True
    heads: Mapping[EntryRef, About] = field(default_factory=dict)


def scan(store: Store, wanted: Wanted, *, limit: int = MAX_COMPARED, max_scanned: int = MAX_SCANNED) -> Scan:
    """Return at most ``limit`` entries that are of the wanted model's tree, class or name, nearest first.

    Entries whose head cannot be read are passed over. An entry of another model is never near, however
    alike its device and torch.
    """
    ranked: list[tuple[tuple[int, ...], EntryRef]] = []
    heads: dict[EntryRef, About] = {}
    count = 0
    entries = iter(store.entries())
    for ref in islice(entries, max_scanned):
        count += 1
        try:
            head, _ = about.split(store.read_manifest_bytes(ref), where=ref.entry_key)
        except StoreError:
            continue
        if not _is_near(head, wanted):
            continue
        heads[ref] = head
        ranked.append((_distance(head, wanted), ref))
    ranked.sort()
    near = tuple(ref for _, ref in ranked[:limit])
    return Scan(near, count, next(entries, None) is None, {ref: heads[ref] for ref in near})


def _is_near(head: About, wanted: Wanted) -> bool:
    return (
        head.tree_digest == wanted.tree_digest
        or (head.root == wanted.root != "")
        or head.identity == wanted.identity
    )


def _distance(head: About, wanted: Wanted) -> tuple[int, ...]:
    """Smaller is nearer: another tree weighs most, then another class, device, torch, each argument."""
    args = head.args if wanted.args is None else dict(wanted.args)
    return (
        head.tree_digest != wanted.tree_digest,
        head.root != wanted.root,
        wanted.identity is not None and head.identity != wanted.identity,
        (head.device != wanted.device) + (head.torch != wanted.torch),
        sum(head.args.get(name) != args.get(name) for name in {*head.args, *args}),
    )
