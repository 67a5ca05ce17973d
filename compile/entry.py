"""Artifact: turn traced programs and sealed pieces into a manifest and its blobs, ready to publish."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

import pwcc
from pwcc.cache import requirements as req
from pwcc.cache import strict
from pwcc.cache.details import Details, line_digests
from pwcc.cache.factors import entry_key
from pwcc.cache.ids import BlobDigest, FactorDigest, LookupKey, factor_digest
from pwcc.cache.manifest import Manifest, ModelSummary
from pwcc.cache.observed import ObservedInput
from pwcc.cache.operators import DecodeAttention
from pwcc.cache.policy import SiteEnvironment
from pwcc.cache.program import Program, UniquePiece
from pwcc.cache.program import Variant as VariantRecord
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.sources import SourceRecord, resolve
from pwcc.cache.store import Store
from pwcc.compile.build_factors import BuildFactors, portable_args
from pwcc.compile.decode_check import require_decode
from pwcc.compile.model_tree import identity, model_tree
from pwcc.compile.piece_compiler import PieceResult
from pwcc.compile.rebuild import Variant
from pwcc.compile.request import Request
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.sealing.decode import decode_forms, seal_decode
from pwcc.compile.signature import signature_facts
from pwcc.compile.target import base_requirements
from pwcc.compile.tracing import Traced, piece_names, stitch_of

Results = Mapping[tuple[FactorDigest, Variant], PieceResult]


class CountingBlobs:
    """A store that remembers which blobs it was given and their sizes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sizes: dict[BlobDigest, int] = {}

    def put_blob(self, data: bytes) -> BlobDigest:
        """Store a blob."""
        digest = self._store.put_blob(data)
        self.sizes[digest] = len(data)
        return digest

    def read_blob(self, digest: BlobDigest) -> bytes:
        """Read a blob back."""
        return self._store.read_blob(digest)


@dataclass(frozen=True)
class EntryWriter:
    """Writes one entry's blobs and makes its manifest; publishing is the store's."""

    store: Store
    model: nn.Module
    request: Request
    build: BuildFactors
    traced: Sequence[Traced]
    results: Results
    predicates: PredicateSet
    sources: tuple[SourceRecord, ...]
    inputs: tuple[ObservedInput, ...] = ()

    def manifest(self, key: LookupKey, tree_digest: FactorDigest) -> Manifest:
        """Store the blobs that are not there yet and return the manifest over all of them."""
        put = CountingBlobs(self.store)
        for result in self.results.values():
            put.sizes.update(result.blobs)
        names = piece_names(self.traced)
        programs = tuple(self._program(item, names, put) for item in self.traced)
        decode = self._decode_attention(put)
        request = self.request
        predicates = put.put_blob(self.predicates.to_json())
        traced = {
            "build observed": request.build_observed,
            "model tree": tree_digest,
            "predicates": predicates,
            "programs": [
                [program.stitch, program.calling, [piece.digest for piece in program.unique]]
                for program in programs
            ],
        }
        factors = self.build.tree(self.sources, traced, self.inputs)
        return Manifest(
            pwcc_version=pwcc.__version__,
            entry_key=entry_key(factors),
            lookup_key=key,
            model=self._summary(tree_digest),
            device=request.target.summary,
            torch=_plain_version(),
            min_tokens=1,
            max_tokens=request.max_tokens,
            sizes=request.sizes,
            profile=request.profile,
            tag=request.options.tag,
            tuned=request.options.autotune,
            build_observed=request.build_observed,
            requirements=self._requirements(),
            sources=self.sources,
            observed=self.inputs,
            predicates=predicates,
            factors=put.put_blob(strict.canonical(factors.to_json())),
            numerics=put.put_blob(
                strict.canonical({"programs": [self._numerics(i, put) for i in self.traced]})
            ),
            programs=programs,
            decode_attention=decode,
            counts={
                "kernels": sum(result.kernels for result in self.results.values()),
                "segments": sum(item.program.segments for item in self.traced),
            },
            details=put.put_blob(self._details().to_bytes()),
            site_environment=SiteEnvironment.record(request.policy, os.environ),
            blobs=dict(sorted(put.sizes.items())),
        )

    def _details(self) -> Details:
        texts = ((record, resolve(record, sys.modules, sys.path)) for record in self.sources)
        read = ((record, path.read_bytes()) for record, path in texts if path is not None)
        return Details.of(
            tree=model_tree(self.model).to_json(),
            signature=signature_facts(self.model),
            lines={
                f"{record.module}:{record.path}": line_digests(text)
                for record, text in read
                if factor_digest(text) == record.digest
            },
        )

    def _summary(self, tree_digest: FactorDigest) -> ModelSummary:
        parameters = {id(p): p for p in self.model.parameters()}.values()
        dtypes = [str(p.dtype).removeprefix("torch.") for p in parameters]
        return ModelSummary(
            identity=self.request.identity,
            args=portable_args(self.request.args),
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            dtype=max(sorted(set(dtypes)), key=dtypes.count) if dtypes else "float32",
            tree_digest=tree_digest,
            root=identity(self.model),
        )

    def _requirements(self) -> tuple[req.Requirement, ...]:
        sealed = dict.fromkeys(result.sealed for result in self.results.values())
        needed = [
            requirement
            for digest in sealed
            for requirement in SealedPiece.from_bytes(self.store.read_blob(digest), where="piece").requirements
        ]
        return req.merge([*base_requirements(self.request.target), *needed])

    def _decode_attention(self, put: CountingBlobs) -> tuple[DecodeAttention, ...]:
        """Seal the decode kernels of the attention calls that run outside every piece, on CUDA."""
        target = self.request.target
        if target.device.type != "cuda" or target.capability is None:
            return ()
        forms = decode_forms(item.trace.graph_module for item in self.traced)
        found = tuple(seal_decode(form, target.capability, put.put_blob) for form in forms)
        require_decode(found, self.store.read_blob, target.device)
        return found

    def _numerics(self, item: Traced, put: CountingBlobs) -> dict[str, strict.Json]:
        unique = item.program.unique
        return {
            "graphs": [put.put_blob(graph.to_bytes()) for graph in unique],
            "variants": [
                [
                    [record.to_json() for record in self.results[graph.digest, variant].numerics]
                    for graph in unique
                ]
                for variant in item.variants
            ],
        }

    def _program(self, item: Traced, names: Mapping[FactorDigest, str], put: CountingBlobs) -> Program:
        unique = item.program.unique
        order = {graph.digest: index for index, graph in enumerate(unique)}
        calling = item.trace.calling
        return Program(
            min_tokens=item.low,
            max_tokens=item.high,
            stitch=put.put_blob(stitch_of(item).encode()),
            calling=put.put_blob(calling.to_bytes()),
            shape_predicates=tuple(predicate.text for predicate in calling.predicates),
            splits=item.program.splits,
            pieces=tuple(order[piece.graph.digest] for piece in item.program.pieces),
            unique=tuple(UniquePiece(graph.digest, names[graph.digest], graph.ops) for graph in unique),
            variants=tuple(
                VariantRecord(
                    variant.kind,
                    variant.low if variant.static else None,
                    max(variant.low, item.low),  # size 1 may have moved to a program of its own
                    variant.high,
                    tuple(self.results[graph.digest, variant].sealed for graph in unique),
                )
                for variant in item.variants
            ),
        )


def _plain_version() -> str:
    import torch

    return str(torch.__version__)
