"""What the operating system may refuse, each with a clear outcome: a named error, a retry, or nothing lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pwcc.cache import failpoints
from pwcc.cache.errors import CacheMiss, LockTimeout, MissingBlob, StoreError
from pwcc.cache.ids import PieceKey, blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.cache.verify import verify
from tests.mounts import mounted

PutEntry = Callable[..., Manifest]
ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "your quota",
    errno.EROFS: "read-only",
    errno.EACCES: "owner and mode",
    errno.EPERM: "owner and mode",
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "fs.file-max",
    errno.EXDEV: "one file system",
    errno.ENAMETOOLONG: "shorter --cache-dir",
    errno.EIO: "pwcc verify",
    errno.EBUSY: "try again",
    errno.ESTALE: "network file system",
}


def break_(patch: pytest.MonkeyPatch, operation: str, code: int, *, times: int = 10**9) -> list[int]:
    """Fail a system call ``times`` times."""
    real, count = getattr(os, operation), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] <= times:
            named = () if isinstance(args[0], int) else (str(args[0]),)  # fsync knows no name
            raise OSError(code, os.strerror(code), *named)
        return real(*args, **kwargs)

    patch.setattr(os, operation, broken)
    return count


@pytest.mark.parametrize("code", sorted(ADVICE), ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("operation", ["replace", "rename", "open", "fsync"])
def test_a_publication_that_is_refused(
    store: Store,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    put_entry: PutEntry,
    operation: str,
    code: int,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    # A folder that cannot be flushed (EACCES: not even opened for it) is no reason to fail.
    may_pass = (operation, code) in {("fsync", errno.EACCES)}
    with monkeypatch.context() as patch:
        break_(patch, operation, code)
        error: StoreError | None = None
        try:
            store.put_blob(b"new")
            store.publish(manifest)
        except StoreError as caught:
            error = caught
    if error is None:
        assert may_pass
    else:
        assert errno.errorcode[code] in error.message
        assert ADVICE[code] in str(error.hint)
        assert error.where is not None
        assert str(store.root) in error.where
        assert list(store.entries()) == []
    assert list((store.root / "v1/tmp").iterdir()) == []
    store.publish(put_entry(store))
    assert verify(store, now=time.time()).exit_code == 0


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE])
@pytest.mark.parametrize("times", [1, 2])
def test_what_passes_is_tried_again(
    store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, code: int, times: int
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    for operation in ("rename", "replace"):
        with monkeypatch.context() as patch:
            break_(patch, operation, code, times=times)
            if operation == "rename":
                assert store.publish(manifest).won
            else:
                store.put_blob(b"new")
    with monkeypatch.context() as patch:
        break_(patch, "open", code, times=times)
        assert store.read_blob(blob_digest(b"new")) == b"new"
    assert len(pauses) == 3 * times


def test_a_directory_removed_while_it_is_used_is_made_again(
    store: Store, manifest: Manifest, put_entry: PutEntry
) -> None:
    shutil.rmtree(store.root)
    digest = store.put_blob(b"first")
    assert store.read_blob(digest) == b"first"
    shutil.rmtree(store.root)
    store.put_piece(PieceKey("a" * 32), b'{"blobs":{}}')
    assert store.get_piece(PieceKey("a" * 32)) == b'{"blobs":{}}'
    with pytest.raises(MissingBlob, match="compile again") as caught:  # its blobs were removed with it
        store.publish(manifest)
    assert "compile again" in str(caught.value)
    shutil.rmtree(store.root / "v1/tmp")
    shutil.rmtree(store.root / "v1/entries")
    assert store.publish(put_entry(store)).won
    assert verify(Store.open(store.root), now=time.time()).exit_code == 0


def test_removed_under_a_reader(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    (ref,) = store.entries()
    shutil.rmtree(store.root)
    assert list(store.entries()) == []
    assert store.candidates(manifest.lookup_key) == []
    assert store.hold(ref) is None
    with pytest.raises(MissingBlob):
        store.read_blob(manifest.factors)
    with pytest.raises(CacheMiss, match="empty or does not exist"):
        Store.find(store.root, hint="compile")


def test_a_blob_that_a_collection_took_before_the_publication(store: Store, manifest: Manifest) -> None:
    store.blob_path(manifest.predicates).unlink()
    with pytest.raises(MissingBlob, match=manifest.predicates):
        store.publish(manifest)
    assert list(store.entries()) == []
    assert list((store.root / "v1/tmp").iterdir()) == []


@pytest.mark.parametrize("point", ["publish.checked", "publish.written", "publish.renamed"])
def test_a_blob_that_a_collection_took_while_the_writer_was_stopped(
    store: Store, manifest: Manifest, put_entry: PutEntry, point: str
) -> None:
    """Longer than the grace age: the collection began before the entry was visible. It is withdrawn again."""

    def collect(name: str) -> None:
        if name == point:
            store.blob_path(manifest.predicates).unlink(missing_ok=True)

    failpoints.install(collect)
    try:
        with pytest.raises(MissingBlob, match=manifest.predicates):
            store.publish(manifest)
    finally:
        failpoints.install(None)
    assert list(store.entries()) == []
    assert list((store.root / "v1/tmp").iterdir()) == []
    assert store.publish(put_entry(store)).won


def test_a_blob_that_comes_back_is_no_loss(store: Store, manifest: Manifest) -> None:
    """A collection puts back what was renewed after it took it away."""
    path = store.blob_path(manifest.predicates)

    def take(name: str) -> None:
        if name == "publish.renamed":
            path.rename(path.with_name("aside"))
            threading.Timer(0.02, lambda: path.with_name("aside").rename(path)).start()

    failpoints.install(take)
    try:
        assert store.publish(manifest).won
    finally:
        failpoints.install(None)
    assert verify(store, now=time.time()).exit_code == 0


def test_a_publication_renews_its_blobs(store: Store, manifest: Manifest) -> None:
    for digest in manifest.blobs:
        os.utime(store.blob_path(digest), (0, 0))
    store.publish(manifest)
    assert all(store.blob_path(digest).stat().st_mtime > 1e9 for digest in manifest.blobs)
    os.utime(store.blob_path(manifest.factors), (0, 0))
    store.put_blob(store.read_blob(manifest.factors))
    assert store.blob_path(manifest.factors).stat().st_mtime > 1e9


def test_a_long_path(tmp_path: Path) -> None:
    root = tmp_path
    while len(str(root)) < 4050:
        root /= "d" * 100
    with pytest.raises(StoreError, match="ENAMETOOLONG") as caught:
        Store.create(root / "cache" / ("e" * 40))
    assert "shorter --cache-dir" in str(caught.value)
    long = tmp_path / ("x" * 200) / ("y" * 200)
    assert Store.create(long).put_blob(b"fine")


def test_a_full_disk_leaves_the_old_state(tmp_path: Path, put_entry: PutEntry) -> None:
    with mounted(tmp_path / "small", "size=1m") as place:
        store = Store.create(place / "cache")
        store.publish(put_entry(store))
        before = {ref.entry_key for ref in store.entries()}
        with pytest.raises(StoreError, match="ENOSPC"):
            store.put_blob(os.urandom(2 * 2**20))
        assert list((place / "cache/v1/tmp").iterdir()) == []
        filler = place / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while stream.write(bytes(4096)):
                pass
        with pytest.raises(StoreError, match="ENOSPC"):
            store.publish(put_entry(store, name="other"))
        assert {ref.entry_key for ref in store.entries()} == before
        assert list((place / "cache/v1/tmp").iterdir()) == []
        filler.unlink()
        assert store.publish(put_entry(store, name="other")).won
        assert verify(store, now=time.time()).exit_code == 0


def test_a_mount_inside_the_cache_is_named(tmp_path: Path, put_entry: PutEntry) -> None:
    store = Store.create(tmp_path / "cache")
    with mounted(store.root / "v1/entries", "size=1m"), pytest.raises(StoreError, match="EXDEV") as caught:
        store.publish(put_entry(store))
    assert "one file system" in str(caught.value)
    assert list(store.entries()) == []
    assert list((store.root / "v1/tmp").iterdir()) == []


def test_a_lock_names_its_holder_and_a_wrong_clock_is_no_trouble(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.lock("entry"):
        holder = store.lock_holder("entry")
        assert holder is not None
        assert holder.owner.pid == os.getpid()
        assert holder.describe(holder.since + 12) == f"process {os.getpid()}, for 12 s"
        assert holder.describe(holder.since - 3600) == f"process {os.getpid()}"
        with pytest.raises(LockTimeout, match=f"process {os.getpid()}"), store.lock("entry", timeout_s=0):
            pass
    assert store.lock_holder("entry") is None
    assert [path.name for path in (store.root / "v1/locks").iterdir()] == ["entry.lock"]


@pytest.mark.parametrize("text", ["", "{", '{"owner":"x","since":1}', '{"owner":5,"since":1}', "x" * 9000])
def test_a_holders_record_that_cannot_be_read_is_none(store: Store, text: str) -> None:
    (store.root / "v1/locks/entry.holder").write_text(text)
    assert store.lock_holder("entry") is None
