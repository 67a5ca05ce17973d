from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pwcc.cache.ids import EntryKey, LookupKey, factor_digest
from pwcc.cache.manifest import DeviceSummary, Manifest, ModelSummary
from pwcc.cache.nearest import MAX_COMPARED, Wanted, scan
from pwcc.cache.store import Store

Put = Callable[..., EntryKey]
TREE = factor_digest(b"tree")
WANTED = Wanted(
    tree_digest=TREE, root="m:Net", device="cpu", torch="2.13.0+cpu", identity="m:make", args={"layers": 2}
)


@pytest.fixture
def put(store: Store, manifest: Manifest) -> Put:
    """Write the manifest of an entry of some model; only its head matters here."""

    def make(name: str, **changes: object) -> EntryKey:
        model = ModelSummary("other", {"layers": 2}, 1, 4, "float32", factor_digest(b"else"), "x:Other")
        fields = {
            key: changes.pop(key) for key in ("identity", "args", "tree_digest", "root") if key in changes
        }
        key = EntryKey(factor_digest(name.encode()))
        lookup = LookupKey(factor_digest(b"lookup" + name.encode()))
        entry = replace(
            manifest,
            model=replace(model, **fields),  # type: ignore[arg-type]
            entry_key=key,
            lookup_key=lookup,
            **changes,  # type: ignore[arg-type]
        )
        ref = store.entry_ref(lookup, key)
        ref.path.mkdir(parents=True)
        ref.manifest.write_bytes(entry.serialise())
        return key

    return make


def test_the_nearest_comes_first_and_strangers_not_at_all(store: Store, put: Put) -> None:
    put("stranger")
    by_class = put("class", root="m:Net", identity="m:make", args={"layers": 3})
    further = put("further", root="m:Net", identity="m:make", args={"layers": 3, "eps": 1.0})
    elsewhere = put("device", root="m:Net", tree_digest=TREE, device=DeviceSummary("cuda", "H200", "9.0"))
    old = put("torch", root="m:Net", tree_digest=TREE, torch="2.11.0", device=DeviceSummary("cuda", "H200"))
    same = put("same", root="m:Net", tree_digest=TREE, identity="m:make")
    found = scan(store, WANTED)
    assert [ref.entry_key for ref in found.near] == [same, elsewhere, old, by_class, further]
    assert (found.scanned, found.complete) == (6, True)


def test_work_is_bounded(store: Store, put: Put) -> None:
    for number in range(40):
        put(f"e{number}", root="m:Net", args={"n": number})
    found = scan(store, WANTED)
    assert len(found.near) == MAX_COMPARED
    cut = scan(store, WANTED, max_scanned=10)
    assert (cut.scanned, cut.complete) == (10, False)
    assert scan(store, WANTED, max_scanned=40).complete


def test_unreadable_heads_are_passed_over(store: Store, put: Put) -> None:
    key = put("good", root="m:Net")
    put("bad", root="m:Net")
    for ref in store.entries():
        if ref.entry_key != key:
            ref.manifest.write_bytes(b"{}")
    assert [ref.entry_key for ref in scan(store, WANTED).near] == [key]


def test_an_empty_cache(store: Store) -> None:
    found = scan(store, WANTED)
    assert (found.near, found.scanned, found.complete) == ((), 0, True)


def test_without_a_name_the_class_decides(store: Store, put: Put) -> None:
    key = put("class", root="m:Net", identity="anything")
    put("empty root", root="")
    unnamed = replace(WANTED, identity=None, args=None)
    assert [ref.entry_key for ref in scan(store, unnamed).near] == [key]
    assert scan(store, replace(unnamed, root="")).near == ()
