"""Artifact: the table of external kernels that a sealed program may call by name.

Inductor's ``extern_kernels.NAME`` is, in 2.11 and 2.13, a public torch function or one of a few Python
functions of Inductor's own (``kernel/mm.py``, ``kernel/conv.py``, ``kernel/mm_plus_mm.py``); those are
written out here, so that serving imports no compiler. A name that is not here is refused when sealing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch


def bias_addmm(
    inp: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> torch.Tensor:
    """Add a bias that was expanded over rows, passing its one row so that cuBLAS fuses it."""
    if (inp.stride(0) == 0 and inp.size(0) != 0) or inp.size(0) == 1:
        return torch.addmm(inp[0], mat1, mat2, out=out, alpha=alpha, beta=beta)
    return torch.addmm(inp, mat1, mat2, out=out, alpha=alpha, beta=beta)


def conv1x1_via_mm(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Compute a 1x1 convolution as a matrix product over channels-last views."""
    w = torch.squeeze(torch.squeeze(w, -1), -1)
    return torch.matmul(x.permute(0, 2, 3, 1), w.permute(1, 0), out=out.permute(0, 2, 3, 1))


def _mm_plus_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.inductor._mm_plus_mm(*args, **kwargs)
    return result


# name in Inductor's wrapper -> the attribute of torch that it is; None: the function of that name above
_TORCH: Final[Mapping[str, str]] = {
    "mm": "mm",
    "mm_dtype": "mm",
    "addmm": "addmm",
    "bmm": "bmm",
    "bmm_dtype": "bmm",
    "baddbmm": "baddbmm",
    "convolution": "convolution",
    "_int_mm": "_int_mm",
    "_scaled_mm": "_scaled_mm",
    "_grouped_mm": "_grouped_mm",
    "_scaled_grouped_mm": "_scaled_grouped_mm",
    "_sparse_semi_structured_mm": "_sparse_semi_structured_mm",
    "_weight_int8pack_mm": "_weight_int8pack_mm",
}
_OWN: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "bias_addmm": bias_addmm,
    "conv1x1_via_mm": conv1x1_via_mm,
    "_mm_plus_mm": _mm_plus_mm,
}

EXTERNS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {name: getattr(torch, attribute) for name, attribute in _TORCH.items() if hasattr(torch, attribute)}
    | dict(_OWN)
)
