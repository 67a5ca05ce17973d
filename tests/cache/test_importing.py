from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import archive, signing
from pwcc.cache.archive import END, ArchiveReader, header, padding
from pwcc.cache.errors import CorruptEntry, NewerFormat, StoreError, UntrustedEntry, UsageError
from pwcc.cache.exporting import export_file, export_stream
from pwcc.cache.gc import collect
from pwcc.cache.ids import BlobDigest
from pwcc.cache.importing import Imported, import_stream
from pwcc.cache.manifest import Manifest
from pwcc.cache.retention import Limits
from pwcc.cache.signing_keys import PrivateKey
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.trust import SignaturePolicy, TrustedKey

PutEntry = Callable[..., Manifest]
KILLED = Path(__file__).with_name("killed.py")
Members = dict[str, bytes]


def files(root: Path) -> dict[str, bytes]:
    found = [path for path in root.rglob("*") if path.is_file() and path.parent.name != "locks"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def pack(members: Members) -> bytes:
    """An archive of these members, in the order of the dictionary."""
    parts = [header(name, len(data)) + data + padding(len(data)) for name, data in members.items()]
    return b"".join(parts) + END


def unpack(data: bytes) -> Members:
    reader = ArchiveReader(io.BytesIO(data), where="x")
    found: Members = {}
    while (member := reader.next()) is not None:
        found[member.name] = reader.read(member.size)
    return found


def put(store: Store, data: bytes, **options: object) -> tuple[Imported, ...]:
    return import_stream(store, io.BytesIO(data), where="x.tar", **options)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path, put_entry: PutEntry) -> Store:
    """A store with two entries that share blobs."""
    store = Store.create(tmp_path / "source")
    for name in ("toy", "other"):
        store.publish(put_entry(store, name=name))
    return store


@pytest.fixture
def data(source: Store) -> bytes:
    stream = io.BytesIO()
    export_stream(source, list(source.entries()), stream)
    return stream.getvalue()


@contextmanager
def unchanged(store: Store) -> Iterator[None]:
    """The block leaves no file behind and changes none."""
    before = files(store.root)
    yield
    assert files(store.root) == before


def test_an_import_gives_the_same_store(store: Store, source: Store, data: bytes) -> None:
    done = put(store, data)
    assert [entry.ref.entry_key for entry in done] == [ref.entry_key for ref in source.entries()]
    assert all(entry.new and entry.same and entry.signatures == 0 for entry in done)
    kept = ("/entries/", "/blobs/")
    original = {n: d for n, d in files(source.root).items() if any(part in f"/{n}" for part in kept)}
    assert {n: d for n, d in files(store.root).items() if any(part in f"/{n}" for part in kept)} == original
    assert list(store.tmp.iterdir()) == []


def test_importing_again_changes_nothing(store: Store, data: bytes) -> None:
    put(store, data)
    times = {path: path.stat().st_ino for path in store.root.rglob("*") if path.is_file()}
    with unchanged(store):
        assert [(entry.new, entry.same) for entry in put(store, data)] == [(False, True)] * 2
    assert {path: path.stat().st_ino for path in store.root.rglob("*") if path.is_file()} == times


def test_an_import_from_a_pipe_in_small_reads(store: Store, data: bytes) -> None:
    class Trickle:
        def __init__(self) -> None:
            self._left = memoryview(data)

        def read(self, size: int, /) -> bytes:
            chunk, self._left = self._left[: min(size, 700)], self._left[min(size, 700) :]
            return bytes(chunk)

    assert len(import_stream(store, Trickle(), where="a pipe")) == 2


def test_zstd_is_seen_by_its_first_bytes(store: Store, source: Store, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    export_file(source, list(source.entries()), tmp_path / "x.tar.zst")
    assert len(put(store, (tmp_path / "x.tar.zst").read_bytes())) == 2


def test_damaged_blobs_that_are_there_are_mended(store: Store, data: bytes) -> None:
    put(store, data)
    ref = next(store.entries())
    digest = store.read_manifest(ref).predicates
    path = store.blob_path(digest)
    path.write_bytes(b"x" * path.stat().st_size)
    put(store, data)
    store.read_blob(digest)


def test_an_entry_of_the_same_key_and_other_bytes_stays(store: Store, source: Store, data: bytes) -> None:
    for ref in source.entries():
        manifest = source.read_manifest(ref)
        for digest in manifest.blobs:
            store.put_blob(source.read_blob(digest))
        store.publish(replace(manifest, counts={**manifest.counts, "other": 1}))
    before = {ref.entry_key: ref.manifest.read_bytes() for ref in store.entries()}
    assert [(entry.new, entry.same) for entry in put(store, data)] == [(False, False)] * 2
    assert {ref.entry_key: ref.manifest.read_bytes() for ref in store.entries()} == before


# Signatures


@pytest.fixture
def key() -> PrivateKey:
    pytest.importorskip("cryptography")
    return PrivateKey.generate()


def trusting(key: PrivateKey) -> SignaturePolicy:
    return SignaturePolicy((TrustedKey(key.public, "ci"),), Path("keys"))


def signed(source: Store, refs: list[EntryRef], key: PrivateKey) -> bytes:
    for ref in refs:
        signing.write(ref, signing.make(ref.manifest.read_bytes(), key), tmp=source.tmp)
    stream = io.BytesIO()
    export_stream(source, list(source.entries()), stream)
    return stream.getvalue()


def test_signatures_travel_and_are_added_to_what_is_there(
    store: Store, source: Store, data: bytes, key: PrivateKey
) -> None:
    put(store, data)
    packed = signed(source, list(source.entries()), key)
    done = put(store, packed, policy=trusting(key))
    assert [(entry.new, entry.signatures) for entry in done] == [(False, 1)] * 2
    for ref in store.entries():
        found = signing.read(ref.path, key.public.id)
        assert found is not None
        assert found.verifies(ref.manifest.read_bytes())
    stream = io.BytesIO()
    export_stream(store, list(store.entries()), stream)
    assert stream.getvalue() == packed
    with unchanged(store):
        assert [entry.signatures for entry in put(store, packed)] == [0, 0]


def test_where_a_signature_is_required_one_unsigned_entry_refuses_all_before_a_blob_is_read(
    store: Store, source: Store, key: PrivateKey
) -> None:
    packed = signed(source, list(source.entries())[:1], key)
    first = packed.index(b"blobs/")

    class Stops(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert self.tell() + (size or 0) <= first + 512, "a blob was read"
            return super().read(size)

    with unchanged(store), pytest.raises(UntrustedEntry, match="expected a signature by a trusted key"):
        import_stream(store, Stops(packed), where="x.tar", policy=trusting(key))


def test_a_signature_of_another_key_or_manifest_does_not_count(
    store: Store, source: Store, key: PrivateKey
) -> None:
    packed = signed(source, list(source.entries()), key)
    with unchanged(store), pytest.raises(UntrustedEntry, match="not trusted here"):
        put(store, packed, policy=trusting(PrivateKey.generate()))
    for ref in source.entries():
        signing.write(ref, signing.make(b"something else", key), tmp=source.tmp)
    stream = io.BytesIO()
    export_stream(source, list(source.entries()), stream)
    with unchanged(store), pytest.raises(UntrustedEntry, match="not over this manifest"):
        put(store, stream.getvalue(), policy=trusting(key))


def test_a_signature_under_another_name_is_refused(store: Store, source: Store, key: PrivateKey) -> None:
    members = unpack(signed(source, list(source.entries()), key))
    name = next(name for name in members if "/signatures/" in name)
    changed = {(name[: -len("0.json")] + "0.json" if n == name else n): d for n, d in members.items()}
    if name in changed:
        changed = {(name[: -len("0.json")] + "1.json" if n == name else n): d for n, d in members.items()}
    with unchanged(store), pytest.raises(CorruptEntry, match="named by its key"):
        put(store, pack(changed))


# Archives that were damaged or made to do harm


def test_every_cut_of_an_archive_publishes_nothing(store: Store, data: bytes) -> None:
    with unchanged(store):
        for cut in (*range(0, len(data), 997), len(data) - 1):
            with pytest.raises(CorruptEntry):
                put(store, data[:cut])


def test_every_changed_byte_is_noticed(store: Store, data: bytes) -> None:
    with unchanged(store):
        for place in range(0, len(data), 487):
            changed = bytearray(data)
            changed[place] ^= 0x10
            with pytest.raises((CorruptEntry, NewerFormat)):
                put(store, bytes(changed))


def names(members: Members) -> tuple[list[str], list[str]]:
    """The names of the manifests and of the blobs, in order."""
    return [n for n in members if n.endswith("manifest.json")], [n for n in members if n.startswith("blobs/")]


def attack(what: str, members: Members) -> bytes:
    manifests, blobs = names(members)
    if what == "a blob is missing":
        del members[blobs[1]]
    elif what == "a blob that no manifest lists":
        extra = b"stowaway"
        members[f"blobs/{hashlib.sha256(extra).hexdigest()}"] = extra
        members = dict(
            sorted(members.items(), key=lambda item: (item[0] in blobs or "blobs/" in item[0], item[0]))
        )
        index = members.pop(archive.INDEX)
        members = {archive.INDEX: index, **members}
    elif what == "a blob of other bytes":
        members[blobs[0]] = b"y" * len(members[blobs[0]])
    elif what == "a longer blob":
        members[blobs[0]] += b"y"
    elif what == "blobs before manifests":
        members = {n: members[n] for n in (archive.INDEX, *blobs, *manifests)}
    elif what == "blobs in another order":
        members = {n: members[n] for n in (archive.INDEX, *manifests, *reversed(blobs))}
    elif what == "no index":
        del members[archive.INDEX]
    elif what == "an entry that the index does not name":
        key = manifests[0].split("/")
        members[archive.INDEX] = archive.index_bytes([(key[1], key[2])])  # type: ignore[list-item]
    elif what == "an entry under another name":
        members[manifests[1]] = members[manifests[0]]
    elif what == "twice the same":
        data = pack(members)
        once = data[: -len(END)]
        return once + once[: 512 + 512] + END
    elif what == "no manifest but code":
        members[manifests[0]] = b"__import__('os').system('touch /tmp/x')"
    return pack(members)


@pytest.mark.parametrize(
    "what",
    [
        "a blob is missing",
        "a blob that no manifest lists",
        "a blob of other bytes",
        "a longer blob",
        "blobs before manifests",
        "blobs in another order",
        "no index",
        "an entry that the index does not name",
        "an entry under another name",
        "twice the same",
        "no manifest but code",
    ],
)
def test_an_archive_that_does_not_fit_together_changes_nothing(store: Store, data: bytes, what: str) -> None:
    with unchanged(store), pytest.raises(CorruptEntry):
        put(store, attack(what, unpack(data)))


def test_an_archive_that_is_larger_than_allowed_is_refused_before_its_blobs(store: Store, data: bytes) -> None:
    with unchanged(store), pytest.raises(CorruptEntry, match=r"at most 100 bytes together(.|\n)*--max-size"):
        put(store, data, max_bytes=100)


def test_a_blob_that_claims_to_be_huge_is_refused_at_once(
    store: Store, source: Store, put_entry: PutEntry
) -> None:
    manifest = put_entry(source)
    huge = replace(manifest, blobs={**manifest.blobs, BlobDigest("f" * 64): 2**40})
    members = {
        archive.INDEX: archive.index_bytes([(huge.lookup_key, huge.entry_key)]),
        f"entries/{huge.lookup_key}/{huge.entry_key}/manifest.json": huge.serialise(),
    }
    with unchanged(store), pytest.raises(CorruptEntry, match="beyond all limits"):
        put(store, pack(members))


def test_a_zstd_bomb_costs_little_memory(store: Store, tmp_path: Path) -> None:
    """Sixty-four gigabytes of zeros in a few megabytes: refused by the first header, not unpacked."""
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    block = bytes(2**24)
    bomb = b"".join(compressor.compress(block) for _ in range(256)) + compressor.flush()
    assert len(bomb) < 2**20
    code = (
        "import resource, sys; from pathlib import Path; from pwcc.cache.store import Store\n"
        "from pwcc.cache.importing import import_stream; from pwcc.cache.errors import CorruptEntry\n"
        "store = Store.open(Path(sys.argv[1])); limit = 600 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try: import_stream(store, open(sys.argv[2], 'rb'), where='bomb')\n"
        "except CorruptEntry as error: print(error.message)\n"
    )
    named = header(f"entries/{'1' * 32}/{'2' * 32}/manifest.json", archive.MAX_SIZE)
    index = archive.index_bytes([("1" * 32, "2" * 32)])  # type: ignore[list-item]
    head = header(archive.INDEX, len(index)) + index + padding(len(index)) + named
    for number, content in enumerate((bomb, zstandard.compress(head) + bomb)):
        (tmp_path / f"{number}.zst").write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-c", code, store.root, tmp_path / f"{number}.zst"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "expected" in done.stdout, done


@pytest.mark.parametrize("damage", ["cut", "flip", "trailing", "second frame"])
def test_a_damaged_zstd_stream_is_one_clear_error(
    store: Store, source: Store, tmp_path: Path, damage: str
) -> None:
    zstandard = pytest.importorskip("zstandard")
    export_file(source, list(source.entries()), tmp_path / "x.tar.zst")
    packed = (tmp_path / "x.tar.zst").read_bytes()
    middle = len(packed) // 2
    changed = {
        "cut": packed[:middle],
        "flip": packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :],
        "trailing": packed + b"junk",
        "second frame": packed + zstandard.compress(b"junk"),
    }[damage]
    with unchanged(store), pytest.raises(CorruptEntry):
        put(store, changed)


def test_without_zstandard_a_zst_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with unchanged(store), pytest.raises(UsageError, match=r"'\.\[zstd\]'"):
        put(store, b"\x28\xb5\x2f\xfd and more")


# Trouble on the way


def test_a_full_disk_publishes_nothing(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    write, count = os.write, itertools.count()

    def full(descriptor: int, chunk: bytes) -> int:
        if next(count) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, chunk)

    with unchanged(store):
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="ENOSPC"):
            put(store, data)
    monkeypatch.undo()
    assert len(put(store, data)) == 2


def test_a_collection_meanwhile_takes_nothing_of_an_import(
    store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Store.publish

    def collect_first(self: Store, manifest: Manifest) -> object:
        collect(self, Limits(), now=time.time() + 3600)  # an import of an hour
        return publish(self, manifest)

    monkeypatch.setattr(Store, "publish", collect_first)
    assert [entry.new for entry in put(store, data)] == [True, True]


@pytest.mark.slow
def test_a_crash_at_any_change_leaves_nothing_or_whole_entries(tmp_path: Path, source: Store) -> None:
    path = tmp_path / "x.tar"
    export_file(source, list(source.entries()), path)
    for step in itertools.count(1, 4):
        store = Store.create(tmp_path / str(step))
        done = subprocess.run([sys.executable, KILLED, str(step), "import", store.root, path], check=False)
        assert done.returncode in (0, -signal.SIGKILL)
        for ref in store.entries():
            for digest in store.read_manifest(ref).blobs:
                store.read_blob(digest)
        put(store, path.read_bytes())
        assert len(list(store.entries())) == 2
        if done.returncode == 0:
            assert step > 5
            return


@pytest.mark.slow
def test_imports_that_race_all_succeed(store: Store, source: Store, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    export_file(source, list(source.entries()), path)
    command = [sys.executable, str(KILLED), "1000000", "import", str(store.root), str(path)]
    running = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert len(list(store.entries())) == 2
    assert list(store.tmp.iterdir()) == []


def test_a_valid_signature_is_not_replaced_by_an_invalid_one(
    store: Store, source: Store, key: PrivateKey
) -> None:
    (ref, *_) = source.entries()
    good = signed(source, [ref], key)
    signing.write(ref, signing.make(b"something else", key), tmp=source.tmp)
    out = io.BytesIO()
    export_stream(source, [ref], out)
    (bad,) = put(store, out.getvalue())
    assert (bad.signatures, bad.kept) == (1, 0)  # nothing better is there
    done = next(item for item in put(store, good) if item.ref.entry_key == ref.entry_key)
    assert (done.signatures, done.kept) == (1, 0)
    before = files(store.root)
    (again,) = put(store, out.getvalue())
    assert (again.signatures, again.kept, again.to_json()["kept_signatures"]) == (0, 1, 1)
    assert files(store.root) == before
