"""``pwcc diff`` on entries that never were compiled: only their records are read."""

from __future__ import annotations

import json
from dataclasses import replace

from pwcc.cache import strict
from pwcc.cache.factors import FactorTree
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from tests.cli.conftest import Publish, Run


def with_factors(store: Store, toy: Manifest, tree: FactorTree) -> dict[str, object]:
    data = strict.canonical(tree.to_json())
    digest = store.put_blob(data)
    return {"factors": digest, "blobs": {**toy.blobs, digest: len(data)}}


def test_values_of_both_sides(run: Run, store: Store, toy: Manifest, publish: Publish) -> None:
    one = FactorTree.of(configuration={"sizes": [1, 2]}, environment={"MKL_CBWR": "AVX2"})
    two = FactorTree.of(configuration={"sizes": [1, 4]})
    publish("aaaa", **with_factors(store, toy, one))
    publish("bbbb", **with_factors(store, toy, two))
    done = run("diff", "aaaa", "bbbb", "--cache-dir", store.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "environment/MKL_CBWR",
        "  - AVX2",
        "  + absent",
        "configuration/sizes[1]",
        "  - 2",
        "  + 4",
        "2 differences",
    ]
    found = json.loads(run("diff", "aaaa", "bbbb", "--cache-dir", store.root, "--json").stdout)
    assert (found["first"][:4], found["second"][:4]) == ("aaaa", "bbbb")
    assert found["changes"][1] == {"path": "configuration/sizes[1]", "first": 2, "second": 4}


def test_two_caches_and_no_difference(run: Run, store: Store, publish: Publish) -> None:
    publish("aaaa")
    done = run("diff", "aaaa", "aaaa", "--cache-dir", store.root, "--other-dir", store.root)
    assert done.stdout == "no factor differs\n"


def test_what_a_hostile_factor_prints(run: Run, store: Store, toy: Manifest, publish: Publish) -> None:
    publish("aaaa", **with_factors(store, toy, FactorTree.of(configuration={"a\x1b[2J": "\x1b[31m"})))
    publish("bbbb", **with_factors(store, toy, FactorTree.of()))
    done = run("diff", "aaaa", "bbbb", "--cache-dir", store.root)
    assert "\x1b" not in done.stdout
    assert "\\x1b[31m" in done.stdout


def test_wrong_names_are_usage_errors(run: Run, store: Store, publish: Publish) -> None:
    publish("aaaa")
    assert run("diff", "aaaa", "cccc", "--cache-dir", store.root).returncode == 2
    assert run("diff", "aaaa", "--cache-dir", store.root).returncode == 2
    done = run("diff", "aaaa", "aaaa", "--cache-dir", store.root / "absent")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_damaged_factors_blob_is_an_error_that_names_it(
    run: Run, store: Store, toy: Manifest, publish: Publish
) -> None:
    publish("aaaa")
    publish("bbbb", **with_factors(store, toy, FactorTree.of()))
    store.blob_path(replace(toy).factors).write_bytes(b"{}")
    done = run("diff", "aaaa", "bbbb", "--cache-dir", store.root)
    assert done.returncode == 1
    assert "SHA-256" in done.stderr
