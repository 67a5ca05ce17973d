"""The seam to mutation: which tensors a traced graph writes.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used: ``Tensor._version`` of fake tensors (in-place
methods count it up; without it only operators with a schema are seen), ``UntypedStorage._cdata`` (identity
of a fake storage), ``OpOverload._schema`` (which arguments an operator writes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from pwcc.compile.runtime.user_kernels import launch


def written(graph: fx.Graph, fakes: Mapping[int, Any]) -> set[int]:
    """Return the keys of the fake tensors whose memory the graph writes, whole or through a view."""
    storages = {key: fake.untyped_storage()._cdata for key, fake in fakes.items()}
    found = {key for key, fake in fakes.items() if fake._version > 0}
    for node in graph.nodes:
        for used in written_arguments(node):
            value = used.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                found.update(key for key, cdata in storages.items() if value.untyped_storage()._cdata == cdata)
    return found


def sharing(fakes: Mapping[int, Any]) -> dict[int, tuple[int, ...]]:
    """Return, of each fake tensor, the keys of the others that lie in the same storage."""
    storages = {key: fake.untyped_storage()._cdata for key, fake in fakes.items()}
    return {
        key: tuple(other for other, held in storages.items() if held == cdata and other != key)
        for key, cdata in storages.items()
    }


def storage(tensor: torch.Tensor) -> int:
    """Return what tells the memory of one fake tensor from that of another."""
    return int(tensor.untyped_storage()._cdata)


def schema_writes(target: Any) -> bool | None:
    """Tell whether an operator writes an argument by its schema; None for a function without a schema."""
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        names: list[str] = target.overloads()  # type: ignore[no-untyped-call]
        return any(getattr(target, name)._schema.is_mutable for name in names)
    return None


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what an operator writes by its schema, or a Triton kernel by its record.

    Splitting operations and kernels do not count versions up.
    """
    target: Any = node.target
    if target is launch:
        arguments: Any = node.kwargs["arguments"]
        names: Any = node.kwargs["written"]
        yield from (arguments[name] for name in names if isinstance(arguments[name], fx.Node))
        return
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    if not isinstance(target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        used = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(used, fx.Node):
            yield used
