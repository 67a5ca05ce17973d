"""Fixtures of the cache tests: a real store in a temporary directory and a small, complete entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import strict
from pwcc.cache.factors import FactorTree, entry_key, lookup_key
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey, factor_digest
from pwcc.cache.manifest import DeviceSummary, Manifest, ModelSummary, Program, UniquePiece, Variant
from pwcc.cache.requirements import Requirement
from pwcc.cache.sealed import CppKernel, InputFacts, SealedPiece
from pwcc.cache.sources import SourceRecord
from pwcc.cache.store import Store

PutEntry = Callable[..., Manifest]


def put_blobs(store: Store, *, name: str = "toy", layers: int = 2) -> Manifest:
    """Put every blob of a small entry and return its manifest, not published."""
    blobs: dict[BlobDigest, int] = {}

    def put(data: bytes) -> BlobDigest:
        digest = store.put_blob(data)
        blobs[digest] = len(data)
        return digest

    tree = FactorTree.of(configuration={"model": name, "sizes": [1, 8]}, compiler={"torch": "2.13.0"})
    kernel = put(b"\x7fELF kernel of " + name.encode())
    records = []
    for index in range(6):
        record = SealedPiece(
            source=put(f"def bind(kernels, constants, device_index): return k{index}\n".encode()),
            code=None,
            device_type="cpu",
            inputs=(InputFacts("tensor", "float32", ("s0", 4), (4, 1)),),
            outputs=1,
            mutated=(),
            realigned=(),
            aligned=(0,),
            kernels=(CppKernel(f"k{index}", kernel, ("const float*",)),),
            externs=(),
            fallbacks=(),
            ops=("aten.add.Tensor",),
            constants=None,
            tuned=False,
            requirements=(),
        )
        records.append(put(record.to_bytes()))
    unique = tuple(
        UniquePiece(factor_digest(f"{name}{i}".encode()), f"piece_{i}", ("aten.mm.default", "aten.add.Tensor"))
        for i in range(3)
    )
    program = Program(
        min_tokens=1,
        max_tokens=64,
        stitch=put(b"def run(pieces, x):\n    return pieces[0](x)\n"),
        calling=put(strict.canonical({"inputs": ["x"]})),
        shape_predicates=({"kind": "range", "low": 1, "high": 64},),
        splits=layers,
        pieces=(0, *[1] * (layers - 1), 2),
        unique=unique,
        variants=(
            Variant("dynamic", None, 1, 64, tuple(records[:3])),
            Variant("static", 8, 8, 8, tuple(records[3:])),
        ),
    )
    return Manifest(
        pwcc_version="0.1.0",
        entry_key=entry_key(tree),
        lookup_key=lookup_key(tree),
        model=ModelSummary(name, {"layers": layers}, 1000, 4000, "float32", factor_digest(name.encode())),
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
        predicates=put(strict.canonical([])),
        factors=put(strict.canonical(tree.to_json())),
        numerics=put(strict.canonical({"max_error": 0.0})),
        programs=(program,),
        counts={"pieces": layers + 1},
        blobs=blobs,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "cache")


@pytest.fixture(scope="session")
def put_entry() -> PutEntry:
    return put_blobs


@pytest.fixture
def manifest(store: Store) -> Manifest:
    return put_blobs(store)


@pytest.fixture
def rekeyed() -> Callable[[Manifest, int], Manifest]:
    def make(manifest: Manifest, index: int) -> Manifest:
        lookup = LookupKey(factor_digest(f"lookup{index // 4}".encode()))
        return replace(manifest, entry_key=EntryKey(factor_digest(f"entry{index}".encode())), lookup_key=lookup)

    return make
