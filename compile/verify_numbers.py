"""Artifact: the numbers of two builds of one entry: their records, and runs of the pieces that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pwcc.cache import strict
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.numerics import SEED, run_and_collect
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.runtime.piece import PieceLoader
from pwcc.compile.runtime.samples import relative_error, sample_inputs

ReadBlob = Callable[[BlobDigest], bytes]

SAMPLE_TOKENS = 4
MEASURED = ("eager", "compiled", "sealed", "tolerance")


@dataclass(frozen=True)
class Side:
    """An entry and where its blobs are read from."""

    manifest: Manifest
    read: ReadBlob


def records_agree(old: bytes, new: bytes) -> bool:
    """Tell whether two numerics records say the same of the same graphs, sizes and seeds.

    Their figures depend on the number of threads, which decides the order of sums. They agree where each
    build's error is within the other's tolerance.
    """
    one, other = strict.loads(old, where="numerics"), strict.loads(new, where="numerics")
    if strict.canonical(_blanked(one)) != strict.canonical(_blanked(other)):
        return False
    return all(
        a["sealed"] <= b["tolerance"] and b["sealed"] <= a["tolerance"]
        for a, b in zip(_figures(one), _figures(other), strict=True)
    )


def _figures(value: Any) -> list[dict[str, float]]:
    if isinstance(value, dict):
        if _is_record(value):
            return [value]
        return [found for name in sorted(value) for found in _figures(value[name])]
    return [found for item in value for found in _figures(item)] if isinstance(value, list) else []


def _is_record(value: dict[str, Any]) -> bool:
    return all(isinstance(value.get(name), (int, float)) for name in MEASURED)


def _blanked(value: Any) -> Any:
    if isinstance(value, dict):
        blank = MEASURED if _is_record(value) else ()
        return {name: None if name in blank else _blanked(item) for name, item in value.items()}
    return [_blanked(item) for item in value] if isinstance(value, list) else value


def pieces_of(manifest: Manifest) -> Iterator[tuple[str, BlobDigest]]:
    """Yield every piece of every variant by program, name and sizes, with its record's digest."""
    for number, program in enumerate(manifest.programs):
        for variant in program.variants:
            sizes = f"n={variant.size}" if variant.size else f"n={variant.low}..{variant.high}"
            for unique, digest in zip(program.unique, variant.pieces, strict=True):
                yield f"program {number} piece {unique.name} {sizes}", digest


def errors_of_changed(found: Side, again: Side, device: torch.device) -> Iterator[tuple[str, float]]:
    """Run each piece whose sealed record differs on both sides, and yield the relative error."""
    graphs = dict(_graphs(again))
    made = dict(pieces_of(again.manifest))
    for what, digest in pieces_of(found.manifest):
        other = made.get(what)
        if other is None or other == digest or what not in graphs:
            continue
        graph, tokens = graphs[what]
        try:
            old, new = _runnable(found.read, digest, device), _runnable(again.read, other, device)
        except StoreError:
            yield what, math.inf
            continue
        with torch.no_grad():
            inputs = sample_inputs(graph, tokens, device, seed=SEED)
            wanted = run_and_collect(graph, new, inputs)
            yield what, relative_error(run_and_collect(graph, old, inputs), wanted)


def _runnable(read: ReadBlob, digest: BlobDigest, device: torch.device) -> Any:
    record = SealedPiece.from_bytes(read(digest), where=f"piece {digest[:12]}")
    return PieceLoader(read, device).load(record).call


def _graphs(side: Side) -> Iterator[tuple[str, tuple[PieceGraph, int]]]:
    """Yield each piece's graph and a size to run it at, by the piece's words."""
    if side.manifest.numerics is None:
        return
    fields = strict.Fields(strict.loads(side.read(side.manifest.numerics), where="numerics"), "numerics")
    programs = fields.list_("programs", strict.Fields)
    for number, (program, recorded) in enumerate(zip(side.manifest.programs, programs, strict=True)):
        graphs = [
            PieceGraph.from_bytes(side.read(digest), where="piece graph")
            for digest in recorded.list_("graphs", strict.as_digest)
        ]
        for variant in program.variants:
            sizes = f"n={variant.size}" if variant.size else f"n={variant.low}..{variant.high}"
            tokens = variant.size or min(max(variant.low, SAMPLE_TOKENS), variant.high)
            for unique, graph in zip(program.unique, graphs, strict=True):
                yield f"program {number} piece {unique.name} {sizes}", (graph, tokens)
