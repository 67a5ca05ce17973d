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
from pwcc.compile.eligibility import reject
from pwcc.compile.report import CompileCounters, CompilePlan, CompileReport, PlannedPiece
from pwcc.compile.request import Request
from pwcc.compile.target import host_facts

NO_DUMP = "--dump wrote nothing: the entry was there already, use --dry-run --dump or another --cache-dir"


def find_entry(
    store: Store, model: nn.Module, request: Request, key: LookupKey, build: BuildFactors
) -> tuple[Manifest, Path] | None:
    """Find an entry that was made from the same factors and still fits the live model.

    Why there is none is a question of its own: see :func:`pwcc.compile.explain.explain_compile`.
    """
    facts = host_facts(request.target)
    for ref in store.candidates(key):
        try:
            manifest = store.read_manifest(ref)
            recorded = FactorTree.from_json(strict.loads(store.read_blob(manifest.factors), where="factors"))
        except StoreError:
            continue
        if (
            build.matches(recorded)
            and reject(store, model, manifest, facts) is None
            and is_whole(store, manifest)
        ):
            return manifest, ref.path
    return None


def is_whole(store: Store, manifest: Manifest) -> bool:
    """Verify every blob: a damaged one makes this a compile, which writes it again."""
    try:
        for digest in manifest.blobs:
            store.read_blob(digest)
    except StoreError:
        return False
    return True


def hit_report(
    found: tuple[Manifest, Path], request: Request, seconds: float, *, dump: Path | None = None
) -> CompileReport:
    """Describe an entry that was found; ``seconds`` is what finding it took.

    Nothing was traced, so there is nothing to dump: asked for, that is a warning.
    """
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
        build_observed=manifest.build_observed,
        warnings=(*plan.warnings(), *([] if dump is None else [NO_DUMP])),
    )
