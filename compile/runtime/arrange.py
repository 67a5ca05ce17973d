"""Artifact: a call's arguments as the leaves that a program takes, refused as Python would refuse them.

A leaf is a tensor or a constant. Containers of an argument (tuple, list, dict, dataclass, named tuple) were
part of the trace: a call must pass the same structure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pwcc.cache.errors import ArgumentError, CorruptEntry, WrongCall
from pwcc.compile.runtime.output import record_class

KINDS = ("positional", "either", "keyword")
DEFAULTS = ("required", "compiled", "other")
FIXED = {"fixed": True}
"""The form of an argument that was compiled with a default that no call can name."""

MAX_PLANS = 256  # ways to name arguments that are remembered; a program has a few

Take = Callable[[object, list[object]], None]
Pick = Callable[[Any], Sequence[object]]


@dataclass(frozen=True)
class Argument:
    """One parameter of ``forward`` as callers see it.

    ``kind`` tells how it may be passed. ``default``: ``required``, or a default that is what was
    ``compiled``, or an ``other`` one, so that it must be passed. ``form`` is the structure around its leaves:
    ``{"leaf": i}``, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, form], ...]}``,
    ``{"class": "module:qualname", "fields": [[name, form], ...]}`` or :data:`FIXED`.
    """

    name: str
    kind: str
    default: str
    form: object

    def to_json(self) -> dict[str, object]:
        """Return the canonical form."""
        return {"name": self.name, "kind": self.kind, "default": self.default, "form": self.form}


class Arrangement:
    """Turns ``args`` and ``kwargs`` into leaves, in order; ``defaults`` are the constants by leaf.

    Raises:
        CorruptEntry: a form of another grammar, or leaves that are not each named once, in order.
        HostMismatch: a class of a module that this process has not imported.
    """

    def __init__(self, arguments: Sequence[Argument], defaults: Sequence[object]) -> None:
        self._arguments = tuple(arguments)
        self._defaults = tuple(defaults)
        self._takes = [_taker(argument.form, argument.name) for argument in arguments]
        self._leaves = [leaves_of(argument.form) for argument in arguments]
        self._names = [argument.name for argument in arguments]
        self._positional = [a.name for a in arguments if a.kind != "keyword"]
        self._by_name = {argument.name: argument for argument in arguments}
        self._is_flat = all(
            a.form == FIXED or a.form == {"leaf": (n or [-1])[0]} for a, n in self._with_leaves()
        )
        self._plans: dict[tuple[object, ...], tuple[tuple[int | None, ...], Pick]] = {}
        if [leaf for leaves in self._leaves for leaf in leaves] != list(range(len(defaults))):
            raise CorruptEntry("expected each leaf of a call's arguments once, in order")

    def _with_leaves(self) -> Iterator[tuple[Argument, list[int]]]:
        return zip(self._arguments, self._leaves, strict=True)

    def leaves(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[object]:
        """Return the leaves of a call.

        Raises:
            WrongCall: a call that Python refuses for ``forward``, too.
            ArgumentError: another structure than was compiled.
        """
        key = (len(args), *kwargs)
        plan = self._plans.get(key)
        if plan is None:
            sources = self._plan(args, kwargs)
            plan = sources, picker([source for source in sources if source is not None])
            if len(self._plans) < MAX_PLANS:
                self._plans[key] = plan
        sources, pick = plan
        values = [*args, *kwargs.values(), *self._defaults]
        if self._is_flat:
            return pick(values)
        found: list[object] = []
        for take, leaves, source in zip(self._takes, self._leaves, sources, strict=True):
            if source is None:
                found.extend(self._defaults[leaf] for leaf in leaves)
            else:
                take(values[source], found)
        return found

    def _plan(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[int | None, ...]:
        """Return where each argument lies in ``[*args, *kwargs.values(), *defaults]``; None: its own default.

        It depends on the number of positional arguments and on the names only.
        """
        given = self._given(range(len(args)), {name: len(args) + i for i, name in enumerate(kwargs)})
        first = len(args) + len(kwargs)
        sources: list[int | None] = []
        for argument, leaves in zip(self._arguments, self._leaves, strict=True):
            if argument.name in given:
                if argument.form == FIXED:
                    _take_nothing(argument.name)(None, [])
                sources.append(given[argument.name])
            else:
                sources.append(first + leaves[0] if self._is_flat and leaves else None)
        return tuple(sources)

    def _given(self, args: Sequence[int], kwargs: Mapping[str, int]) -> dict[str, int]:
        if len(args) > len(self._positional):
            raise WrongCall(
                f"expected at most {len(self._positional)} arguments {self._positional}, got {len(args)}"
            )
        given = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            argument = self._by_name.get(name)
            if argument is None:
                raise WrongCall(f"unexpected argument {name!r}; expected {self._names}")
            if argument.kind == "positional":
                raise WrongCall(f"argument {name!r} is positional-only, and was passed by name")
            if name in given:
                raise WrongCall(f"argument {name!r} given twice")
            given[name] = value
        missing = [a.name for a in self._arguments if a.default == "required" and a.name not in given]
        if missing:
            raise WrongCall(f"missing arguments {missing}; expected {self._names}")
        for argument in self._arguments:
            if argument.default == "other" and argument.name not in given:
                raise ArgumentError(
                    f"argument {argument.name!r} was left out, and its default is not what was compiled",
                    hint=f"pass {argument.name}, or compile an entry without it",
                )
        return given


def picker(places: Sequence[int | str]) -> Pick:
    """Return what takes the values at ``places`` out of a list or mapping, in their order."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[place] for place in places]


def leaves_of(form: object) -> list[int]:
    """Return the leaves of a form, in order.

    Raises:
        CorruptEntry: another form.
    """
    match form:
        case {"leaf": int(index), **rest} if not rest:
            return [index]
        case {"tuple": list(items), **rest} | {"list": list(items), **rest} if not rest:
            return [leaf for item in items for leaf in leaves_of(item)]
        case {"dict": list(pairs), **rest} if not rest:
            return [leaf for pair in pairs for leaf in leaves_of(_pair(pair)[1])]
        case {"class": str(), "fields": list(pairs), **rest} if not rest:
            return [leaf for pair in pairs for leaf in leaves_of(_pair(pair)[1])]
        case {"fixed": True, **rest} if not rest:
            return []
    raise CorruptEntry(f"unknown form of an argument {repr(form)[:80]}")


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise CorruptEntry(f"expected a key and a form, got {repr(item)[:80]}")
    return item[0], item[1]


def _taker(form: object, path: str) -> Take:
    """Return the function that appends a value's leaves, or says what of its structure differs."""
    leaves_of(form)  # of the grammar
    match form:
        case {"leaf": _}:
            return lambda value, found: found.append(value)
        case {"tuple": list(items)}:
            return _take_items(tuple, items, path)
        case {"list": list(items)}:
            return _take_items(list, items, path)
        case {"dict": list(pairs)}:
            return _take_keys(dict, pairs, path)
        case {"class": name, "fields": list(pairs)}:
            cls = record_class(name, "takes")
            if issubclass(cls, Mapping):
                return _take_keys(cls, pairs, path)
            return _take_fields(cls, pairs, path)
        case _:
            return _take_nothing(path)


def _take_items(kind: type, items: Sequence[object], path: str) -> Take:
    takes = [_taker(item, f"{path}[{index}]") for index, item in enumerate(items)]

    def take(value: object, found: list[object]) -> None:
        if type(value) is not kind or len(value) != len(takes):  # type: ignore[arg-type]
            raise _other(path, f"a {kind.__name__} of {len(takes)}", value)
        for part, item in zip(takes, value, strict=True):  # type: ignore[call-overload]
            part(item, found)

    return take


def _take_keys(kind: type, pairs: Sequence[object], path: str) -> Take:
    takes = [(key, _taker(form, f"{path}[{key!r}]")) for key, form in map(_pair, pairs)]
    keys = [key for key, _ in takes]

    def take(value: object, found: list[object]) -> None:
        if type(value) is not kind or list(value) != keys:  # type: ignore[call-overload]
            raise _other(path, f"a {kind.__name__} with the keys {keys}", value)
        for key, part in takes:
            part(value[key], found)  # type: ignore[index]

    return take


def _take_fields(cls: type, pairs: Sequence[object], path: str) -> Take:
    takes = [(str(name), _taker(form, f"{path}.{name}")) for name, form in map(_pair, pairs)]

    def take(value: object, found: list[object]) -> None:
        if type(value) is not cls:
            raise _other(path, f"a {cls.__qualname__}", value)
        for name, part in takes:
            part(getattr(value, name), found)

    return take


def _take_nothing(path: str) -> Take:
    def take(value: object, found: list[object]) -> None:
        raise ArgumentError(
            f"argument {path!r} was compiled with its default, which has no portable form",
            hint=f"leave {path} out, or wrap the model so that its forward takes tensors",
        )

    return take


def _other(path: str, wanted: str, value: object) -> ArgumentError:
    got = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        got += f" with the keys {list(value)[:8]}"
    elif isinstance(value, (tuple, list)):
        got += f" of {len(value)}"
    return ArgumentError(
        f"argument {path!r} was compiled as {wanted}, got {got}", hint="compile an entry for this structure"
    )
