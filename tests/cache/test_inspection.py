from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import factor_digest
from pwcc.cache.inspection import detail, find, summaries
from pwcc.cache.manifest import Manifest
from pwcc.cache.sources import SourceRecord
from pwcc.cache.store import Store

PutEntry = Callable[..., Manifest]
Rekeyed = Callable[[Manifest, int], Manifest]


def test_one_line_per_entry(store: Store, manifest: Manifest) -> None:
    path = store.publish(replace(manifest, counts={"unsealed": 3})).path
    os.utime(path / "manifest.json", (1000.0, 1000.0))
    (found,) = summaries(store, now=1060.0)
    assert found.problem is None
    assert found.age_s == 60.0
    assert found.key == manifest.entry_key[:12]
    assert (found.model, found.args, found.device, found.sizes) == ("toy", {"layers": 2}, "cpu", (8,))
    assert (found.pieces, found.unique, found.variants, found.sealed) == (3, 3, 2, 0.5)
    assert found.bytes == sum(manifest.blobs.values())
    assert json.loads(strict.canonical(found.to_json()))["entry_key"] == manifest.entry_key


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"about":{}}', b"\x80\x04pickle", None])
def test_an_unreadable_entry_is_a_problem_of_its_own(
    store: Store, manifest: Manifest, rekeyed: Rekeyed, damage: bytes | None
) -> None:
    store.publish(manifest)
    broken = store.publish(rekeyed(manifest, 1)).path / "manifest.json"
    if damage is None:
        broken.unlink()
    else:
        broken.write_bytes(damage)
    found = summaries(store, now=0.0)
    assert sorted(item.problem is None for item in found) == [False, True]


def test_truncation_and_a_moved_entry_show_in_the_listing(store: Store, manifest: Manifest) -> None:
    path = store.publish(manifest).path
    moved = path.with_name("0" * 32)
    path.rename(moved)
    (found,) = summaries(store, now=0.0)
    assert found.problem is not None
    moved.rename(path)
    data = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(data[:-1])
    (found,) = summaries(store, now=0.0)
    assert "digest" in (found.problem or "")


def test_detail(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    (ref,) = store.entries()
    found = detail(store, ref)
    text = strict.canonical(found)
    assert found == json.loads(text)
    assert str(store.root).encode() not in text
    value = json.loads(text)
    assert value["factors"]["groups"]["compiler"] == {"torch": "2.13.0"}
    assert set(value["factors"]["digests"]) == {"environment", "configuration", "sources", "compiler"}
    (program,) = value["programs"]
    assert program["calling"] == {"inputs": ["x"]}
    piece = program["unique"][1]
    assert piece["ops"] == ["aten.mm.default", "aten.add.Tensor"]
    assert piece["positions"] == 1
    assert [record["kernels"][0]["name"] for record in piece["records"]] == ["k1", "k4"]
    assert piece["records"][1]["variant"] == {"kind": "static", "size": 8, "tokens": [8, 8]}
    assert value["numerics"] == {"max_error": 0.0}
    assert value["requirements"][1] == {"kind": "cpu_flags", "value": ["avx2", "fma"]}
    assert value["missing_blobs"] == []


def test_detail_shows_what_it_can(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    (ref,) = store.entries()
    store.blob_path(manifest.factors).write_bytes(b"{}")
    store.blob_path(manifest.programs[0].variants[0].pieces[0]).unlink()
    found = json.loads(strict.canonical(detail(store, ref)))
    assert "expected SHA-256" in found["factors"]["problem"]
    assert "found none" in found["programs"][0]["unique"][0]["records"][0]["record"]["problem"]
    assert len(found["missing_blobs"]) == 2
    ref.manifest.write_bytes(b"x")
    with pytest.raises(CorruptEntry):
        detail(store, ref)


def test_find(store: Store, manifest: Manifest) -> None:
    store.publish(manifest)
    (ref,) = store.entries()
    assert find(store, manifest.entry_key[:4].upper()) == [ref]
    assert find(store, manifest.entry_key) == [ref]
    assert find(store, "") == find(store, manifest.entry_key[:3]) == []
    assert find(store, "zzzz") == []


def big(manifest: Manifest) -> Manifest:
    sources = tuple(SourceRecord(f"m{i}", f"m{i}.py", factor_digest(b"%d" % i)) for i in range(100))
    return replace(manifest, sources=sources)


def test_a_thousand_entries(store: Store, manifest: Manifest, rekeyed: Rekeyed) -> None:
    manifest = big(manifest)
    for index in range(1000):
        entry = rekeyed(manifest, index)
        ref = store.entry_ref(entry.lookup_key, entry.entry_key)
        ref.path.mkdir(parents=True)
        ref.manifest.write_bytes(entry.serialise())  # not publish(): 3,000 flushes to disk
    found = summaries(store, now=0.0)
    best = 1.0
    for _ in range(5):
        start = perf_counter()
        assert len(summaries(store, now=0.0)) == 1000
        best = min(best, perf_counter() - start)
    assert all(item.problem is None for item in found)
    assert best < 0.150, f"{best:.3f} s"


def test_nothing_heavy_is_imported(store: Store) -> None:
    code = (
        "import sys, pwcc.cache.inspection, pwcc.cache.sources, pwcc.cache.host\n"
        "heavy = {'torch', 'triton', 'sympy', 'rich', 'typer', 'filelock', 'platformdirs', 'subprocess'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


def test_nothing_in_the_store_is_executed(store: Store, manifest: Manifest, tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    (store.root / "v1" / "sitecustomize.py").write_text(f"open({str(flag)!r}, 'w')")
    store.publish(manifest)
    (ref,) = store.entries()
    detail(store, ref)
    assert not flag.exists()
