"""Key: pwcc's own layer operators, and the policy that says which keep their kernels in compiled pieces.

A traced graph holds the operator, whatever the policy says. When a piece is compiled, an operator that is off
is written out in plain torch operations, which Inductor fuses with what stands around it; one that is on
keeps its kernel: written in Triton, it becomes part of the piece; with none for the device it is called as
it is. Without a compiler an operator always runs its kernel.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from pwcc.cache.errors import UsageError


@dataclass(frozen=True)
class CustomOp:
    """One operator ``pwcc::<name>``: its plain form, and its kernel by device type.

    Both take the operator's arguments and return what it returns; both can be traced. ``kernels`` launch
    through ``torch.library.wrap_triton``.
    """

    name: str
    native: Callable[..., Any]
    kernels: dict[str, Callable[..., Any]]


# name of the operator -> the module that registers it when it is imported
MODULES: Final[dict[str, str]] = {
    "rms_norm": "pwcc.compile.ops.layers",
    "fused_add_rms_norm": "pwcc.compile.ops.layers",
    "silu_and_mul": "pwcc.compile.ops.layers",
}
DEFAULT_CUSTOM_OPS: Final = "none"
"""The policy of a compile that does not say one."""
_registered: dict[str, CustomOp] = {}


def register(op: CustomOp) -> CustomOp:
    """Make an operator known to the policy, and return it; its name must be in ``MODULES``.

    Raises:
        ValueError: the table of modules does not hold it, so a worker process could not find it.
    """
    if op.name not in MODULES:
        raise ValueError(f"expected one of {', '.join(MODULES)}, got {op.name!r}")
    _registered[op.name] = op
    return op


def named(name: str) -> CustomOp:
    """Return an operator of the table, registering it first if needed."""
    if name not in _registered:
        importlib.import_module(MODULES[name])
    return _registered[name]


def parse_policy(text: str) -> tuple[str, ...]:
    """Return the names of the operators that a policy keeps, sorted.

    ``none`` (the default) or ``all``, then ``+name`` and ``-name`` in any number, with commas between; without
    a first word it is ``none``.

    Raises:
        UsageError: an unknown name, a name that is both on and off, a word that is none of these.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    base = words.pop(0) if words and words[0] in ("all", "none") else "none"
    on, off = (_names(words, sign) for sign in "+-")
    for word in words:
        if word[0] not in "+-":
            raise UsageError(
                f"expected custom operators as all, none, +name or -name, got {word!r}",
                hint="all and none come first" if word in ("all", "none") else f"write +{word} or -{word}",
            )
    if both := on & off:
        raise UsageError(f"expected {sorted(both)[0]!r} once, got it on and off")
    return tuple(sorted((set(MODULES) if base == "all" else on) - off | on))


def _names(words: Collection[str], sign: str) -> set[str]:
    found = {word[1:] for word in words if word.startswith(sign)}
    for name in sorted(found - set(MODULES)):
        close = difflib.get_close_matches(name, MODULES, n=1)
        raise UsageError(
            f"pwcc has no custom operator {name!r}",
            hint=(f"did you mean {close[0]}? " if close else "") + f"there are {', '.join(MODULES)}",
        )
    return found


def write_out(graph_module: fx.GraphModule, *, keep: Collection[str], device_type: str = "cpu") -> int:
    """Give every operator of the table the form that the policy says, in place; return how many changed.

    ``keep`` are the names that are on. What is called as it is stays as it is.
    """
    changed = 0
    for node in graph_module.graph.nodes:
        name = _name_of(node.target) if node.op == "call_function" else None
        if name is None:
            continue
        op = named(name)
        form = op.kernels.get(device_type) if name in keep else op.native
        if form is not None:
            node.target = form
            changed += 1
    if changed:
        graph_module.recompile()
    return changed


def _name_of(target: object) -> str | None:
    """Return the name of an operator of the table; any overload of it."""
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return None
    namespace, _, name = target._qualified_op_name.partition("::")
    return name if namespace == "pwcc" and name in MODULES else None
