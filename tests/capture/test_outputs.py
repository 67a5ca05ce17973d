"""Outputs are cut along the one dimension that is the token count; what cannot be cut is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.cache.errors import CaptureError
from pwcc.capture.modes import CaptureMode
from pwcc.capture.outputs import OutputSlices
from pwcc.compile.ops.forward_context import RunMode
from tests.capture.toy import World, compiled_of, first, last, middle


def observed(make: Any, *sizes: int) -> OutputSlices:
    slices = OutputSlices()
    for size in sizes:
        slices.observe(size, (make(torch.arange(size * 3.0).reshape(size, 3)),))
    return slices


@pytest.mark.parametrize(
    ("make", "dim"),
    [
        (lambda y: y, 0),
        (lambda y: y.t(), 1),
        (lambda y: y.sum(0), None),
        (lambda y: y[-1:], None),
        (lambda y: y[None], 1),
        (lambda y: 3, None),
    ],
)
def test_the_dimension_that_follows(make: Any, dim: int | None) -> None:
    assert observed(make, 8, 4, 3).dims == (dim,)  # with 3 tokens two dimensions are the size


@pytest.mark.parametrize(
    "make",
    [
        lambda y: torch.cat([y, y]),
        lambda y: y[:-1],
        lambda y: y @ y.t(),
        lambda y: y[: len(y) // 2],
        lambda y: y if len(y) > 5 else y[None],
        len,
    ],
)
def test_what_cannot_be_cut_is_refused(make: Any) -> None:
    with pytest.raises(CaptureError, match=r"output 0 is .* at 8 tokens and .* at 4, so that"):
        observed(make, 8, 4)


def test_one_size_alone_is_taken_at_its_word() -> None:
    assert observed(lambda y: y, 1).dims == (0,)


def doubling(args: list[Any]) -> tuple[Tensor, ...]:
    (logits,) = last(args)
    return (torch.cat([logits, logits]),)


@pytest.mark.parametrize("sizes", [(8,), (4, 8)])
def test_the_plan_decides_what_a_program_that_cannot_be_padded_does(cpu: World, sizes: tuple[int, ...]) -> None:
    cpu.compiled = compiled_of(cpu.model, cpu.device, pieces=(first, middle, doubling))
    batch = cpu.prompts(3)
    with pytest.raises(CaptureError, match="output 0 is"):
        cpu.runner(CaptureMode.FULL, plan={"sizes": sizes, "on_failure": "raise"}).capture()
    runner = cpu.runner(CaptureMode.FULL, plan={"sizes": sizes})
    report = runner.capture()
    assert len(report.failed) == len(report.rows)
    got = runner(*batch)
    assert got.shape[0] == 6
    assert torch.equal(got, runner.without_graphs(*batch))
    assert runner.last is not None
    assert runner.last.mode is RunMode.NONE
