"""Plans in a store: written whole, read strictly, of the entry that they are asked for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache.errors import CorruptEntry, StoreError
from pwcc.cache.ids import EntryKey
from pwcc.cache.store import Store
from pwcc.capture.plan_store import load_plan, plan_path, save_plan
from tests.capture.test_plan import PLAN

OTHER = EntryKey("1" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


def test_save_load_and_replace(store: Store) -> None:
    assert load_plan(store, PLAN.entry_key) is None
    path = save_plan(store, PLAN)
    assert path == store.root / "v1" / "plans" / PLAN.entry_key / "default.json"
    assert load_plan(store, PLAN.entry_key) == PLAN
    later = replace(PLAN, measured=())
    save_plan(store, later)
    assert load_plan(store, PLAN.entry_key) == later
    assert [file.name for file in path.parent.iterdir()] == ["default.json"]
    assert load_plan(store, PLAN.entry_key, "other") is None


def test_a_plan_of_another_entry_is_refused(store: Store) -> None:
    path = plan_path(store, OTHER)
    path.parent.mkdir(parents=True)
    path.write_bytes(PLAN.to_bytes())
    with pytest.raises(CorruptEntry, match="expected a plan for entry"):
        load_plan(store, OTHER)


def test_damage_is_named_with_its_file(store: Store) -> None:
    path = save_plan(store, PLAN)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptEntry) as caught:
        load_plan(store, PLAN.entry_key)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b"])
def test_names_stay_inside(store: Store, name: str) -> None:
    with pytest.raises(CorruptEntry):
        save_plan(store, PLAN, name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written(store: Store) -> None:
    store.plans.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="saving a capture plan"):
            save_plan(store, PLAN)
    finally:
        store.plans.chmod(0o700)


def test_a_plans_folder_that_is_a_file(store: Store) -> None:
    folder = plan_path(store, PLAN.entry_key).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")
    with pytest.raises(StoreError, match="saving a capture plan"):
        save_plan(store, PLAN)
    assert load_plan(store, PLAN.entry_key) is None
