"""Costs lie beside an entry: they may be missing, and are read as strictly as all else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pwcc.cache import costs
from pwcc.cache.costs import Costs, PieceCost
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import EntryKey
from pwcc.cache.store import Store

KEY = EntryKey("0a" * 16)
SOME = Costs({"trace": 1.5, "total": 4.0}, {"p0 n=1": PieceCost(2.0, 0.25)}, 2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


def test_they_are_read_as_written(store: Store) -> None:
    assert costs.read(store, KEY) is None
    path = costs.write(store, KEY, SOME)
    assert costs.read(store, KEY) == SOME
    assert path.relative_to(store.root).as_posix() == f"v1/costs/{KEY}.json"
    costs.write(store, KEY, Costs({}, {}, 1))
    assert costs.read(store, KEY) == Costs({}, {}, 1)
    costs.FILES.forget(store, KEY)
    costs.FILES.forget(store, KEY)
    assert costs.read(store, KEY) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stages", {"trace": "1"}),
        ("stages", {"trace": -1}),
        ("stages", {"trace": True}),
        ("pieces", {"p0": 1}),
        ("jobs", 0),
        ("entry_key", "0b" * 16),
        ("schema", 2),
        ("more", 1),
    ],
)
def test_anything_else_is_refused(store: Store, name: str, value: object) -> None:
    path = costs.write(store, KEY, SOME)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(CorruptEntry):
        costs.read(store, KEY)


def test_a_key_is_no_path(store: Store) -> None:
    with pytest.raises(CorruptEntry, match="expected an entry key"):
        costs.read(store, EntryKey("../../etc/passwd"))
