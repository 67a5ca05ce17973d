"""The numerics record: what is compared with what, and what is too far off."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.cache.errors import CorruptEntry, NumericsError
from pwcc.compile.numerics import (
    SEED,
    NumericsRecord,
    Run,
    measure,
    recheck,
    reference,
    require,
    run_and_collect,
)
from pwcc.compile.piece_graph import PieceGraph, PieceNode, SymbolInput, TensorInput, interpret
from pwcc.compile.runtime.samples import sample_inputs

CPU = torch.device("cpu")


def node(target: str, *args: object, op: str = "call_function") -> PieceNode:
    return PieceNode(op, target, list(args), {"dict": []})


def piece(dtype: str = "float32") -> PieceGraph:
    """A matrix product, an update of its second input in place, and memory that is only allocated."""
    return PieceGraph(
        (
            SymbolInput("s0"),
            TensorInput(dtype, "cpu", ("s0", 64), (64, 1)),
            TensorInput(dtype, "cpu", (64, 64), (64, 1)),
            TensorInput(dtype, "cpu", (64,), (1,)),
        ),
        (
            node("torch.mm", {"v": 1}, {"v": 2}),
            node("mul_", {"v": 3}, 3.0, op="call_method"),
            node("torch.empty_like", {"v": 4}),
        ),
        ({"v": 4}, {"v": 6}),
    )


def eager(graph: PieceGraph) -> Run:
    return lambda inputs: [item for item in interpret(graph, inputs, device=CPU) if isinstance(item, Tensor)]


def off_by(graph: PieceGraph, relative: float) -> Run:
    """Eager, with noise of a relative size on the first output."""

    def run(inputs: list[object]) -> Sequence[Any]:
        first, *rest = interpret(graph, inputs, device=CPU)
        assert isinstance(first, Tensor)
        noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
        return [first + (noise * first.float().norm() * relative / noise.norm()).to(first.dtype), *rest]

    return run


def test_reference_is_float32_and_leaves_the_inputs_alone() -> None:
    graph = piece("bfloat16")
    inputs = sample_inputs(graph, 5, CPU, seed=SEED)
    before = [item.clone() for item in inputs if isinstance(item, Tensor)]
    found = reference(graph, inputs, CPU)
    assert len(found) == 1 + 3  # the output that is written, then every tensor input
    assert {item.dtype for item in found if isinstance(item, Tensor)} == {torch.float32}
    assert isinstance(found[3], Tensor)
    assert torch.equal(found[3], 3 * before[2].float())
    for item, held in zip(inputs[1:], before, strict=True):
        assert isinstance(item, Tensor)
        assert torch.equal(item, held)


def test_collected_inputs_show_what_was_written() -> None:
    graph = piece()
    inputs = sample_inputs(graph, 5, CPU, seed=SEED)
    *_, updated = run_and_collect(graph, eager(graph), inputs)
    assert isinstance(updated, Tensor)
    assert isinstance(inputs[3], Tensor)
    assert torch.equal(updated, 3 * inputs[3])


def test_exact_code_may_be_units_off_under_another_number_of_threads() -> None:
    graph = piece()
    record = measure(graph, 7, CPU, compiled=eager(graph), sealed=eager(graph))
    assert record == NumericsRecord(7, SEED, 0, 0, 0, 4 * torch.finfo(torch.float32).eps)
    assert recheck(graph, record, CPU, eager(graph)) == 0


def test_reduced_precision_is_measured_against_float32() -> None:
    graph = piece("bfloat16")
    record = measure(graph, 7, CPU, compiled=eager(graph), sealed=eager(graph))
    assert 1e-4 < record.eager == record.compiled == record.sealed < 1e-2
    assert record.tolerance == 2 * record.compiled
    require(record, recheck(graph, record, CPU, eager(graph)))


@pytest.mark.parametrize(
    ("relative", "fits"), [(1.5e-3, True), (3e-3, False), (1.0, False), (float("nan"), False)]
)
def test_sealed_code_may_be_twice_as_far_off(relative: float, fits: bool) -> None:
    graph = piece("bfloat16")
    sealed = off_by(graph, relative)
    base = off_by(graph, 1e-3)
    if fits:
        record = measure(graph, 7, CPU, compiled=base, sealed=sealed)
        assert record.sealed <= record.tolerance
        return
    sealed = off_by(graph, relative * 3) if relative == 3e-3 else sealed
    with pytest.raises(NumericsError, match=r"expected an error of at most .* got .* \(size 7\)"):
        measure(graph, 7, CPU, compiled=base, sealed=sealed)


def test_compiled_code_that_computes_something_else() -> None:
    graph = piece()
    wrong = off_by(graph, 0.5)
    with pytest.raises(NumericsError, match="where eager itself is"):
        measure(graph, 7, CPU, compiled=wrong, sealed=wrong)


def skipping_the_update(graph: PieceGraph) -> Run:
    def run(inputs: list[object]) -> Sequence[Any]:
        kept = [item.clone() if isinstance(item, Tensor) else item for item in inputs]
        return interpret(graph, kept, device=CPU)

    return run


def test_a_lost_update_is_seen() -> None:
    graph = piece()
    record = measure(graph, 7, CPU, compiled=eager(graph), sealed=eager(graph))
    error = recheck(graph, record, CPU, skipping_the_update(graph))
    assert error > 0.5
    with pytest.raises(NumericsError):
        require(record, error)


def test_memory_that_is_only_allocated_does_not_count() -> None:
    graph = piece()
    record = measure(graph, 7, CPU, compiled=eager(graph), sealed=eager(graph))

    def other_garbage(inputs: list[object]) -> Sequence[Any]:
        first, second = interpret(graph, inputs, device=CPU)
        assert isinstance(second, Tensor)
        return [first, second.fill_(float("nan"))]

    assert recheck(graph, record, CPU, other_garbage) == 0


RECORD = NumericsRecord(7, SEED, 1e-3, 2e-3, 2e-3, 4e-3)


def test_record_round_trip() -> None:
    value = json.loads(json.dumps(RECORD.to_json()))
    assert NumericsRecord.parse(value, "test") == RECORD


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("tolerance"),
        lambda r: r.update(extra=1),
        lambda r: r.update(size=-1),
        lambda r: r.update(size=True),
        lambda r: r.update(size=2**62),
        lambda r: r.update(seed="1"),
        lambda r: r.update(tolerance="0.1"),
        lambda r: r.update(tolerance=float("inf")),
        lambda r: r.update(compiled=float("nan")),
        lambda r: r.update(tolerance=-1.0),
    ],
)
def test_other_records_are_corrupt(change: Change) -> None:
    value: dict[str, Any] = dict(RECORD.to_json())
    change(value)
    with pytest.raises(CorruptEntry):
        NumericsRecord.parse(value, "test")


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 5e-3])
def test_require(error: float) -> None:
    require(RECORD, 4e-3)
    with pytest.raises(NumericsError):
        require(replace(RECORD), error)
