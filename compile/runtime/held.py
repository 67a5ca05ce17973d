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
MAX_NESTED = 3  # a dict of layers of pairs; deeper, or longer than this, are no caches of tensors
MAX_ITEMS = 4096
_DISPATCH = "__torch_dispatch__"
_PLAIN_DISPATCH = getattr(torch.Tensor, _DISPATCH, None)
_MODULES_OWN = frozenset(vars(nn.Module()))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (name, tensor) that a module holds: parameters, buffers, plain tensor attributes.

    So are those in lists, tuples and dicts that are attributes, as ``caches[0][1]`` or ``tables['a']``.
    One pass over the modules: torch's own ``named_*`` methods cost five times as much for 300 tensors.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    yield start + name, value
        for name, value in module.__dict__.items():
            if name in _MODULES_OWN:
                continue
            if isinstance(value, torch.Tensor):
                yield start + name, value
            elif isinstance(value, (list, tuple, dict)):
                yield from _inside(start + name, value, MAX_NESTED)


def _inside(
    name: str, held: list[object] | tuple[object, ...] | dict[object, object], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if not depth or len(held) > MAX_ITEMS:
        return
    for key, value in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(value, torch.Tensor):
            yield f"{name}[{key!r}]", value
        elif isinstance(value, (list, tuple, dict)):
            yield from _inside(f"{name}[{key!r}]", value, depth - 1)


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
        raise CacheMiss(
            f"expected a tensor {name!r} in the model, found none{_moved(name, held)}",
            hint="compile this model",
        )
    for other in weight.names[1:]:
        twin = held.get(other)
        if twin is not tensor and (twin is None or not _same_memory(twin, tensor)):
            raise CacheMiss(f"{name!r} and {other!r} were one tensor when compiled, and are two here")
    if type(tensor).__module__.startswith("torch._subclasses"):
        raise CacheMiss(
            f"{name!r} is a fake tensor, which holds no values", hint="load the model's values first"
        )
    if getattr(type(tensor), _DISPATCH, None) is not _PLAIN_DISPATCH:
        raise CacheMiss(
            f"{name!r} is a {type(tensor).__name__} here, a tensor that computes in a way of its own, as "
            "quantised ones do",
            hint="compile this model, or serve it without pwcc",
        )
    found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if found != (weight.dtype, weight.shape):
        raise CacheMiss(
            f"{name!r}: expected {weight.dtype} {weight.shape}, got {found[0]} {found[1]}",
            hint="compile this model",
        )
    if tensor.device != device:
        raise CacheMiss(
            f"{name!r}: expected it on {device}, got {tensor.device}",
            hint="load its values first (load_state_dict(assign=True), or to_empty)"
            if tensor.is_meta
            else "move the model first",
        )
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


def _moved(name: str, held: Mapping[str, torch.Tensor]) -> str:
    """Say where a wrapper, such as an adapter, has put a tensor: ``a.weight`` at ``a.base_layer.weight``."""
    owner, _, leaf = name.rpartition(".")
    inside = f"{owner}." if owner else ""
    found = next((n for n in held if n.startswith(inside) and n.endswith(f".{leaf}")), None)
    return "" if found is None else f"; it may be {found!r} now, inside a module that was wrapped around it"


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
