"""Fixtures of the command line's tests: a real store with small entries, and the program run in-process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import strict
from pwcc.cache.factors import FactorTree
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey, factor_digest
from pwcc.cache.manifest import DeviceSummary, Manifest, ModelSummary, Program, UniquePiece, Variant
from pwcc.cache.requirements import Requirement
from pwcc.cache.sources import SourceRecord
from pwcc.cache.store import Store
from pwcc.cli import main

DAY_OLD = 86400.0 * 3 + 60


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("PWCC_CACHE_DIR", raising=False)

    def call(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        code = main([str(item) for item in argv])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(argv, code, out, err)

    return call


def toy_manifest(store: Store) -> Manifest:
    """Put every blob of one small entry and return its manifest, not published."""
    blobs: dict[BlobDigest, int] = {}

    def put(data: bytes) -> BlobDigest:
        digest = store.put_blob(data)
        blobs[digest] = len(data)
        return digest

    kernel = put(b"\x7fELF" + bytes(2000))
    piece: dict[str, object] = {"schema": 1, "externs": ["mm"], "fallbacks": []}
    piece["passes"] = [{"name": "noop", "matches": 2}]
    piece["kernels"] = [{"name": "cpp_fused_add_0", "kind": "cpp", "blob": kernel}]
    record = put(strict.canonical(piece))
    ops = ("aten.mm.default", "aten.mm.default", "aten.add.Tensor")
    program = Program(
        min_tokens=1,
        max_tokens=64,
        stitch=put(b"def run(pieces, x):\n    return pieces[0](x)\n"),
        calling=put(strict.canonical({"inputs": ["x"]})),
        shape_predicates=(),
        splits=2,
        pieces=(0, 1, 0),
        unique=(
            UniquePiece(factor_digest(b"first"), "piece_0", ops),
            UniquePiece(factor_digest(b"second"), "piece_1", ("aten.add.Tensor",)),
        ),
        variants=(
            Variant("dynamic", None, 1, 64, (record, record)),
            Variant("static", 8, 8, 8, (record, record)),
        ),
    )
    tree = FactorTree.of(environment={"OMP_NUM_THREADS": None}, compiler={"torch": "2.13.0", "gcc": [13, 2]})
    numerics = {
        "programs": [
            {
                "variants": [
                    [[{"size": 8, "eager": 1e-7, "compiled": 1.25e-7, "sealed": 1.25e-7, "tolerance": 2.5e-7}]]
                ]
            }
        ]
    }
    return Manifest(
        pwcc_version="0.1.0",
        entry_key=EntryKey("0" * 32),
        lookup_key=LookupKey("f" * 32),
        model=ModelSummary("builtin:toy", {"layers": 2}, 1000, 4000, "float32", factor_digest(b"toy")),
        device=DeviceSummary("cpu"),
        torch="2.13.0+cpu",
        min_tokens=1,
        max_tokens=64,
        sizes=(8,),
        profile=None,
        tuned=False,
        build_observed=True,
        requirements=(Requirement("os", "linux"), Requirement("cpu_flags", ("avx2", "fma"))),
        sources=(SourceRecord("toy.model", "toy/model.py", factor_digest(b"source")),),
        predicates=put(strict.canonical({"schema": 1, "predicates": []})),
        factors=put(strict.canonical(tree.to_json())),
        numerics=put(strict.canonical(numerics)),
        programs=(program,),
        counts={"pieces": 3},
        blobs=blobs,
    )


Publish = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


@pytest.fixture
def toy(store: Store) -> Manifest:
    return toy_manifest(store)


@pytest.fixture
def publish(store: Store, toy: Manifest) -> Publish:
    """Publish an entry under a key that begins as asked; ``changes`` are manifest fields."""

    def put(prefix: str, **changes: object) -> Path:
        entry = replace(toy, entry_key=EntryKey(prefix.ljust(32, "0")), **changes)  # type: ignore[arg-type]
        path = store.publish(entry).path
        age = path.stat().st_mtime - DAY_OLD
        os.utime(path / "manifest.json", (age, age))
        return path

    return put
