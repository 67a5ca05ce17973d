from __future__ import annotations

import errno
import os

import pytest

from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.ids import BlobDigest, blob_digest
from pwcc.cache.store import Store


def test_blob_round_trip(store: Store) -> None:
    digest = store.put_blob(b"kernel")
    assert digest == blob_digest(b"kernel")
    assert store.blob_path(digest) == store.root / "v1/blobs/sha256" / digest[:2] / digest
    assert store.read_blob(digest) == b"kernel"
    assert store.has_blob(digest)
    assert store.has_blob(digest, size=6)
    assert not store.has_blob(digest, size=7)
    assert store.read_blob(store.put_blob(b"")) == b""


def test_an_existing_blob_is_kept_and_a_short_one_replaced(store: Store) -> None:
    digest = store.put_blob(b"kernel")
    path = store.blob_path(digest)
    before = path.stat().st_ino
    store.put_blob(b"kernel")
    assert path.stat().st_ino == before
    path.write_bytes(b"ker")
    store.put_blob(b"kernel")
    assert store.read_blob(digest) == b"kernel"


def test_damaged_blob_names_file_expected_and_got(store: Store) -> None:
    digest = store.put_blob(b"kernel")
    store.blob_path(digest).write_bytes(b"kernex")
    with pytest.raises(CorruptEntry) as caught:
        store.read_blob(digest)
    for part in (str(store.blob_path(digest)), digest, blob_digest(b"kernex")):
        assert part in str(caught.value)


def test_missing_and_oversized_blobs(store: Store) -> None:
    with pytest.raises(CorruptEntry, match="found none"):
        store.read_blob(blob_digest(b"never"))
    digest = store.put_blob(b"x" * 100)
    with pytest.raises(CorruptEntry, match="at most 99"):
        store.read_blob(digest, max_bytes=99)
    with pytest.raises(CorruptEntry, match="64 hex"):
        store.read_blob(BlobDigest("../../../etc/passwd"))


@pytest.mark.parametrize("operation", ["fsync", "replace", "write", "open", "mkdir"])
def test_any_failing_step(store: Store, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, refuse)
        with pytest.raises(StoreError, match="No space left"):
            store.put_blob(b"kernel")
    assert not store.has_blob(blob_digest(b"kernel"))
    assert list((store.root / "v1/tmp").iterdir()) == []
    assert store.read_blob(store.put_blob(b"kernel")) == b"kernel"
