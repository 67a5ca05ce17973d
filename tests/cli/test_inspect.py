from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache.ids import EntryKey, factor_digest
from pwcc.cache.manifest import Manifest, ModelSummary
from pwcc.cache.store import Store

Run = Callable[..., subprocess.CompletedProcess[str]]
Publish = Callable[..., Path]


def test_a_listing(run: Run, store: Store, publish: Publish, toy: Manifest) -> None:
    publish("0a")
    model = ModelSummary("hf:SomeVeryLongArchitectureForCausalLM", {}, 1, 4, "bfloat16", toy.model.tree_digest)
    publish("0b", model=model, sizes=(1, 2, 3, 4, 8, 16), profile="tuned")
    done = run("inspect", store.root)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout == (
        "ENTRY         MODEL                SIZES     PIECES  DEVICE   BYTES  AGE  SEALED\n"
        "0a0000000000  toy                  8            2/3  cpu     2.5 kB  3 d    100%\n"
        "0b0000000000  hf:SomeVeryL…tuned]  1-4,8,16     2/3  cpu     2.5 kB  3 d    100%\n"
        "2 entries\n"
    )
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_an_empty_cache(run: Run, store: Store) -> None:
    done = run("inspect", store.root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 entries\n", "")


def test_the_listing_as_json(run: Run, store: Store, publish: Publish) -> None:
    publish("0a")
    done = run("inspect", store.root, "--json")
    (entry,) = json.loads(done.stdout)["entries"]
    assert (entry["entry_key"], entry["sizes"], entry["problem"]) == ("0a".ljust(32, "0"), [8], None)
    assert done.stderr == ""


def test_one_entry(run: Run, store: Store, publish: Publish) -> None:
    publish("0a")
    done = run("inspect", store.root, "0A00")
    assert done.returncode == 0
    assert done.stdout.split("\n\n", 1)[1] == (
        "signatures\n"
        "  none\n"
        "\n"
        "program 0: 1 to 64 tokens, 3 pieces, 2 splits\n"
        "  variants: dynamic 1..64, n=8\n"
        "  PIECE    DIGEST        USES  OPS  KERNELS  PASSES (MATCHES)\n"
        f"  piece_0  {factor_digest(b'first')[:12]}     2    3        2  noop 4\n"
        f"  piece_1  {factor_digest(b'second')[:12]}     1    1        2  noop 4\n"
        "\n"
        "requirements: 2 (os, cpu_flags)\n"
        "predicates: 0 rules\n"
        "factors: 3 (environment 1, compiler 2)\n"
        "sources: 1 traced file\n"
        "observed: none\n"
        "numerics: 1 check against float32 eager, largest relative error 1.25e-07\n"
        "tuning: none, or the results did not travel with the entry\n"
        "\n"
        "--full lists all of it, --json as data; pwcc report writes a page about it\n"
    )


def test_one_entry_in_full(run: Run, store: Store, publish: Publish) -> None:
    publish("0a")
    done = run("inspect", store.root, "0A00", "--full")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for line in (
        "entry           0a000000000000000000000000000000",
        "model           builtin:toy layers=2",
        "  cpu_flags: avx2 fma",
        "  variants: dynamic 1..64, n=8",
        "    aten.mm.default x2, aten.add.Tensor",
        "    n=8: kernels cpp_fused_add_0 (cpp); calls mm; passes noop 2",
        "  OMP_NUM_THREADS: -",
        "  gcc: 13 2",
        "        0        0      0     8  1e-07  1.25e-07  1.25e-07    2.5e-07",
    ):
        assert line in lines
    assert any(line.startswith("  toy.model  toy/model.py  ") for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert str(store.root) not in done.stdout


def test_one_entry_as_json(run: Run, store: Store, publish: Publish) -> None:
    publish("0a")
    found = json.loads(run("inspect", store.root, "0a00", "--json").stdout)
    assert found["counts"] == {"pieces": 3}
    assert found["missing_blobs"] == []


def test_a_missing_blob_is_said(run: Run, store: Store, publish: Publish, toy: Manifest) -> None:
    publish("0a")
    store.blob_path(toy.factors).unlink()
    done = run("inspect", store.root, "0a00")
    assert done.returncode == 0
    assert "MISSING BLOBS (this entry cannot be loaded)" in done.stdout
    assert "factors: unreadable: expected a blob, found none" in done.stdout
    done = run("inspect", store.root, "0a00", "--full")
    assert "  unreadable: expected a blob, found none" in done.stdout


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("0a", "expected at least 4 hex digits of an entry's key, got '0a'"),
        ("../../x", "expected the first hex digits of an entry's key, got '../../x'"),
        ("beef", "no entry's key begins with 'beef'"),
        ("0a00", "2 entries' keys begin with '0a00': 0a0000000000, 0a0011000000"),
    ],
)
def test_a_prefix_that_names_no_single_entry(
    run: Run, store: Store, publish: Publish, prefix: str, message: str
) -> None:
    publish("0a")
    publish("0a0011")
    done = run("inspect", store.root, prefix, "--json")
    assert done.returncode == 2
    assert message in done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["exit_code"], error["message"]) == ("UsageError", 2, message)


def test_not_a_cache_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, what in (
        (tmp_path, "one without its"),
        (tmp_path / "no", "no such"),
        (tmp_path / "file", "a file"),
    ):
        done = run("inspect", path)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith(f"error: expected a pwcc cache directory, got {what}")
        assert f"\n  at: {path}\n" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_truncated_manifest(run: Run, store: Store, publish: Publish) -> None:
    publish("0b")
    manifest = publish("0a") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    done = run("inspect", store.root)
    assert done.returncode == 0
    assert "0a0000000000  unreadable: expected" in done.stdout
    assert done.stdout.endswith("2 entries, 1 unreadable\n")
    done = run("inspect", store.root, "0a00")
    assert done.returncode == 1
    assert "the file was truncated or edited; copy the entry again" in done.stderr


def test_a_thousand_entries_in_300_ms(store: Store, toy: Manifest) -> None:
    for index in range(1000):
        entry = replace(toy, entry_key=EntryKey(f"{index:032x}"))
        ref = store.entry_ref(entry.lookup_key, entry.entry_key)
        ref.path.mkdir(parents=True)
        ref.manifest.write_bytes(entry.serialise())  # not publish(): 3,000 flushes to disk
    # CPU time: the program has one thread, and other tests may keep the cores busy.
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "pwcc", "inspect", str(store.root)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert done.stdout.endswith("1,000 entries\n")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best <= 0.300, f"{best:.3f} s"
