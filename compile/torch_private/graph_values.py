"""The seam to fake values on graph nodes: what is known of two of them for every size, and which share memory.

Run on torch 2.13.0+cpu. Private name used: ``untyped_storage()._cdata``, the identity of a fake tensor's
memory, as Inductor's own passes use it. Nothing here adds a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq


def tensor_of(node: object) -> torch.Tensor | None:
    """Return the fake tensor of a node, or None where it has another value or none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def memory_of(node: object) -> int | None:
    """Return a number that nodes share exactly if their tensors share memory; None without a tensor."""
    value = tensor_of(node)
    return None if value is None else int(value.untyped_storage()._cdata)


def same_sizes(one: Any, other: Any) -> bool:
    """Tell whether two sequences of sizes are equal for every value of their symbols."""
    return len(one) == len(other) and all(same_size(a, b) for a, b in zip(one, other, strict=True))


def same_size(one: Any, other: Any) -> bool:
    """Tell whether two sizes are equal for every value of their symbols."""
    return bool(statically_known_true(sym_eq(one, other)))


def same_tensor_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether shape, strides, dtype, device and the conjugate and negative bits are the same."""
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and one.layout == other.layout == torch.strided
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
        and same_sizes(one.shape, other.shape)
        and same_sizes(one.stride(), other.stride())
    )


def is_row_major(value: torch.Tensor) -> bool:
    """Tell whether a tensor is known to be contiguous, so that any reshape of it is a view."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected = expected * size
    return value.layout == torch.strided


def value_of(target: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return what an operation gives for the fake values of nodes; the first argument is a tensor's node."""
    values: Any = fx.map_arg(tuple(args), lambda node: node.meta["val"])
    with values[0].fake_mode:
        return target(*values)
