from __future__ import annotations

import errno
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache import pins
from pwcc.cache.errors import CorruptEntry, StoreError, UsageError
from pwcc.cache.exporting import export_file, export_stream
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import EntryRef, Store

PutEntry = Callable[..., Manifest]


@pytest.fixture
def refs(store: Store, put_entry: PutEntry) -> list[EntryRef]:
    for name in ("toy", "other"):
        store.publish(put_entry(store, name=name))
    return list(store.entries())


def exported(store: Store, refs: list[EntryRef]) -> bytes:
    stream = io.BytesIO()
    export_stream(store, refs, stream)
    return stream.getvalue()


def test_an_archive_holds_manifests_and_each_blob_once(store: Store, refs: list[EntryRef]) -> None:
    stream = io.BytesIO()
    done = export_stream(store, refs, stream)
    manifests = [store.read_manifest(ref) for ref in refs]
    blobs = {digest for manifest in manifests for digest in manifest.blobs}
    assert (done.entries, done.signatures, done.blobs) == (tuple(refs), 0, len(blobs))
    assert done.bytes == len(stream.getvalue())
    stream.seek(0)
    with tarfile.open(fileobj=stream) as tar:
        names = tar.getnames()
    keys = [f"entries/{ref.lookup_key}/{ref.entry_key}/manifest.json" for ref in refs]
    assert names == ["pwcc-export.json", *keys, *(f"blobs/{digest}" for digest in sorted(blobs))]


def test_the_same_entries_give_the_same_bytes_anywhere(
    store: Store, refs: list[EntryRef], tmp_path: Path
) -> None:
    first = exported(store, refs)
    pins.pin(store, refs[0], note="not part of the entry")
    other = Store.open(shutil.copytree(store.root, tmp_path / "elsewhere"))
    for path in other.root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o600)
        os.utime(path, (1, 1))
    assert exported(other, list(other.entries())[::-1] * 2) == first
    assert str(tmp_path).encode() not in first


def test_a_file_of_zstd_holds_the_same_tar(store: Store, refs: list[EntryRef], tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    for name in ("a.tar", "b.tar.zst", "c.tar.zst"):
        export_file(store, refs, tmp_path / name)
    plain, packed, again = ((tmp_path / n).read_bytes() for n in ("a.tar", "b.tar.zst", "c.tar.zst"))
    assert packed == again
    assert len(packed) < len(plain)
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as stream:
        assert stream.read() == plain


def test_without_zstandard_zst_is_refused_and_nothing_is_left(
    store: Store, refs: list[EntryRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UsageError, match=r"'\.\[zstd\]'"):
        export_file(store, refs, out / "x.tar.zst")
    assert list(out.iterdir()) == []
    export_file(store, refs, out / "x.tar")


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x", "x.zst"])
def test_other_endings_are_refused(store: Store, refs: list[EntryRef], tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"ends in \.tar or \.tar\.zst"):
        export_file(store, refs, tmp_path / name)


def test_no_entry_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one entry"):
        export_file(store, [], tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_entry_is_not_exported_and_the_old_file_stays(
    store: Store, refs: list[EntryRef], tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "x.tar"
    export_file(store, refs[:1], out)
    before = out.read_bytes()
    path = store.blob_path(store.read_manifest(refs[0]).predicates)
    if damage == "manifest":
        path = refs[0].manifest
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptEntry):
        export_file(store, refs, out)
    assert out.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir() if item.is_file()] == ["x.tar"]


def test_a_full_disk_leaves_no_file(
    store: Store, refs: list[EntryRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"writing the archive failed: No space left on device \(ENOSPC\)"):
        export_file(store, refs, tmp_path / "x.tar")
    assert [item for item in tmp_path.iterdir() if item.is_file()] == []


def test_a_folder_that_is_not_there_is_one_clear_error(
    store: Store, refs: list[EntryRef], tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="writing the archive failed: No such file"):
        export_file(store, refs, tmp_path / "no" / "x.tar")


def test_a_manifest_that_is_not_canonical_is_not_exported(
    store: Store, refs: list[EntryRef], tmp_path: Path
) -> None:
    """It could not be imported: what is published is written from its fields."""
    from pwcc.cache import about, strict

    data = refs[0].manifest.read_bytes()
    head, body = about.split(data, where="x")
    spaced = body.replace(b'":', b'": ', 1)
    assert strict.loads(spaced, where="x") == strict.loads(body, where="x")
    refs[0].manifest.write_bytes(about.seal(head, spaced))
    store.read_manifest(refs[0])
    with pytest.raises(CorruptEntry, match="canonical"):
        export_file(store, refs, tmp_path / "x.tar")
