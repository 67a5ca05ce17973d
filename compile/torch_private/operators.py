"""The seam to operator registries: which Python code and which library stand behind a custom operator.

Run on torch 2.13.0+cpu. Private names used, and what breaks if they change (then the operator's files
are no sources any more, nothing fails): ``torch._library.custom_ops.OPDEFS`` with ``_init_fn``,
``_backend_fns`` and ``_abstract_fn``; ``torch._library.simple_registry.singleton`` with
``fake_impl.kernels``, each of which has ``source``, ``file:line``; ``torch._C._dispatch_dump``, whose lines
end in ``registered at file:line``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

BUILT_IN = ("aten", "prims", "prim", "inductor", "higher_order", "pwcc")
_REGISTERED = re.compile(r"registered at (.+?):\d+")


@dataclass(frozen=True)
class Behind:
    """What stands behind some operators.

    ``codes`` are functions, ``files`` Python files that registered something; ``compiled`` tells that an
    operator was registered by something else than Python.
    """

    codes: tuple[CodeType, ...]
    files: tuple[str, ...]
    compiled: bool


def behind(names: Iterable[str]) -> Behind:
    """Return what stands behind operators named ``ns::name``; torch's and pwcc's own are left out."""
    codes: dict[CodeType, None] = {}
    files: set[str] = set()
    compiled = False
    for name in sorted({name for name in names if name.partition("::")[0] not in BUILT_IN}):
        for function in _functions(name):
            codes.update(dict.fromkeys(_codes(function, 0)))
        for file in _registering(name):
            if file.endswith(".py"):
                files.add(file)
            elif not file.startswith("<"):
                compiled = True
    return Behind(tuple(codes), tuple(sorted(files)), compiled)


def _functions(name: str) -> Iterator[object]:
    from torch._library.custom_ops import OPDEFS

    definition: Any = OPDEFS.get(name)
    if definition is not None:
        yield getattr(definition, "_init_fn", None)
        yield getattr(definition, "_abstract_fn", None)
        yield from getattr(definition, "_backend_fns", {}).values()


def _registering(name: str) -> Iterator[str]:
    from torch._library.simple_registry import singleton

    holder: Any = getattr(singleton.find(name), "fake_impl", None)
    for kernel in getattr(holder, "kernels", ()):
        yield str(getattr(kernel, "source", "")).rpartition(":")[0]
    dump: Any = getattr(torch._C, "_dispatch_dump", None)
    if dump is not None:
        yield from _REGISTERED.findall(str(dump(name)))


def _codes(function: object, depth: int) -> Iterator[CodeType]:
    if isinstance(function, FunctionType) and depth < 8:
        yield function.__code__
        held = [function.__dict__.get("__wrapped__")]
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        for item in held:
            yield from _codes(item, depth + 1)


def names_in(graph: torch.fx.Graph) -> set[str]:
    """Return the operators that a graph calls, ``ns::name`` without overload."""
    found: set[str] = set()
    for node in graph.nodes:
        target: Any = node.target
        packet = getattr(target, "_qualified_op_name", None)
        if packet is not None:
            found.add(str(packet))
        else:
            schema = getattr(target, "_schema", None)
            if schema is not None:
                found.add(str(schema.name))
    return found
