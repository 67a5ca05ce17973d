"""Key: where a guarded value lives on the live model, or what covers everything found there."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TypeAlias

from torch import nn

from pwcc.compile.guard_table import Covered, is_compiler_module
from pwcc.compile.runtime.hooks import ALL_HOOK_TABLES
from pwcc.compile.runtime.paths import LOST, Roots, Step, getter
from pwcc.compile.runtime.portable import NotPortable
from pwcc.compile.torch_private.guards import describe_key, module_of_alias
from pwcc.compile.torch_private.sources import Path

INSTALLED = re.compile(r"__import_.+|.*_\d+_c\d+")
"""Names of globals that Dynamo itself installs: module aliases, and objects by id and compile id."""
WITHIN_ARGUMENT = {"item", "dict_item", "list_item", "key", "value_at"}

Place: TypeAlias = "tuple[str, tuple[Step, ...]] | Covered"


class Places:
    """Turns Dynamo's access paths into roots and steps that another process can follow."""

    def __init__(
        self, model: nn.Module, local_scope: Mapping[str, object], global_scope: Mapping[str, object]
    ) -> None:
        self._model = model
        self._locals = local_scope
        self._globals = global_scope
        self._roots = Roots(model, sys.modules)

    def value(self, root: str, steps: Sequence[Step]) -> object:
        """Return the object at a place.

        Raises:
            NotPortable: it is not there.
        """
        try:
            return getter(steps)(self._roots.resolve(root))
        except LOST as error:
            raise NotPortable(f"the value is not where it was ({type(error).__name__}: {error})") from None

    def find(self, path: Path) -> Place:
        """Return root and steps of a path, or what covers everything under it.

        Raises:
            NotPortable, NoPath: no other process could find it.
        """
        root, steps = "", path.steps
        if path.base == "local":
            if not self._is_model(path.name):
                if self._is_checked(path.name, steps):
                    return Covered.ARGUMENT
                raise NotPortable("an attribute of an argument")
            root, steps = _submodule(steps)
        elif path.base == "cell":
            root, steps = "forward:", (("free", path.name), *steps)
        elif path.base == "import":
            root = f"module:{path.name}"
        elif path.base == "global":
            if path.name.startswith("__builtins_dict__") or _makes_named_tuples(self._globals.get(path.name)):
                return Covered.BUILTIN
            root, steps = self._global(path.name, steps)
        else:
            raise NotPortable(f"state of torch itself ({path.name or path.base})")
        if root.startswith("module:") and is_compiler_module(root.removeprefix("module:")):
            return Covered.COMPILER
        return root, self._keyed(root, steps)

    def _is_model(self, name: str) -> bool:
        if name in self._locals:
            return self._locals[name] is self._model
        method = self._model.forward
        function = getattr(method, "__func__", None)  # a bound method: its first name is the model
        return isinstance(function, FunctionType) and function.__code__.co_varnames[:1] == (name,)

    def _is_checked(self, name: str, steps: Sequence[Step]) -> bool:
        """Tell whether a path into an argument leads over items, and fields of records, which calls check."""
        value = self._locals.get(name)
        for step in steps:
            if step[0] in ("attr", "plain_attr"):
                if step[-1] not in _fields(value):
                    return False
            elif step[0] not in WITHIN_ARGUMENT:
                return False
            try:
                value = getter([step])(value)
            except LOST:
                value = None
        return True

    def _global(self, name: str, steps: tuple[Step, ...]) -> tuple[str, tuple[Step, ...]]:
        if not INSTALLED.fullmatch(name):
            return "globals:", (("item", name), *steps)
        value = self._globals.get(name)
        if value is None:
            module = module_of_alias(name)
            value = sys.modules.get(module) if module else None
        if isinstance(value, ModuleType):
            return f"module:{value.__name__}", steps
        home, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(home, str) and isinstance(qualname, str) and "<" not in qualname:
            place = f"module:{home}", tuple(("attr", part) for part in qualname.split("."))
            if self.value(*place) is value:
                return place[0], (*place[1], *steps)
        raise NotPortable("an object that Dynamo installed as a global")

    def _keyed(self, root: str, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Look dictionary values up by key where a guard names a position, if the key is a plain value.

        A hook stays a position: its key counts the hooks of the whole process.
        """
        out: list[Step] = []
        for step in steps:
            if step[0] == "value_at" and len(step) == 2 and not hook_table(out):
                holder = self.value(root, out)
                key = list(dict.keys(holder))[int(step[1])] if isinstance(holder, dict) else None
                described = describe_key(key)
                if isinstance(described, (str, int)) and not isinstance(described, bool):
                    out.append(("dict_item", described))
                    continue
            out.append(step)
        return tuple(out)


def _fields(value: object) -> Sequence[str]:
    return tuple(
        getattr(type(value), "__dataclass_fields__", None) or getattr(type(value), "_fields", None) or ()
    )


def hook_table(steps: Sequence[Step]) -> bool:
    """Tell whether a path ends at a table of hooks by id, of one module or of the process."""
    if not steps or steps[-1][0] not in ("attr", "plain_attr"):
        return False
    name = str(steps[-1][-1])
    return name in ALL_HOOK_TABLES or name.replace("_global", "", 1) in ALL_HOOK_TABLES


def _submodule(steps: tuple[Step, ...]) -> tuple[str, tuple[Step, ...]]:
    names: list[str] = []
    while len(steps) >= 2 and steps[0] == ("attr", "_modules") and steps[1][0] == "item":
        names.append(str(steps[1][-1]))
        steps = steps[2:]
    return f"model:{'.'.join(names)}", steps


def _makes_named_tuples(value: object) -> bool:
    """Tell whether a dict is the namespace that Python itself gives a named tuple's ``__new__``."""
    names = {"_tuple_new", "__builtins__", "__name__"}
    return isinstance(value, dict) and "_tuple_new" in value and set(value) <= names
