from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache import pins
from pwcc.cache.errors import StoreError, UsageError
from pwcc.cache.ids import EntryKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import EntryRef, Store


@pytest.fixture
def ref(store: Store, manifest: Manifest) -> EntryRef:
    store.publish(manifest)
    return next(store.entries())


def test_a_pin_is_kept_with_its_note_until_it_is_removed(store: Store, ref: EntryRef) -> None:
    assert pins.pinned(store) == frozenset()
    pins.pin(store, ref, note="release 1.2")
    assert pins.pinned(store) == {ref.entry_key}
    assert pins.note_of(store, ref.entry_key) == "release 1.2"
    pins.pin(store, ref)
    assert pins.note_of(store, ref.entry_key) == ""
    assert pins.unpin(store, ref.entry_key)
    assert not pins.unpin(store, ref.entry_key)
    assert pins.pinned(store) == frozenset()


def test_a_pin_is_no_part_of_the_entry(store: Store, ref: EntryRef) -> None:
    before = {path: path.read_bytes() for path in ref.path.rglob("*")}
    pins.pin(store, ref)
    assert {path: path.read_bytes() for path in ref.path.rglob("*")} == before


@pytest.mark.parametrize("note", ["x" * 501, "two\nlines", "\x1b[31mred"])
def test_a_note_that_a_terminal_must_not_get_is_refused(store: Store, ref: EntryRef, note: str) -> None:
    with pytest.raises(UsageError, match="printable characters"):
        pins.pin(store, ref, note=note)
    assert pins.pinned(store) == frozenset()


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"schema":1,"note":"\\u001b[31m"}', b'{"schema":1}', b"x" * 100_000]
)
def test_a_damaged_pin_still_pins(store: Store, ref: EntryRef, text: bytes) -> None:
    pins.pin(store, ref)
    (pins.folder(store) / f"{ref.entry_key}.json").write_bytes(text)
    assert pins.pinned(store) == {ref.entry_key}
    assert pins.note_of(store, ref.entry_key) == ""


def test_other_names_are_no_pins(store: Store, ref: EntryRef) -> None:
    pins.pin(store, ref)
    for name in ("README", "x.json", f"{'0' * 32}.json.tmp"):
        (pins.folder(store) / name).write_text("{}")
    assert pins.pinned(store) == {ref.entry_key}


def test_a_folder_that_cannot_be_listed_is_an_error(
    store: Store, ref: EntryRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a collection would take what is pinned."""

    def refuse(path: Path) -> list[str]:
        raise OSError(errno.EACCES, "Permission denied", str(path))

    failing: Callable[[Path], list[str]] = refuse
    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(StoreError, match="listing pins failed"):
        pins.pinned(store)


def test_a_key_that_is_none_is_refused(store: Store) -> None:
    with pytest.raises(StoreError):
        pins.unpin(store, EntryKey("../../x"))
