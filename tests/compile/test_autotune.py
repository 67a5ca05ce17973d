"""``--autotune-from``: which entry's winners are taken, and what is said of what they do not decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import tuning
from pwcc.cache.errors import CorruptEntry, StoreError, UsageError
from pwcc.cache.ids import EntryKey, blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.cache.trust import restrict
from pwcc.cache.tuning import Candidate, EntryTuning, PieceTuning, TunedChoice
from pwcc.compile.autotune import Pins, entry_tuning, find_pins, untuned_warnings
from pwcc.compile.piece_compiler import PieceResult
from tests.cache.conftest import put_blobs
from tests.compile.test_piece_cache import TASK

FILES = {"ab/c.best_config": '{"XBLOCK": 64}'}
PIECE = PieceTuning((TunedChoice("kernel", "k0", "XBLOCK=64"),), 0, FILES)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


@pytest.fixture
def tuned(store: Store) -> Manifest:
    manifest = put_blobs(store)
    store.publish(manifest)
    tuning.write(store, EntryTuning(manifest.entry_key, {"p0 n=1": PIECE}))
    return manifest


def test_found_by_key_here_and_in_another_cache(store: Store, tuned: Manifest, tmp_path: Path) -> None:
    wanted = Pins(tuned.entry_key, FILES)
    assert find_pins(tuned.entry_key, store) == find_pins(tuned.entry_key[:6], store) == wanted
    other = Store.create(tmp_path / "other")
    assert find_pins(f"{store.root}/{tuned.entry_key[:6]}", other) == wanted
    with pytest.raises(UsageError, match="got none") as raised:
        find_pins(tuned.entry_key, other)
    assert raised.value.where == str(other.root)


@pytest.mark.parametrize("given", ["", "abc", "zzzz", "0000000"])
def test_no_such_entry(store: Store, tuned: Manifest, given: str) -> None:
    assert not tuned.entry_key.startswith("0000000")
    with pytest.raises(UsageError, match="expected one entry whose key begins with") as raised:
        find_pins(given, store)
    assert "DIR/KEY" in str(raised.value.hint)


def test_several_entries(store: Store, tuned: Manifest) -> None:
    near = EntryKey(tuned.entry_key[:-1] + ("0" if tuned.entry_key[-1] != "0" else "1"))
    store.publish(replace(tuned, entry_key=near))
    with pytest.raises(UsageError, match="got 2 of them"):
        find_pins(tuned.entry_key[:8], store)
    assert find_pins(tuned.entry_key, store).entry == tuned.entry_key


def test_an_entry_that_was_not_tuned(store: Store) -> None:
    manifest = put_blobs(store)
    store.publish(manifest)
    with pytest.raises(UsageError, match="holds no tuning results") as raised:
        find_pins(manifest.entry_key, store)
    assert "CUDA" in str(raised.value.hint)


def test_no_cache_and_damaged_results(store: Store, tuned: Manifest, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        find_pins(f"{tmp_path}/nowhere/{tuned.entry_key}", store)
    tuning.FILES.path_of(store, tuned.entry_key).write_text("[]")
    with pytest.raises(CorruptEntry):
        find_pins(tuned.entry_key, store)


def test_unsigned_results_are_not_used_where_signatures_are_required(store: Store, tuned: Manifest) -> None:
    restrict(store, True)
    with pytest.raises(UsageError, match="nobody signs"):
        find_pins(tuned.entry_key, store)


def test_what_was_not_decided_is_named() -> None:
    pins = Pins(EntryKey("ab" * 16), FILES)
    timed = TunedChoice("kernel", "k1", "XBLOCK=64", candidates=(Candidate("XBLOCK=64", 1.0),))
    made = [
        ("p0 n=1", PIECE),
        ("p1 n=1", PieceTuning((*PIECE.choices, timed), 5)),
        ("p2 n=1", PieceTuning((), 2)),
    ]
    first, second = untuned_warnings(pins, [*made, ("p3 n=1", None)])
    assert first == "p1 n=1: entry abababababab has no winner for k1, which was tuned here (5 timing runs)"
    assert "p2 n=1" in second
    assert "an operation or a fusion" in second
    assert untuned_warnings(None, made) == ()


def test_an_entry_of_the_cpu_has_no_results() -> None:
    key = EntryKey("ab" * 16)
    assert entry_tuning(key, {"p0 n=1": None}) is None
    assert entry_tuning(key, {"p0 n=1": None, "p1 n=1": PIECE}) == EntryTuning(key, {"p1 n=1": PIECE})


def test_results_and_pins_reach_a_worker_and_the_piece_cache() -> None:
    from pwcc.cache import strict
    from pwcc.compile.piece_compiler import PieceTask

    task = replace(TASK, pins=FILES)
    assert PieceTask.from_bytes(task.to_bytes()) == task
    digest = blob_digest(b"record")
    result = PieceResult(digest, (), (), {digest: 6}, 1, 0.0, 0.0, tuning=PIECE)
    assert PieceResult.parse(strict.canonical(result.to_json()), "piece") == result


def test_pins_are_not_in_the_key(store: Store) -> None:
    from pwcc.compile.piece_cache import PieceCache
    from pwcc.compile.target import target_of

    cache = PieceCache(store, target_of("cpu"))
    assert cache.key(replace(TASK, pins=FILES)) == cache.key(TASK)
