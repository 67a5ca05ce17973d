"""Artifact: the numerics check of a loaded entry: every sealed piece, and the whole model against eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.compile.call import eager_region
from pwcc.compile.decode_check import decode_errors
from pwcc.compile.input_values import Call
from pwcc.compile.numerics import NumericsRecord, recheck
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.runtime import program_code
from pwcc.compile.runtime.decode import DecodeKernels
from pwcc.compile.runtime.samples import relative_error

if TYPE_CHECKING:
    from pwcc.compile.compiled_model import CompiledModel

# The whole model is compared in its own dtype: both sides round, each layer adds; a wrong piece is off by O(1).
MODEL_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2, "float64": 1e-9}


@dataclass(frozen=True)
class CheckRow:
    """One comparison: a piece variant against float32 eager, or the whole model against eager."""

    what: str
    size: int
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Within tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class CheckReport:
    """All comparisons. Errors are relative, ||got - reference|| / ||reference||."""

    rows: tuple[CheckRow, ...]

    @property
    def ok(self) -> bool:
        """Every row is within its tolerance, and there is at least one."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def worst(self) -> CheckRow:
        """The row that is closest to, or furthest beyond, its tolerance."""
        return max(self.rows, key=lambda row: row.error / row.tolerance if row.tolerance else row.error)

    @property
    def max_error(self) -> float:
        """The largest error of any row."""
        return max((row.error for row in self.rows), default=0.0)

    @property
    def tolerance(self) -> float:
        """The tolerance of the worst row."""
        return self.worst.tolerance

    def to_json(self) -> dict[str, strict.Json]:
        """Return the report for ``--json``."""
        rows: list[strict.Json] = [
            {"what": r.what, "size": r.size, "error": r.error, "tolerance": r.tolerance, "ok": r.ok}
            for r in self.rows
        ]
        return {"ok": self.ok, "max_error": self.max_error, "rows": rows}


def check(
    compiled: CompiledModel, model: nn.Module, inputs_for: Callable[[int], Sequence[torch.Tensor] | Call] | None
) -> CheckReport:
    """Re-run the recorded checks; see :meth:`CompiledModel.check`."""
    _compare_programs(compiled)
    rows = _piece_rows(compiled) + _decode_rows(compiled)
    if inputs_for is not None:
        rows += _model_rows(compiled, model, inputs_for)
    return CheckReport(tuple(rows))


def _compare_programs(compiled: CompiledModel) -> None:
    """Prove that the byte code in use is what the readable program of each piece compiles to."""
    records = (p.record for program in compiled.programs for v in program.variants for p in v.pieces)
    for record in records:
        blob, is_code = record.program(program_code.MAGIC)
        text = compiled.read_blob(record.source)
        if is_code and program_code.encode(text) != compiled.read_blob(blob):
            raise CorruptEntry(
                "expected byte code that the piece's program compiles to, got another",
                where=f"piece {record.source[:12]}",
                hint="do not use this entry: remove it and compile again",
            )


def _piece_rows(compiled: CompiledModel) -> list[CheckRow]:
    digest = compiled.manifest.numerics
    if digest is None:
        raise CorruptEntry("the entry holds no numerics record")
    fields = strict.Fields(strict.loads(compiled.read_blob(digest), where="numerics"), "numerics")
    programs = fields.list_("programs", strict.Fields)
    fields.done()
    rows: list[CheckRow] = []
    for program, recorded in zip(compiled.programs, programs, strict=True):
        graphs = [
            PieceGraph.from_bytes(compiled.read_blob(digest), where="piece graph")
            for digest in recorded.list_("graphs", strict.as_digest)
        ]
        records = recorded.list_("variants", _parse_records)
        for variant, numbers in zip(program.variants, records, strict=True):
            kind = "static" if variant.static else "dynamic"
            for index, (piece, graph, sizes) in enumerate(zip(variant.pieces, graphs, numbers, strict=True)):
                call: Any = piece.call
                for record in sizes:
                    error = recheck(graph, record, compiled.device, call)
                    rows.append(CheckRow(f"piece {index} {kind}", record.size, error, record.tolerance))
    return rows


def _decode_rows(compiled: CompiledModel) -> list[CheckRow]:
    kernel = compiled.attention_kernel
    if not isinstance(kernel, DecodeKernels):
        return []
    return [
        CheckRow(f"decode attention {form[0]} {form[1]}/{form[2]}x{form[3]}", 1, error, tolerance)
        for form, error, tolerance in decode_errors(kernel, compiled.device)
    ]


def _parse_records(value: object, where: str) -> tuple[tuple[NumericsRecord, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(item, list) for item in value):
        raise CorruptEntry("expected lists of numerics records", where=where)
    return tuple(tuple(NumericsRecord.parse(record, where) for record in item) for item in value)


def _model_rows(
    compiled: CompiledModel, model: nn.Module, inputs_for: Callable[[int], Sequence[torch.Tensor] | Call]
) -> list[CheckRow]:
    low, high = compiled.manifest.min_tokens, compiled.manifest.max_tokens
    asked = {*compiled.sizes, min(high, low + 2), min(high, 17)}
    asked.update(first for first, _ in compiled.manifest.ranges)
    sizes = [size for size in sorted(asked) if compiled.manifest.serves(size)]
    tolerance = MODEL_TOLERANCE.get(compiled.manifest.model.dtype, 1e-2)
    rows: list[CheckRow] = []
    for size in sizes:
        given = inputs_for(size)
        call = given if isinstance(given, Call) else Call(tuple(given), {})
        with torch.no_grad(), eager_region():
            wanted = _flatten(model(*call.args, **call.kwargs))
        got = _flatten(compiled(*call.args, **call.kwargs))
        rows.append(CheckRow("model against eager", size, relative_error(got, wanted), tolerance))
    return rows


def _flatten(value: object) -> list[object]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flatten(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flatten(item)]
    if dataclasses.is_dataclass(value):
        return [leaf for field in dataclasses.fields(value) for leaf in _flatten(getattr(value, field.name))]
    return [value]
