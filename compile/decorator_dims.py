"""Key: which dimensions of a decorated forward's arguments are dynamic, and the forms of its first call."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, UsageError
from pwcc.compile.argument_forms import form_of
from pwcc.compile.input_forms import TOKENS, ConstantSpec, ContainerSpec, InputSpec, Spec, named_fill
from pwcc.compile.model_args import unknown_name
from pwcc.compile.signature import definition

DimsOf = int | Sequence[int] | Mapping[int, str]
"""Dynamic dimensions of one argument: one, several, or each with the name of its size."""

Dims = Mapping[str, Mapping[int, str]]
"""Dynamic dimensions by argument, each with the name of its size; negative ones count from the end."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def dynamic_dims(forward: Callable[..., object], given: Mapping[str, DimsOf] | None) -> Dims:
    """Return the dynamic dimensions of a forward: ``given``, or inferred from its annotations.

    Inferred: the first dimension of each argument annotated ``Tensor`` or ``Tensor | None``, and of each such
    field of an argument annotated with a dataclass (under ``argument.field``).

    Raises:
        UsageError: an argument of that name does not exist, dimensions are not integers, or nothing is dynamic.
    """
    parameters = inspect.signature(forward).parameters
    if given is None:
        found = dict(_inferred(forward))
        if not found:
            raise UsageError(
                "no argument of forward is annotated as a Tensor, so nothing tells what is dynamic",
                where=definition(forward),
                hint="annotate it, or pass dynamic_arg_dims={'x': 0}; {} where every size is fixed",
            )
        return found
    for name in given:
        head = name.partition(".")[0]
        if head not in parameters:
            raise unknown_name(f"forward has no parameter {head!r}", head, list(parameters))
    return {name: _named(name, dims) for name, dims in given.items()}


def _named(name: str, dims: DimsOf) -> dict[int, str]:
    found: dict[object, object]
    if isinstance(dims, Mapping):
        found = dict(dims.items())
    else:
        found = dict.fromkeys([dims] if isinstance(dims, int) else dims, TOKENS)
    for dim, size in found.items():
        if type(dim) is not int or not isinstance(size, str) or not size.isidentifier():
            raise UsageError(
                f"expected dynamic_arg_dims[{name!r}] to be a dimension, several, or {{dimension: name}}, "
                f"got {dims!r}"
            )
    return typing.cast("dict[int, str]", found)


def _inferred(forward: Callable[..., object]) -> typing.Iterator[tuple[str, dict[int, str]]]:
    try:
        hints = typing.get_type_hints(forward)
    except Exception as error:  # annotations are user code
        raise UsageError(
            f"the annotations of forward cannot be read: {type(error).__name__}: {error}",
            where=definition(forward),
            hint="pass dynamic_arg_dims={'x': 0}",
        ) from error
    for name in inspect.signature(forward).parameters:
        hint = _without_none(hints.get(name))
        if _is_tensor(hint):
            yield name, {0: TOKENS}
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            fields = typing.get_type_hints(hint)
            for field in dataclasses.fields(hint):
                if _is_tensor(_without_none(fields.get(field.name))):
                    yield f"{name}.{field.name}", {0: TOKENS}


def _is_tensor(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, Tensor)


def _without_none(hint: object) -> object:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return rest[0] if len(rest) == 1 else None
    return hint


@dataclass(frozen=True)
class FirstCall:
    """What a module's first call tells of every later one: its arguments' forms, and which leaves were None."""

    specs: tuple[Spec, ...]
    nones: Mapping[str, bool]
    positional: tuple[str, ...]

    @classmethod
    def of(
        cls, module: nn.Module, dims: Dims, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> FirstCall:
        """Read a call's arguments: tensors with their sizes by name, scalars as constants, containers by leaf.

        Raises:
            UsageError: a dimension that a tensor does not have, sizes of one name that differ, or an argument
                that is neither tensor, scalar nor container of them. TypeError: as ``forward`` itself.
        """
        signature = inspect.signature(module.forward)
        given = signature.bind(*args, **kwargs)
        passed = set(given.arguments)
        given.apply_defaults()
        reader = _Reader(dims, next((h.device for h in (*module.parameters(), *module.buffers())), None))
        specs = []
        for name, value in given.arguments.items():
            if signature.parameters[name].kind not in _VARIADIC:
                spec = reader.read(name, value)
                if name in passed:
                    specs.append(spec)
        positional = tuple(n for n, p in signature.parameters.items() if p.kind in _POSITIONAL)
        return cls(tuple(specs), reader.nones, positional)

    def require_same_nones(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Hold every argument, and every leaf of one, to what it was: None for life, or never None.

        Raises:
            ArgumentError: one changed; names it.
        """
        for name, value in {**dict(zip(self.positional, args, strict=False)), **kwargs}.items():
            try:
                _, names, leaves = form_of(value, name)
            except ArgumentError:
                continue  # what is called says it
            for leaf, found in zip(names, leaves, strict=True):
                was = self.nones.get(leaf)
                if was is not None and was is not (found is None):
                    first, now = ("None", "a value") if was else ("a value", "None")
                    raise ArgumentError(
                        f"argument {leaf!r} was {first} at the first call and is {now} now",
                        hint="an argument of a compiled module is None for life or never: use one module for "
                        "each form, or level 1",
                    )


class _Reader:
    """Reads one call's arguments; sizes of one name must be equal, the first name met is the token count's."""

    def __init__(self, dims: Dims, home: torch.device | None) -> None:
        self.nones: dict[str, bool] = {}
        self._dims = dims
        self._home = home
        self._seen: dict[str, tuple[str, int]] = {}
        self._names: dict[str, str] = {}

    def read(self, name: str, value: object) -> Spec:
        try:
            form, names, leaves = form_of(value, name)
        except ArgumentError as error:
            raise UsageError(error.message, hint=error.hint) from None
        specs = tuple(self._leaf(path, leaf) for path, leaf in zip(names, leaves, strict=True))
        return specs[0] if form == {"output": 0} else ContainerSpec(name=name, form=form, leaves=specs)

    def _leaf(self, path: str, leaf: object) -> InputSpec | ConstantSpec:
        self.nones[path] = leaf is None
        if not isinstance(leaf, Tensor):
            return ConstantSpec(name=path, value=typing.cast("bool | int | float | str | None", leaf))
        elsewhere = self._home is not None and leaf.device.type != self._home.type
        shape = self._shape(path, leaf)
        device = str(leaf.device) if elsewhere else None
        return named_fill(InputSpec(name=path, dtype=leaf.dtype, shape=shape, device=device))

    def _shape(self, path: str, tensor: Tensor) -> tuple[int | str, ...]:
        shape: list[int | str] = list(tensor.shape)
        for dim, size in self._dims.get(path, {}).items():
            if not -tensor.dim() <= dim < tensor.dim():
                raise UsageError(f"argument {path!r} has no dimension {dim}: it has {tensor.dim()}")
            first, count = self._seen.setdefault(size, (path, tensor.shape[dim]))
            if tensor.shape[dim] != count:
                raise UsageError(
                    f"dimension {dim} of {path!r} is {tensor.shape[dim]} and that of {first!r} is {count}, "
                    "and both are declared to be one size",
                    hint="give them two names: dynamic_arg_dims={arg: {dim: name}}, or leave the fixed one out",
                )
            shape[dim] = self._names.setdefault(size, size if self._names else TOKENS)
        return tuple(shape)
