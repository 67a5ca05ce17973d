"""Key: guards on the environment become records, and what Dynamo guards not becomes predicates."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType

import torch
from torch import nn

from pwcc.compile.code_scan import Found
from pwcc.compile.runtime.classes import is_plain
from pwcc.compile.runtime.paths import LOST, Absent, Roots, Step, getter
from pwcc.compile.runtime.portable import NotPortable, describe
from pwcc.compile.runtime.predicates import Predicate, Rule

TABLES = ("_parameters", "_buffers", "_modules")  # where nn.Module.__getattr__ looks


def without_environment(
    predicates: Sequence[Predicate], model: nn.Module, global_scope: Mapping[str, object]
) -> tuple[list[Predicate], dict[str, str]]:
    """Take the guards on the inside of ``os.environ`` out; return the rest, and the variables they name.

    Those guards speak of Python's own bookkeeping (its dictionary of bytes, the line of its encoder). The
    variables become records, whose digests are salted.
    """
    kept: list[Predicate] = []
    named: dict[str, str] = {}
    for predicate in predicates:
        inside = _inside_environment(predicate, model, global_scope)
        if inside is None:
            kept.append(predicate)
            continue
        for step in inside:
            if step[0] == "bytes_item" and len(step) == 2:
                named[str(step[1])] = predicate.rule.where
    return kept, named


def _inside_environment(
    predicate: Predicate, model: nn.Module, global_scope: Mapping[str, object]
) -> tuple[Step, ...] | None:
    """Return the steps beyond ``os.environ``, or None if the path does not lead through it."""
    if predicate.root.startswith("model:") and not any(s[0] == "bytes_item" for s in predicate.rule.steps):
        return None
    steps = predicate.rule.steps
    try:
        value: object = (
            global_scope if predicate.root == "globals:" else Roots(model, sys.modules).resolve(predicate.root)
        )
        for index, step in enumerate(steps):
            value = getter((step,))(value)
            if value is os.environ:
                return steps[index + 1 :] or (("attr", "environ"),)
    except (*LOST, Absent):
        return None
    return None


def added_predicates(model: nn.Module, found: Found) -> list[Predicate]:
    """Return predicates for what Dynamo guards not: ``requires_grad``, and looks into ``__dict__``."""
    added: list[Predicate] = []
    for name, module in model.named_modules():
        root = f"model:{name}"
        if found.requires_grad:
            added += [
                Predicate(
                    root,
                    Rule(
                        (("attr", "_parameters"), ("item", key), ("attr", "requires_grad")),
                        "is",
                        describe(parameter.requires_grad),
                        found.requires_grad,
                    ),
                )
                for key, parameter in module._parameters.items()
                if parameter is not None
            ]
        for qualname, keys in found.own_keys.items():
            if qualname.rpartition(".")[0] in {base.__qualname__ for base in type(module).__mro__}:
                for key in keys:
                    added += _own_key(root, module, key)
    return added


def shadow_predicates(
    predicates: Sequence[Predicate],
    model: nn.Module,
    global_scope: Mapping[str, object],
    codes: Iterable[CodeType],
) -> list[Predicate]:
    """Return predicates for names that an object's own ``__getattr__`` may have answered.

    Dynamo does not guard that the object lacks such a name, so nothing tells of one that hides the answer
    later. The names are all that traced code asks of any object.
    """
    roots = Roots(model, sys.modules)
    names = sorted({name for code in codes for name in code.co_names if not name.startswith("__")})
    added: list[Predicate] = []
    for predicate in predicates:
        if predicate.rule.test != "instance":
            continue
        steps = predicate.rule.steps
        try:
            base = global_scope if predicate.root == "globals:" else roots.resolve(predicate.root)
            value = getter(steps)(base)
            held = object.__getattribute__(value, "__dict__")
        except (*LOST, Absent):
            continue
        if not any("__getattr__" in vars(kind) and not is_plain(kind) for kind in type(value).__mro__):
            continue
        tables = [held, *(held[table] for table in TABLES if table in held)]
        for name in names:
            if any(name in table for table in tables) or hasattr(type(value), name):
                continue
            where = predicate.rule.where
            own, kind = (*steps, ("plain_attr", "__dict__")), (*steps, ("type",))
            added.append(Predicate(predicate.root, Rule(own, "excludes", name, where)))
            added.append(Predicate(predicate.root, Rule(kind, "lacks", name, where)))
    return added


def _own_key(root: str, module: nn.Module, key: str) -> list[Predicate]:
    held = vars(module)
    if key not in held:
        return [Predicate(root, Rule((("attr", "__dict__"),), "excludes", key))]
    made = [Predicate(root, Rule((("attr", "__dict__"),), "contains", key))]
    try:
        value = describe(held[key])
    except NotPortable:
        return made
    if not isinstance(held[key], (torch.Tensor, nn.Module, dict)):
        made.append(Predicate(root, Rule((("attr", "__dict__"), ("item", key)), "is", value)))
    return made
