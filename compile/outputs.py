"""Key: the structure that ``forward`` returns, read off Dynamo's output bytecode, for a host without it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import nn

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.compile.runtime.calling import build_output
from pwcc.compile.runtime.held import named_tensors
from pwcc.compile.runtime.portable import type_name
from pwcc.compile.signature import definition
from pwcc.compile.torch_private import dynamo


def output_template(
    model: nn.Module, examples: Sequence[object], weights: Sequence[tuple[str, ...]], raw: dynamo.RawCapture
) -> tuple[object, list[tuple[str, ...]]]:
    """Run Dynamo's output bytecode over marker tensors and describe what it builds.

    Returns the template and the names of tensors that the model returns as they are and that are not
    among ``weights``; the template counts them after those.

    Raises:
        UnsealableError: a value or class that another process cannot rebuild, by name.
    """
    output = next(node for node in raw.graph_module.graph.nodes if node.op == "output")
    markers = [torch.empty(0) for _ in output.args[0]]
    where = definition(model.forward)
    try:
        built = raw.replay(lambda *_: tuple(markers))(model, *examples)
    except Exception as error:
        raise UnsealableError(
            f"what forward returns cannot be described: {type(error).__name__}: {error}", where=where
        ) from error
    held: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        held.setdefault(id(tensor), []).append(name)
    describer = _Describer(
        [item for item in examples if isinstance(item, torch.Tensor)], markers, weights, held
    )
    try:
        template = describer.describe(built)
        _require_same(build_output(template)(markers, describer.arguments, describer.weights), built)
    except UnsealableError as error:
        error.where = error.where or where
        raise
    except (CorruptEntry, TypeError) as error:
        raise UnsealableError(
            f"forward returns a {type(built).__qualname__}, which pwcc cannot rebuild: {error}", where=where
        ) from error
    return template, describer.returned


class _Describer:
    """Knows every tensor that ``forward`` may return, and describes what is built of them."""

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        markers: Sequence[torch.Tensor],
        weights: Sequence[tuple[str, ...]],
        held: Mapping[int, list[str]],
    ) -> None:
        self.arguments = arguments
        self.returned: list[tuple[str, ...]] = []
        self.weights: list[object] = [None] * len(weights)
        self._held = held
        self._positions = {names[0]: index for index, names in enumerate(weights)}
        self._known: dict[int, dict[str, int]] = {id(item): {"argument": i} for i, item in enumerate(arguments)}
        self._known |= {id(marker): {"output": i} for i, marker in enumerate(markers)}

    def describe(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._known.get(id(value)) or self._weight(value)
        if value is None or type(value) in (bool, int, str):
            return {"constant": value}
        if isinstance(value, float) and type(value) is float:
            return {"constant": value} if math.isfinite(value) else {"float": str(value)}
        if type(value) in (tuple, list):
            items = [self.describe(item) for item in value]  # type: ignore[attr-defined]
            return {type(value).__name__: items}
        if isinstance(value, dict) and type(value) is dict:
            for key in value:
                if key is not None and type(key) not in (bool, int, str):
                    raise UnsealableError(f"forward returns a dict with a {type(key).__qualname__} as a key")
            return {"dict": [[key, self.describe(item)] for key, item in value.items()]}
        named = _fields(value)
        if named is None:
            raise UnsealableError(
                f"forward returns a {type(value).__qualname__}, whose structure pwcc cannot rebuild"
            )
        name = type_name(type(value))
        return {"class": name, "fields": [[key, self.describe(item)] for key, item in named.items()]}

    def _weight(self, tensor: torch.Tensor) -> object:
        names = tuple(self._held.get(id(tensor), ()))
        if not names:
            raise UnsealableError("forward returns a tensor that is neither computed, passed in nor held")
        if names[0] not in self._positions:
            self._positions[names[0]] = len(self._positions)
            self.returned.append(names)
            self.weights.append(None)
        self.weights[self._positions[names[0]]] = tensor
        return {"weight": self._positions[names[0]]}


def _fields(value: object) -> dict[str, object] | None:
    if isinstance(value, Mapping):
        return dict(value.items()) if all(type(key) is str for key in value) else None
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return None if names is None else dict(zip(names, value, strict=True))
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _require_same(rebuilt: object, built: object) -> None:
    """Refuse a class whose constructor does not give back what its fields said."""
    if isinstance(built, torch.Tensor):
        same = rebuilt is built
    elif type(rebuilt) is not type(built):
        same = False
    elif isinstance(built, (tuple, list)):
        same = len(built) == len(rebuilt)  # type: ignore[arg-type]
        for one, other in zip(rebuilt, built, strict=False):  # type: ignore[call-overload]
            _require_same(one, other)
    elif (wanted := _fields(built)) is not None:
        found = _fields(rebuilt) or {}
        same = list(found) == list(wanted)
        for name in wanted if same else ():
            _require_same(found[name], wanted[name])
    else:
        same = rebuilt == built or rebuilt != rebuilt  # noqa: PLR0124 (NaN)
    if not same:
        raise UnsealableError(f"forward returns a {type(built).__qualname__}, which pwcc cannot rebuild")
