"""The seam to Triton kernels that a model's own code launches: found in a trace, called again from a piece.

Run on torch 2.11.0+cu130 with Triton 3.6, 2.13.0+cpu with 3.9 and 2.14.1+cu130 with 3.8: traced, and on the
first two compiled to cubins; nothing was launched. Private names used, and what breaks if they
change: the higher-order operator ``triton_kernel_wrapper_mutation`` with its five arguments, its
``kernel_side_table`` (``get_kernel``, ``get_constant_args``, ``add_kernel``, ``add_constant_args``) and
``get_mutated_tensors`` (without it every tensor argument counts as written); of Triton ``JITFunction.fn`` and
``.cache_key`` (a digest of a kernel's source and of the functions that it calls), ``Autotuner.fn`` and
``.configs``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from pwcc.cache import strict
from pwcc.cache.ids import FactorDigest, factor_digest

_OPERATOR = "triton_kernel_wrapper_mutation"


def is_kernel(value: object) -> bool:
    """Tell whether a value is a Triton kernel, maybe under ``triton.autotune``; imports no Triton."""
    modules = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return "triton" in modules and hasattr(value, "fn") and hasattr(value, "arg_names")


def jitted(kernel: Any) -> Any:
    """Return the ``triton.jit`` function under ``autotune`` and ``heuristics``."""
    while is_kernel(getattr(kernel, "fn", None)):
        kernel = kernel.fn
    return kernel


def source_digest(kernel: Any) -> FactorDigest:
    """Return the digest of a kernel's source, of the functions it calls, and of the configurations it tries."""
    configs: list[strict.Json] = []
    outer = kernel
    while is_kernel(getattr(outer, "fn", None)):
        configs.append([type(outer).__name__, *map(str, getattr(outer, "configs", ()))])
        outer = outer.fn
    return factor_digest(strict.canonical({"source": str(outer.cache_key), "around": configs}))


def codes(kernel: Any) -> Iterator[CodeType]:
    """Yield the code of a kernel and of the kernels that it calls, each once."""
    seen: dict[CodeType, None] = {}
    waiting = [kernel]
    while waiting:
        function = getattr(jitted(waiting.pop()), "fn", None)
        if isinstance(function, FunctionType) and function.__code__ not in seen:
            seen[function.__code__] = None
            waiting += kernels_named_by(function)
    yield from seen


def kernels_named_by(function: FunctionType) -> list[object]:
    """Return the Triton kernels among the globals and closed-over values that a function names."""
    held = [function.__globals__.get(name) for name in _names(function.__code__)]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return [value for value in held if is_kernel(value)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class Launch:
    """One launch in a traced graph: the kernel and what it is called with, read out of torch's side table.

    ``grid`` holds one tuple per configuration, or one for all; ``written`` names the tensors that the kernel
    writes. Read it before Dynamo is reset, which empties the table.
    """

    def __init__(self, node: fx.Node) -> None:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        given: dict[str, Any] = dict(node.kwargs)
        self.kernel: Any = kernel_side_table.get_kernel(given["kernel_idx"])
        self.constants: dict[str, Any] = dict(kernel_side_table.get_constant_args(given["constant_args_idx"]))
        self.grid: Sequence[Any] = given["grid"]
        self.arguments: dict[str, Any] = dict(given["kwargs"])
        self.takes_descriptors = bool(given["tma_descriptor_metadata"])
        self.written = _written(given, self.arguments)


def launches(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a traced graph that launch a Triton kernel."""
    return [node for node in graph.nodes if getattr(node.target, "__name__", "") == _OPERATOR]


def _written(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors

    values = {
        name: value.meta.get("example_value") if isinstance(value, fx.Node) else value
        for name, value in arguments.items()
    }
    tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    loud = logging.getLogger("torch._higher_order_ops.triton_kernel_wrap")
    before, loud.disabled = loud.disabled, True
    try:
        found = get_mutated_tensors(given["kernel_idx"], given["constant_args_idx"], values, {})
    except Exception:  # noqa: BLE001 - it compiles the kernel to read it, which may fail in any way
        return tensors
    finally:
        loud.disabled = before
    return [name for name in tensors if name in found]


def call(
    kernel: Any, constants: Mapping[str, object], grid: Sequence[Any], arguments: Mapping[str, object]
) -> None:
    """Launch a kernel: on real tensors now, under a trace as the operator that Inductor compiles."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    triton_kernel_wrapper_mutation(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        constant_args_idx=kernel_side_table.add_constant_args(dict(constants)),
        grid=list(grid),
        tma_descriptor_metadata={},
        kwargs=dict(arguments),
    )
