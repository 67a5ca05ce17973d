from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import about
from pwcc.cache.errors import CorruptEntry, NewerFormat, StoreError
from pwcc.cache.ids import EntryKey, LookupKey, PieceKey, blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store

PutEntry = Callable[..., Manifest]
Rekeyed = Callable[[Manifest, int], Manifest]


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def ref_of(store: Store) -> Path:
    (ref,) = store.entries()
    return ref.manifest


# Publishing


def test_publish_and_read_back(store: Store, manifest: Manifest) -> None:
    published = store.publish(manifest)
    assert published.won
    (ref,) = store.entries()
    assert ref.path == published.path
    assert store.candidates(manifest.lookup_key) == [ref]
    assert store.candidates(LookupKey("0" * 32)) == []
    assert store.read_manifest(ref) == manifest
    assert list((store.root / "v1/tmp").iterdir()) == []


def test_a_tag_that_was_taken_meanwhile_is_put_back(store: Store, manifest: Manifest) -> None:
    """A removal that races with a compile may take the tag and fail at the folders that came back."""
    (store.root / "CACHEDIR.TAG").unlink()
    store.publish(manifest)
    assert Store.open(store.root).candidates(manifest.lookup_key)


def test_second_publication_uses_the_first(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    again = store.publish(replace(manifest, tuned=True))
    assert not again.won
    (ref,) = store.entries()
    assert not store.read_manifest(ref).tuned
    assert list((store.root / "v1/tmp").iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "empty", "no manifest", "blob gone", "a file"])
def test_a_broken_entry_is_quarantined_and_replaced(store: Store, manifest: Manifest, damage: str) -> None:
    path = store.publish(manifest).path
    if damage == "truncate":
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:100])
    elif damage == "empty":
        (path / "manifest.json").write_bytes(b"")
    elif damage == "no manifest":
        (path / "manifest.json").rename(path / "other")
    elif damage == "a file":
        shutil.rmtree(path)
        path.write_bytes(b"x")
    else:
        (path / "manifest.json").unlink()
        extra = store.put_blob(b"only in the old one")
        old = replace(manifest, blobs={**manifest.blobs, extra: 19})
        (path / "manifest.json").write_bytes(old.serialise())
        store.blob_path(extra).unlink()
    assert store.publish(manifest).won
    (ref,) = store.entries()
    assert store.read_manifest(ref) == manifest
    (record,) = store.quarantined(manifest.lookup_key)
    assert record.entry_key == manifest.entry_key
    assert len(list((store.root / "v1/quarantine").iterdir())) == 2


def test_a_newer_entry_is_not_touched(store: Store, manifest: Manifest) -> None:
    path = store.publish(manifest).path / "manifest.json"
    path.write_bytes(about.seal(replace(about.About.of(manifest), schema=2), b'{"schema":2}'))
    with pytest.raises(NewerFormat):
        store.publish(manifest)
    assert b'"schema":2' in path.read_bytes()


def test_a_missing_blob_prevents_publication(store: Store, manifest: Manifest) -> None:
    digest = next(iter(manifest.blobs))
    store.blob_path(digest).unlink()
    with pytest.raises(CorruptEntry, match=digest):
        store.publish(manifest)
    assert list(store.entries()) == []


def test_keys_must_match_the_directory(store: Store, manifest: Manifest) -> None:
    path = store.publish(manifest).path
    path.rename(path.with_name("0" * 32))
    (ref,) = store.entries()
    with pytest.raises(CorruptEntry, match="moved or renamed"):
        store.read_manifest(ref)


def test_garbage_names_are_skipped(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    entries = store.root / "v1/entries"
    for name in (".hidden", "tmp", "A" * 32, "0" * 31, "0" * 32 + "x", manifest.lookup_key + "~"):
        (entries / name).mkdir()
        (entries / manifest.lookup_key / name).mkdir()
    (entries / ("f" * 32)).write_text("a file")
    assert [ref.entry_key for ref in store.entries()] == [manifest.entry_key]


# Faults

OPERATIONS = ("fsync", "replace", "rename", "write", "open", "mkdir")
Fault = Callable[[str, int, int], AbstractContextManager[Callable[[], bool]]]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Fail the n-th call of one system call inside the block; what it yields says whether it was reached."""

    @contextmanager
    def make(operation: str, nth: int, code: int) -> Iterator[Callable[[], bool]]:
        real = getattr(os, operation)
        calls = 0

        def broken(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(code, os.strerror(code), str(args[0]))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, broken)
            yield lambda: calls >= nth

    return make


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_failing_step_of_a_publication(
    store: Store, manifest: Manifest, fault: Fault, operation: str, code: int
) -> None:
    for nth in range(1, 100):
        shutil.rmtree(store.root / "v1/entries")
        (store.root / "v1/entries").mkdir()
        with fault(operation, nth, code) as reached:
            error = failure(lambda: store.publish(manifest))
        assert list((store.root / "v1/tmp").iterdir()) == []
        visible = list(store.entries())
        for ref in visible:  # only ever whole
            assert store.read_manifest(ref) == manifest
        if not reached():
            assert error is None
            assert nth > 1 or operation == "replace"
            return
        assert error is not None
        assert os.strerror(code) in str(error)
        assert store.publish(manifest).won is not bool(visible)
    raise AssertionError(operation)


def failure(call: Callable[[], object]) -> StoreError | None:
    try:
        call()
    except StoreError as error:
        return error
    return None


CRASH = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from conftest import put_blobs
from pwcc.cache.store import Store
store = Store.create(Path({root!r}))
left = [int(sys.argv[1])]
def guarded(real):
    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
for name in ("replace", "rename", "fsync", "write"):
    setattr(os, name, guarded(getattr(os, name)))
store.publish(put_blobs(store))
"""


def test_killed_at_any_point(tmp_path: Path, put_entry: PutEntry) -> None:
    outcomes = set()
    for steps in (0, 3, 20, 50, *range(72, 81)):  # a whole run takes 79 steps, the 77th makes it visible
        root = tmp_path / f"cache{steps}"
        script = CRASH.format(folder=str(Path(__file__).parent), root=str(root))
        done = subprocess.run([sys.executable, "-c", script, str(steps)], check=False, capture_output=True)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
        visible = list(Store(root).entries())
        outcomes.add((done.returncode == 0, len(visible)))
        for ref in visible:
            found = Store(root).read_manifest(ref)
            assert all(Store(root).read_blob(digest) is not None for digest in found.blobs)
        store = Store.create(root)
        assert store.publish(put_entry(store)).won is not bool(visible)
        blobs = [path for path in (root / "v1/blobs/sha256").rglob("*") if path.is_file()]
        assert all(blob_digest(path.read_bytes()) == path.name for path in blobs)
    # killed before and after the entry became visible, and not killed
    assert outcomes == {(False, 0), (False, 1), (True, 1)}


RACE = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from conftest import put_blobs
from pwcc.cache.store import Store
sys.stdin.readline()
store = Store.create(Path({root!r}))
for _ in range(5):
    print(store.publish(put_blobs(store)).won)
"""


def test_several_processes_publish_one_entry(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    script = RACE.format(folder=str(Path(__file__).parent), root=str(root))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    results = []
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        results += out.split()
    assert sorted(results) == ["False"] * 19 + ["True"]
    store = Store.open(root)
    assert [store.read_manifest(ref).model.identity for ref in store.entries()] == ["toy"]
    assert list((root / "v1/tmp").iterdir()) == []
    assert sorted(path.name for path in root.iterdir()) == ["CACHEDIR.TAG", "README", "v1"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "owner and mode"), (errno.EROFS, "read-only")],
)
def test_errors_carry_file_and_advice(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError) as caught:
        store.put_blob(b"x")
    assert advice in str(caught.value)
    assert str(store.root) in str(caught.value)
    assert caught.value.exit_code == 1


# Reading elsewhere


def test_relocation_and_same_bytes(store: Store, put_entry: PutEntry, tmp_path: Path) -> None:
    manifest = put_entry(store)
    store.publish(manifest)
    copy = tmp_path / "elsewhere" / "deeper"
    copy.parent.mkdir()
    subprocess.run(["cp", "-r", str(store.root), str(copy)], check=True)
    again = Store.create(tmp_path / "third")
    again.publish(put_entry(again))
    assert tree(copy) == tree(store.root) == tree(again.root)
    assert str(tmp_path).encode() not in b"".join(data for data in tree(copy).values() if data)
    shutil.rmtree(store.root)
    moved = Store.open(copy)
    (ref,) = moved.entries()
    assert all(moved.read_blob(digest) for digest in moved.read_manifest(ref).blobs)


READ = """
import sys
from pathlib import Path
from pwcc.cache.inspection import detail, summaries
from pwcc.cache.ids import PieceKey
from pwcc.cache.store import Store
WRITES = {{"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.chmod", "os.link", "os.symlink"}}
def hook(event, args):
    writing = event == "open" and (isinstance(args[1], str) and set(args[1]) & set("wax+") or args[2] & 0o3)
    if event in WRITES or event.startswith(("subprocess", "os.exec", "os.fork", "import")) or writing:
        print(event, args)
root = Path({root!r})
summaries(Store.open(root), now=0.0)  # imports what it needs lazily
sys.addaudithook(hook)
store = Store.open(root)
for ref in store.entries():
    assert all(store.read_blob(digest) for digest in store.read_manifest(ref).blobs)
    detail(store, ref)
summaries(store, now=0.0)
store.get_piece(PieceKey("0" * 32))
"""


def test_reading_writes_nothing_and_starts_nothing(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    script = READ.format(root=str(store.root))
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


# Pieces and locks


def test_pieces(store: Store) -> None:
    key = PieceKey("a" * 32)
    assert store.get_piece(key) is None
    store.put_piece(key, b'{"a":1}')
    store.put_piece(key, b'{"a":2}')
    assert store.get_piece(key) == b'{"a":2}'
    with pytest.raises(StoreError):
        store.get_piece(PieceKey("../x"))


def test_refs(store: Store, manifest: Manifest, rekeyed: Rekeyed) -> None:
    for index in range(6):
        store.publish(rekeyed(manifest, index))
    refs = list(store.entries())
    assert refs == sorted(refs)
    assert len(store.candidates(rekeyed(manifest, 0).lookup_key)) == 4
    with pytest.raises(CorruptEntry):
        store.entry_ref(LookupKey(".."), EntryKey("0" * 32))
