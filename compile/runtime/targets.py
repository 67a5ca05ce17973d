"""Artifact: the operations that a piece graph or a stitch program may name, and nothing else.

Piece graphs come from a cache directory and ``--check`` runs them, so a name resolves only to a function
over tensors or sizes: torch's own operators and functionals, operators that a library registered,
Python's operators and ``math``. Modules that load files, start processes or change the process's state
are out of reach, and so is every attribute that could lead to them.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import re
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from pwcc.cache.errors import CorruptEntry

_FUNCTIONS: Any = vars(torch._C)["_VariableFunctions"]  # the operators among torch's own functions
# Torch's Python bindings of operators, by module; only built-in functions of theirs resolve.
_BINDINGS = ("torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft", "torch._C._sparse")
_PYTHON_MODULES = {"torch.nn.functional": torch.nn.functional, "torch.functional": torch.functional}
_OTHERS = frozenset(
    """
    torch._assert torch._refs.tensor
    torch.sym_float torch.sym_int torch.sym_ite torch.sym_max torch.sym_min torch.sym_not torch.sym_sum
    torch._sym_acos torch._sym_asin torch._sym_atan torch._sym_cos torch._sym_cosh torch._sym_log2
    torch._sym_sin torch._sym_sinh torch._sym_sqrt torch._sym_tan torch._sym_tanh
    torch.amp.autocast_mode._enter_autocast torch.amp.autocast_mode._exit_autocast
    torch.amp.autocast_mode.autocast
    torch._functorch.predispatch._add_batch_dim torch._functorch.predispatch._remove_batch_dim
    torch._functorch.predispatch._vmap_increment_nesting torch._functorch.predispatch._vmap_decrement_nesting
    torch._functorch.predispatch.lazy_load_decompositions
    """.split()  # noqa: SIM905 (a table)
)
_OPERATORS = frozenset(
    """
    abs add and_ concat eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index inv
    invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow
    rshift setitem sub truediv truth xor
    """.split()  # noqa: SIM905 (a table)
)
_BUILTINS = frozenset({"getattr", "max", "min", "abs", "float", "int", "bool", "sum", "round", "len"})
# Functions among the operators that reach outside: files, foreign memory, the terminal.
_DENIED = frozenset(("from_file", "from_numpy", "frombuffer", "_from_blob", "save", "warn", "_print"))
_DENIED_NAMESPACES = frozenset(
    ("prim", "c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "profiler", "higher_order")
)
_DENIED_METHODS = frozenset(
    """
    apply_ as_subclass backward const_data_ptr data_ptr map2_ map_ module_load numpy register_hook
    register_post_accumulate_grad_hook requires_grad_ resize_ resize_as_ retain_grad set_ share_memory_ storage
    storage_type untyped_storage
    """.split()  # noqa: SIM905 (a table)
)
_SPECIAL_METHODS = frozenset(
    [f"__{prefix}{name.rstrip('_')}__" for name in _OPERATORS for prefix in ("", "r", "i")] + ["__len__"]
)
_LAUNCH = "pwcc.compile.runtime.user_kernels.launch"  # runs only Triton kernels that the process holds already
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@functools.cache
def resolve_target(target: str) -> Callable[..., object]:
    """Return the function behind a qualified name such as ``torch._C._nn.linear``.

    Raises:
        CorruptEntry: a piece may not call it, or it does not exist in this process.
    """
    parts = target.split(".")
    if not all(_PART.fullmatch(part) for part in parts) or any(
        part.startswith("__") and part not in _SPECIAL_METHODS for part in parts
    ):
        raise CorruptEntry(f"a piece may not call {target[:80]!r}")
    try:
        found = _find(target, parts)
    except (AttributeError, ImportError):
        raise CorruptEntry(
            f"the operation {target!r} does not exist in this process",
            hint="import the library that registers it before loading",
        ) from None
    if not callable(found):
        raise CorruptEntry(f"a piece may not call {target[:80]!r}")
    return found


def _find(target: str, parts: list[str]) -> object:
    """Return what a name stands for, or None where it may not be called; AttributeError if it is not there."""
    parent, _, name = target.rpartition(".")
    root = parts[0]
    if root in ("operator", "_operator") and len(parts) == 2:
        return getattr(operator, name) if name in _OPERATORS else None
    if root == "math" and len(parts) == 2:
        return _builtin(math, name)
    if root == "builtins" and len(parts) == 2:
        return vars(importlib.import_module("builtins"))[name] if name in _BUILTINS else None
    if (root != "torch" and target != _LAUNCH) or len(parts) < 2 or name in _DENIED:
        return None
    if target in _OTHERS or target == _LAUNCH:
        return getattr(importlib.import_module(parent), name)
    if parts[1] == "ops":
        return _operation(parts[2:])
    if parent == "torch.Tensor":
        require_method(name)
        return getattr(torch.Tensor, name)
    if parent == "torch":
        if hasattr(_FUNCTIONS, name) or name in torch.functional.__all__:
            return getattr(torch, name)
        if name in vars(torch):
            return None
        raise AttributeError(name)  # not getattr: torch imports some of its modules when they are asked for
    if parent in _BINDINGS:
        return _builtin(importlib.import_module(parent), name)
    if parent in _PYTHON_MODULES:
        found = getattr(_PYTHON_MODULES[parent], name)
        own = isinstance(found, FunctionType) and found.__module__ == parent
        return found if own or isinstance(found, BuiltinFunctionType) else None
    return None


def _builtin(module: Any, name: str) -> object:
    found = getattr(module, name)
    return found if isinstance(found, BuiltinFunctionType) else None


def _operation(parts: list[str]) -> object:
    """Return an operator that is registered: namespace, name and perhaps overload."""
    if len(parts) not in (2, 3) or parts[0] in _DENIED_NAMESPACES or _DENIED & set(parts):
        return None
    namespace = getattr(torch.ops, parts[0])
    if not isinstance(namespace, torch._ops._OpNamespace):
        return None
    found: object = getattr(namespace, parts[1])
    if not isinstance(found, torch._ops.OpOverloadPacket):
        return None
    if len(parts) == 2:
        return found
    if parts[2] not in found.overloads():  # type: ignore[no-untyped-call]
        raise AttributeError(parts[2])
    return getattr(found, parts[2])


def require_method(name: str) -> None:
    """Refuse a method that is not an operation of tensors.

    Raises:
        CorruptEntry: it is private, reaches a tensor's memory, or is no method of tensors.
    """
    private = name.startswith("_") and name not in _SPECIAL_METHODS
    if private or name in _DENIED_METHODS or not callable(getattr(torch.Tensor, name, None)):
        raise CorruptEntry(f"a piece may not call the method {name[:80]!r}")


def require_attribute(name: object) -> None:
    """Refuse an attribute that is not a plain property of tensors, such as ``T`` or ``real``.

    Raises:
        CorruptEntry: the name is private, a method, or no string.
    """
    plain = isinstance(name, str) and not name.startswith("_") and name.isidentifier()
    if not plain or name in ("grad", "grad_fn") or callable(getattr(torch.Tensor, str(name), None)):
        raise CorruptEntry(f"a piece may not read the attribute {str(name)[:80]!r}")


_SEARCHED = ("torch", "torch.nn.functional", *_BINDINGS, "builtins", "math", "torch.Tensor")


def target_name(target: Callable[..., object]) -> str | None:
    """Return the qualified name under which :func:`resolve_target` finds ``target``, or None."""
    if isinstance(target, torch._ops.OpOverload):
        return _own_name(target, f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return _own_name(target, "torch.ops." + target._qualified_op_name.replace("::", "."))
    if isinstance(target, torch._ops.OperatorBase):
        return None  # a higher-order operation: it takes functions, which have no name
    name = getattr(target, "__name__", "")
    own = getattr(target, "__module__", None)
    names = dict.fromkeys((getattr(target, "__qualname__", name), name))
    for module in ("operator", *((own,) if own else ()), *_SEARCHED):
        for candidate in names:
            if (found := _own_name(target, f"{module}.{candidate}")) is not None:
                return found
    return None


def _own_name(target: Callable[..., object], candidate: str) -> str | None:
    try:
        return (
            candidate if resolve_target(candidate) == target else None
        )  # built-in methods: equal, not identical
    except CorruptEntry:
        return None
