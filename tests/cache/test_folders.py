"""Links and pipes inside a cache: nothing is read, written or removed through a link, and nothing waits."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache import activity, folders, inspection, last_use, layout, locks, ownership, pins, removal, signing
from pwcc.cache.errors import NotAStore, StoreError, UntrustedStore
from pwcc.cache.exporting import export_file
from pwcc.cache.findings import Kind
from pwcc.cache.gc import collect
from pwcc.cache.importing import import_stream
from pwcc.cache.manifest import Manifest
from pwcc.cache.repair import repair
from pwcc.cache.retention import Limits
from pwcc.cache.signing_keys import PrivateKey
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.verify import verify

PutEntry = Callable[..., Manifest]
LATER = 400 * 86400.0


@pytest.fixture
def ref(store: Store, manifest: Manifest) -> EntryRef:
    store.publish(manifest)
    return next(store.entries())


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def move_out(path: Path, to: Path) -> None:
    """Put a folder elsewhere and a link in its place."""
    path.mkdir(exist_ok=True)
    path.rename(to)
    path.symlink_to(to)


def test_make(tmp_path: Path) -> None:
    folders.make(tmp_path / "a")
    folders.make(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        folders.make(tmp_path / "x/y")
    folders.make(tmp_path / "x/y", parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").write_bytes(b"")
    for name in ("link", "file"):
        assert not folders.is_real(tmp_path / name)
        with pytest.raises(NotADirectoryError):
            folders.make(tmp_path / name)


def test_no_fixed_folder_may_be_a_link(store: Store, ref: EntryRef, tmp_path: Path) -> None:
    (store.root / "v1/quarantine/old").mkdir()
    for index, part in enumerate(layout.FIXED):
        shutil.copytree(store.root, tmp_path / str(index) / "cache")
        refuse_link(Store(tmp_path / str(index) / "cache"), part, tmp_path / str(index))


def refuse_link(store: Store, part: str, tmp_path: Path) -> None:
    (ref,) = store.entries()
    move_out(store.root / "v1" / part, out := tmp_path / "out")
    (out / "precious").mkdir(exist_ok=True)
    (out / "precious" / "file").write_bytes(b"keep")
    before = contents(out)
    for trust in (False, True):  # a load
        with pytest.raises(UntrustedStore, match="symbolic link"):
            ownership.require(store.root, trust=trust, environ={})
    with pytest.raises(UntrustedStore, match="symbolic link"):  # a compile, an import
        Store.create(store.root)
    with pytest.raises(UntrustedStore, match="symbolic link"):
        collect(store, Limits(), now=time.time() + LATER, grace_s=0.0)
    with pytest.raises(UntrustedStore, match="symbolic link"):
        collect(store, Limits(), now=time.time() + LATER, grace_s=0.0, asked=[ref])
    with pytest.raises(UntrustedStore, match="symbolic link"):
        pins.pin(store, ref)
    found = verify(store, now=time.time() + LATER, threads=1)
    assert Kind.TRUST in {finding.kind for finding in found.findings}
    with pytest.raises(UntrustedStore, match="symbolic link"):
        repair(store, found)
    assert contents(out) == before


def test_nothing_is_removed_through_other_links(
    store: Store, ref: EntryRef, manifest: Manifest, tmp_path: Path
) -> None:
    prefix = store.blob_path(manifest.factors).parent
    store.blob_path(manifest.factors).write_bytes(b"damaged")
    move_out(prefix, tmp_path / "blobs")
    move_out(store.plans / ref.entry_key, tmp_path / "plans")
    (tmp_path / "plans/file").write_bytes(b"keep")
    before = contents(tmp_path / "blobs")
    found = repair(store, verify(store, now=time.time() + LATER, threads=1))
    assert found.mask & Kind.TRUST.bit
    assert contents(tmp_path / "blobs") == before
    removal.remove_entry(store, ref)
    assert contents(tmp_path / "plans") == {"file": b"keep"}


def test_a_collection_does_not_enter_linked_lookup_keys_and_blob_folders(
    store: Store, ref: EntryRef, tmp_path: Path, put_entry: PutEntry
) -> None:
    other = Store.create(tmp_path / "other")
    other.publish(put_entry(other, name="other"))
    (theirs,) = other.entries()
    (store.root / "v1/entries" / theirs.lookup_key).symlink_to(theirs.path.parent)
    for folder in (other.root / "v1/blobs/sha256").iterdir():
        place = store.root / "v1/blobs/sha256" / folder.name
        if not place.exists():
            place.symlink_to(folder)
    before = contents(other.root)
    collect(store, Limits(max_bytes=0), now=time.time() + LATER, grace_s=0.0)
    assert contents(other.root) == before
    kinds = {finding.kind for finding in verify(store, now=time.time(), threads=1).findings}
    assert Kind.TRUST in kinds


@pytest.mark.parametrize("what", ["blobs", "lookup", "entry", "signatures"])
def test_nothing_is_written_through_other_links(
    store: Store, manifest: Manifest, tmp_path: Path, put_entry: PutEntry, what: str
) -> None:
    source = Store.create(tmp_path / "source")
    source.publish(put_entry(source))
    (packed,) = source.entries()
    signing.write(packed, signing.make(packed.manifest.read_bytes(), PrivateKey.generate()), tmp=source.tmp)
    export_file(source, [packed], tmp_path / "a.tar")
    fresh = Store.create(tmp_path / "fresh")
    place = fresh.entry_ref(manifest.lookup_key, manifest.entry_key).path
    (tmp_path / "out").mkdir()
    if what == "blobs":
        fresh.blob_path(manifest.factors).parent.symlink_to(tmp_path / "out")
    elif what == "lookup":
        place.parent.symlink_to(tmp_path / "out")
    else:
        if what == "signatures":
            fresh.publish(put_entry(fresh))
            (place / "signatures").symlink_to(tmp_path / "out")
            finding = next(f for f in verify(fresh, now=time.time(), threads=1).findings)
            assert (finding.kind, finding.where) == (Kind.TRUST, str(place / "signatures"))
        else:
            place.parent.mkdir()
            place.symlink_to(tmp_path / "out")
    with (tmp_path / "a.tar").open("rb") as stream:
        if what == "entry":  # the link itself is set aside
            assert import_stream(fresh, stream, where="a.tar")[0].new
            assert folders.is_real(place)
        else:
            with pytest.raises(StoreError, match="expected a folder, got a symbolic link"):
                import_stream(fresh, stream, where="a.tar")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_lock_and_its_holder_are_no_links(store: Store, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"keep")
    holder = store.root / "v1/locks/a.holder"
    holder.symlink_to(tmp_path / "victim")
    with store.lock("a"):
        assert store.lock_holder("a") is not None
        assert not holder.is_symlink()
    (store.root / "v1/locks/b.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match="expected a lock file"), store.lock("b"):
        pass
    assert (tmp_path / "victim").read_bytes() == b"keep"


def test_a_pipe_blocks_nobody(store: Store, ref: EntryRef) -> None:
    for path in (ref.manifest, store.root / "CACHEDIR.TAG"):
        path.unlink()
        os.mkfifo(path)
    os.mkfifo(store.root / "v1/locks/a.lock")
    os.mkfifo(store.root / "v1/locks/a.holder")
    os.mkfifo(store.root / "v1/locks/import.lock")
    assert store.lock_holder("a") is None
    assert not activity.writers_at_work(store)
    with activity.writing(store):
        pass
    with (
        pytest.raises(StoreError, match="expected a lock file"),
        locks.file_lock(store.root / "v1/locks/a.lock", timeout_s=0),
    ):
        pass
    last_use.stamp(store, ref.entry_key)
    (last_use.folder(store) / ref.entry_key).unlink()
    os.mkfifo(last_use.folder(store) / ref.entry_key)
    assert not last_use.stamp(store, ref.entry_key)
    (summary,) = inspection.summaries(store, now=0.0)
    assert "regular file" in (summary.problem or "")
    with pytest.raises(NotAStore, match="got one without its"):
        Store.open(store.root)
    assert Store.open(Store.create(store.root).root).root == store.root  # a writer puts the tag right


def test_who_may_write_is_looked_up_quickly(store: Store) -> None:
    def look() -> float:
        start = time.perf_counter()
        ownership.require(store.root, environ={})
        return time.perf_counter() - start

    assert min(look() for _ in range(50)) < 0.0002
