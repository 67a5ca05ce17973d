"""The native check of tensors: are these exactly like those, in one call; and what no check can make usable.

Run on torch 2.13.0+cpu. Private names used: ``torch._C._dynamo.guards.TensorGuards``
(compares type, dispatch keys, dtype, device, requires_grad, sizes and strides; without it every call takes
the slow path), ``Tensor._is_zerotensor``, ``torch._C._functorch.is_functorch_wrapped_tensor``. It crashes
without lists of sizes and strides, so it is made here only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

TensorCheck = Callable[..., bool]

_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_CHECK = getattr(_GUARDS, "TensorGuards", None)
_WRAPPED = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)


def tensor_check(tensors: Sequence[torch.Tensor]) -> TensorCheck | None:
    """Return a function that tells whether as many objects are tensors of the same form as these.

    None where torch has no such check. The tensors themselves are not kept. At least one is needed; all are
    strided.
    """
    if _CHECK is None:
        return None
    try:
        guards = _CHECK(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
    except (TypeError, ValueError, RuntimeError):
        return None
    check: TensorCheck = guards.check
    return check


def unreadable(tensor: torch.Tensor) -> str | None:
    """Say what keeps compiled code from reading a plain tensor's memory by its strides; None: nothing does."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory"
    if _WRAPPED is not None and _WRAPPED(tensor):
        return "a tensor inside a torch.func transform"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazily conjugated or negated view"
    return None
