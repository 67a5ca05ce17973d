"""What one published entry holds: every part of it checked against what was compiled."""

from __future__ import annotations

import json

import pytest

from pwcc.cache.factors import FactorTree, entry_key
from pwcc.cache.ids import blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import EntryRef, Store
from pwcc.compile.entry import CountingBlobs
from pwcc.compile.numerics import NumericsRecord
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.runtime.predicates import PredicateSet
from tests.conftest import Warm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def entry(llama: Warm) -> tuple[Store, EntryRef, Manifest]:
    store = Store.open(llama.root)
    (ref,) = store.entries()
    return store, ref, store.read_manifest(ref)


Entry = tuple[Store, EntryRef, Manifest]


def test_its_key_is_that_of_its_factors(entry: Entry) -> None:
    store, ref, manifest = entry
    tree = FactorTree.from_json(json.loads(store.read_blob(manifest.factors)))
    assert entry_key(tree) == manifest.entry_key == ref.entry_key
    names = {group: [factor.name for factor in found] for group, found in tree.groups()}
    assert {"model", "model arguments", "options", "build observed"} <= set(names["configuration"])
    assert {"torch", "c++ compiler", "numeric state", "device", "pwcc code"} <= set(names["compiler"])
    assert names["sources"]
    assert "environment" in names


def test_it_lists_every_blob_that_it_needs_and_no_other(entry: Entry) -> None:
    store, _, manifest = entry
    needed = set(manifest.referenced())
    for program in manifest.programs:
        for variant in program.variants:
            for digest in variant.pieces:
                needed |= {digest, *SealedPiece.from_bytes(store.read_blob(digest), where="piece").blobs}
    assert manifest.numerics is not None
    for recorded in json.loads(store.read_blob(manifest.numerics))["programs"]:
        needed |= set(recorded["graphs"])
    assert set(manifest.blobs) == needed
    for digest, size in manifest.blobs.items():
        assert len(store.read_blob(digest)) == size


def test_it_describes_the_model(entry: Entry) -> None:
    _, _, manifest = entry
    model = manifest.model
    assert (model.identity, dict(model.args), model.dtype) == ("builtin:llama-tiny", {"layers": 2}, "float32")
    assert model.parameter_bytes == 4 * model.parameters > 0
    assert (manifest.min_tokens, manifest.max_tokens, manifest.sizes) == (1, 8192, (1, 2))
    assert (manifest.device.type, manifest.profile, manifest.tuned) == ("cpu", None, False)


def test_its_program_runs_three_pieces_around_two_attentions(entry: Entry) -> None:
    store, _, manifest = entry
    (program,) = manifest.programs
    assert (program.pieces, program.splits) == ((0, 1, 2), 2)
    assert [(v.kind, v.size, v.low, v.high) for v in program.variants] == [
        ("dynamic", None, 1, 8192),
        ("static", 1, 1, 1),
        ("static", 2, 2, 2),
    ]
    assert manifest.counts["segments"] == 5
    stitch = store.read_blob(program.stitch).decode()
    compile(stitch, "stitch.py", "exec")
    assert "import" not in stitch


def test_its_requirements_cover_what_the_kernels_need(entry: Entry) -> None:
    store, _, manifest = entry
    held = {requirement.kind: requirement.value for requirement in manifest.requirements}
    assert {"machine", "os", "byte_order", "torch", "python_abi", "glibc", "cpu_flags"} <= set(held)
    for digest in manifest.programs[0].variants[0].pieces:
        record = SealedPiece.from_bytes(store.read_blob(digest), where="piece")
        assert {requirement.kind for requirement in record.requirements} <= set(held)
        assert record.externs or record.kernels


def test_every_piece_has_a_numerics_record_within_twice_inductors_error(entry: Entry) -> None:
    store, _, manifest = entry
    assert manifest.numerics is not None
    (recorded,) = json.loads(store.read_blob(manifest.numerics))["programs"]
    digests = [PieceGraph.from_bytes(store.read_blob(d), where="graph").digest for d in recorded["graphs"]]
    assert digests == [piece.digest for piece in manifest.programs[0].unique]
    measured = [
        [[NumericsRecord.parse(item, "numerics") for item in piece] for piece in variant]
        for variant in recorded["variants"]
    ]
    sizes = [[[record.size for record in piece] for piece in variant] for variant in measured]
    assert sizes == [[[1, 2, 64]] * 3, [[1]] * 3, [[2]] * 3]
    for record in (record for variant in measured for piece in variant for record in piece):
        assert record.sealed <= record.tolerance
        # twice Inductor's own error, but never below what another thread count may change
        assert record.tolerance in (2 * record.compiled, 4 * 2.0**-23)


def test_its_predicates_are_portable_and_name_constants(entry: Entry) -> None:
    store, _, manifest = entry
    data = store.read_blob(manifest.predicates)
    PredicateSet.from_json(data)
    for name in (b"eps", b"heads", b"theta"):
        assert name in data


def test_counting_blobs_counts_once(llama: Warm, entry: Entry) -> None:
    store, _, manifest = entry
    counting = CountingBlobs(store)
    data = store.read_blob(manifest.predicates)
    assert counting.put_blob(data) == counting.put_blob(data) == blob_digest(data)
    assert counting.sizes == {manifest.predicates: len(data)}
    assert counting.read_blob(manifest.predicates) == data
