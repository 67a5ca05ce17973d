"""Artifact: the names that a sealed program may use, by the dotted path that Inductor's wrapper gives them."""

from __future__ import annotations

import math
from typing import Final

import torch

_GUARDS: Final = "torch._C._dynamo.guards."

# path in the wrapper -> name in torch_private/primitives.py, or the operator that it is
PRIMITIVES: Final = {
    _GUARDS + "assert_size_stride": "assert_size_stride",
    _GUARDS + "assert_size_stride_grouped": "assert_size_stride_grouped",
    _GUARDS + "assert_alignment": "assert_alignment",
    _GUARDS + "copy_if_misaligned": "copy_if_misaligned",
    _GUARDS + "_empty_strided_cpu": "empty_strided_cpu",
    _GUARDS + "_empty_strided_cpu_pinned": "empty_strided_cpu_pinned",
    _GUARDS + "_empty_strided_cuda": "empty_strided_cuda",
    _GUARDS + "_reinterpret_tensor": "reinterpret_tensor",
}

# Registered from Python by modules that a serving host does not import (torch._prims and the like).
REFUSED_NAMESPACES: Final = frozenset({"prims", "rngprims", "inductor_prims", "higher_order", "_inductor_test"})

# Methods of tensors, of torch.Size and of the list of arguments that generated code calls.
METHODS: Final = frozenset(
    {
        "__floordiv__",
        "amax",  # these and sum, prod, view, to: the last step of a split reduction over its workspace
        "amin",
        "as_strided",
        "clear",
        "clone",
        "copy_",
        "item",
        "prod",
        "record",  # torch.Event, before the host reads a device-to-host copy
        "size",
        "storage_offset",
        "stride",
        "sum",
        "synchronize",
        "to",
        "view",
        "zero_",
    }
)

BUILTINS: Final = frozenset({"RuntimeError", "abs", "bool", "float", "int", "max", "min", "pow", "round"})

# What sympy's Python printer emits (torch/utils/_sympy/printers.py) besides operators and math.*.
_TORCH_FUNCTIONS: Final = frozenset({"torch.sym_float", "torch._sym_sqrt", "torch.Event"})


def math_function(path: str) -> bool:
    """Tell whether ``path`` is a function or constant of the ``math`` module."""
    module, _, name = path.partition(".")
    return module == "math" and bool(name) and not name.startswith("_") and hasattr(math, name)


def is_torch_value(path: str) -> bool:
    """Tell whether ``path`` is a dtype, layout or memory format of torch, or a scalar function it prints."""
    if path in _TORCH_FUNCTIONS:
        return True
    root, _, name = path.partition(".")
    value = getattr(torch, name, None) if root == "torch" and name.isidentifier() else None
    return isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
