"""Key: the model as a tree of rows: what is registered where, with which shape, dtype and ties.

The digest is part of the lookup key, so a serving host computes it from a live model in milliseconds,
with torch alone. It is the same for real, meta and fake parameters, and on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pwcc.cache import strict
from pwcc.cache.errors import ModelError
from pwcc.cache.ids import FactorDigest, factor_digest
from pwcc.compile.runtime.portable import type_name

_TENSOR_TYPES = frozenset({"torch:Tensor", "torch.nn.parameter:Parameter", "torch.nn.parameter:Buffer"})


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of the model. ``tied_to`` is the first name of the same object, empty for itself.

    ``kind`` is parameter, buffer, scratch buffer (not in the state dict) or attribute. ``layout`` is
    empty for a contiguous strided tensor, else what differs (strides, sparse layout, tensor class).
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    tied_to: str

    def to_json(self) -> list[object]:
        """Return the row as a list."""
        return [self.name, self.kind, self.dtype, list(self.shape), self.layout, self.tied_to]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module: its class, and its forward where that is not the class's own by name (a patch)."""

    name: str
    type: str
    forward: str

    def to_json(self) -> list[object]:
        """Return the row as a list."""
        return [self.name, self.type, self.forward]


@dataclass(frozen=True, slots=True)
class ModelTree:
    """All rows, in registration order."""

    modules: tuple[ModuleRow, ...]
    tensors: tuple[TensorRow, ...]

    def to_json(self) -> dict[str, object]:
        """Return the tree for a manifest."""
        return {
            "modules": [row.to_json() for row in self.modules],
            "tensors": [row.to_json() for row in self.tensors],
        }

    def digest(self) -> FactorDigest:
        """Return XXH3-128 over all rows."""
        return factor_digest(strict.canonical(self.to_json()))


def identity(model: nn.Module) -> str:
    """Return ``module:qualname`` of the model's class."""
    return type_name(type(model))


def model_tree(model: nn.Module) -> ModelTree:
    """Return the rows of ``model``: no weight is read, no device touched.

    Plain tensor attributes (``self.table = torch.arange(4)``) count; tensors inside lists or other
    objects do not, Dynamo's guards speak of those. Modules reached by several names have a row each.

    Raises:
        ModelError: a parameter or buffer of a lazy module that never ran.
    """
    modules: list[ModuleRow] = []
    tensors: list[TensorRow] = []
    first: dict[int, str] = {}
    forwards: dict[type, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        cls = type(module)
        if cls not in forwards:
            forwards[cls] = _origin(cls, cls.forward)
        own = module.__dict__.get("forward")
        modules.append(ModuleRow(name, type_name(cls), forwards[cls] if own is None else _origin(cls, own)))
        prefix = f"{name}." if name else ""
        for kind, local, tensor in _held(module):
            full = prefix + local
            original = first.setdefault(id(tensor), full)
            tensors.append(_row(full, kind, tensor, "" if original == full else original))
    return ModelTree(tuple(modules), tuple(tensors))


def _held(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield "parameter", name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            kind = "scratch buffer" if name in module._non_persistent_buffers_set else "buffer"
            yield kind, name, buffer
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor):
            yield "attribute", name, value


def _row(name: str, kind: str, tensor: torch.Tensor, tied_to: str) -> TensorRow:
    if is_lazy(tensor):
        raise ModelError(
            f"{kind} {name!r} has no shape yet: its lazy module never ran",
            hint="call the model once in eager, or give the module its sizes",
        )
    return TensorRow(name, kind, str(tensor.dtype), tuple(tensor.shape), _layout(tensor), tied_to)


def _layout(tensor: torch.Tensor) -> str:
    cls = type_name(type(tensor))
    # a fake tensor stands for a plain one; naming its class would make it another model
    parts = [] if cls in _TENSOR_TYPES or type(tensor).__module__.startswith("torch._subclasses") else [cls]
    if tensor.layout is not torch.strided:
        parts.append(str(tensor.layout))
    elif not tensor.is_contiguous():
        parts.append(f"strides {tuple(tensor.stride())}")
    return ", ".join(parts)


def _origin(cls: type, forward: object) -> str:
    """Return where a forward was written, or nothing if that is the class's own body or a base's."""
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType):
        return f"a {type_name(type(function))}"
    home, name = str(function.__globals__.get("__name__")), function.__code__.co_qualname
    own = {(base.__module__, f"{base.__qualname__}.forward") for base in cls.__mro__}
    return "" if (home, name) in own else f"{home}:{name}"
