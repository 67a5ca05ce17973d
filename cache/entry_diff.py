"""Key: two entries compared, factor by factor; nothing of either is executed, and torch is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pwcc.cache import strict
from pwcc.cache.details import Details, diff_size, row_text, tree_changes
from pwcc.cache.entries import EntryRef
from pwcc.cache.errors import StoreError
from pwcc.cache.factors import ABSENT, Absent, FactorTree, diff
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.cache.strict import Json

MAX_JSON: int = 32 * 1024 * 1024


@dataclass(frozen=True)
class EntryChange:
    """One difference: ``first`` and ``second`` are the values, :data:`ABSENT` where there is none.

    ``note`` adds what the values do not say, such as ``+3 -1 lines`` of a source.
    """

    path: str
    first: Json | Absent
    second: Json | Absent
    note: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form; a side that is absent has no field."""
        sides: dict[str, Json] = {}
        for name, value in (("first", self.first), ("second", self.second)):
            if not isinstance(value, Absent):
                sides[name] = value
        return {"path": self.path, **sides, **({"note": self.note} if self.note else {})}


def compare_entries(first: tuple[Store, EntryRef], second: tuple[Store, EntryRef]) -> list[EntryChange]:
    """Return every factor in which two entries differ, then the rows of their models, then requirements.

    Raises:
        StoreError: a manifest or a factors blob cannot be read.
    """
    (a, factors_a, details_a), (b, factors_b, details_b) = _read(*first), _read(*second)
    found = [
        EntryChange(change.path, change.before, change.after, _lines(change.path, details_a, details_b))
        for change in diff(factors_a, factors_b)
    ]
    return [*found, *_rows(details_a, details_b), *_requirements(a, b)]


def _read(store: Store, ref: EntryRef) -> tuple[Manifest, FactorTree, Details | None]:
    manifest = store.read_manifest(ref)
    raw = strict.loads(store.read_blob(manifest.factors, max_bytes=MAX_JSON), where="factors")
    try:
        details = Details.from_bytes(store.read_blob(manifest.details)) if manifest.details else None
    except StoreError:
        details = None
    return manifest, FactorTree.from_json(raw), details


def _lines(path: str, first: Details | None, second: Details | None) -> str:
    name = path.removeprefix("sources/")
    if name == path or first is None or second is None:
        return ""
    before, after = first.lines.get(name), second.lines.get(name)
    return "" if before is None or after is None else "+{} -{} lines".format(*diff_size(before, after))


def _rows(first: Details | None, second: Details | None) -> Iterator[EntryChange]:
    if first is not None and second is not None:
        for path, before, after in tree_changes(first.tree, second.tree):
            yield EntryChange(f"model/{path}", row_text(before), row_text(after))
        if first.signature != second.signature:
            yield EntryChange("model/forward", first.signature, second.signature)


def _requirements(first: Manifest, second: Manifest) -> Iterator[EntryChange]:
    sides = [{item.kind: item.to_json()["value"] for item in m.requirements} for m in (first, second)]
    for kind in sorted({*sides[0], *sides[1]}):
        before, after = sides[0].get(kind, ABSENT), sides[1].get(kind, ABSENT)
        if before != after:
            yield EntryChange(f"requirement/{kind}", before, after)
