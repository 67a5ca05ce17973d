"""Serve the Key noun: buffers of Hugging Face models that ``forward`` moves to where they already are.

``self.table = self.table.to(device, dtype)`` rebinds a buffer, which compiled code would not do. Where device
and dtype are right it changes nothing, so the assignment is left out, and anything else is refused.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Settled(nn.Module):
    """Comes before the class of a module whose ``forward`` moves buffers of its own."""

    _settled: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Leave a settled buffer as it is; raise ``ValueError`` for another device or dtype than it has."""
        if name not in self._settled:
            super().__setattr__(name, value)
            return
        held: Any = self._buffers[name]
        if value.dtype != held.dtype or value.device != held.device:
            raise ValueError(
                f"forward moves its buffer {name} to {value.dtype} on {value.device}, "
                f"and it is {held.dtype} on {held.device}"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class that it comes before: this one has no name by which it is found."""
        made: Any = super().__reduce_ex__(2)
        return _empty, (type(self).__mro__[2], self._settled), *made[2:]


def _empty(cls: type[nn.Module], settled: frozenset[str]) -> nn.Module:
    before = _settled_class(cls, settled)
    return before.__new__(before)


def _settled_class(cls: type[nn.Module], settled: frozenset[str]) -> type[nn.Module]:
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Settled, cls), {**own, "_settled": settled})


def settle_buffers(model: PreTrainedModel) -> list[str]:
    """Leave out the assignments by which parts of ``model`` move their buffers; return the buffers' names.

    The first call would give such a buffer the model's dtype, so it has that from now on.
    """
    names: list[str] = []
    for prefix, module in model.named_modules():
        moved = sorted(name for name in _candidates(module) if module._buffers.get(name) is not None)
        for name in moved:
            module._buffers[name] = _plain(module._buffers[name], model)
            names.append(f"{prefix}.{name}" if prefix else name)
        if moved:
            settled: Any = module
            settled.__class__ = _settled_class(type(module), frozenset(moved))
    return names


def moved_names(forward: Callable[..., object]) -> set[str]:
    """Return the attributes that ``forward`` assigns only what ``self.name = self.name.to(...)`` assigns."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return set()
    nodes = list(ast.walk(tree))
    stored = Counter(
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    moved = Counter(name for node in nodes if isinstance(node, ast.Assign) and (name := _move(node)))
    return {name for name, count in moved.items() if stored[name] == count}


def _candidates(module: nn.Module) -> set[str]:
    own = type(module).__module__.startswith("transformers.models.") and not isinstance(module, Settled)
    return moved_names(type(module).forward) if own and module._buffers else set()


def _move(node: ast.Assign) -> str | None:
    """Return ``name`` of ``self.name = self.name.to(...)``."""
    match node:
        case ast.Assign(
            targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=source), attr="to")
            ),
        ) if name == source:
            return name
    return None


def _plain(buffer: Tensor | None, model: PreTrainedModel) -> Tensor | None:
    """Return a buffer in the dtype of the model's weights, where it has one of floating point."""
    if buffer is None or not buffer.is_floating_point():
        return buffer
    return buffer.detach().to(model.dtype)
