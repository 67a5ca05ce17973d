from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import about, activity, atomic, last_use, pins, removal, strict
from pwcc.cache.errors import StoreError
from pwcc.cache.gc import BUSY_GRACE_S, GRACE_S, Collected, collect
from pwcc.cache.ids import BlobDigest, EntryKey, PieceKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.retention import Limits
from pwcc.cache.store import EntryRef, Store

PutEntry = Callable[..., Manifest]
Rekeyed = Callable[[Manifest, int], Manifest]
DAY = 86400.0
KILLED = Path(__file__).with_name("killed.py")


def later(store: Store, limits: Limits = Limits(), **options: object) -> Collected:  # noqa: B008 - frozen
    """Collect as if in ten days, when everything is past any grace age."""
    return collect(store, limits, now=time.time() + 10 * DAY, **options)  # type: ignore[arg-type]


def refs(store: Store) -> list[EntryRef]:
    return list(store.entries())


def blobs(store: Store) -> set[str]:
    return {path.name for path in (store.root / "v1/blobs").rglob("*") if path.is_file()}


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def age(ref: EntryRef, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(ref.manifest, (then, then))


def check(store: Store) -> None:
    """Every visible entry is whole."""
    for ref in store.entries():
        for digest in store.read_manifest(ref).blobs:
            store.read_blob(digest)


@pytest.fixture
def two(store: Store, put_entry: PutEntry) -> tuple[EntryRef, EntryRef]:
    """Two entries that share some blobs; the first was used longer ago."""
    for name in ("toy", "other"):
        store.publish(put_entry(store, name=name))
    by_name = {store.read_manifest(ref).model.identity: ref for ref in store.entries()}
    age(by_name["toy"], 3)
    age(by_name["other"], 1)
    return by_name["toy"], by_name["other"]


# Entries


def test_nothing_goes_without_limits(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    before = tree(store.root)
    report = later(store)
    assert (report.removed, report.blobs, report.pieces, report.before) == ((), 0, 0, report.after)
    assert tree(store.root) == before


def test_the_entry_used_longest_ago_goes_with_what_only_it_needs(
    store: Store, two: tuple[EntryRef, EntryRef]
) -> None:
    toy, other = two
    own = set(store.read_manifest(toy).blobs) - set(store.read_manifest(other).blobs)
    everything = blobs(store)
    report = later(store, Limits(max_bytes=1_000_000_000, max_age_s=12 * DAY))
    assert [verdict.held.ref for verdict in report.removed] == [toy]
    assert refs(store) == [other]
    assert blobs(store) == everything - own
    assert report.blobs == len(own) > 0
    check(store)
    files = [path for path in (store.root / "v1/entries").rglob("*") if path.is_file()]
    files += [path for path in (store.root / "v1/blobs").rglob("*") if path.is_file()]
    assert report.after == sum(path.stat().st_size for path in files)
    assert not toy.path.parent.exists()
    assert list((store.root / "v1/tmp").iterdir()) == []


def test_plans_stamp_and_pin_go_with_the_entry(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    toy, _ = two
    plan = store.plans / toy.entry_key / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    pins.pin(store, toy)
    assert last_use.stamp(store, toy.entry_key)
    report = later(store, asked=[toy], force=True)
    assert [verdict.reason for verdict in report.removed] == ["asked for"]
    assert not plan.parent.exists()
    assert pins.pinned(store) == frozenset()
    assert last_use.stamps(store) == {}


def test_a_stamp_counts_as_use(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    toy, other = two
    last_use.stamp(store, toy.entry_key)
    report = collect(store, Limits(max_age_s=DAY / 2), now=time.time())
    assert [verdict.held.ref for verdict in report.removed] == [other]


def test_a_pinned_entry_stays(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    pins.pin(store, two[0])
    report = later(store, Limits(max_bytes=0))
    assert refs(store) == [two[0]]
    assert [verdict.reason for verdict in report.verdicts if not verdict.remove] == ["pinned"]
    assert "entries that are pinned or in use" in report.notes[0]
    check(store)


def test_an_entry_that_a_reader_holds_stays(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    held = store.hold(two[0])
    later(store, Limits(max_bytes=0))
    assert refs(store) == [two[0]]
    check(store)
    del held
    later(store, Limits(max_bytes=0))
    assert refs(store) == []
    assert blobs(store) == set()


def test_a_reader_that_comes_after_the_survey_is_seen(
    store: Store, two: tuple[EntryRef, EntryRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = store.hold(two[0])
    monkeypatch.setattr(activity, "is_read", lambda ref: False)
    report = later(store, Limits(max_bytes=0))
    assert refs(store) == [two[0]]
    assert [verdict.reason for verdict in report.verdicts if not verdict.remove] == [removal.READ]
    check(store)
    assert held is not None


def test_a_pin_that_is_set_after_the_survey_holds(
    store: Store, two: tuple[EntryRef, EntryRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    pins.pin(store, two[0])
    monkeypatch.setattr(pins, "pinned", lambda _: frozenset())
    report = later(store, Limits(max_bytes=0))
    assert [verdict.held.ref for verdict in report.removed] == [two[1]]
    check(store)


def test_a_dry_run_says_the_same_and_changes_nothing(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    before = tree(store.root)
    said = later(store, Limits(keep_last=0), dry_run=True)
    assert tree(store.root) == before
    done = later(store, Limits(keep_last=0))
    assert replace(said, dry_run=False) == done
    assert len(done.removed) == 2


def test_removing_by_name_leaves_other_leftovers_alone(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    orphan = store.put_blob(b"of nobody")
    report = later(store, asked=[two[0]])
    assert refs(store) == [two[1]]
    assert report.blobs > 0
    assert store.has_blob(orphan)


def test_a_store_that_cannot_be_written_is_one_clear_error(
    store: Store, two: tuple[EntryRef, EntryRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system", "x")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StoreError, match=r"removing an entry failed.*EROFS"):
        later(store, Limits(max_bytes=0))
    assert len(refs(store)) == 2
    check(store)


# What cannot be read


def test_a_damaged_entry_is_reported_and_keeps_no_blob(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    toy, other = two
    toy.manifest.write_bytes(toy.manifest.read_bytes()[:200])
    report = later(store)
    assert toy.entry_key[:12] in report.notes[0]
    assert set(refs(store)) == {toy, other}  # it is for verify to set it aside
    assert blobs(store) == set(store.read_manifest(other).blobs)


def test_an_entry_of_a_newer_pwcc_keeps_every_blob(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    toy, other = two
    manifest = store.read_manifest(toy)
    toy.manifest.write_bytes(about.seal(replace(about.About.of(manifest), schema=999), b'{"schema":999}'))
    before = blobs(store)
    report = later(store, asked=[other])
    assert refs(store) == [toy]
    assert blobs(store) == before
    assert "no blob was collected" in report.notes[-1]


# Blobs and pieces without a user


def test_an_old_orphan_goes_and_a_young_one_waits(store: Store) -> None:
    digest = store.put_blob(b"of a compile that runs")
    report = collect(store, Limits(), now=time.time())
    assert (report.blobs, report.waiting, report.waiting_bytes) == (0, 1, 22)
    assert store.has_blob(digest)
    assert later(store).blobs == 1
    assert not store.has_blob(digest)


def test_a_copy_that_kept_old_times_is_young(store: Store) -> None:
    """As from cp -a or rsync -a: blobs arrive before their manifest, with times of long ago."""
    digest = store.put_blob(b"copied")
    os.utime(store.blob_path(digest), (1, 1))
    assert collect(store, Limits(), now=time.time()).blobs == 0


def test_a_time_in_the_future_is_young(store: Store) -> None:
    digest = store.put_blob(b"of a wrong clock")
    ahead = time.time() + 1000 * DAY
    os.utime(store.blob_path(digest), (ahead, ahead))
    assert later(store).blobs == 0


def test_a_running_compile_makes_the_grace_age_a_day(store: Store) -> None:
    store.put_blob(b"an hour old")
    with store.lock("0" * 32):
        busy = collect(store, Limits(), now=time.time() + 3600)
    assert (busy.grace_s, busy.blobs) == (BUSY_GRACE_S, 0)
    free = collect(store, Limits(), now=time.time() + 3600)
    assert (free.grace_s, free.blobs) == (GRACE_S, 1)


def test_an_import_counts_as_a_running_writer(store: Store) -> None:
    with activity.writing(store):
        assert activity.writers_at_work(store)
    assert not activity.writers_at_work(store)


def test_where_there_are_no_locks_writers_are_assumed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.lock("0" * 32):
        pass

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert activity.writers_at_work(store)


@pytest.mark.parametrize("links", [True, False])
def test_a_blob_that_a_writer_renews_meanwhile_is_put_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    digest = store.put_blob(b"found by a writer just now")
    rename = os.rename
    now = time.time() + 10 * DAY

    def renew_first(source: Path, to: Path) -> None:
        if "sha256" in str(source):
            os.utime(source, (now, now))
        rename(source, to)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "rename", renew_first)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    assert collect(store, Limits(), now=now).blobs == 0
    assert store.read_blob(digest) == b"found by a writer just now"
    assert list((store.root / "v1/tmp").iterdir()) == []


def test_what_a_writer_made_again_is_not_overwritten(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, now = tmp_path / "blob", time.time()
    path.write_bytes(b"old")
    os.utime(path, (1, 1))
    rename = os.rename

    def replaced(source: Path, to: Path) -> None:
        os.utime(source)
        rename(source, to)
        path.write_bytes(b"new")

    monkeypatch.setattr(os, "rename", replaced)
    assert not removal.remove_old(path, tmp=store.tmp, before_s=now - 5)
    assert path.read_bytes() == b"new"
    assert list(store.tmp.iterdir()) == []


def test_putting_a_blob_again_renews_it(store: Store) -> None:
    digest = store.put_blob(b"used again")
    os.utime(store.blob_path(digest), (1, 1))
    store.put_blob(b"used again")
    assert store.blob_path(digest).stat().st_mtime > time.time() - 60


def test_publishing_renews_every_blob(store: Store, manifest: Manifest) -> None:
    for digest in manifest.blobs:
        os.utime(store.blob_path(digest), (1, 1))
    store.publish(manifest)
    assert all(store.blob_path(digest).stat().st_mtime > time.time() - 60 for digest in manifest.blobs)


def test_another_users_blob_is_renewed_by_a_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = store.put_blob(b"of a colleague")
    path = store.blob_path(digest)
    os.utime(path, (1, 1))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.put_blob(b"of a colleague") == digest
    assert path.stat().st_mtime > time.time() - 60
    monkeypatch.setattr(os, "replace", refuse)  # a cache that may only be read
    assert store.blobs.touch(digest)
    assert store.read_blob(digest) == b"of a colleague"


def test_a_blob_that_vanishes_while_it_is_put_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = store.put_blob(b"taken between the look and the touch")
    touch = store.blobs.touch

    def taken(found: BlobDigest) -> bool:
        store.blob_path(found).unlink()
        monkeypatch.undo()
        return touch(found)

    monkeypatch.setattr(store.blobs, "touch", taken)
    assert store.put_blob(b"taken between the look and the touch") == digest
    assert store.has_blob(digest)


def test_a_piece_record_stays_with_its_blobs(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    toy, other = two
    own = store.read_manifest(toy).blobs
    shared = {d: s for d, s in own.items() if d in store.read_manifest(other).blobs}
    used, lost = PieceKey("1" * 32), PieceKey("2" * 32)
    store.put_piece(used, strict.canonical({"blobs": shared}))
    store.put_piece(lost, strict.canonical({"blobs": dict(own)}))
    assert later(store).pieces == 0
    report = later(store, asked=[toy])
    assert report.pieces == 1
    assert store.get_piece(used) is not None
    assert store.get_piece(lost) is None


def test_a_young_piece_record_keeps_its_blobs(store: Store) -> None:
    """A compile that was interrupted goes on from its finished pieces."""
    digest = store.put_blob(b"kernel")
    store.put_piece(PieceKey("1" * 32), strict.canonical({"blobs": {digest: 6}}))
    report = collect(store, Limits(), now=time.time())
    assert (report.pieces, report.blobs, report.waiting) == (0, 0, 1)
    report = later(store)
    assert (report.pieces, report.blobs, report.after) == (1, 1, 0)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"blobs":{"../x":1}}', b'{"blobs":[]}', b'{"blobs":{}}'])
def test_a_piece_record_that_says_nothing_goes(store: Store, text: bytes) -> None:
    store.put_piece(PieceKey("1" * 32), text)
    assert later(store).pieces == 1


def test_a_record_of_a_blob_that_is_gone_goes(store: Store) -> None:
    store.put_piece(PieceKey("1" * 32), strict.canonical({"blobs": {"a" * 64: 6}}))
    assert later(store).pieces == 1


def test_files_that_are_not_the_stores_stay(store: Store) -> None:
    paths = [store.root / "v1" / name for name in ("pieces/notes.txt", "blobs/sha256/x", "entries/x", "x")]
    for path in paths:
        path.write_text("mine")
    later(store)
    assert all(path.read_text() == "mine" for path in paths)


def test_stamps_of_entries_that_are_gone_go(store: Store) -> None:
    last_use.stamp(store, EntryKey("1" * 32))
    later(store)
    assert last_use.stamps(store) == {}


def test_what_was_set_aside_goes_after_a_month(store: Store, two: tuple[EntryRef, EntryRef]) -> None:
    assert store.quarantine(two[0], "damaged", is_damaged=lambda _: True) is not None
    later(store)
    assert len(store.quarantined()) == 1
    collect(store, Limits(), now=time.time() + 31 * DAY)
    assert list((store.root / "v1/quarantine").iterdir()) == []


# Crashes and races, with real processes


@pytest.mark.slow
def test_a_crash_at_any_change_leaves_whole_entries(
    tmp_path: Path, put_entry: PutEntry, rekeyed: Rekeyed
) -> None:
    for step in itertools.count(1):
        store = Store.create(tmp_path / str(step))
        manifest = put_entry(store)
        own = [store.put_blob(b"only of %d" % index) for index in range(2)]
        for index, extra in enumerate(own):
            store.publish(rekeyed(replace(manifest, blobs={**manifest.blobs, extra: 9}), index))
        store.put_piece(PieceKey("1" * 32), strict.canonical({"blobs": dict.fromkeys(own, 9)}))
        done = subprocess.run([sys.executable, KILLED, str(step), "gc", store.root], check=False)
        assert done.returncode in (0, -signal.SIGKILL)
        check(store)
        later(store, Limits(keep_last=1), grace_s=0)  # goes on where the other was killed
        (ref,) = store.entries()
        assert blobs(store) == set(store.read_manifest(ref).blobs)
        assert list(store.tmp.iterdir()) == []
        if done.returncode == 0:
            assert step > 5
            return


WRITER = """
import sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import put_blobs
from pwcc.cache.errors import MissingBlob
from pwcc.cache.ids import EntryKey
from pwcc.cache.store import Store
store, end, count = Store.create(Path(sys.argv[1])), time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < end:
    manifest = put_blobs(store, name=f"toy{count % 3}")
    try:
        store.publish(replace(manifest, entry_key=EntryKey(f"{count % 7:032x}")))
        count += 1
    except MissingBlob:  # it took longer than the grace age, which is two seconds here
        print("slow", file=sys.stderr)
print(count)
"""
COLLECTOR = """
import sys, time
from pathlib import Path
from pwcc.cache.gc import collect
from pwcc.cache.retention import Limits
from pwcc.cache.store import Store
store, end, removed = Store.create(Path(sys.argv[1])), time.monotonic() + float(sys.argv[3]), [0, 0]
while time.monotonic() < end:
    report = collect(store, Limits(max_bytes=0), now=time.time(), grace_s=2.0)
    removed[0] += len(report.removed)
    removed[1] += report.blobs
print(*removed)
"""


def race(root: Path, seconds: float, *programs: str) -> Iterator[subprocess.Popen[str]]:
    here = str(Path(__file__).parent)
    for program in programs:
        yield subprocess.Popen(
            [sys.executable, "-c", program, root, here, str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextlib.contextmanager
def marked(ref: EntryRef) -> Iterator[None]:
    """Hold an entry as :mod:`pwcc.cache.holds` does, and know that it is the one that is there."""
    descriptor = os.open(ref.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(ref.path.stat(), os.fstat(descriptor)):
            yield
        else:
            raise FileNotFoundError
    finally:
        os.close(descriptor)


@pytest.mark.slow
def test_a_writer_two_collections_and_a_reader_at_once(store: Store) -> None:
    """What is published and held is whole at any moment, and two collections do not disturb each other."""
    running = list(race(store.root, 7.0, WRITER, COLLECTOR, COLLECTOR))
    read = 0
    while any(process.poll() is None for process in running):
        for ref in store.entries():
            with contextlib.suppress(FileNotFoundError, BlockingIOError), marked(ref):
                for digest in store.read_manifest(ref).blobs:
                    store.read_blob(digest)
                read += 1
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    published = int(outputs[0][0])
    removed = [int(number) for output, _ in outputs[1:] for number in output.split()]
    assert published > 10
    assert removed[0] + removed[2] > 10, removed
    assert read > 10
    later(store, Limits(max_bytes=0))
    assert blobs(store) == set()


def test_piece_records_that_cannot_be_read_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = store.put_blob(b"of a piece")
    for key in ("1" * 32, "2" * 32):
        store.put_piece(PieceKey(key), strict.canonical({"blobs": {blob: 10}}))
    hidden, real = store.root / "v1/pieces" / f"{'1' * 32}.json", atomic.open_regular

    def open_regular(path: Path) -> int:
        if path == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(atomic, "open_regular", open_regular)
    done = collect(store, Limits(), now=time.time() + 1000, grace_s=0.0)
    assert (done.pieces, done.blobs) == (0, 0)
    assert done.notes[0] == "1 of 2 piece records cannot be read; they were kept"
    assert hidden.exists()
    assert store.has_blob(blob)
