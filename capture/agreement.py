"""Graph: whether replayed graphs say what the compiled variants say, which padding may make untrue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pwcc.cache.errors import CaptureError

if TYPE_CHECKING:
    from pwcc.capture.runner import GraphRunner

WIDE_TOLERANCE = 1e-4  # float32: another variant sums in another order
NARROW_TOLERANCE = 3e-2  # bfloat16 has 8 bits of mantissa: a few roundings per layer


def check(runner: GraphRunner, batches: Iterable[Sequence[Any]], *, tolerance: float | None = None) -> float:
    """Run batches with and without graphs, all of them twice in turn, and return the largest error.

    A batch is what the runner is called with; interleave sizes to find state that leaks from one to another.
    The error is the largest difference over the largest magnitude, at least 1. ``tolerance`` defaults to 1e-4
    for float32 and wider, 3e-2 for narrower outputs. Keys and values are written as the batches say.
    Only padded batches show rows, or sums over tokens (``y.sum(0)``), that depend on padding: their shape is
    right.

    Raises:
        CaptureError: an error beyond tolerance, as for a model whose rows depend on padding rows.
    """
    worst = 0.0
    listed = [tuple(batch) for batch in batches]
    for batch in (*listed, *listed):
        got = runner(*batch)
        used = runner.last
        error, allowed = _compare(got, runner.without_graphs(*batch))
        limit = allowed if tolerance is None else tolerance
        worst = max(worst, error)
        if not error <= limit:
            raise CaptureError(
                f"graphs disagree with the compiled variants: error {error:.3g}, allowed {limit:.3g} ({used})",
                hint="rows of this model may depend on padding rows: use mode NONE, or pad nothing",
            )
    return worst


def _compare(got: object, wanted: object) -> tuple[float, float]:
    error, allowed = 0.0, WIDE_TOLERANCE
    for one, other in zip(_leaves(got), _leaves(wanted), strict=True):
        if one.shape != other.shape:
            raise CaptureError(
                f"graphs return shape {tuple(one.shape)}, the compiled variants {tuple(other.shape)}"
            )
        if not one.numel():
            continue
        if one.is_floating_point() and one.dtype.itemsize < torch.float32.itemsize:
            allowed = NARROW_TOLERANCE
        a, b = one.double(), other.double()
        found = ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
        error = found if math.isnan(found) else max(error, found)  # a NaN must not be lost in a maximum
    return error, allowed


def _leaves(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    if is_dataclass(value):
        return [leaf for field in fields(value) for leaf in _leaves(getattr(value, field.name))]
    return []
