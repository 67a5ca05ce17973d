"""Two entries compared: names and values, in one cache or in two, with nothing executed and no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import strict
from pwcc.cache.details import Details, line_digests
from pwcc.cache.entries import EntryRef
from pwcc.cache.entry_diff import EntryChange, compare_entries
from pwcc.cache.errors import StoreError
from pwcc.cache.factors import ABSENT, FactorTree, entry_key, lookup_key
from pwcc.cache.manifest import Manifest
from pwcc.cache.requirements import Requirement
from pwcc.cache.store import Store
from tests.cache.conftest import put_blobs


def publish(
    store: Store, tree: FactorTree, text: str = "a\n", rows: object = (), *needs: Requirement
) -> EntryRef:
    manifest = put_blobs(store)
    details = Details.of({"tensors": rows}, [["x", ""]], {"m:m.py": line_digests(text.encode())})
    blobs = dict(manifest.blobs)
    digests = []
    for data in (strict.canonical(tree.to_json()), details.to_bytes()):
        digests.append(store.put_blob(data))
        blobs[digests[-1]] = len(data)
    entry: Manifest = replace(
        manifest,
        factors=digests[0],
        details=digests[1],
        blobs=blobs,
        entry_key=entry_key(tree),
        lookup_key=lookup_key(tree),
        requirements=needs,
    )
    store.publish(entry)
    return store.entry_ref(entry.lookup_key, entry.entry_key)


def tree(**configuration: object) -> FactorTree:
    return FactorTree.of(
        configuration=configuration, sources={"m:m.py": "d" * 32}, environment={"OMP_NUM_THREADS": "1"}
    )


def test_every_difference_is_named(store: Store) -> None:
    row = ["w", "parameter", "torch.float32", [2], "", ""]
    a = publish(store, tree(sizes=[1, 2]), "a\nb\n", [row], Requirement("glibc", "2.17"))
    other = FactorTree.of(configuration={"sizes": [1, 4]}, sources={"m:m.py": "e" * 32})
    wider = ["w", "parameter", "torch.float32", [4], "", ""]
    b = publish(store, other, "a\nc\nd\n", [wider], Requirement("glibc", "2.31"), Requirement("os", "linux"))
    assert compare_entries((store, a), (store, b)) == [
        EntryChange("environment/OMP_NUM_THREADS", "1", ABSENT),
        EntryChange("configuration/sizes[1]", 2, 4),
        EntryChange("sources/m:m.py", "d" * 32, "e" * 32, "+2 -1 lines"),
        EntryChange("model/tensor w", "parameter torch.float32 [2]", "parameter torch.float32 [4]"),
        EntryChange("requirement/glibc", "2.17", "2.31"),
        EntryChange("requirement/os", ABSENT, "linux"),
    ]


def test_an_entry_equals_itself_and_its_copy(store: Store, tmp_path: Path) -> None:
    a = publish(store, tree(sizes=[1]))
    assert compare_entries((store, a), (store, a)) == []
    other = Store.create(tmp_path / "other")
    assert compare_entries((store, a), (other, publish(other, tree(sizes=[1])))) == []


def test_json_has_no_field_for_what_is_absent() -> None:
    assert EntryChange("a/b", ABSENT, None).to_json() == {"path": "a/b", "second": None}
    assert EntryChange("a/b", 1, 2, "note").to_json() == {
        "path": "a/b",
        "first": 1,
        "second": 2,
        "note": "note",
    }


def test_damage_is_an_error(store: Store) -> None:
    a, b = publish(store, tree(sizes=[1])), publish(store, tree(sizes=[2]))
    store.blob_path(store.read_manifest(b).factors).write_bytes(b"{}")
    with pytest.raises(StoreError):
        compare_entries((store, a), (store, b))


def test_a_lost_details_blob_only_costs_the_details(store: Store) -> None:
    a, b = publish(store, tree(sizes=[1])), publish(store, tree(sizes=[2]), "other\n")
    details = store.read_manifest(b).details
    assert details is not None
    store.blob_path(details).unlink()
    assert [change.path for change in compare_entries((store, a), (store, b))] == ["configuration/sizes[0]"]


def test_diff_imports_no_torch(store: Store) -> None:
    a, b = publish(store, tree(sizes=[1])), publish(store, tree(sizes=[2]))
    code = (
        "import sys\nfrom pwcc.cli import main\n"
        f"code = main(['diff', {a.entry_key!r}, {b.entry_key!r}, '--cache-dir', {str(store.root)!r}])\n"
        "assert code == 0 and 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["configuration/sizes[0]", "  - 1", "  + 2", "1 difference"]
