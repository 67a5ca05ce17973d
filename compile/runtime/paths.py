"""Artifact: access paths, the way from the live model to the value a predicate speaks of.

A path is a root and steps, never an expression that is evaluated. Roots are strings:

- ``model:`` and ``model:layers.0.norm``: the model, or one of its submodules by name
- ``module:package.name``: an imported Python module
- ``globals:``: the namespace in which the model's ``forward`` was defined
- ``forward:``: the function behind the model's ``forward``

Steps are ``[kind]`` or ``[kind, operand]``; :data:`STEPS` lists all of them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from torch import nn

from pwcc.cache.errors import CorruptEntry

Operand: TypeAlias = "str | int"
Step: TypeAlias = "tuple[str] | tuple[str, Operand]"
Getter: TypeAlias = Callable[[Any], object]  # Any: what a step finds is checked by taking it

MAX_STEPS = 64
ROOTS = ("model:", "module:", "globals:", "forward:")


class Absent(Exception):
    """A root or step leads nowhere on this host; the message says what is missing."""


def _item(key: Operand) -> Getter:
    return operator.itemgetter(key)


def _bytes_item(key: Operand) -> Getter:
    return operator.itemgetter(str(key).encode())


def _free(name: Operand) -> Getter:
    def get(function: Any) -> object:
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        contents: object = cell.cell_contents
        return contents

    return get


STEPS: dict[str, tuple[type | tuple[type, ...] | None, Callable[[Operand], Getter]]] = {
    "attr": (str, lambda name: operator.attrgetter(str(name))),
    "plain_attr": (str, lambda name: lambda value: object.__getattribute__(value, str(name))),
    "item": ((str, int), _item),
    "bytes_item": (str, _bytes_item),  # os.environ keeps bytes
    "dict_item": ((str, int), lambda key: lambda value: dict.__getitem__(value, key)),
    "list_item": (int, lambda index: lambda value: list.__getitem__(value, int(index))),
    "key": (int, lambda index: lambda value: list(dict.keys(value))[int(index)]),
    "value_at": (int, lambda index: lambda value: list(dict.values(value))[int(index)]),
    "free": (str, _free),
    "type": (None, lambda _: type),
    "vars": (None, lambda _: vars),  # a view; Dynamo's dict(type.__dict__) copies it for each look-up
    "fields": (None, lambda _: dataclasses.fields),
}
"""Every step: the type of its operand, and what makes its getter."""

LOST = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""What a step raises when the live object has no such part; a property of the user's may raise more."""


def getter(steps: Sequence[Step]) -> Getter:
    """Return one function that follows ``steps``; it raises one of :data:`LOST` when it cannot."""
    chain: list[Getter] = []
    dotted: list[str] = []
    for kind, *operand in steps:
        if kind == "attr" and "." not in str(operand[0]):
            dotted.append(str(operand[0]))
            continue
        if dotted:
            chain.append(operator.attrgetter(".".join(dotted)))
            dotted = []
        chain.append(STEPS[str(kind)][1](operand[0] if operand else 0))
    if dotted:
        chain.append(operator.attrgetter(".".join(dotted)))
    if not chain:
        return lambda value: value
    if len(chain) == 1:
        return chain[0]

    def follow(value: object) -> object:
        for get in chain:
            value = get(value)
        return value

    return follow


def parse_step(value: object, where: str) -> Step:
    """Item parser: one step read from JSON."""
    if isinstance(value, list) and 1 <= len(value) <= 2 and isinstance(value[0], str) and value[0] in STEPS:
        wanted = STEPS[value[0]][0]
        if wanted is None and len(value) == 1:
            return (value[0],)
        if wanted is not None and len(value) == 2 and not isinstance(value[1], bool):
            operand: object = value[1]
            if isinstance(operand, wanted) and isinstance(operand, (str, int)):
                return (value[0], operand)
    raise CorruptEntry("expected a step of an access path", where=where)


def parse_root(value: object, where: str) -> str:
    """Item parser: one root read from JSON."""
    if isinstance(value, str) and len(value) <= 1024 and value.startswith(ROOTS):
        return value
    raise CorruptEntry("expected the root of an access path", where=where)


def show_path(root: str, steps: Sequence[Step], *, namespace: str = "globals") -> str:
    """Return a path as a person would write it: ``model.layers.0.norm.eps``."""
    kind, _, name = root.partition(":")
    text = {"model": "model", "module": name, "globals": namespace, "forward": "model.forward"}[kind]
    if kind == "model" and name:
        text += f".{name}"
    for step, *operand in steps:
        part = operand[0] if operand else ""
        if step in ("attr", "plain_attr") or (kind == "globals" and (step, *operand) == steps[0]):
            text += f".{part}"
        elif step in ("item", "bytes_item", "dict_item", "list_item"):
            text += f"[{part!r}]"
        else:
            text += {
                "key": f".keys()[{part}]",
                "value_at": f".values()[{part}]",
                "free": f".<{part}>",
                "type": ".__class__",
            }.get(step, f".<{step}>")
    return text


class Roots:
    """Resolves roots on one live model, each at most once per check."""

    def __init__(self, model: nn.Module, modules: Mapping[str, ModuleType]) -> None:
        self._model = model
        self._modules = modules
        self._submodules: dict[str, nn.Module] = {"": model}
        self.classes: dict[type, object] = {}
        """Records of classes, made at most once per check."""

    @property
    def namespace(self) -> str:
        """Name of the Python module that defines the model's ``forward``."""
        try:
            return str(self.forward().__globals__.get("__name__", "globals"))
        except Absent:
            return "globals"

    def resolve(self, root: str) -> object:
        """Return the object a root stands for.

        Raises:
            Absent: no such submodule, Python module or function here.
        """
        kind, _, name = root.partition(":")
        if kind == "model":
            return self._submodule(name)
        if kind == "module":
            found = self._modules.get(name)
            if found is None:
                raise Absent(f"no imported module {name}")
            return found
        return self.forward().__globals__ if kind == "globals" else self.forward()

    def _submodule(self, name: str) -> nn.Module:
        below: list[str] = []  # a loop: a hostile name has as many levels as it has dots
        while name not in self._submodules:
            name, _, last = name.rpartition(".")
            below.append(last)
        found = self._submodules[name]
        for last in reversed(below):
            child = found._modules.get(last)
            if child is None:
                raise Absent("no submodule")
            name = f"{name}.{last}" if name else last
            self._submodules[name] = found = child
        return found

    def forward(self) -> FunctionType:
        """Return the plain function behind ``model.forward``."""
        function = getattr(self._model.forward, "__func__", self._model.forward)
        if not isinstance(function, FunctionType):
            raise Absent("no Python function behind model.forward")
        return function
