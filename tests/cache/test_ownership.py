from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pwcc.cache import ownership
from pwcc.cache.errors import UntrustedStore
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to give files away")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o2775, 0o1777])
def test_ones_own_cache_is_trusted(store: Store, mode: int) -> None:
    store.root.chmod(mode)
    ownership.require(store.root, environ={})
    assert list(ownership.concerns(store.root)) == []


@pytest.mark.parametrize("part", [".", "v1", "v1/entries", "v1/pieces"])
def test_a_part_that_everybody_may_write_is_refused(store: Store, part: str) -> None:
    (store.root / part).chmod(0o777)
    with pytest.raises(UntrustedStore, match="everybody may write") as caught:
        ownership.require(store.root, environ={})
    assert "--trust-dir" in str(caught.value)
    assert ownership.require(store.root, trust=True, environ={})


@needs_root
def test_a_part_of_another_user_is_refused_and_roots_is_not(store: Store) -> None:
    assert list(ownership.concerns(store.root, user=12345)) == []  # root's, as in an image
    os.chown(store.root / "v1", 12345, -1)
    assert list(ownership.concerns(store.root, user=12345)) == []
    with pytest.raises(UntrustedStore, match="user id 12345"):
        ownership.require(store.root, environ={})


@pytest.mark.parametrize("part", ["v1", "v1/entries"])
def test_a_link_inside_is_refused(store: Store, tmp_path: Path, part: str) -> None:
    path = store.root / part
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(UntrustedStore, match="symbolic link"):
        ownership.require(store.root, environ={})


def test_the_cache_itself_may_be_named_by_a_link(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.root)
    ownership.require(tmp_path / "link", environ={})


def test_the_variable_names_directories(store: Store, tmp_path: Path) -> None:
    store.root.chmod(0o777)
    (tmp_path / "link").symlink_to(store.root)
    for value in ("1", str(store.root), f"/somewhere:{store.root}", str(tmp_path / "link")):
        assert ownership.require(store.root, environ={ownership.VARIABLE: value})
    for value in ("", "0", "/", str(store.root.parent), ":"):
        with pytest.raises(UntrustedStore):
            ownership.require(store.root, environ={ownership.VARIABLE: value})


@pytest.mark.parametrize("part", ["lookup", "entry", "manifest"])
def test_an_entry_that_everybody_may_write(store: Store, manifest: Manifest, part: str) -> None:
    store.publish(manifest)
    (ref,) = store.entries()
    assert ownership.entry_concern(ref.path, ref.manifest) is None
    path = {"lookup": ref.path.parent, "entry": ref.path, "manifest": ref.manifest}[part]
    path.chmod(0o777)
    found = ownership.entry_concern(ref.path, ref.manifest)
    assert found is not None
    assert str(path) in found


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


PUBLISH = """
import os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from conftest import put_blobs
from pwcc.cache.store import Store
os.umask(int(sys.argv[2], 8))
store = Store.create(Path(sys.argv[1]))
store.publish(put_blobs(store))
"""
READ = """
import os, sys
from pathlib import Path
from pwcc.cache import ownership
from pwcc.cache.store import Store
os.setgroups([int(sys.argv[3])]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[2]))
store = Store.open(Path(sys.argv[1]))
assert list(ownership.concerns(store.root)) == []
(ref,) = store.entries()
assert ownership.entry_concern(ref.path, ref.manifest) is None
assert all(store.read_blob(digest) is not None for digest in store.read_manifest(ref).blobs)
"""


@needs_root
@pytest.mark.parametrize(
    ("umask", "reader", "group", "works"),
    [
        ("022", 12345, 12345, True),
        ("027", 12345, 777, True),
        ("027", 12345, 12345, False),
        ("077", 12345, 777, False),
    ],
)
def test_who_may_read_is_the_umask_and_the_group_of_the_folder(
    public: Path, umask: str, reader: int, group: int, works: bool
) -> None:
    root = public / "cache"
    root.mkdir(mode=0o2775)
    os.chown(root, 0, 777)
    root.chmod(0o2775)
    script = PUBLISH.format(folder=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", script, str(root), umask], check=True)
    allowed = 0o777 & ~int(umask, 8)
    for path in root.rglob("*"):
        mode, group_id = path.stat().st_mode & 0o777, path.stat().st_gid
        assert group_id == 777, path
        assert mode == (allowed if path.is_dir() else allowed & 0o666), path
    argv = [sys.executable, "-c", READ, str(root), str(reader), str(group)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (done.returncode == 0) is works, done.stderr
    if not works:  # says which file, its mode and its owner
        assert "CACHEDIR.TAG" in done.stderr
        assert f"EACCES: mode {allowed & 0o666:04o}, user id 0, group id 777" in done.stderr
