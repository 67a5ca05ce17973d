"""Every file of an entry damaged in every way: found each time, and nothing in the cache is ever executed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import about, atomic, strict
from pwcc.cache.errors import StoreError
from pwcc.cache.factors import FactorTree
from pwcc.cache.findings import Kind, Verification
from pwcc.cache.ids import PieceKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.repair import repair
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.verify import GRACE_S, is_damaged, verify

PutEntry = Callable[..., Manifest]
Damage = Callable[[Path], None]


def look(store: Store, **options: object) -> Verification:
    return verify(store, now=time.time() + GRACE_S + 60, threads=1, **options)  # type: ignore[arg-type]


def kinds(found: Verification) -> set[Kind]:
    return {finding.kind for finding in found.findings}


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


@pytest.fixture
def ref(store: Store, manifest: Manifest) -> EntryRef:
    store.publish(manifest)
    return store.entry_ref(manifest.lookup_key, manifest.entry_key)


def test_an_intact_cache(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    before = tree(store.root)
    found = look(store)
    assert (found.exit_code, found.findings) == (0, ())
    assert (found.entries, found.blobs) == (1, len(manifest.blobs))
    assert found.bytes == sum(manifest.blobs.values())
    assert tree(store.root) == before
    assert not is_damaged(store, ref)
    several = verify(store, now=time.time(), threads=4)
    assert (several.bytes, several.blobs, several.exit_code) == (found.bytes, found.blobs, 0)


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_a_link(path: Path) -> None:
    """To a file with the very same bytes."""
    data = path.read_bytes()
    other = path.parent.parent / f"same-{path.name[:8]}"
    other.write_bytes(data)
    path.unlink()
    path.symlink_to(other)


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    truncate, zero, empty, lengthen, Path.unlink, replace_by_a_folder, replace_by_a_link, replace_by_a_pipe
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_file_of_an_entry_is_missed_and_put_right(
    store: Store, ref: EntryRef, manifest: Manifest, damage: Damage, tmp_path: Path, put_entry: PutEntry
) -> None:
    every = ("manifest", *manifest.blobs)
    for name in every if damage in (truncate, Path.unlink) else every[::6]:
        root = tmp_path / "copy"
        shutil.copytree(store.root, root)
        copy = Store.open(root)
        (moved,) = copy.entries()
        path = moved.manifest if name == "manifest" else root / "v1/blobs/sha256" / name[:2] / name
        damage(path)
        found = look(copy)
        expected = Kind.ENTRY if name == "manifest" else Kind.BLOB
        assert expected in kinds(found), (name, found)
        assert found.exit_code & ~64 & expected.bit
        assert any(finding.where == str(path) for finding in found.findings), (name, found)
        assert is_damaged(copy, moved)
        repaired = repair(copy, found)
        assert all(f.repaired for f in repaired.findings if f.kind in (Kind.ENTRY, Kind.BLOB)), repaired
        assert list(copy.entries()) == []
        assert (kinds(look(copy)) - {Kind.LEFTOVER}) == set(), look(copy)
        (record,) = copy.quarantined()
        assert record.entry_key == manifest.entry_key
        assert copy.publish(put_entry(copy)).won
        shutil.rmtree(root)


def test_every_bit_of_every_byte_of_the_manifest(store: Store, ref: EntryRef) -> None:
    """One bit of each byte, in turn: 100 %."""
    data = bytearray(ref.manifest.read_bytes())
    for index in range(len(data)):
        bit = 1 << (index % 8)
        data[index] ^= bit
        ref.manifest.write_bytes(data)
        try:
            store.read_manifest(ref)
        except StoreError:
            pass
        else:
            raise AssertionError(f"byte {index} flipped, and the manifest was read")
        if index % 500 == 0:
            assert Kind.ENTRY in kinds(look(store, refs=[ref])) or Kind.UNREADABLE in kinds(
                look(store, refs=[ref])
            )
        data[index] ^= bit
    ref.manifest.write_bytes(data)
    assert not is_damaged(store, ref)


def test_sampled_bytes_of_every_blob(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    choose = random.Random(0)
    for digest in manifest.blobs:
        path = store.blob_path(digest)
        data = path.read_bytes()
        for index in {0, len(data) - 1, *(choose.randrange(len(data)) for _ in range(8))}:
            changed = bytearray(data)
            changed[index] ^= 1 << choose.randrange(8)
            path.write_bytes(changed)
            assert Kind.BLOB in kinds(look(store, refs=[ref]))
        path.write_bytes(data)
    assert look(store).exit_code == 0


def test_two_blobs_swapped(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    a, b = (store.blob_path(digest) for digest in list(manifest.blobs)[:2])
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)
    found = look(store)
    assert {finding.where for finding in found.findings} == {str(a), str(b)}
    assert kinds(found) == {Kind.BLOB}


def test_two_manifests_swapped(store: Store, ref: EntryRef, put_entry: PutEntry) -> None:
    other = store.publish(put_entry(store, name="other")).path / "manifest.json"
    one, two = ref.manifest.read_bytes(), other.read_bytes()
    ref.manifest.write_bytes(two)
    other.write_bytes(one)
    found = look(store)
    assert [finding.kind for finding in found.findings if finding.kind is not Kind.LEFTOVER] == [Kind.ENTRY] * 2
    with pytest.raises(StoreError, match="moved or renamed"):
        store.read_manifest(ref)


def republish(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    ref.manifest.write_bytes(manifest.serialise())


def test_factors_of_another_key(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    """A valid manifest over valid blobs that claims another build's key."""
    tree = FactorTree.of(configuration={"model": "another"})
    digest = store.put_blob(data := strict.canonical(tree.to_json()))
    republish(store, ref, replace(manifest, factors=digest, blobs={**manifest.blobs, digest: len(data)}))
    (finding,) = look(store, refs=[ref]).findings
    assert finding.kind is Kind.ENTRY
    assert f"expected factors of entry key {manifest.entry_key}" in finding.message


def test_a_record_that_names_a_blob_outside_the_manifest(
    store: Store, ref: EntryRef, manifest: Manifest
) -> None:
    kernel = next(digest for digest in manifest.blobs if store.read_blob(digest).startswith(b"\x7fELF"))
    blobs = {digest: size for digest, size in manifest.blobs.items() if digest != kernel}
    republish(store, ref, replace(manifest, blobs=blobs))
    messages = [finding.message for finding in look(store, refs=[ref]).findings]
    assert len(messages) == 6
    assert all(kernel in message and "does not list" in message for message in messages)


def test_a_wrong_size_in_the_manifest(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    digest = manifest.predicates
    republish(store, ref, replace(manifest, blobs={**manifest.blobs, digest: 999}))
    (finding,) = look(store, refs=[ref]).findings
    assert finding.kind is Kind.ENTRY
    assert "expected 999 bytes" in finding.message


def test_requirements_of_this_host_are_no_damage(store: Store, ref: EntryRef) -> None:
    facts = {"os": "plan9", "cpu_flags": frozenset({"avx2"})}
    found = look(store, facts=facts)
    assert kinds(found) == {Kind.HOST}
    assert found.exit_code == 64 + 16
    assert sorted(finding.message.partition(":")[0] for finding in found.findings) == ["cpu_flags", "os"]
    repaired = repair(store, found)
    assert all(finding.repaired is None for finding in repaired.findings)
    assert ref.manifest.exists()


def test_a_newer_entry_is_not_damaged_and_not_touched(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    ref.manifest.write_bytes(about.seal(replace(about.About.of(manifest), schema=2), b'{"schema":2}'))
    found = look(store)
    assert Kind.UNREADABLE in kinds(found)
    assert Kind.ENTRY not in kinds(found)
    repair(store, found)
    assert b'"schema":2' in ref.manifest.read_bytes()
    assert not is_damaged(store, ref)


# What belongs to no entry


def test_orphans_leftovers_and_foreign_names(store: Store, ref: EntryRef) -> None:
    orphan = store.put_blob(b"nobody needs me")
    (store.root / "v1/blobs/sha256/zz").mkdir()
    (store.root / "v1/blobs/sha256" / orphan[:2] / "notes.txt").write_text("x")
    (store.root / "v1/entries/notes").mkdir()
    (ref.path / "evil.py").write_text("raise SystemExit")
    (store.root / "v1/tmp" / ("c" * 32)).write_bytes(b"half")
    os.utime(store.root / "v1/tmp" / ("c" * 32), (0, 0))
    assert kinds(verify(store, now=time.time())) == {Kind.LEFTOVER}
    found = look(store)
    names = {Path(finding.where).name for finding in found.findings}
    assert names == {orphan, "zz", "notes.txt", "notes", "evil.py", "c" * 32}
    assert found.exit_code == 64 + 4
    repaired = repair(store, found)
    done = {Path(finding.where).name for finding in repaired.findings if finding.repaired}
    assert done == {"c" * 32}  # what is intact, or not ours, stays
    assert store.has_blob(orphan)


def test_a_fresh_blob_of_a_running_compile_is_no_orphan(store: Store, ref: EntryRef) -> None:
    store.put_blob(b"published soon")
    assert verify(store, now=time.time()).exit_code == 0


def test_piece_records(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    kept = store.put_blob(b"of a piece alone")
    store.put_piece(PieceKey("a" * 32), strict.canonical({"blobs": {kept: 16}}))
    assert look(store).exit_code == 0
    store.put_piece(PieceKey("b" * 32), b'{"blobs":{"x":1}}')
    store.put_piece(PieceKey("c" * 32), b"not json")
    store.put_piece(PieceKey("d" * 32), strict.canonical({"blobs": {"0" * 64: 1}}))
    store.blob_path(kept).write_bytes(b"of another alone")
    found = look(store)
    records = [f for f in found.findings if f.where.endswith(".json")]
    assert {Path(f.where).stem[0]: f.kind for f in records} == {
        "a": Kind.BLOB, "b": Kind.ENTRY, "c": Kind.ENTRY, "d": Kind.LEFTOVER
    }  # fmt: skip
    assert [(f.where, f.kind) for f in found.findings if f not in records] == [
        (str(store.blob_path(kept)), Kind.BLOB)
    ]
    repair(store, found)
    assert sorted(path.stem[0] for path in (store.root / "v1/pieces").iterdir()) == ["d"]
    assert not store.blob_path(kept).exists()


def test_a_damaged_blob_goes_after_its_entry_was_set_aside(
    store: Store, ref: EntryRef, manifest: Manifest
) -> None:
    """As after a load that met it: then only the record of a piece still names the blob."""
    blob = next(iter(manifest.piece_records()))
    store.put_piece(PieceKey("a" * 32), strict.canonical({"blobs": {blob: manifest.blobs[blob]}}))
    path = store.blob_path(blob)
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert store.quarantine(ref, "damaged", is_damaged=lambda moved: is_damaged(store, moved))
    repaired = repair(store, look(store))
    assert {f.repaired for f in repaired.findings if f.kind is Kind.BLOB} == {"removed"}
    assert (repaired.exit_code & 2, look(store).exit_code & ~(64 + 4)) == (0, 0)
    assert not path.exists()


def test_a_repair_leaves_what_was_set_aside(store: Store, ref: EntryRef) -> None:
    assert store.quarantine(ref, "damaged", is_damaged=lambda _: True)
    before = tree(store.root / "v1/quarantine")
    then = time.time() - 400 * 86400
    for path in (store.root / "v1/quarantine").iterdir():
        os.utime(path, (then, then))
    found = repair(store, look(store))
    assert found.quarantined == 1
    assert tree(store.root / "v1/quarantine") == before


def test_capture_plans(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    folder = store.plans / manifest.entry_key
    folder.mkdir()
    (folder / "good.json").write_bytes(b"{}")
    (folder / "bad.json").write_bytes(b'{"a":1,"a":2}')
    found = look(store)
    (finding,) = found.findings
    assert (finding.kind, finding.where) == (Kind.ENTRY, str(folder / "bad.json"))
    repair(store, found)
    assert [path.name for path in folder.iterdir()] == ["good.json"]
    assert ref.manifest.exists()  # a plan is outside the entry


def test_links_and_owners(store: Store, ref: EntryRef, manifest: Manifest, tmp_path: Path) -> None:
    ref.manifest.chmod(0o666)
    prefix = store.blob_path(manifest.predicates).parent
    prefix.rename(tmp_path / "elsewhere")
    prefix.symlink_to(tmp_path / "elsewhere")
    found = look(store)
    wheres = {finding.where for finding in found.findings if finding.kind is Kind.TRUST}
    assert wheres == {str(ref.path), str(prefix)}


# Repair


def test_a_repair_takes_nothing_that_a_writer_put_right(
    store: Store, ref: EntryRef, manifest: Manifest, put_entry: PutEntry
) -> None:
    """Between finding the damage and repairing it, a compile has healed it."""
    store.blob_path(manifest.factors).write_bytes(b"x")
    ref.manifest.write_bytes(b"{}")
    found = look(store)
    assert {Kind.ENTRY, Kind.BLOB} <= kinds(found)
    store.publish(put_entry(store))
    before = tree(store.root / "v1/blobs") | tree(store.root / "v1/entries")
    repair(store, found)
    assert tree(store.root / "v1/blobs") | tree(store.root / "v1/entries") == before
    assert look(store).exit_code == 0


def test_one_damaged_blob_of_two_entries(store: Store, ref: EntryRef, put_entry: PutEntry) -> None:
    other = put_entry(store, name="other")
    store.publish(other)
    store.blob_path(other.numerics or other.factors).write_bytes(b"x")  # both name it
    found = look(store)
    assert {finding.entry for finding in found.findings} == {ref.entry_key, other.entry_key}
    repair(store, found)
    assert list(store.entries()) == []
    assert {record.entry_key for record in store.quarantined()} == {ref.entry_key, other.entry_key}


def test_only_one_entry_is_looked_at_when_one_is_named(
    store: Store, ref: EntryRef, put_entry: PutEntry
) -> None:
    other = put_entry(store, name="other")
    path = store.publish(other).path
    (path / "manifest.json").write_bytes(b"")
    found = look(store, refs=[ref])
    assert (found.exit_code, found.entries) == (0, 1)
    assert look(store).exit_code


def test_exit_codes_do_not_meet_those_of_other_endings() -> None:
    bits = [kind.bit for kind in Kind]
    assert sorted(bits) == [1, 2, 4, 8, 16, 32]
    assert all(64 < 64 + bit < 128 for bit in (*bits, sum(bits)))


PAYLOADS = {
    "sitecustomize.py": b"open({marker!r}, 'w')",
    "pickle.pkl": b"cos\nsystem\n(S'touch {marker}'\ntR.",
    "kernel.so": b"\x7fELF",
}
RUN = """
import os, sys
def hook(event, args):
    text = repr(args)
    if event in ("exec", "compile", "import", "pickle.find_class", "ctypes.dlopen") and {root!r} in text:
        print("EXECUTED", event, text[:200])
    if event == "open" and {root!r} in text and args[2] & (os.O_WRONLY | os.O_RDWR):
        print("WROTE", text[:200])
sys.addaudithook(hook)
from pwcc.cli import main
print(main(sys.argv[1:]), "torch" in sys.modules)
"""


def test_nothing_in_a_cache_is_executed_or_written(store: Store, ref: EntryRef, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for name, text in PAYLOADS.items():
        data = text.replace(b"{marker!r}", repr(str(marker)).encode()).replace(
            b"{marker}", str(marker).encode()
        )
        for folder in (store.root, ref.path, store.root / "v1/pieces"):
            (folder / name).write_bytes(data)
        store.put_blob(data)
    script = RUN.format(root=str(store.root))
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(store.root)],
        check=True, capture_output=True, text=True, cwd=store.root,
    )  # fmt: skip
    assert "EXECUTED" not in done.stdout
    assert "WROTE" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"{64 + 4} False"
    assert not marker.exists()


# What cannot be read, and what is in the way


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function after which this user may not read a file or folder; root may read all."""
    hidden: set[str] = set()
    real_open, real_scan = atomic.open_regular, os.scandir

    def check(path: object) -> None:
        if str(path) in hidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def open_regular(path: Path) -> int:
        check(path)
        return real_open(path)

    def scandir(path: Path) -> object:
        check(path)
        return real_scan(path)

    monkeypatch.setattr(atomic, "open_regular", open_regular)
    monkeypatch.setattr(os, "scandir", scandir)
    return lambda path: hidden.add(str(path))


def test_a_repair_keeps_what_it_cannot_read(
    store: Store, ref: EntryRef, manifest: Manifest, hide: Callable[[Path], None]
) -> None:
    plan = store.plans / ref.entry_key / "default.json"
    plan.parent.mkdir()
    plan.write_bytes(b"{}")
    blob = store.put_blob(b"of a piece")
    store.put_piece(PieceKey("1" * 32), strict.canonical({"blobs": {blob: 10}}))
    hide(plan)
    hide(store.blob_path(blob))
    before = tree(store.root)
    found = repair(store, look(store))
    assert kinds(found) == {Kind.UNREADABLE}
    assert found.exit_code == 64 + Kind.UNREADABLE.bit
    assert tree(store.root) == before


def test_a_folder_that_cannot_be_listed_is_said(
    store: Store, ref: EntryRef, hide: Callable[[Path], None]
) -> None:
    hide(store.root / "v1/pieces")
    (finding,) = look(store).findings
    assert (finding.kind, finding.where) == (Kind.UNREADABLE, str(store.root / "v1/pieces"))


def test_a_copy_under_another_lookup_key_is_set_aside(store: Store, ref: EntryRef) -> None:
    for key in ("0" * 32, "f" * 32):  # before and after the right one
        shutil.copytree(ref.path, store.root / "v1/entries" / key / ref.entry_key)
    assert repair(store, look(store)).exit_code == 0
    assert list(store.entries()) == [ref]
    assert len(store.quarantined()) == 2


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, Path.mkdir])
def test_what_is_in_the_way_of_files_and_folders(
    store: Store, ref: EntryRef, manifest: Manifest, make: Callable[[Path], None]
) -> None:
    (store.plans / ref.entry_key).mkdir()
    places = [store.plans / ref.entry_key / "default.json", store.root / "v1/pieces" / f"{'1' * 32}.json"]
    if make is not Path.mkdir:
        prefix = next(f"{i:02x}" for i in range(256) if all(f"{i:02x}" != d[:2] for d in manifest.blobs))
        entries = store.root / "v1/entries"
        (entries / ("a" * 32)).mkdir()
        places += [
            store.root / "v1/blobs/sha256" / prefix,
            entries / ("b" * 32),
            entries / ("a" * 32) / ("c" * 32),
        ]
    for place in places:
        make(place)
    found = look(store)
    assert {finding.where for finding in found.findings} >= {
        str(place) for place in places if place.name != "c" * 32
    }
    assert not any(finding.kind is Kind.LEFTOVER for finding in found.findings)
    assert repair(store, found).exit_code == 0
    assert not any(os.path.lexists(place) for place in places)
    assert look(store).exit_code == 0
    assert list(store.entries()) == [ref]


@pytest.mark.parametrize("part", ["entries", "pieces", "blobs/sha256", "plans", "locks", "tmp", "quarantine"])
def test_a_fixed_folder_that_is_a_file(store: Store, ref: EntryRef, part: str) -> None:
    place = store.root / "v1" / part
    shutil.rmtree(place)
    place.write_bytes(b"")
    found = look(store)
    assert any((f.kind, f.where) == (Kind.ENTRY, str(place)) for f in found.findings)
    assert repair(store, found).mask & Kind.ENTRY.bit  # left to a person, and reported
