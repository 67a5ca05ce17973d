from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import about, last_use, pins, strict
from pwcc.cache.errors import CorruptEntry, NewerFormat
from pwcc.cache.ids import BlobDigest, PieceKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.survey import PINNED, READ, blobs_of, survey

PutEntry = Callable[..., Manifest]


@pytest.fixture
def ref(store: Store, manifest: Manifest) -> EntryRef:
    store.publish(manifest)
    return next(store.entries())


def test_the_blob_list_is_that_of_a_full_parse(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    assert blobs_of(store.read_manifest_bytes(ref), ref) == manifest.blobs


def test_a_manifest_in_another_order_is_parsed_in_full(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    head, body = about.split(store.read_manifest_bytes(ref), where="x")
    fields = strict.loads(body, where="x")
    assert isinstance(fields, dict)
    blobs = fields.pop("blobs")
    rest = strict.canonical(fields)[:-1] + b',"blobs":' + strict.canonical(blobs) + b"}"
    assert blobs_of(about.seal(head, rest), ref) == manifest.blobs


@pytest.mark.parametrize("blobs", ['{"x":1}', f'{{"{"a" * 64}":-1}}'])
def test_a_blob_list_of_another_form_is_refused(store: Store, ref: EntryRef, blobs: str) -> None:
    head, _ = about.split(store.read_manifest_bytes(ref), where="x")
    with pytest.raises(CorruptEntry):
        blobs_of(about.seal(head, b'{"blobs":' + blobs.encode() + b',"schema":1}'), ref)


def test_a_changed_byte_and_a_newer_schema_are_told_apart(store: Store, ref: EntryRef) -> None:
    data = store.read_manifest_bytes(ref)
    with pytest.raises(CorruptEntry):
        blobs_of(data[:-1] + b" ", ref)
    head, body = about.split(data, where="x")
    with pytest.raises(NewerFormat):
        blobs_of(about.seal(replace(head, schema=2), body), ref)


def test_what_a_survey_tells_of_an_entry(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    os.utime(ref.manifest, (1000, 1000))
    (store.plans / ref.entry_key).mkdir()
    (store.plans / ref.entry_key / "plan.json").write_bytes(b"12345")
    (ref.path / "signatures").mkdir()
    (ref.path / "signatures" / "x").write_bytes(b"123")
    (held,) = survey(store).entries
    assert (held.ref, held.used_s, held.blobs, held.protected) == (ref, 1000, manifest.blobs, None)
    assert held.own_bytes == ref.manifest.stat().st_size + 5 + 3
    last_use.stamp(store, ref.entry_key)
    pins.pin(store, ref)
    (held,) = survey(store).entries
    assert held.used_s > time.time() - 60
    assert held.protected == PINNED


def test_readers_are_looked_for_only_if_asked(store: Store, ref: EntryRef) -> None:
    hold = store.hold(ref)
    assert [held.protected for held in survey(store).entries] == [READ]
    assert [held.protected for held in survey(store, readers=False).entries] == [None]
    assert hold is not None


def test_blobs_and_pieces_with_their_sizes(store: Store, ref: EntryRef, manifest: Manifest) -> None:
    store.put_piece(PieceKey("1" * 32), strict.canonical({"blobs": {"b" * 64: 7}}))
    found = survey(store)
    assert {digest: file.bytes for digest, file in found.blobs.items()} == manifest.blobs
    assert [piece.blobs for piece in found.pieces] == [{BlobDigest("b" * 64): 7}]
    files = [path for name in ("entries", "blobs", "pieces") for path in (store.root / "v1" / name).rglob("*")]
    assert found.bytes == sum(path.stat().st_size for path in files if path.is_file())


def test_links_in_the_folders_of_blobs_and_pieces_are_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    (store.root / "v1/pieces" / f"{'1' * 32}.json").symlink_to(tmp_path / "x")
    folder = store.root / "v1/blobs/sha256/aa"
    folder.mkdir()
    (folder / ("a" * 64)).symlink_to(tmp_path / "x")
    found = survey(store)
    assert (found.pieces, dict(found.blobs)) == ((), {})


def test_an_entry_that_is_removed_meanwhile_is_not_there(
    store: Store, ref: EntryRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = list(store.entries())
    shutil.rmtree(ref.path)
    monkeypatch.setattr(store, "entries", lambda: iter(refs))
    found = survey(store)
    assert (found.entries, found.unreadable) == ((), ())


def test_an_entry_without_a_manifest_is_as_old_as_its_folder(store: Store, ref: EntryRef) -> None:
    ref.manifest.unlink()
    found = survey(store)
    assert [reason for _, reason in found.unreadable] == ["expected a manifest, found none"]
    assert found.complete
    assert found.entries[0].used_s > time.time() - 60
