"""Artifact: the numerics record of a sealed piece: how far from float32 eager it may be, and why.

``compiled`` is the error of what Inductor compiled, run by Inductor itself; a sealed piece, here and on
every later host, may be at most twice as far from float32 eager, or four units of float32 where that is
more. ``eager`` is the error of the same operations in the model's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pwcc.cache import strict
from pwcc.cache.errors import NumericsError
from pwcc.compile.piece_graph import PieceGraph, interpret
from pwcc.compile.runtime.samples import copies, relative_error, sample_inputs, upcast

SEED = 20250711
# Compiled code rounds in other places than eager does; beyond this factor it computes something else.
SANITY_FACTOR = 16.0
# Another number of threads sums in another order: a piece that is exact here may be units off on its host.
THREAD_UNITS = 4.0
MAX_SIZE = 2**31 - 1  # tokens; a check allocates inputs of the recorded size


@dataclass(frozen=True)
class NumericsRecord:
    """Relative Frobenius errors against float32 eager, for seeded inputs of one size."""

    size: int
    seed: int
    eager: float
    compiled: float
    sealed: float
    tolerance: float

    def to_json(self) -> dict[str, strict.Json]:
        """Return the JSON form."""
        return {
            "size": self.size,
            "seed": self.seed,
            "eager": self.eager,
            "compiled": self.compiled,
            "sealed": self.sealed,
            "tolerance": self.tolerance,
        }

    @classmethod
    def parse(cls, value: object, where: str) -> NumericsRecord:
        """Parse what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = strict.Fields(value, where)
        record = cls(
            size=fields.int_("size", high=MAX_SIZE),
            seed=fields.int_("seed"),
            eager=_error(fields, "eager"),
            compiled=_error(fields, "compiled"),
            sealed=_error(fields, "sealed"),
            tolerance=_error(fields, "tolerance"),
        )
        fields.done()
        return record


def _error(fields: strict.Fields, name: str) -> float:
    value = fields.float_(name)
    if not (math.isfinite(value) and value >= 0):
        fields.fail(name, "a finite number from 0 on", value)
    return value


Run = Callable[[list[object]], Sequence[object]]


def reference(graph: PieceGraph, inputs: Sequence[object], device: torch.device) -> list[object]:
    """Run the piece in float32 eager; outputs, then the (possibly updated) tensor inputs."""
    wide = upcast(inputs)
    outputs = interpret(graph, wide, device=device, upcast=True)
    return [*_written(graph, outputs), *_tensors(wide)]


def run_and_collect(graph: PieceGraph, run: Run, inputs: Sequence[object]) -> list[object]:
    """Run over copies of the inputs; outputs, then the (possibly updated) tensor inputs."""
    mine = copies(inputs)
    outputs = run(list(mine))
    return [*_written(graph, outputs), *_tensors(mine)]


def _written(graph: PieceGraph, outputs: Sequence[object]) -> list[object]:
    return [outputs[position] for position in graph.written_outputs]


def _tensors(items: Sequence[object]) -> list[torch.Tensor]:
    return [item for item in items if isinstance(item, torch.Tensor)]


def measure(
    graph: PieceGraph, size: int, device: torch.device, *, compiled: Run, sealed: Run
) -> NumericsRecord:
    """Compare Inductor's own callable and the sealed piece with float32 eager.

    Raises:
        NumericsError: the sealed piece is further off than twice Inductor's error, or Inductor's error
            is out of proportion to eager's in the same dtype.
    """
    with torch.no_grad():
        inputs = sample_inputs(graph, size, device, seed=SEED)
        wanted = reference(graph, inputs, device)
        plain = copies(inputs)
        outputs = interpret(graph, plain, device=device)
        eager = relative_error([*_written(graph, outputs), *_tensors(plain)], wanted)
        ours = relative_error(run_and_collect(graph, compiled, inputs), wanted)
        tolerance = max(2 * ours, THREAD_UNITS * _unit(wanted))
        theirs = relative_error(run_and_collect(graph, sealed, inputs), wanted)
    if not ours <= SANITY_FACTOR * max(eager, _unit(wanted)):
        raise NumericsError(
            f"compiled code is {ours:.3g} off float32 eager where eager itself is {eager:.3g} (size {size})"
        )
    record = NumericsRecord(size, SEED, eager, ours, theirs, tolerance)
    require(record, theirs)
    return record


def recheck(graph: PieceGraph, record: NumericsRecord, device: torch.device, sealed: Run) -> float:
    """Run the recorded check again on this host and return the error (compare with ``record.tolerance``)."""
    with torch.no_grad():
        inputs = sample_inputs(graph, record.size, device, seed=record.seed)
        return relative_error(run_and_collect(graph, sealed, inputs), reference(graph, inputs, device))


def require(record: NumericsRecord, error: float) -> None:
    """Raise NumericsError unless ``error`` is within the record's tolerance."""
    if not error <= record.tolerance:
        raise NumericsError(
            f"sealed piece: expected an error of at most {record.tolerance:.3g} against float32 eager, "
            f"got {error:.3g} (size {record.size})"
        )


def _unit(values: Sequence[object]) -> float:
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)
