"""Artifact: find an entry that was made from the same factors, and report it instead of compiling."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import StoreError
from pwcc.cache.factors import FactorTree
from pwcc.cache.ids import LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.compile.build_factors import BuildFactors
from pwcc.compile.load import reject
from pwcc.compile.report import CompileCounters, CompilePlan, CompileReport, PlannedPiece
from pwcc.compile.request import Request
from pwcc.compile.target import host_facts


def find_entry(
    store: Store, model: nn.Module, request: Request, key: LookupKey, build: BuildFactors
) -> tuple[Manifest, Path] | None:
    """Return an entry that was made from the same factors and still fits the live model, if there is one."""
    facts = host_facts(request.target)
    for ref in store.candidates(key):
        try:
            manifest = store.read_manifest(ref)
            recorded = FactorTree.from_json(strict.loads(store.read_blob(manifest.factors), where="factors"))
        except StoreError:
            continue
        if not build.matches(recorded):
            continue
        if reject(store, model, manifest, facts) is None and _is_whole(store, manifest):
            return manifest, ref.path
    return None


def _is_whole(store: Store, manifest: Manifest) -> bool:
    """Verify every blob: a damaged one makes this a compile, which writes it again."""
    try:
        for digest in manifest.blobs:
            store.read_blob(digest)
    except StoreError:
        return False
    return True


def hit_report(found: tuple[Manifest, Path], request: Request, seconds: float) -> CompileReport:
    """Describe an entry that was found; ``seconds`` is what finding it took."""
    manifest, path = found
    unique = [piece for program in manifest.programs for piece in program.unique]
    plan = CompilePlan(
        model=request.identity,
        device=request.target.name or request.target.device.type,
        splitting_ops=request.options.splitting_ops,
        splits=sum(program.splits for program in manifest.programs),
        pieces=tuple(p.unique[i].name for p in manifest.programs for i in p.pieces),
        unique=tuple(
            PlannedPiece(piece.name, piece.digest, sum(i == index for i in program.pieces), piece.ops)
            for program in manifest.programs
            for index, piece in enumerate(program.unique)
        ),
        variants=tuple(
            f"n={v.size}" if v.size else f"n={v.low}..{v.high}" for p in manifest.programs for v in p.variants
        ),
        size_mode="",
        parameters=manifest.model.parameters,
        parameter_bytes=manifest.model.parameter_bytes,
    )
    counters = CompileCounters(
        pieces=manifest.counts.get("segments", 0),
        compiled_pieces=len(plan.pieces),
        unique_pieces=len(unique),
        splits=plan.splits,
        variants=len(plan.variants),
    )
    return CompileReport(
        hit=True,
        entry_key=manifest.entry_key,
        lookup_key=manifest.lookup_key,
        path=path,
        plan=plan,
        counters=counters,
        seconds={"total": seconds},
        bytes=sum(manifest.blobs.values()),
        kernels=manifest.counts.get("kernels", 0),
        warnings=plan.warnings(),
    )
