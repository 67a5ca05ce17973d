"""Artifact: what Inductor makes of the fused FP8 operators: on CUDA their Triton kernels, as a user's kernels.

So a piece holds the kernel itself, tuned, sealed and launched as Inductor's own are, and a serving host
imports neither Triton nor the operators. On a CPU, and for rows too wide for one program, the operator
stays a call. Run on torch 2.11.0 and 2.13.0. Private names used: ``_inductor.lowering.register_lowering``,
``lowerings``, ``fallback_handler`` and ``empty_strided``; ``ir.ExternKernel.realize_input`` and
``require_contiguous``; ``triton_kernel_wrapper_mutation`` and ``kernel_side_table``, which every
``torch.compile`` of a user's kernel goes through.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pwcc.compile.ops.fused import OPERATORS
from pwcc.compile.ops.fused.formulas import FP8
from pwcc.compile.ops.fused.tiles import MAX_WIDTH, Tile, pointwise_tile, row_tile


@functools.cache
def install() -> None:
    """Give Inductor the lowerings of ``pwcc``'s fused operators, once a process; imports Inductor.

    They are of our own operators only: nothing else that the process compiles changes.
    """
    from torch._inductor.lowering import register_lowering

    for name in OPERATORS:
        overload = getattr(torch.ops.pwcc, name).default
        register_lowering(overload, type_promotion_kind=None)(functools.partial(_lower, overload))


def install_for(graph: fx.Graph) -> None:
    """Install the lowerings if a graph calls one of the operators: a model may do so itself."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    if any(str(target).removesuffix(".default").removeprefix("pwcc.") in OPERATORS for target in targets):
        install()


def _lower(overload: Any, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in overload._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    first = given["x" if "x" in given else "gate"]
    width = first.get_size()[-1]
    plain = isinstance(width, int) or getattr(width, "is_Integer", False)
    row = "per_token" in overload._opname or "norm" in overload._opname
    if first.get_device().type != "cuda" or not plain or (row and int(width) > MAX_WIDTH):
        from torch._inductor.lowering import fallback_handler

        call: Any = fallback_handler
        return call(overload, add_to_fallback_set=False)(*args, **kwargs)
    return (_norm if "x" in given else _gate)(given, int(width))


def _norm(given: Mapping[str, Any], hidden: int) -> Any:
    x, residual, scale = given["x"], given.get("residual"), given.get("scale")
    rows, stride = _rows(x)
    beside, beside_stride = (rows, stride) if residual is None else _rows(residual)
    out = _empty(x, x.get_size(), FP8)
    scales = None if scale is not None else _empty(x, [*x.get_size()[:-1], 1], torch.float32)
    total = None if residual is None else _empty(x, x.get_size(), x.get_dtype())
    tile = row_tile(hidden)
    _launch(
        "rms_norm_fp8",
        x,
        tile,
        {
            "x": rows,
            "residual": beside,
            "weight": _vector(given["weight"]),
            "scale": scales if scale is None else _vector(scale),
            "out": out,
            "scales": out if scales is None else scales,
            "residual_out": out if total is None else total,
            "x_stride": stride,
            "residual_stride": beside_stride,
        },
        {
            "HIDDEN": hidden,
            "BLOCK": tile.block,
            "EPS": float(given["eps"]),
            "FLOOR": float(given.get("floor", 0.0)),
            "ADD": residual is not None,
            "DYNAMIC": scale is None,
        },
    )
    made = [tensor for tensor in (out, scales, total) if tensor is not None]
    return made[0] if len(made) == 1 else tuple(made)


def _gate(given: Mapping[str, Any], width: int) -> Any:
    gate, scale = given["gate"], given.get("scale")
    one, one_stride = _rows(gate)
    other, other_stride = _rows(given["up"])
    out = _empty(gate, gate.get_size(), FP8)
    scales = None if scale is not None else _empty(gate, [*gate.get_size()[:-1], 1], torch.float32)
    tile = row_tile(width) if scale is None else pointwise_tile(width)
    _launch(
        "silu_and_mul_fp8",
        gate,
        tile,
        {
            "gate": one,
            "up": other,
            "scale": scales if scale is None else _vector(scale),
            "out": out,
            "scales": out if scales is None else scales,
            "gate_stride": one_stride,
            "up_stride": other_stride,
        },
        {
            "WIDTH": width,
            "BLOCK": tile.block,
            "FLOOR": float(given.get("floor", 0.0)),
            "DYNAMIC": scale is None,
        },
    )
    return out if scales is None else (out, scales)


def _rows(tensor: Any) -> tuple[Any, Any]:
    """Return a tensor in memory and the distance of its rows in elements; a copy if it is no plain matrix.

    A slice of columns, as of a projection that makes both halves of a gated layer, is read where it lies.
    """
    from torch._inductor import ir

    size = tensor.get_size()
    if len(size) == 2:
        placed = ir.ExternKernel.realize_input(tensor)
        placed.freeze_layout()
        stride = placed.get_stride()
        if stride[-1] == 1:
            return placed if isinstance(placed, ir.TensorBox) else ir.TensorBox(placed), stride[0]
    return ir.ExternKernel.require_contiguous(tensor), size[-1]


def _vector(tensor: Any) -> Any:
    from torch._inductor import ir

    return ir.ExternKernel.require_contiguous(tensor)


def _empty(like: Any, size: Sequence[Any], dtype: torch.dtype) -> Any:
    from torch._inductor.lowering import empty_strided

    return empty_strided(list(size), None, dtype=dtype, device=like.get_device())


def _launch(
    name: str, first: Any, tile: Tile, arguments: Mapping[str, Any], constants: Mapping[str, object]
) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
    from torch._inductor.lowering import lowerings

    rows: Any = 1
    for size in first.get_size()[:-1]:
        rows = rows * size
    lowerings[triton_kernel_wrapper_mutation](
        kernel_idx=kernel_side_table.add_kernel(_kernel(name, tile.warps)),
        constant_args_idx=kernel_side_table.add_constant_args(dict(constants)),
        grid=[(rows, tile.count, 1)],
        tma_descriptor_metadata={},
        kwargs=dict(arguments),
    )


@functools.cache
def _kernel(name: str, warps: int) -> Any:
    import triton

    from pwcc.compile.ops.fused import kernels

    return triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(getattr(kernels, name))
