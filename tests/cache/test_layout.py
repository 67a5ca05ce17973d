from __future__ import annotations

import os
from pathlib import Path

import pytest

from pwcc.cache import layout
from pwcc.cache.errors import NewerFormat, NotAStore, StoreError
from pwcc.cache.store import Store, default_root, named_root


def test_create_makes_the_documented_tree(tmp_path: Path) -> None:
    root = tmp_path / "a" / "cache"
    Store.create(root)
    found = {str(path.relative_to(root)) for path in root.rglob("*")}
    assert found == {
        "CACHEDIR.TAG",
        "README",
        "v1",
        "v1/entries",
        "v1/pieces",
        "v1/blobs",
        "v1/blobs/sha256",
        "v1/plans",
        "v1/locks",
        "v1/tmp",
        "v1/quarantine",
    }
    assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
    assert b"IT IS CODE" in (root / "README").read_bytes()


def test_create_is_idempotent_and_completes(tmp_path: Path) -> None:
    Store.create(tmp_path)
    (tmp_path / "README").unlink()
    (tmp_path / "v1/tmp").rmdir()
    Store.create(tmp_path)
    Store.open(tmp_path)
    assert (tmp_path / "README").exists()
    assert (tmp_path / "v1/tmp").is_dir()


def test_what_a_racing_or_crashed_creator_left_is_accepted(tmp_path: Path) -> None:
    (tmp_path / ".pwcc-1-abc").write_bytes(b"half")
    (tmp_path / "lost+found").mkdir()
    Store.open(Store.create(tmp_path).root)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        store = Store.create(tmp_path / "cache")
        blob = store.blob_path(store.put_blob(b"x"))
        with store.lock("a"):
            pass
    finally:
        os.umask(before)
    assert blob.stat().st_mode & 0o777 == 0o666 & ~mask
    assert blob.parent.stat().st_mode & 0o777 == 0o777 & ~mask
    assert (store.root / "README").stat().st_mode & 0o777 == 0o666 & ~mask
    assert (store.root / "v1/locks/a.lock").stat().st_mode & 0o777 == 0o666 & ~mask


def test_someone_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(NotAStore, match=r"thesis\.tex"):
        Store.create(tmp_path)
    (tmp_path / "CACHEDIR.TAG").write_bytes(layout.TAG[:44] + b"# by another tool\n")
    with pytest.raises(NotAStore):
        Store.create(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CACHEDIR.TAG", "thesis.tex"]


def test_open_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(NotAStore, match="no such directory"):
        Store.open(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAStore, match="a file"):
        Store.open(tmp_path / "file")
    with pytest.raises(NotAStore, match="directory, got a file"):
        Store.create(tmp_path / "file")
    with pytest.raises(NotAStore, match=r"CACHEDIR\.TAG") as caught:
        Store.open(tmp_path)
    assert "pwcc compile" in str(caught.value)
    with pytest.raises(StoreError):
        Store.create(tmp_path / "file" / "below")


def test_open_tells_a_newer_store(tmp_path: Path) -> None:
    Store.create(tmp_path)
    (tmp_path / "v1").rename(tmp_path / "v2")
    with pytest.raises(NewerFormat, match="got v2: a newer pwcc"):
        Store.open(tmp_path)
    (tmp_path / "v2").rename(tmp_path / "x")
    with pytest.raises(NotAStore, match="expected a folder v1"):
        Store.open(tmp_path)


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PWCC_CACHE_DIR", str(tmp_path / "here"))
    assert default_root() == named_root() == tmp_path / "here"
    for environ in ({}, {"PWCC_CACHE_DIR": ""}):
        assert named_root(environ) is None
        assert default_root(environ).name == "pwcc"
