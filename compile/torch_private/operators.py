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

from pwcc.compile.torch_private.user_kernels import codes as kernel_codes
from pwcc.compile.torch_private.user_kernels import kernels_named_by

BUILT_IN = ("aten", "prims", "prim", "inductor", "higher_order", "pwcc")
_REGISTERED = re.compile(r"registered at (.+?):\d+")
_OPENED = re.compile(r"^CompositeImplicitAutograd\b.*?registered at (.+?):\d+", re.MULTILINE)


@dataclass(frozen=True)
class Behind:
    """What stands behind some operators.

    ``codes`` are functions, ``files`` Python files that registered something; ``compiled`` tells that an
    operator was registered by something else than Python. ``opened`` are functions that run while a piece is
    compiled, and ``opened_files`` files with such functions that torch does not give away.
    """

    codes: tuple[CodeType, ...]
    files: tuple[str, ...]
    compiled: bool
    opened: tuple[FunctionType, ...] = ()
    opened_files: tuple[str, ...] = ()


def behind(names: Iterable[str]) -> Behind:
    """Return what stands behind operators named ``ns::name``; torch's and pwcc's own are left out."""
    codes: dict[CodeType, None] = {}
    files: set[str] = set()
    opened: list[FunctionType] = []
    opened_files: set[str] = set()
    compiled = False
    for name in sorted({name for name in names if name.partition("::")[0] not in BUILT_IN}):
        for function in _functions(name):
            codes.update(dict.fromkeys(_codes(function, 0)))
        opened += _opened(name)
        opened_files.update(file for file in _OPENED.findall(_dump(name)) if file.endswith(".py"))
        for file in _registering(name):
            if file.endswith(".py"):
                files.add(file)
            elif not file.startswith("<"):
                compiled = True
    return Behind(tuple(codes), tuple(sorted(files)), compiled, tuple(opened), tuple(sorted(opened_files)))


def _functions(name: str) -> Iterator[object]:
    from torch._library.custom_ops import OPDEFS

    definition: Any = OPDEFS.get(name)
    if definition is not None:
        yield getattr(definition, "_init_fn", None)
        yield getattr(definition, "_abstract_fn", None)
        yield from getattr(definition, "_backend_fns", {}).values()


def _opened(name: str) -> Iterator[FunctionType]:
    """Yield the fakes of an operator, whose shapes are folded, and the body of a ``triton_op``."""
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton

    definition: Any = OPDEFS.get(name)
    holder: Any = getattr(singleton.find(name), "fake_impl", None)
    body = getattr(definition, "_init_fn", None)
    fakes = [getattr(kernel, "func", None) for kernel in getattr(holder, "kernels", ())]
    for function in (getattr(definition, "_abstract_fn", None), *fakes):
        if isinstance(function, FunctionType):
            yield function
    if isinstance(body, FunctionType) and kernels_named_by(body):
        yield body


def _registering(name: str) -> Iterator[str]:
    from torch._library.simple_registry import singleton

    holder: Any = getattr(singleton.find(name), "fake_impl", None)
    for kernel in getattr(holder, "kernels", ()):
        yield str(getattr(kernel, "source", "")).rpartition(":")[0]
    yield from _REGISTERED.findall(_dump(name))


def _dump(name: str) -> str:
    dump: Any = getattr(torch._C, "_dispatch_dump", None)
    return "" if dump is None else str(dump(name))


def _codes(function: object, depth: int) -> Iterator[CodeType]:
    if isinstance(function, FunctionType) and depth < 8:
        yield function.__code__
        for kernel in kernels_named_by(function):
            yield from kernel_codes(kernel)
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
