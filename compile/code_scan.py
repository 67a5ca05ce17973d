"""Key: what traced code reads that Dynamo places no guard on, found in its byte code.

Dynamo interprets ``forward`` without calling ``os.environ``, guards no variable that is absent, and none of
``find_spec``, grad mode, the process group, a weight's ``requires_grad`` or a look into ``__dict__``. This is
a straight-line reading of each code object with a stack of known values: modules, the environment, its
methods, and constants. Branches join as "unknown". A read whose name is not a constant there is reported as
such, with its line: it never goes unnoticed.
"""

from __future__ import annotations

import dis
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any, Final

import torch

from pwcc.cache import process_state
from pwcc.compile.bytecode import UNKNOWN, Constant, StackReading
from pwcc.compile.callers import Owner, owner_of


class _Environment:
    """The environment, whatever object stands for it."""


@dataclass(frozen=True)
class _Call:
    """A function that reads when called: ``kind`` is environment, module or grad."""

    kind: str


ENVIRONMENT: Final = _Environment()
_READ = _Call("environment")
_PROBE = _Call("module")
_GRAD = _Call("grad")
_READERS: Final = ("get", "__getitem__", "__contains__", "setdefault", "pop")
_NAMES: Final[Mapping[str, object]] = {
    "environ": ENVIRONMENT,
    "environb": ENVIRONMENT,
    "getenv": _READ,
    "getenvb": _READ,
    "find_spec": _PROBE,
    "is_grad_enabled": _GRAD,
}
"""Attributes that mean one thing on any object that is not known better."""
_BY_NAME: Final = {
    name.rpartition(".")[2]: name
    for name in process_state.STATES
    if name.startswith(("torch.distributed.", "torch.get_autocast", "torch.is_autocast"))
}
"""Names that speak for themselves, whatever object they are asked of."""
_BUILTINS: Final = {"hash": hash}
_AUTOCASTS: Final = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cpu.amp.autocast",
    "torch.cuda.amp.autocast",
)
MAX_DEPTH: Final = 20


@dataclass(frozen=True)
class Computed:
    """A read whose name the code computes: ``code`` and ``line`` say where, ``what`` what it is."""

    code: CodeType
    line: int
    what: str

    @property
    def where(self) -> str:
        """Return the place as ``file.py:line``."""
        return f"{os.path.basename(self.code.co_filename)}:{self.line}"  # noqa: PTH119


@dataclass
class Found:
    """What some code objects read. The maps go from name to the line, ``file.py:line``.

    ``states`` are functions of :data:`process_state.STATES` that the code names, ``volatile`` of
    :data:`process_state.VOLATILE`. ``own_keys`` are constants in code that looks into an object's
    ``__dict__``, by qualified name.
    """

    variables: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    volatile: dict[str, str] = field(default_factory=dict)
    grad_mode: str = ""
    requires_grad: str = ""
    own_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)


def scan(codes: Iterable[tuple[CodeType, Mapping[str, object]]]) -> Found:
    """Read code objects, each with the namespace of its module; nested ones are read too."""
    found = Found()
    asked = _process_functions()
    for code, namespace in codes:
        for inner in _nested(code, 0):
            _Reading(inner, namespace, found, asked).run()
    return found


def _process_functions() -> dict[int, str]:
    """Return what the tables of ``process_state.py`` name and this process has loaded, by identity."""
    names = [*process_state.STATES, *process_state.VOLATILE]
    found = {id(function): name for name in names if (function := process_state.lookup(name, sys.modules))}
    casts = {id(cast): process_state.AUTOCAST_TYPES for name in _AUTOCASTS if (cast := _autocast(name))}
    return {**found, **casts}


def _autocast(name: str) -> object:
    return process_state.lookup(name, sys.modules)


def _nested(code: CodeType, depth: int) -> Iterator[CodeType]:
    yield code
    if depth < MAX_DEPTH:
        for const in code.co_consts:
            if isinstance(const, CodeType):
                yield from _nested(const, depth + 1)


class _Reading(StackReading):
    """One code object, whose reads go to ``found``."""

    def __init__(
        self, code: CodeType, namespace: Mapping[str, object], found: Found, asked: Mapping[int, str]
    ) -> None:
        super().__init__(code)
        self._namespace = namespace
        self._found = found
        self._asked = asked
        self._keywords = 0
        self._looks_into_dict = False

    def run(self) -> None:
        self.read()
        if self._looks_into_dict:
            keys = {c for c in self.code.co_consts if isinstance(c, str) and c.isidentifier()}
            self._found.own_keys[self.code.co_qualname] = tuple(sorted(keys))

    def _where(self) -> str:
        return Computed(self.code, self.line, "").where

    def lose(self, value: object) -> None:
        """Note that a value goes where this reading cannot follow."""
        if isinstance(value, _Environment):
            self._computed("the environment")
        elif value in (_READ, _PROBE):
            self._computed("a variable" if value is _READ else "a module")

    def _computed(self, what: str) -> None:
        made = Computed(self.code, self.line, what)
        if made not in self._found.computed:
            self._found.computed.append(made)

    # Operations that are followed

    def _load_global(self, step: Any) -> None:
        name = str(step.argval)
        value = self._known(self._namespace.get(name, _BUILTINS.get(name)), name)
        # A NULL comes with it for a call, before it or after it by version: both places hold the value.
        self.push(*[value] * dis.stack_effect(step.opcode, step.arg))

    def _load_name(self, step: Any) -> None:
        self._load_global(step)

    def _load_attr(self, step: Any) -> None:
        effect = dis.stack_effect(step.opcode, step.arg)
        value = self._attribute(self.pop(), str(step.argval))
        self.push(*[value] * (effect + 1))

    _load_method = _load_attr

    def _import_name(self, step: Any) -> None:
        self.pop()
        self.pop()
        name = str(step.argval)
        known = sys.modules.get(name)
        self.push(known if isinstance(known, ModuleType) else UNKNOWN)

    def _import_from(self, step: Any) -> None:
        self.push(self._attribute(self.top(), str(step.argval)))

    def _kw_names(self, step: Any) -> None:
        self._keywords = len(self.code.co_consts[step.arg])

    def _binary_subscr(self, step: Any) -> None:
        key, holder = self.pop(), self.pop()
        self._read_by(holder, key)
        self.push(UNKNOWN)

    def _contains_op(self, step: Any) -> None:
        holder, key = self.pop(), self.pop()
        self._read_by(holder, key)
        self.push(UNKNOWN)

    def _read_by(self, holder: object, key: object) -> None:
        if isinstance(holder, _Environment):
            self._read(_READ, key)
        else:
            self.lose(key)

    def _call(self, step: Any) -> None:
        arguments = [self.pop() for _ in range(step.arg)][::-1]
        above, below = self.pop(), self.pop()  # the function, and a NULL or its object
        called = next((value for value in (below, above) if isinstance(value, _Call)), None)
        first = arguments[0] if len(arguments) > self._keywords else UNKNOWN
        if called is not None:
            if called is _GRAD:
                self._note_grad_mode()
            else:
                self._read(called, first)
            arguments = arguments[1:]
        for value in arguments:
            self.lose(value)
        self._keywords = 0
        self.push(UNKNOWN)

    def _call_kw(self, step: Any) -> None:
        names = self.pop()
        self._keywords = (
            len(names.value) if isinstance(names, Constant) and isinstance(names.value, tuple) else 1
        )
        self._call(step)

    def _note_grad_mode(self) -> None:
        # An installed package asks for it to choose between training and inference, which is settled.
        if owner_of("", self.code.co_filename, ()) is Owner.OWN:
            self._found.grad_mode = self._found.grad_mode or self._where()

    def _read(self, called: _Call, key: object) -> None:
        name = key.value if isinstance(key, Constant) else None
        if isinstance(name, bytes):
            name = os.fsdecode(name)
        if not isinstance(name, str):
            self._computed("a variable" if called.kind == "environment" else "a module")
        elif called.kind == "environment":
            self._found.variables.setdefault(name, self._where())
        else:
            self._found.modules.setdefault(name, self._where())

    # What names stand for

    def _attribute(self, base: object, name: str) -> object:
        if name == "requires_grad":
            self._found.requires_grad = self._found.requires_grad or self._where()
        elif name == "__dict__":
            self._looks_into_dict = True
        if isinstance(base, _Environment):
            if name not in _READERS:
                self._computed("the environment")
            return _READ if name in _READERS else UNKNOWN
        if isinstance(base, ModuleType):
            return self._known(vars(base).get(name), name)
        if name in _BY_NAME:
            self._found.states.setdefault(_BY_NAME[name], self._where())
        return _NAMES.get(name, UNKNOWN)

    def _known(self, value: object, name: str) -> object:
        if value is os.environ or value is getattr(os, "environb", None):
            return ENVIRONMENT
        if value is os.getenv or value is getattr(os, "getenvb", None):
            return _READ
        if value is importlib.util.find_spec:
            return _PROBE
        if value is torch.is_grad_enabled:
            return _GRAD
        if isinstance(value, ModuleType):
            return value
        asked = self._asked.get(id(value))
        if asked is not None:
            kept = self._found.states if asked in process_state.STATES else self._found.volatile
            kept.setdefault(asked, self._where())
        if name == "vars" and value is None:
            self._looks_into_dict = True
        return UNKNOWN if value is not None else _NAMES.get(name, UNKNOWN)
