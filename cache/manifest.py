"""Artifact: the manifest, the one file that says what an entry is; parsed strictly, never executed.

On disk it is canonical JSON whose first field ``about`` repeats what a listing shows, with a digest of
all bytes after it, so that ``inspect`` can list a thousand entries without parsing them in full
(:mod:`pwcc.cache.about`). It holds no time, user, host name or absolute path: same inputs, same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pwcc.cache import about, strict
from pwcc.cache.errors import CorruptEntry, NewerFormat
from pwcc.cache.ids import BlobDigest, EntryKey, FactorDigest, LookupKey
from pwcc.cache.observed import ObservedInput
from pwcc.cache.operators import DecodeAttention
from pwcc.cache.policy import NO_SITE, SiteEnvironment
from pwcc.cache.program import MAX_TOKENS, Program, UniquePiece, Variant
from pwcc.cache.requirements import Requirement
from pwcc.cache.sources import SourceRecord
from pwcc.cache.strict import Fields, Json, as_int, as_json, as_name, as_text

__all__ = ["SCHEMA", "DeviceSummary", "Manifest", "ModelSummary", "Program", "UniquePiece", "Variant"]

SCHEMA: Final = 1


@dataclass(frozen=True)
class ModelSummary:
    """Which model: its identity as given, arguments, size (bytes of parameters), tree digest.

    ``root`` is the class of its root module, as ``module:qualname``; empty where it was not recorded.
    """

    identity: str
    args: Mapping[str, Json]
    parameters: int
    parameter_bytes: int
    dtype: str
    tree_digest: FactorDigest
    root: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "identity": self.identity,
            "args": dict(self.args),
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "dtype": self.dtype,
            "tree_digest": self.tree_digest,
            "root": self.root,
        }

    @classmethod
    def parse(cls, value: object, where: str) -> ModelSummary:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        model = cls(
            identity=fields.item("identity", as_text),
            args=fields.mapping("args", as_json, max_items=10_000),
            parameters=fields.int_("parameters"),
            parameter_bytes=fields.int_("parameter_bytes"),
            dtype=fields.item("dtype", as_text),
            tree_digest=FactorDigest(fields.key("tree_digest")),
            root=fields.item("root", as_text),
        )
        fields.done()
        return model


@dataclass(frozen=True)
class DeviceSummary:
    """Which device class: type (``cpu``, ``cuda``), name and capability (``9.0``) where it has them."""

    type: str
    name: str | None = None
    capability: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"type": self.type, "name": self.name, "capability": self.capability}

    @classmethod
    def parse(cls, value: object, where: str) -> DeviceSummary:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        device = cls(
            fields.item("type", as_name),
            fields.opt_item("name", as_text),
            fields.opt_item("capability", as_text),
        )
        fields.done()
        return device


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One entry. ``blobs`` maps every reachable blob, kernels of pieces included, to its bytes.

    ``predicates``, ``factors``, ``numerics`` and ``details`` (what only an explanation reads, see
    ``cache/details.py``) name JSON blobs. ``counts`` are free counters; the
    listing reads ``unsealed``, the number of piece records that hold a pickle (absent means 0).
    """

    pwcc_version: str
    entry_key: EntryKey
    lookup_key: LookupKey
    model: ModelSummary
    device: DeviceSummary
    torch: str
    min_tokens: int
    max_tokens: int
    sizes: tuple[int, ...]
    profile: str | None
    tuned: bool
    build_observed: bool
    requirements: tuple[Requirement, ...]
    sources: tuple[SourceRecord, ...]
    predicates: BlobDigest
    factors: BlobDigest
    numerics: BlobDigest | None
    programs: tuple[Program, ...]
    counts: Mapping[str, int]
    blobs: Mapping[BlobDigest, int]
    decode_attention: tuple[DecodeAttention, ...] = ()
    observed: tuple[ObservedInput, ...] = ()
    site_environment: SiteEnvironment = NO_SITE
    tag: str | None = None
    details: BlobDigest | None = None
    schema: int = SCHEMA

    def serialise(self) -> bytes:
        """Return the manifest's bytes: a function of its fields alone.

        Raises:
            CorruptEntry: the fields do not form a manifest that :meth:`parse` would accept.
        """
        data = about.seal(about.About.of(self), strict.canonical(self._body()))
        Manifest.parse(data)  # what cannot be read back must never be published
        return data

    @classmethod
    def parse(cls, data: bytes, *, where: str = "manifest.json") -> Manifest:
        """Return the manifest in ``data``.

        Raises:
            NewerFormat: a newer pwcc wrote it. CorruptEntry: anything else that :meth:`serialise`
                would not write: truncation, unknown fields, indexes out of range, unlisted blobs.
        """
        stated, body = about.split(data, where=where)
        value = strict.loads(body, where=where)
        if isinstance(value, dict) and isinstance(value.get("schema"), int) and value["schema"] > SCHEMA:
            raise NewerFormat(
                f"expected manifest schema {SCHEMA}, got {value['schema']}: a newer pwcc wrote it",
                where=where,
                hint="upgrade pwcc on this host, or compile again with this version",
            )
        manifest = cls._parse(Fields(value, where))
        _check(manifest, where)
        if about.About.of(manifest) != stated:
            raise CorruptEntry("the summary 'about' does not match the fields it repeats", where=where)
        return manifest

    @classmethod
    def _parse(cls, fields: Fields) -> Manifest:
        low = fields.int_("min_tokens", high=MAX_TOKENS)
        manifest = cls(
            schema=fields.int_("schema", low=1, high=SCHEMA),
            pwcc_version=fields.item("pwcc_version", as_text),
            entry_key=EntryKey(fields.key("entry_key")),
            lookup_key=LookupKey(fields.key("lookup_key")),
            model=fields.item("model", ModelSummary.parse),
            device=fields.item("device", DeviceSummary.parse),
            torch=fields.item("torch", as_text),
            min_tokens=low,
            max_tokens=fields.int_("max_tokens", low=low, high=MAX_TOKENS),
            sizes=fields.list_("sizes", as_int, max_items=10_000),
            profile=fields.opt_item("profile", as_name),
            tag=fields.opt_item("tag", as_name),
            tuned=fields.bool_("tuned"),
            build_observed=fields.bool_("build_observed"),
            requirements=fields.list_("requirements", Requirement.parse, max_items=1_000),
            sources=fields.list_("sources", SourceRecord.parse),
            observed=fields.list_("observed", ObservedInput.parse),
            predicates=fields.digest("predicates"),
            factors=fields.digest("factors"),
            numerics=fields.opt_digest("numerics"),
            programs=fields.list_("programs", Program.parse, max_items=1_000),
            decode_attention=fields.list_("decode_attention", DecodeAttention.parse, max_items=1_000),
            counts=fields.mapping("counts", as_int, max_items=1_000),
            blobs=_blobs(fields),
            site_environment=fields.item("site_environment", SiteEnvironment.parse),
            details=fields.opt_digest("details"),
        )
        fields.done()
        return manifest

    def _body(self) -> dict[str, Json]:
        return {
            "schema": self.schema,
            "pwcc_version": self.pwcc_version,
            "entry_key": self.entry_key,
            "lookup_key": self.lookup_key,
            "model": self.model.to_json(),
            "device": self.device.to_json(),
            "torch": self.torch,
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "sizes": list(self.sizes),
            "profile": self.profile,
            "tag": self.tag,
            "tuned": self.tuned,
            "build_observed": self.build_observed,
            "requirements": [requirement.to_json() for requirement in self.requirements],
            "sources": [source.to_json() for source in self.sources],
            "observed": [item.to_json() for item in self.observed],
            "predicates": self.predicates,
            "factors": self.factors,
            "numerics": self.numerics,
            "programs": [program.to_json() for program in self.programs],
            "decode_attention": [kernel.to_json() for kernel in self.decode_attention],
            "counts": dict(self.counts),
            "blobs": {str(digest): size for digest, size in self.blobs.items()},
            "site_environment": self.site_environment.to_json(),
            "details": self.details,
        }

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Inclusive token ranges of the dynamic variants, ascending, each once."""
        dynamic = (v for program in self.programs for v in program.variants if v.size is None)
        return tuple(sorted({(v.low, v.high) for v in dynamic}))

    def serves(self, size: int) -> bool:
        """Tell whether a variant answers a token count: ranges may leave some out."""
        variants = (v for program in self.programs for v in program.variants)
        return any(v.low <= size <= v.high if v.size is None else v.size == size for v in variants)

    def piece_records(self) -> tuple[BlobDigest, ...]:
        """Return every sealed piece that the entry runs, each once: of programs, then of decode attention."""
        programs = (piece for program in self.programs for v in program.variants for piece in v.pieces)
        return tuple(dict.fromkeys((*programs, *(kernel.piece for kernel in self.decode_attention))))

    def referenced(self) -> Iterator[BlobDigest]:
        """Yield every blob that the manifest itself names; pieces name further ones."""
        yield self.predicates
        yield self.factors
        for optional in (self.numerics, self.details):
            if optional is not None:
                yield optional
        for program in self.programs:
            yield from program.blobs()
        for kernel in self.decode_attention:
            yield kernel.piece


def _blobs(fields: Fields) -> dict[BlobDigest, int]:
    found = fields.mapping("blobs", as_int)
    for digest, size in found.items():
        strict.as_digest(digest, f"{fields.where}:blobs")
        if size < 0:
            fields.fail("blobs", "sizes of 0 bytes or more", size)
    return {BlobDigest(digest): size for digest, size in found.items()}


def _check(manifest: Manifest, where: str) -> None:
    """Check what no single field can: sizes in range and every named blob listed."""
    for size in manifest.sizes:
        if not manifest.min_tokens <= size <= manifest.max_tokens:
            limits = f"[{manifest.min_tokens}, {manifest.max_tokens}]"
            raise CorruptEntry(f"expected sizes within {limits}, got {size}", where=where)
    if len(set(manifest.sizes)) != len(manifest.sizes):
        raise CorruptEntry("a size is listed twice", where=where)
    for digest in manifest.referenced():
        if digest not in manifest.blobs:
            raise CorruptEntry(f"blob {digest} is named but not listed in 'blobs'", where=where)
    for program in manifest.programs:
        if program.min_tokens < manifest.min_tokens or program.max_tokens > manifest.max_tokens:
            raise CorruptEntry("a program answers tokens outside the manifest's range", where=where)
