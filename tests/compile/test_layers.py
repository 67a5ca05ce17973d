"""Layers, transfer and last use with a real entry, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pwcc.cache import last_use
from pwcc.cache.store import Store
from tests.conftest import Warm

pytestmark = pytest.mark.slow


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time: nothing in a lower layer may change."""
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in sorted(root.rglob("*"))
    }


def test_an_image_below_a_writable_cache(llama: Warm, tmp_path: Path) -> None:
    machine, upper = llama.machine, tmp_path / "upper"
    before = tree(llama.root)
    # A fresh container loads from its image and makes nothing.
    loaded = machine.pwcc_json("load", upper, *llama.model, "--layer", llama.root)
    assert loaded["entry"] == llama.report["entry_key"]
    assert not upper.exists()
    # The same compile is a hit, of the image, also by the variable.
    same: tuple[str | Path, ...] = ("compile", *llama.model, *llama.options, "--cache-dir", upper)
    again = machine.pwcc_json(*same, PWCC_LAYERS=str(llama.root), PWCC_TRACK_USE="1")
    assert (again["hit"], again["entry_key"]) == (True, llama.report["entry_key"])
    assert list(last_use.stamps(Store.open(upper))) == [llama.report["entry_key"]]
    assert list(Store.open(upper).entries()) == []
    # A compile of fewer sizes takes every piece of the image, and is complete without it.
    fewer = machine.pwcc_json(
        "compile", *llama.model, "--sizes", "1", "--cache-dir", upper, "--layer", llama.root
    )
    counters = fewer["counters"]
    assert (fewer["hit"], counters["compiles"], counters["piece_cache_hits"]) == (False, 0, 6)
    alone = Store.open(upper)
    (ref,) = alone.entries()
    assert ref.entry_key == fewer["entry_key"]
    for digest in alone.read_manifest(ref).blobs:
        alone.read_blob(digest)
    assert tree(llama.root) == before
    # It travels alone, and a load may say that it was used.
    archive, to = tmp_path / "x.tar", tmp_path / "to"
    machine.pwcc("export", "--cache-dir", upper, fewer["entry_key"], "-o", archive)
    machine.pwcc("import", archive, "--cache-dir", to)
    loaded = machine.pwcc_json("load", to, *llama.model, PWCC_TRACK_USE="1")
    assert loaded["entry"] == fewer["entry_key"]
    assert loaded["receipt"]["files_written"] == 0
    assert list(last_use.stamps(Store.open(to))) == [fewer["entry_key"]]


def test_a_load_stamps_nothing_unless_asked(llama: Warm) -> None:
    assert last_use.stamps(Store.open(llama.root)) == {}
