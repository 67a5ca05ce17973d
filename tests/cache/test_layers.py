from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import inspection, layers, strict
from pwcc.cache.errors import CacheMiss, CorruptEntry, MissingBlob, NotAStore, UntrustedEntry, UntrustedStore
from pwcc.cache.gc import collect
from pwcc.cache.ids import PieceKey
from pwcc.cache.layers import create_layered, find_layered, open_layered, require_trust
from pwcc.cache.manifest import Manifest
from pwcc.cache.retention import Limits
from pwcc.cache.store import EntryRef, Store

PutEntry = Callable[..., Manifest]


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time: nothing below may change, not even a time."""
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in sorted(root.rglob("*"))
    }


@pytest.fixture
def image(tmp_path: Path, put_entry: PutEntry) -> Store:
    """A lower store with one entry."""
    store = Store.create(tmp_path / "image")
    store.publish(put_entry(store, name="toy"))
    return store


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    return tmp_path / "upper"


def test_entries_of_all_layers_are_found(image: Store, upper: Path, put_entry: PutEntry) -> None:
    before = tree(image.root)
    store = create_layered(upper, [image.root])
    store.publish(put_entry(store, name="mine"))
    found = {store.read_manifest(ref).model.identity: ref for ref in store.entries()}
    assert sorted(found) == ["mine", "toy"]
    assert (store.owns(found["mine"]), store.owns(found["toy"])) == (True, False)
    for ref in found.values():
        for digest in store.read_manifest(ref).blobs:
            store.read_blob(digest)
    assert [ref.entry_key for ref in store.entries()] == sorted(ref.entry_key for ref in found.values())
    assert tree(image.root) == before


def test_an_entry_in_two_layers_counts_once_and_the_upper_wins(image: Store, upper: Path) -> None:
    shutil.copytree(image.root, upper)
    store = open_layered(upper, [image.root])
    (ref,) = store.entries()
    assert store.owns(ref)
    assert store.candidates(ref.lookup_key) == [ref]
    (below,) = image.entries()
    shutil.rmtree(ref.path)
    assert list(store.entries()) == [below]


def test_an_upper_that_is_not_there_yet_is_empty(image: Store, upper: Path) -> None:
    store = open_layered(upper, [image.root])
    assert len(list(store.entries())) == 1
    assert not upper.exists()
    upper.mkdir()
    assert len(list(find_layered(upper, [image.root], hint="").entries())) == 1
    (upper / "something else").write_text("x")
    with pytest.raises(NotAStore):
        open_layered(upper, [image.root])


def test_without_layers_it_is_the_plain_store(image: Store, upper: Path) -> None:
    assert open_layered(image.root, []).layers == ()
    with pytest.raises(NotAStore):
        open_layered(upper, [])
    with pytest.raises(CacheMiss, match="empty or does not exist"):
        find_layered(upper, [], hint="compile")


@pytest.mark.parametrize("make", [open_layered, create_layered])
def test_a_layer_that_is_missing_is_a_clear_error_and_nothing_is_made(
    upper: Path, tmp_path: Path, make: Callable[[Path, list[Path]], Store]
) -> None:
    with pytest.raises(NotAStore, match=r"a layer is no pwcc cache(.|\n)*--layer and PWCC_LAYERS"):
        make(upper, [tmp_path / "not mounted"])
    assert not upper.exists()


def test_what_is_published_is_complete_by_itself(image: Store, upper: Path) -> None:
    """As when a compile used pieces of the image."""
    before = tree(image.root)
    manifest = image.read_manifest(next(image.entries()))
    store = create_layered(upper, [image.root])
    published = store.publish(replace(manifest, tuned=True))
    assert published.won
    alone = Store.open(upper)
    (ref,) = alone.entries()
    for digest in alone.read_manifest(ref).blobs:
        alone.read_blob(digest)
    assert tree(image.root) == before


def test_a_blob_that_no_layer_has_is_still_missed(image: Store, upper: Path) -> None:
    manifest = image.read_manifest(next(image.entries()))
    image.blob_path(manifest.factors).unlink()
    store = create_layered(upper, [image.root])
    with pytest.raises(MissingBlob):
        store.publish(manifest)
    assert list(Store.open(upper).entries()) == []


def test_a_damaged_blob_above_is_read_from_below(image: Store, upper: Path) -> None:
    shutil.copytree(image.root, upper)
    store = open_layered(upper, [image.root])
    digest = store.read_manifest(next(store.entries())).predicates
    store.blob_path(digest).write_bytes(b"??")
    store.read_blob(digest)
    image.blob_path(digest).unlink()
    with pytest.raises(CorruptEntry, match="expected SHA-256"):
        store.read_blob(digest)


def test_piece_records_of_layers_are_found_and_new_ones_go_up(image: Store, upper: Path) -> None:
    key = PieceKey("1" * 32)
    image.put_piece(key, b"below")
    before = tree(image.root)
    store = create_layered(upper, [image.root])
    assert store.get_piece(key) == b"below"
    assert store.get_piece(PieceKey("2" * 32)) is None
    store.put_piece(key, b"above")
    assert store.get_piece(key) == b"above"
    assert tree(image.root) == before


def test_a_damaged_entry_below_is_never_moved(image: Store, upper: Path) -> None:
    store = create_layered(upper, [image.root])
    (ref,) = store.entries()
    ref.manifest.write_bytes(b"damaged")
    before = tree(image.root)
    assert store.quarantine(ref, "damaged", is_damaged=lambda _: True) is None
    assert tree(image.root) == before


def test_a_collection_is_of_one_directory(image: Store, upper: Path, put_entry: PutEntry) -> None:
    before = tree(image.root)
    create_layered(upper, [image.root]).publish(put_entry(Store.open(upper), name="mine"))
    report = collect(Store.open(upper), Limits(max_bytes=0), now=0.0, dry_run=True)
    assert len(report.removed) == 1
    assert tree(image.root) == before


def test_three_layers_in_order(image: Store, upper: Path, tmp_path: Path, put_entry: PutEntry) -> None:
    middle = Store.create(tmp_path / "middle")
    middle.publish(put_entry(middle, name="between"))
    store = open_layered(upper, [middle.root, image.root, middle.root, upper])
    assert [layer.root for layer in store.layers] == [middle.root, image.root]
    assert sorted(s.model for s in inspection.summaries(store, now=0.0)) == ["between", "toy"]


def test_every_layer_must_be_trusted(image: Store, upper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create_layered(upper, [image.root])
    assert require_trust(store) == ()
    image.root.chmod(0o777)
    with pytest.raises(UntrustedStore):
        require_trust(store)
    assert require_trust(store, trust=True) == (upper, image.root)
    monkeypatch.setenv("PWCC_TRUST_DIR", str(image.root))
    assert require_trust(store) == (image.root,)


def test_layers_are_named_by_the_caller_or_the_environment() -> None:
    environ = {layers.VARIABLE: f"a{os.pathsep}{os.pathsep}b"}
    assert layers.named(None, environ) == (Path("a"), Path("b"))
    assert layers.named(["c"], environ) == (Path("c"),)
    assert layers.named([], environ) == ()
    assert layers.named(None, {}) == ()


def test_a_manifest_of_two_layers_is_read_as_data(image: Store, upper: Path) -> None:
    store = open_layered(upper, [image.root])
    detail = inspection.detail(store, next(store.entries()))
    assert detail["missing_blobs"] == []
    assert strict.canonical(detail)


@pytest.mark.parametrize("damage", ["bytes", "owner", "admission"])
def test_an_upper_copy_that_cannot_be_used_hides_no_lower_one(image: Store, upper: Path, damage: str) -> None:
    (below,) = image.entries()
    shutil.copytree(image.root, upper)
    store = open_layered(upper, [image.root])
    (ref,) = store.entries()
    assert store.owns(ref)
    if damage == "bytes":
        ref.manifest.write_bytes(b"{}")
    elif damage == "owner":
        ref.manifest.chmod(0o666)
    else:

        def admit(asked: EntryRef, _data: bytes) -> None:
            if store.owns(asked):
                raise UntrustedEntry("unsigned")

        store.require(admit)
    assert list(store.entries()) == [below]
    assert store.candidates(below.lookup_key) == [below]
    below.manifest.write_bytes(b"{}")
    if damage == "bytes":  # none can be used: the upper one tells why
        assert list(store.entries()) == [ref]
