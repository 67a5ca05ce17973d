"""Artifact: the tensors that a live model holds, and binding a program's weights to them by name."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from pwcc.cache.errors import CacheMiss
from pwcc.compile.runtime.calling import Weight
from pwcc.compile.runtime.memory import refuse_shared_weights

ALIGNMENT = 16  # bytes; what Inductor assumes of CUDA inputs (GPU_ALIGN_BYTES)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (name, tensor) that a module holds: parameters, buffers, plain tensor attributes.

    One pass over the modules: torch's own ``named_*`` methods cost five times as much for 300 tensors.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for table in (module._parameters, module._buffers, module.__dict__):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield start + name, value


class Replaced:
    """Notices that a tensor which weights were bound from no longer exists: the model holds another one.

    Costs nothing a call. It cannot notice a tensor that something else keeps alive, nor ``.data = ``.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._watched: list[weakref.ref[torch.Tensor]] = []

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch these tensors instead of those of before."""
        self.noticed = False
        self._watched = [weakref.ref(tensor, self._notice) for tensor in tensors]

    def _notice(self, _: weakref.ref[torch.Tensor]) -> None:
        self.noticed = True


def bind_weights(
    held: Mapping[str, torch.Tensor], weights: Sequence[Weight], device: torch.device
) -> list[torch.Tensor]:
    """Return the live model's tensors, ``held`` by name, in program order.

    Raises:
        CacheMiss: a name is gone, tied names are no longer one tensor, or a tensor's dtype, shape,
            layout, device or alignment is not what was compiled, or one that the program writes shares
            memory with another only here; names the tensor.
    """
    bound = [_bind(weight, held, device) for weight in weights]
    refuse_shared_weights(weights, bound)
    return bound


def _bind(weight: Weight, held: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    name = weight.names[0]
    tensor = held.get(name)
    if tensor is None:
        raise CacheMiss(f"expected a tensor {name!r} in the model, found none", hint="compile this model")
    for other in weight.names[1:]:
        twin = held.get(other)
        if twin is not tensor and (twin is None or not _same_memory(twin, tensor)):
            raise CacheMiss(f"{name!r} and {other!r} were one tensor when compiled, and are two here")
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if found != (weight.dtype, weight.shape):
        raise CacheMiss(
            f"{name!r}: expected {weight.dtype} {weight.shape}, got {found[0]} {found[1]}",
            hint="compile this model",
        )
    if tensor.device != device:
        raise CacheMiss(f"{name!r}: expected it on {device}, got {tensor.device}", hint="move the model first")
    if not _same_layout(tensor, weight.stride):
        raise CacheMiss(
            f"{name!r}: expected stride {weight.stride}, got {tensor.stride()}", hint="make it contiguous"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise CacheMiss(
            f"{name!r} is a lazily conjugated or negated view, which compiled code cannot read",
            hint="replace it by its resolve_conj().resolve_neg()",
        )
    if device.type == "cuda" and tensor.data_ptr() % ALIGNMENT:
        raise CacheMiss(f"{name!r} does not start at a multiple of {ALIGNMENT} bytes", hint="clone it")
    return tensor.detach()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are one by address and layout; on the meta device nothing has an address."""
    return (
        not one.is_meta
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    )


def _same_layout(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    if tensor.stride() == stride or not tensor.numel():
        return True
    return all(
        size == 1 or got == wanted
        for size, got, wanted in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )
