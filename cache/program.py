"""Artifact: one compiled program of a manifest: its stitch, piece order, unique pieces and variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pwcc.cache.ids import BlobDigest, FactorDigest
from pwcc.cache.strict import Fields, Json, as_digest, as_int, as_json, as_name, as_text

MAX_TOKENS: Final = 2**31 - 1
MAX_PIECES: Final = 100_000
MAX_UNIQUE: Final = 10_000
MAX_VARIANTS: Final = 10_000
MAX_OPS: Final = 100_000
VARIANT_KINDS: Final = ("dynamic", "static")


@dataclass(frozen=True)
class UniquePiece:
    """One distinct piece: structural graph digest (32 hex digits), short name, ops in graph order."""

    digest: FactorDigest
    name: str
    ops: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"digest": self.digest, "name": self.name, "ops": list(self.ops)}

    @classmethod
    def parse(cls, value: object, where: str) -> UniquePiece:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        piece = cls(
            FactorDigest(fields.key("digest")),
            fields.item("name", as_name),
            fields.list_("ops", as_text, max_items=MAX_OPS),
        )
        fields.done()
        return piece


@dataclass(frozen=True)
class Variant:
    """One compiled shape range; ``pieces`` holds one sealed-piece record per unique piece.

    ``kind`` is ``dynamic`` (``size`` None) or ``static`` (``low <= size <= high``, tokens).
    """

    kind: str
    size: int | None
    low: int
    high: int
    pieces: tuple[BlobDigest, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "size": self.size,
            "low": self.low,
            "high": self.high,
            "pieces": list(self.pieces),
        }

    @classmethod
    def parse(cls, value: object, where: str) -> Variant:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        kind = fields.str_("kind")
        if kind not in VARIANT_KINDS:
            fields.fail("kind", f"one of {VARIANT_KINDS}", kind)
        low = fields.int_("low", high=MAX_TOKENS)
        high = fields.int_("high", low=low, high=MAX_TOKENS)
        size = fields.opt_int("size", low=low, high=high)
        if (size is None) != (kind == "dynamic"):
            fields.fail("size", "a size for a static variant, null for a dynamic one", size)
        variant = cls(kind, size, low, high, fields.list_("pieces", as_digest, max_items=MAX_UNIQUE))
        fields.done()
        return variant


@dataclass(frozen=True)
class Program:
    """What one trace became; it answers calls of ``min_tokens`` to ``max_tokens`` tokens.

    ``pieces`` gives, per position in the stitched program, the index into ``unique``. ``stitch`` is
    the blob of the straight-line program, ``calling`` of the calling convention (JSON).
    ``shape_predicates`` are opaque JSON values, evaluated by the loader.
    """

    min_tokens: int
    max_tokens: int
    stitch: BlobDigest
    calling: BlobDigest
    shape_predicates: tuple[Json, ...]
    splits: int
    pieces: tuple[int, ...]
    unique: tuple[UniquePiece, ...]
    variants: tuple[Variant, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "stitch": self.stitch,
            "calling": self.calling,
            "shape_predicates": list(self.shape_predicates),
            "splits": self.splits,
            "pieces": list(self.pieces),
            "unique": [piece.to_json() for piece in self.unique],
            "variants": [variant.to_json() for variant in self.variants],
        }

    @classmethod
    def parse(cls, value: object, where: str) -> Program:
        """Return what :meth:`to_json` wrote.

        Raises:
            CorruptEntry: also for piece indexes out of range, a variant without one record per
                unique piece, or one that reaches outside the program's tokens.
        """
        fields = Fields(value, where)
        low = fields.int_("min_tokens", high=MAX_TOKENS)
        program = cls(
            min_tokens=low,
            max_tokens=fields.int_("max_tokens", low=low, high=MAX_TOKENS),
            stitch=fields.digest("stitch"),
            calling=fields.digest("calling"),
            shape_predicates=fields.list_("shape_predicates", as_json),
            splits=fields.int_("splits", high=MAX_PIECES),
            pieces=fields.list_("pieces", as_int, max_items=MAX_PIECES),
            unique=fields.list_("unique", UniquePiece.parse, max_items=MAX_UNIQUE),
            variants=fields.list_("variants", Variant.parse, max_items=MAX_VARIANTS),
        )
        fields.done()
        for index in program.pieces:
            if not 0 <= index < len(program.unique):
                fields.fail("pieces", f"indexes below {len(program.unique)}", index)
        for variant in program.variants:
            if len(variant.pieces) != len(program.unique):
                fields.fail("variants", f"{len(program.unique)} piece records each", len(variant.pieces))
            if variant.low < program.min_tokens or variant.high > program.max_tokens:
                fields.fail("variants", "ranges within the program's tokens", [variant.low, variant.high])
        return program

    def blobs(self) -> Iterator[BlobDigest]:
        """Yield every blob that the program names itself."""
        yield self.stitch
        yield self.calling
        for variant in self.variants:
            yield from variant.pieces
