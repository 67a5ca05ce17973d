"""Tuning results: beside the entry, parsed strictly, gone with it, and no part of its digests."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pwcc.cache import tuning
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import EntryKey
from pwcc.cache.inspection import detail, find
from pwcc.cache.manifest import Manifest
from pwcc.cache.removal import remove_entry
from pwcc.cache.store import Store
from pwcc.cache.strict import Json
from pwcc.cache.survey import survey
from pwcc.cache.tuning import Candidate, EntryTuning, PieceTuning, TunedChoice, parse_files

KERNEL = TunedChoice(
    "kernel",
    "triton_poi_fused_add_0",
    "XBLOCK=256 num_stages=1 num_warps=4",
    descent=True,
    candidates=(Candidate("XBLOCK=128 num_stages=1 num_warps=4", 3.25), Candidate("XBLOCK=1024", None)),
)
BAD_TIME: dict[str, Json] = {**KERNEL.to_json(), "candidates": [{"config": "", "us": True}]}
FILES = {
    "ab/cabc.best_config": '{"XBLOCK": 256, "num_warps": 4}',
    "cd/ccde.kernel_perf": "0.0123 inf",
    "cache/0a1b": '{"system": {}, "cache": {"mm": {"x": {"highest": {"extern_mm": 0.01}}}}}',
}
PIECE = PieceTuning((KERNEL,), runs=7, files=FILES)


def of(manifest: Manifest, **pieces: PieceTuning) -> EntryTuning:
    return EntryTuning(manifest.entry_key, pieces or {"p0 n=1": PIECE})


def test_written_and_read_back(store: Store, manifest: Manifest) -> None:
    assert tuning.read(store, manifest.entry_key) is None
    tuning.write(store, of(manifest))
    found = tuning.read(store, manifest.entry_key)
    assert found is not None
    assert found == of(manifest)
    assert found.files == FILES


def test_an_entry_is_the_same_bytes_whatever_was_measured(store: Store, manifest: Manifest) -> None:
    place = store.publish(manifest).path
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    tuning.write(store, of(manifest))
    tuning.write(store, of(manifest, p1=replace(PIECE, runs=9)))
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    read = tuning.read(store, manifest.entry_key)
    assert read is not None
    assert set(read.pieces) == {"p1"}


def test_inspect_shows_choices_without_the_compilers_files(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    (ref,) = find(store, manifest.entry_key)
    assert detail(store, ref)["tuning"] is None
    tuning.write(store, of(manifest))
    assert detail(store, ref)["tuning"] == {"p0 n=1": {"runs": 7, "choices": [KERNEL.to_json()]}}
    tuning.FILES.path_of(store, manifest.entry_key).write_text("{")
    shown = detail(store, ref)["tuning"]
    assert isinstance(shown, dict)
    assert "JSON" in str(shown["problem"])


def test_removed_with_its_entry_and_counted_with_it(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    (ref,) = find(store, manifest.entry_key)
    (before,) = survey(store).entries
    path = tuning.write(store, of(manifest))
    (after,) = survey(store).entries
    assert after.own_bytes - before.own_bytes == path.stat().st_size
    assert remove_entry(store, ref) is None
    assert not path.exists()
    tuning.FILES.forget(store, manifest.entry_key)  # once more is no error


def test_states_of_one_file_are_united(manifest: Manifest) -> None:
    one = {"cache/0a": '{"cache": {"mm": {"x": 1, "y": 2}}}', "ab/c.kernel_perf": "0.5"}
    other = {"cache/0a": '{"cache": {"mm": {"y": 3, "z": 4}}}', "ab/c.kernel_perf": "0.6"}
    both = of(manifest, p0=PieceTuning(files=one), p1=PieceTuning(files=other)).files
    assert json.loads(both["cache/0a"]) == {"cache": {"mm": {"x": 1, "y": 3, "z": 4}}}
    assert both["ab/c.kernel_perf"] == "0.6"


@pytest.mark.parametrize(
    "files",
    [
        {"../evil.best_config": "{}"},
        {"/etc/evil.best_config": "{}"},
        {"ab/../evil.best_config": "{}"},
        {"ab/cd/evil.best_config": "{}"},
        {"evil.best_config": "{}"},
        {"ab/code.py": "{}"},
        {"ab/code.so": "{}"},
        {"ab/x.best_config": "import os"},
        {"ab/x.kernel_perf": "-1"},
        {"ab/x.kernel_perf": 0.5},
        ["ab/x.best_config"],
    ],
)
def test_no_other_file_is_taken(files: object) -> None:
    with pytest.raises(CorruptEntry):
        parse_files(files, "pins")


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"entry_key": "0" * 32},
        {"pieces": {"p0": {"choices": [], "runs": -1, "files": {}}}},
        {"pieces": {"p0": {"choices": [], "runs": 0, "files": {}, "more": 1}}},
        {"pieces": []},
        {"pieces": {"p0": {"choices": [{**KERNEL.to_json(), "name": "\x1b[2J"}], "runs": 0, "files": {}}}},
        {"pieces": {"p0": {"choices": [BAD_TIME]}}},
    ],
)
def test_a_damaged_file_is_refused(store: Store, manifest: Manifest, change: dict[str, object]) -> None:
    path = tuning.write(store, of(manifest))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CorruptEntry):
        tuning.read(store, manifest.entry_key)


def test_a_key_is_no_path(store: Store) -> None:
    with pytest.raises(CorruptEntry, match="expected an entry key"):
        tuning.FILES.path_of(store, EntryKey("../../x"))


def test_a_fifo_is_not_waited_for(store: Store, manifest: Manifest) -> None:
    import os

    path = tuning.FILES.path_of(store, manifest.entry_key)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(CorruptEntry, match="plain file"):
        tuning.read(store, manifest.entry_key)
