"""Under PWCC_RECACHE an entry with other contents gives way; the same one, byte for byte, stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache.layers import create_layered
from pwcc.cache.manifest import Manifest
from pwcc.cache.renewal import set_aside_other
from pwcc.cache.store import Store

PutEntry = Callable[..., Manifest]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


def test_another_entry_of_the_same_keys_is_set_aside_and_the_new_one_published(
    store: Store, put_entry: PutEntry
) -> None:
    old = put_entry(store, name="toy")
    store.publish(old)
    new = replace(old, pwcc_version="9")
    assert store.publish(new).path.is_dir()
    (ref,) = store.entries()
    assert store.read_manifest(ref) == old, "an intact entry is never overwritten"

    place = set_aside_other(store, new)
    assert place is not None
    assert list(store.entries()) == []
    store.publish(new)
    (ref,) = store.entries()
    assert store.read_manifest(ref) == new
    assert [record.reason for record in store.quarantined()] == ["replaced under PWCC_RECACHE"]


def test_the_same_entry_stays_and_no_entry_is_nothing_to_do(store: Store, put_entry: PutEntry) -> None:
    manifest = put_entry(store, name="toy")
    assert set_aside_other(store, manifest) is None
    store.publish(manifest)
    assert set_aside_other(store, manifest) is None
    assert len(list(store.entries())) == 1
    assert store.quarantined() == []


def test_an_unreadable_entry_gives_way(store: Store, put_entry: PutEntry) -> None:
    manifest = put_entry(store, name="toy")
    path = store.publish(manifest).path
    (path / "manifest.json").write_bytes(b"{")
    assert set_aside_other(store, manifest) is not None


def test_an_entry_of_a_lower_layer_is_left_alone(tmp_path: Path, put_entry: PutEntry) -> None:
    image = Store.create(tmp_path / "image")
    old = put_entry(image, name="toy")
    image.publish(old)
    store = create_layered(tmp_path / "upper", [image.root])
    assert set_aside_other(store, replace(old, pwcc_version="9")) is None
    assert len(list(image.entries())) == 1
