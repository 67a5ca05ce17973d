"""Serve the Artifact noun: ``pwcc::rms_norm``, ``fused_add_rms_norm``, ``silu_and_mul``; modules on them.

For models of one's own: the policy of ``custom_ops.py`` decides at compile time whether a piece holds their
kernels or their plain forms, without a change to the model. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pwcc.compile.ops import registration
from pwcc.compile.ops.custom_ops import CustomOp, register
from pwcc.compile.ops.fused.tiles import MAX_WIDTH, pointwise_tile, row_tile

SCHEMAS: Final = {
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "fused_add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "silu_and_mul": "(Tensor x) -> Tensor",
}

# --- plain forms ------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows ``[..., hidden]`` in float32, round to ``x``'s dtype, weight them."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised sum, and the sum itself in ``x``'s dtype."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """Split ``[..., 2 * width]`` into gate and up; return ``silu(gate) * up``, ``[..., width]``."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


# --- kernels ----------------------------------------------------------------------------------------

Launcher = Callable[[Any], Any]


def direct(kernel: Any) -> Any:
    """Launch a kernel at once."""
    return kernel


def traced(kernel: Any) -> Any:
    """Let a trace record the launch."""
    return torch.library.wrap_triton(kernel)


def _norm(
    launcher: Launcher, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from pwcc.compile.ops import layer_kernels

    hidden = x.shape[-1]
    rows = _rows(x)
    beside = rows if residual is None else _rows(residual)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    tile = row_tile(hidden)
    launcher(layer_kernels.rms_norm)[(rows.shape[0],)](
        rows,
        beside,
        weight.contiguous(),
        out,
        total,
        rows.stride(0),
        beside.stride(0),
        HIDDEN=hidden,
        BLOCK=tile.block,
        EPS=eps,
        ADD=residual is not None,
        num_warps=tile.warps,
    )
    return out.view(x.shape), total.view(x.shape)


def _gate(launcher: Launcher, x: Tensor) -> Tensor:
    from pwcc.compile.ops import layer_kernels

    width = x.shape[-1] // 2
    rows = _rows(x)
    out = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    tile = pointwise_tile(width)
    launcher(layer_kernels.silu_and_mul)[(rows.shape[0], tile.count)](
        rows, out, rows.stride(0), WIDTH=width, BLOCK=tile.block, num_warps=tile.warps
    )
    return out.view(*x.shape[:-1], width)


def _rows(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def kernel_forms(launcher: Launcher) -> dict[str, Callable[..., Any]]:
    """Return each operator's kernel form; rows that no program can hold keep the plain form."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[-1] > MAX_WIDTH:
            return rms_norm(x, weight, eps)
        return _norm(launcher, x, None, weight, eps)[0]

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.shape[-1] > MAX_WIDTH:
            return fused_add_rms_norm(x, residual, weight, eps)
        return _norm(launcher, x, residual, weight, eps)

    def gate(x: Tensor) -> Tensor:
        return _gate(launcher, x)

    return {"rms_norm": norm, "fused_add_rms_norm": add_norm, "silu_and_mul": gate}


# --- the operators ----------------------------------------------------------------------------------

_PLAIN: Final[dict[str, Callable[..., Any]]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
}


def _eager(name: str) -> Callable[..., Any]:
    """Return what runs on CUDA without a compiler: the kernel, or the plain form where there are no rows."""
    kernel, plain = kernel_forms(direct)[name], _PLAIN[name]

    def run(x: Tensor, *rest: Any) -> Any:
        return (kernel if x.numel() else plain)(x, *rest)

    return run


_library = globals().get("_library") or registration.register(
    {
        name: registration.Operator(schema, _PLAIN[name], _eager(name), _PLAIN[name])
        for name, schema in SCHEMAS.items()
    }
)
for _name in SCHEMAS:
    register(CustomOp(_name, _PLAIN[_name], {"cuda": kernel_forms(traced)[_name]}))


class RMSNorm(nn.Module):
    """Root-mean-square norm with an optional residual addition before it."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normed sum and the sum itself, both ``[..., hidden]`` in ``x``'s dtype."""
        if residual is None:
            return torch.ops.pwcc.rms_norm(x, self.weight, self.eps), x
        normed, total = torch.ops.pwcc.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return normed, total


class SiluAndMul(nn.Module):
    """SwiGLU's activation over a fused projection."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., 2 * width]`` to ``[..., width]``."""
        gated: Tensor = torch.ops.pwcc.silu_and_mul(x)
        return gated
