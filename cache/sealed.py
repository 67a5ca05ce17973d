"""Artifact: the record of one sealed piece (``piece.json``): its program, kernels, constants and inputs.

A record names blobs by digest and says how the piece is called. It holds no path, no device index and
no weight. The program itself (``piece.py``) is a blob of Python source, see ``compile/runtime/piece.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import BlobDigest
from pwcc.cache.passes import MAX_PASSES, PassCount
from pwcc.cache.requirements import Requirement
from pwcc.cache.sealed_kernels import CppKernel, Kernel, TritonKernel, as_identifier, parse_kernel
from pwcc.cache.strict import Fields, Json

SCHEMA: Final = 1
MAX_INPUTS: Final = 10_000
MAX_KERNELS: Final = 10_000
MAX_RANK: Final = 64
DEVICE_TYPES: Final = ("cpu", "cuda")
INPUT_KINDS: Final = ("tensor", "symint", "int")

Dim = int | str

__all__ = ["CppKernel", "Dim", "InputFacts", "Kernel", "SealedPiece", "TritonKernel"]


@dataclass(frozen=True)
class InputFacts:
    """One positional input of a piece, as it was compiled.

    ``tensor``: ``dtype`` is torch's name for it (``bfloat16``); ``shape`` and ``stride`` hold integers
    or expressions in size symbols. ``symint``: ``value`` is the expression (usually one symbol) that
    arrives as a Python integer. ``int``: ``value`` is the constant it was compiled for.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[Dim, ...] = ()
    stride: tuple[Dim, ...] = ()
    value: Dim | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        if self.kind == "tensor":
            return {
                "kind": self.kind,
                "dtype": self.dtype,
                "shape": list(self.shape),
                "stride": list(self.stride),
            }
        return {"kind": self.kind, "value": self.value}

    @classmethod
    def parse(cls, value: object, where: str) -> InputFacts:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        kind = fields.str_("kind")
        if kind == "tensor":
            facts = cls(
                kind,
                dtype=fields.item("dtype", as_identifier),
                shape=fields.list_("shape", _dim, max_items=MAX_RANK),
                stride=fields.list_("stride", _dim, max_items=MAX_RANK),
            )
            if len(facts.shape) != len(facts.stride):
                fields.fail("stride", f"{len(facts.shape)} strides", facts.stride)
        elif kind in INPUT_KINDS:
            facts = cls(kind, value=fields.item("value", _dim))
        else:
            fields.fail("kind", f"one of {INPUT_KINDS}", kind)
        fields.done()
        return facts


@dataclass(frozen=True)
class CompiledProgram:
    """A program as byte code: the interpreter's magic number in hex (``importlib.util.MAGIC_NUMBER``)."""

    magic: str
    blob: BlobDigest

    @classmethod
    def parse(cls, value: object, where: str) -> CompiledProgram:
        """Return what a record holds; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        program = cls(fields.str_("magic", max_length=32), fields.digest("blob"))
        fields.done()
        return program


@dataclass(frozen=True)
class SealedPiece:
    """One sealed piece.

    ``mutated`` are inputs that the piece writes. ``realigned`` are inputs that must be copied when
    their address is no multiple of 16 bytes (and written back when they are also mutated), on every
    call; ``aligned`` are inputs assumed aligned without a check, so whoever binds them must check once.
    ``externs`` and ``fallbacks`` name the torch functions and operators that the program calls;
    ``ops`` are the operators of the graph that it was compiled from; ``passes`` are the graph passes that
    it went through, in order, with their matches. ``code`` is the same program as
    Python's own byte code, for interpreters of one magic number; others compile the text.
    """

    source: BlobDigest
    code: CompiledProgram | None
    device_type: str
    inputs: tuple[InputFacts, ...]
    outputs: int
    mutated: tuple[int, ...]
    realigned: tuple[int, ...]
    aligned: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    externs: tuple[str, ...]
    fallbacks: tuple[str, ...]
    ops: tuple[str, ...]
    constants: BlobDigest | None
    tuned: bool
    requirements: tuple[Requirement, ...]
    passes: tuple[PassCount, ...] = ()

    @property
    def blobs(self) -> tuple[BlobDigest, ...]:
        """Every blob that the record names, each once, in a fixed order."""
        code = [self.code.blob] if self.code is not None else []
        digests = [self.source, *code, *(kernel.blob for kernel in self.kernels)]
        if self.constants is not None:
            digests.append(self.constants)
        return tuple(dict.fromkeys(digests))

    def program(self, magic: str) -> tuple[BlobDigest, bool]:
        """Return the blob that an interpreter of this magic number runs, and whether it is byte code."""
        if self.code is not None and self.code.magic == magic:
            return self.code.blob, True
        return self.source, False

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "code": None if self.code is None else {"magic": self.code.magic, "blob": self.code.blob},
            "device_type": self.device_type,
            "inputs": [facts.to_json() for facts in self.inputs],
            "outputs": self.outputs,
            "mutated": list(self.mutated),
            "realigned": list(self.realigned),
            "aligned": list(self.aligned),
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "externs": list(self.externs),
            "fallbacks": list(self.fallbacks),
            "ops": list(self.ops),
            "constants": self.constants,
            "tuned": self.tuned,
            "passes": [count.to_json() for count in self.passes],
            "requirements": [requirement.to_json() for requirement in self.requirements],
        }

    def to_bytes(self) -> bytes:
        """Serialise canonically: the same record gives the same bytes."""
        return strict.canonical(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> SealedPiece:
        """Parse what :meth:`to_bytes` wrote.

        Raises:
            CorruptEntry: another schema, a field of the wrong form, an input index out of range, or two
                kernels of one name.
        """
        return cls.parse(strict.loads(data, where=where), where)

    @classmethod
    def parse(cls, value: object, where: str) -> SealedPiece:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        schema = fields.int_("schema")
        if schema != SCHEMA:
            fields.fail("schema", f"schema {SCHEMA}", schema)
        device_type = fields.str_("device_type")
        if device_type not in DEVICE_TYPES:
            fields.fail("device_type", f"one of {DEVICE_TYPES}", device_type)
        piece = cls(
            source=fields.digest("source"),
            code=fields.opt_item("code", CompiledProgram.parse),
            device_type=device_type,
            inputs=fields.list_("inputs", InputFacts.parse, max_items=MAX_INPUTS),
            outputs=fields.int_("outputs", high=MAX_INPUTS),
            mutated=fields.list_("mutated", strict.as_int, max_items=MAX_INPUTS),
            realigned=fields.list_("realigned", strict.as_int, max_items=MAX_INPUTS),
            aligned=fields.list_("aligned", strict.as_int, max_items=MAX_INPUTS),
            kernels=fields.list_("kernels", parse_kernel, max_items=MAX_KERNELS),
            externs=fields.list_("externs", as_identifier),
            fallbacks=fields.list_("fallbacks", strict.as_text),
            ops=fields.list_("ops", strict.as_text),
            constants=fields.opt_digest("constants"),
            tuned=fields.bool_("tuned"),
            passes=fields.list_("passes", PassCount.parse, max_items=MAX_PASSES),
            requirements=fields.list_("requirements", Requirement.parse, max_items=1000),
        )
        fields.done()
        piece._check(where)
        return piece

    def _check(self, where: str) -> None:
        for name in ("mutated", "realigned", "aligned"):
            for index in getattr(self, name):
                if not 0 <= index < len(self.inputs) or self.inputs[index].kind != "tensor":
                    raise CorruptEntry(f"expected a tensor input in {name!r}, got index {index}", where=where)
        names = [kernel.name for kernel in self.kernels]
        if len(set(names)) != len(names):
            raise CorruptEntry("expected one kernel a name, got a duplicate", where=where)
        expected = CppKernel if self.device_type == "cpu" else TritonKernel
        for kernel in self.kernels:
            if not isinstance(kernel, (expected, CppKernel)):
                raise CorruptEntry(f"kernel {kernel.name!r} does not run on {self.device_type}", where=where)


def _dim(value: object, where: str) -> Dim:
    return strict.as_text(value, where) if isinstance(value, str) else strict.as_int(value, where)
