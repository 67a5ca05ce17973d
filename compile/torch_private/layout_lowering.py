"""Artifact: ``pwcc::laid_out``, a tensor in the memory order that is asked for, under Inductor.

Inductor keeps to eager's strides of an output by itself, but not where a stride holds an unbacked symbol: it
then chooses freely, also for a ``clone`` with a memory format. Run on torch 2.11.0 and 2.13.0. Private names
used: ``_inductor.lowering.register_lowering``, ``lowering.clone``, ``ir.ExternKernel.require_stride_order``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pwcc.compile.ops.registration import Operator, register


def eager(x: Tensor, order: Sequence[int], own: bool) -> Tensor:
    """Return a copy of ``x`` whose dimensions lie in memory as ``order`` lists them, the slowest first."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(tuple(order)).clone(memory_format=torch.contiguous_format).permute(back)


_LIBRARY = register({"laid_out": Operator("(Tensor x, int[] order, bool own) -> Tensor", eager, eager, eager)})


@functools.cache
def install() -> None:
    """Give Inductor the lowering, once a process; imports Inductor."""
    from torch._inductor.lowering import register_lowering

    overload: Any = torch.ops.pwcc.laid_out.default
    register_lowering(overload, type_promotion_kind=None)(_lower)


def _lower(x: Any, order: Sequence[int], own: bool) -> Any:
    from torch._inductor import ir, lowering

    if own:
        clone: Any = lowering.clone
        x = clone(x)
    ranks = {dim: len(order) - 1 - place for place, dim in enumerate(order)}  # 0 is the fastest
    return ir.ExternKernel.require_stride_order(x, [ranks[dim] for dim in range(len(order))])
