"""``pwcc verify``: what it says, its exit codes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache.ids import EntryKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from tests.cache.conftest import put_blobs

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def whole(store: Store) -> Manifest:
    manifest = put_blobs(store)
    store.publish(manifest)
    return manifest


def test_an_intact_cache(run: Run, store: Store, whole: Manifest) -> None:
    done = run("verify", store.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("ok: 1 entry, 18 blobs, ")
    assert "GB/s" in done.stdout
    # What this host lacks is a note: it is no damage.
    assert "note: " in run("verify", store.root).stdout or "avx2" in Path("/proc/cpuinfo").read_text()


def test_the_cache_of_the_environment_and_an_entry_of_it(
    run: Run, store: Store, whole: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWCC_CACHE_DIR", str(store.root))
    assert run("verify").returncode == 0
    done = run("verify", whole.entry_key[:8], "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["entries"] == 1
    assert run("verify", whole.entry_key[:8], "--cache-dir", store.root).returncode == 0
    unknown = run("verify", "ffffffff")
    assert unknown.returncode == 2
    assert "no entry's key begins with 'ffffffff'" in unknown.stderr


@pytest.mark.parametrize("target", ["nonsense", "ab"])
def test_what_is_neither_a_directory_nor_a_key(run: Run, target: str) -> None:
    done = run("verify", target)
    assert done.returncode == 2
    assert "4 to 32 hex digits" in done.stderr


def test_not_a_cache(run: Run, tmp_path: Path) -> None:
    assert run("verify", tmp_path).returncode == 1


def test_damage_is_named_and_repaired(run: Run, store: Store, whole: Manifest) -> None:
    path = store.blob_path(whole.predicates)
    path.write_bytes(b"[ ]")
    done = run("verify", store.root)
    assert done.returncode == 64 + 2
    assert f"blob: {path}: expected SHA-256 {whole.predicates}, got " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 finding: ")
    assert path.exists()
    answer = json.loads(run("verify", store.root, "--json").stdout)
    (finding,) = answer["findings"]
    assert (answer["ok"], answer["exit_code"], finding["kind"]) == (False, 66, "blob")
    assert finding["entry_key"] == whole.entry_key

    repaired = run("verify", store.root, "--repair")
    assert repaired.returncode == 0
    assert "set aside in quarantine" in repaired.stdout
    assert not path.exists()
    assert list(store.entries()) == []
    again = run("verify", store.root)
    assert again.returncode == 0  # the other blobs are too young to be orphans
    assert "1 entry in quarantine" in again.stdout


def test_a_requirement_counts_only_when_asked(run: Run, store: Store) -> None:
    from dataclasses import replace

    from pwcc.cache.requirements import Requirement

    manifest = put_blobs(store)
    store.publish(replace(manifest, requirements=(Requirement("machine", "pdp11"),)))
    done = run("verify", store.root)
    assert done.returncode == 0
    assert "note: " in done.stdout
    assert "pdp11" in done.stdout
    assert run("verify", store.root, "--host").returncode == 64 + 16


def test_others_directories_are_said(run: Run, store: Store, whole: Manifest) -> None:
    store.root.chmod(0o777)
    done = run("verify", store.root)
    assert done.returncode == 64 + 8
    assert "everybody may write" in done.stdout
    listing = run("inspect", store.root)  # only warns
    assert listing.returncode == 0
    assert "--trust-dir" in listing.stderr
    refused = run("load", store.root, "--model", "llama-tiny", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["type"] == "UntrustedStore"


def test_a_repair_that_may_not_write(
    run: Run, store: Store, whole: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.blob_path(whole.predicates).write_bytes(b"x")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(os, "rename", refuse)
    done = run("verify", store.root, "--repair")
    assert done.returncode == 1
    assert "EROFS" in done.stderr
    assert EntryKey(whole.entry_key) in {ref.entry_key for ref in store.entries()}
