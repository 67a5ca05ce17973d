"""Key: every guard Dynamo placed, as a portable predicate, a named cover, or a named refusal.

``guard_table.py`` says what becomes of each guard type; this file finds where a guarded value lives on
the model (never by evaluating an expression) and writes down what it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pwcc.cache import strict
from pwcc.cache.errors import UnsealableError
from pwcc.compile.guard_forms import write
from pwcc.compile.guard_places import Place, Places, hook_table
from pwcc.compile.guard_table import GUARDS, REGISTRIES, Covered, Form, Refused
from pwcc.compile.runtime.classes import class_record, is_plain
from pwcc.compile.runtime.comparisons import digest
from pwcc.compile.runtime.hooks import module_hooks
from pwcc.compile.runtime.paths import Absent, Step
from pwcc.compile.runtime.portable import NotPortable, attempt, describe, type_name
from pwcc.compile.runtime.predicates import Predicate, PredicateSet, Rule
from pwcc.compile.torch_private.guards import GuardView, functorch_active, views
from pwcc.compile.torch_private.sources import NoPath, Path

SINGLETONS = {"enum", "class", "module", "torch", "operator", "builtin"}
"""Forms of values of which a process has one: their identity is their name."""
BY_KEY = {Form.KEYS, Form.CONTAINS, Form.EXCLUDES}
ROOT_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
)  # a call of the model runs them, a trace of forward does not


@dataclass(frozen=True, slots=True)
class Dropped:
    """A guard that needs no predicate, because another check covers it."""

    type: str
    expression: str
    covered: Covered


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of all guards of one trace."""

    predicates: tuple[Predicate, ...]
    dropped: tuple[Dropped, ...]
    guards: int

    def covers(self) -> dict[str, int]:
        """Return how many guards each other check covers, by its name."""
        return dict(sorted(Counter(item.covered.name.lower() for item in self.dropped).items()))


def collect(
    guards: Sequence[Any],
    *,
    model: nn.Module,
    local_scope: Mapping[str, object],
    global_scope: Mapping[str, object],
) -> Collected:
    """Turn the guards of one trace of ``model.forward`` into predicates that hold on ``model`` now.

    Args:
        guards: Dynamo's guards; shape guards among them are counted as covered elsewhere.
        model: the module that was traced.
        local_scope: the arguments of the trace by name, the model's own ``self`` among them.
        global_scope: the namespace of the traced ``forward``, with the aliases Dynamo put there.

    Raises:
        UnsealableError: a guard that has no portable form, by type, expression and source line; or a
            predicate that does not hold on the very model it was taken from.
    """
    collector = _Collector(model, local_scope, global_scope)
    seen = views(guards)
    for guard in seen:
        collector.add(guard)
    collector.add_root()
    found = Collected(tuple(collector.predicates()), tuple(collector.dropped), len(seen))
    violated = PredicateSet.of(found.predicates).check(model, limit=1)
    if violated:
        raise UnsealableError(
            f"a guard does not hold on the model it was taken from: {violated[0]}",
            hint="the forward changes what it depends on; keep state in buffers or outside the model",
        )
    return found


class _Collector:
    def __init__(
        self, model: nn.Module, local_scope: Mapping[str, object], global_scope: Mapping[str, object]
    ) -> None:
        self.dropped: list[Dropped] = []
        self._model = model
        self._places = Places(model, local_scope, global_scope)
        self._found: dict[tuple[str, bytes], Predicate] = {}
        self._tree = {id(tensor) for module in model.modules() for tensor in _tensors(module)}

    def predicates(self) -> list[Predicate]:
        return [self._found[key] for key in sorted(self._found)]

    def add_root(self) -> None:
        """Guard the root as Dynamo guards submodules: it was traced by its ``forward``, not called."""
        for name in ROOT_HOOKS:
            self._put("model:", (("attr", name),), "length", 0, None)
        self._put("model:", (), "type", type_name(type(self._model)), None)
        if "forward" not in self._model.__dict__:
            self._put("model:", (), "lacks_own", "forward", None)

    def add(self, guard: GuardView) -> None:
        try:
            carried = GUARDS.get(guard.type, Refused("a guard type that pwcc does not know"))
            if isinstance(carried, Refused):
                raise NotPortable(carried.reason)
            if isinstance(carried, Covered):
                if carried is Covered.INFERENCE and functorch_active():
                    raise NotPortable("the trace ran inside a functorch transform")
                self.dropped.append(Dropped(guard.type, guard.expression, carried))
                return
            if guard.path is None:
                raise NotPortable(guard.problem)
            covered = self._add_form(guard, guard.path, carried)
        except (NotPortable, NoPath, Absent) as error:
            raise UnsealableError(
                f"guard {guard.type} on {guard.expression or guard.path}: {error}",
                where=guard.where,
                hint="make what the forward depends on a plain value: a number, string, type or function",
            ) from None
        if covered is not None:
            self.dropped.append(Dropped(guard.type, guard.expression, covered))

    def _add_form(self, guard: GuardView, path: Path, form: Form) -> Covered | None:
        """Write one guard down, or return what covers it."""
        place = self._places.find(path)
        if form is Form.SAME and guard.other is not None:
            return self._add_same(guard, place, self._places.find(guard.other))
        if isinstance(place, Covered):
            return place
        root, steps = place
        value = self._places.value(root, steps)
        if form is Form.TENSOR and isinstance(value, torch.Tensor) and id(value) in self._tree:
            return Covered.TREE
        if _is_registry(root, steps, form):
            return Covered.REGISTRY
        if self._names_a_hook(root, steps, form, guard.where):
            return Covered.HOOKS
        if steps[-1:] == (("attr", "__code__"),):  # a function says more of its code than the code itself
            function = self._places.value(root, steps[:-1])
            if isinstance(function, FunctionType):
                steps, value = steps[:-1], function
        for written in write(form, value, guard):
            test, expected = written.test, written.value
            if test == "is" and any(step[0] == "bytes_item" for step in steps):
                test, expected = "digest", digest(expected)  # an environment variable may be a secret
            self._put(root, steps, test, expected, guard.where)
        return None

    def _names_a_hook(self, root: str, steps: tuple[Step, ...], form: Form, where: str | None) -> bool:
        """Tell whether a guard names a hook by its id, and put a predicate on all hooks in its place.

        Global hooks need none: a model is neither compiled nor served while there are any.
        """
        table = steps[:-1] if steps[-1:] and steps[-1][0] == "key" else steps
        if not hook_table(table) or (table == steps and form not in BY_KEY):
            return False
        if root.startswith("model:"):
            hooks = module_hooks(self._places.value(root, table[:-1]))
            self._put(root, table[:-1], "hooks", hooks, where)
        return True

    def _add_same(self, guard: GuardView, place: Place, other: Place) -> Covered | None:
        if Covered.ARGUMENT in (place, other):
            raise NotPortable("an argument is the same object as another input")
        if isinstance(place, Covered):
            place, other = other, place
        if isinstance(place, Covered):
            return place
        described = attempt(self._places.value(*place))
        singleton = isinstance(described, list) and described[0] in SINGLETONS
        if isinstance(other, Covered) or singleton:  # say what both are: easier to read, and shared by layers
            wanted = describe(self._places.value(*place))
            self._put(*place, "is", wanted, guard.where)
            if not isinstance(other, Covered):
                self._put(*other, "is", wanted, guard.where)
        else:
            self._put(*place, "same", [other[0], [list(step) for step in other[1]]], guard.where)
        return None

    def _put(self, root: str, steps: tuple[Step, ...], test: str, value: Any, where: str | None) -> None:
        if test == "type" or (test == "is" and isinstance(value, list) and value[:1] == ["class"]):
            live = self._places.value(root, steps)
            if test == "type" and not is_plain(type(live)):
                test, value = "instance", class_record(type(live))
            elif test == "is" and isinstance(live, type) and not is_plain(live):
                test, value = "class", class_record(live)
        line = "" if where is None else PurePath(where).name  # a directory would name the build machine
        rule = Rule(steps, test, value, line)
        key = (root, strict.canonical(rule.to_json()[:3]))
        known = self._found.get(key)
        if known is None or line < known.rule.where:  # guards come in no fixed order; keep one line
            self._found[key] = Predicate(root, rule)


def _is_registry(root: str, steps: Sequence[Step], form: Form) -> bool:
    if not steps or (root, steps[0][1:]) not in [(at, (name,)) for at, name in REGISTRIES]:
        return False
    return (steps[1:2] != () and steps[1][0] == "key") or (len(steps) == 1 and form in (Form.LENGTH, Form.KEYS))


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    held = (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values())
    return [item for item in held if isinstance(item, torch.Tensor)]
