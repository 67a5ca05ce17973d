"""Key: the structure that ``forward`` returns, read off Dynamo's output bytecode, for a host without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.compile.argument_forms import map_tensors
from pwcc.compile.conditions import run_time_value, source_line
from pwcc.compile.markers import ArgumentMarker, SizeMarker, make_markers, settled, unwrap_numbers
from pwcc.compile.origins import held_names
from pwcc.compile.runtime.output import build_output, is_result
from pwcc.compile.runtime.portable import type_name
from pwcc.compile.signature import definition
from pwcc.compile.sizes import Sizes
from pwcc.compile.torch_private import dynamo, symbols

FIRST_MARKER = 1 << 50  # markers of sizes are beyond it, and no constant that a model returns is
FIRST_SIZE, OTHER_SIZE = 1 << 60, 1 << 52  # what is made of a size, such as a text, differs between the two


def output_template(
    model: nn.Module,
    call: tuple[Sequence[object], Mapping[str, object]],
    leaves: Sequence[object],
    dims: Mapping[int, Mapping[int, str]],
    weights: Sequence[tuple[str, ...]],
    raw: dynamo.RawCapture,
    names: Mapping[Any, str],
) -> tuple[object, list[tuple[str, ...]]]:
    """Run Dynamo's output bytecode over marker tensors and describe what it builds.

    Sizes that the graph returns become expressions of the template.

    Args:
        model: the traced module.
        call: the arguments of the trace, by position and by name.
        leaves: the same, flat.
        dims: the dynamic dimensions by leaf, each with the name of its size in the program.
        weights: the names of each weight that the graph reads, in order.
        raw: the capture.
        names: torch's size symbols -> the program's.

    Returns:
        The template, and the names of tensors that the model returns as they are and that are not among
        ``weights``; the template counts them after those.

    Raises:
        TraceError: a size that is known only at run time.
        UnsealableError: a value or class that another process cannot rebuild, by name.
    """
    output = next(node for node in raw.graph_module.graph.nodes if node.op == "output")
    results = list(output.args[0])
    where = definition(model.forward)
    held = held_names(model)
    args, kwargs = call

    def describe(
        make: Callable[[Any, Mapping[int, str]], Any], first: int
    ) -> tuple[object, list[tuple[str, ...]], list[Any]]:
        made = make_markers(results, first)
        of_arguments = {name: SizeMarker(2 * first + index) for index, name in enumerate(_names(dims))}
        sizes = _sizes(results, made, raw, names) | {id(item): name for name, item in of_arguments.items()}
        change = exchange(make, of_arguments)
        arguments = [change(item) for item in leaves if isinstance(item, torch.Tensor)]
        try:
            built = raw.replay(lambda *_: tuple(made))(
                model,
                *(map_tensors(item, change) for item in args),
                **{name: map_tensors(item, change) for name, item in kwargs.items()},
            )
        except Exception as error:
            raise UnsealableError(
                f"what forward returns cannot be described: {type(error).__name__}: {error}", where=where
            ) from error
        try:
            markers = [*settled(made), *of_arguments.values()]
            plain = _Describer(arguments, markers, {}, weights, held)
            _require_same(build_output(plain.describe(built))(markers, arguments, plain.weights), built)
            describer = _Describer(arguments, markers, sizes, weights, held)
            return describer.describe(built), describer.returned, made
        except UnsealableError as error:
            error.where = error.where or where
            raise
        except (CorruptEntry, TypeError) as error:
            raise UnsealableError(
                f"forward returns a {type(built).__qualname__}, which pwcc cannot rebuild: {error}", where=where
            ) from error

    def exchange(
        make: Callable[[Any, Mapping[int, str]], Any], of_arguments: Mapping[str, SizeMarker]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        found = {
            id(item): ArgumentMarker.of(make(item, own), {dim: of_arguments[name] for dim, name in own.items()})
            for item, own in ((item, dims.get(index, {})) for index, item in enumerate(leaves))
            if own
        }
        return lambda tensor: found.get(id(tensor), tensor)

    template, returned, made = describe(lambda leaf, _: leaf, FIRST_SIZE)
    unwrap_numbers(output, made)
    if describe(_larger, OTHER_SIZE)[0] != template:
        raise UnsealableError(
            "forward returns a value that follows the size of an argument and was traced as a constant",
            where=where,
            hint="return tensors and sizes, and make texts or keys of sizes outside",
        )
    return template, returned


def _larger(leaf: Any, dims: Mapping[int, str]) -> Any:
    """Return a tensor like a leaf whose dynamic dimensions are larger; its values are of no use."""
    shape = [size + (dim in dims) for dim, size in enumerate(leaf.shape)]
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def _names(dims: Mapping[int, Mapping[int, str]]) -> list[str]:
    return list(dict.fromkeys(name for own in dims.values() for name in own.values()))


def _sizes(
    results: Sequence[object], made: Sequence[object], raw: dynamo.RawCapture, names: Mapping[Any, str]
) -> dict[int, str]:
    """Return the text of each size among a graph's results, by the ``id`` of its marker.

    Raises:
        TraceError: a size that is known only at run time.
    """
    texts: dict[int, str] = {}
    numbers = Sizes(raw.shape_env, names)
    for node, marker in zip(results, made, strict=True):
        size = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(node, fx.Node) or not isinstance(size, torch.SymInt):
            continue
        expr = symbols.expression(size, raw.shape_env)
        if any(symbol not in names for symbol in symbols.free_symbols(expr)):
            raise run_time_value(expr, source_line(node))
        if not numbers.is_computed(node):  # otherwise the program returns the number itself
            texts[id(marker)] = str(symbols.to_text(expr, names))
    return texts


class _Describer:
    """Knows every tensor that ``forward`` may return, and describes what is built of them."""

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        markers: Sequence[object],
        sizes: Mapping[int, str],
        weights: Sequence[tuple[str, ...]],
        held: Mapping[int, list[str]],
    ) -> None:
        self.arguments = arguments
        self.returned: list[tuple[str, ...]] = []
        self.weights: list[object] = [None] * len(weights)
        self._held = held
        self._sizes = sizes
        self._positions = {names[0]: index for index, names in enumerate(weights)}
        self._known: dict[int, dict[str, int]] = {id(item): {"argument": i} for i, item in enumerate(arguments)}
        self._known |= {id(marker): {"output": i} for i, marker in enumerate(markers)}

    def describe(self, value: object) -> object:
        if id(value) in self._sizes:
            return {"size": self._sizes[id(value)]}
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, torch.Tensor):
            return self._weight(value)
        if isinstance(value, torch.Size):
            return {"shape": [self.describe(item) for item in value]}
        if isinstance(value, int) and abs(value) >= FIRST_MARKER:
            raise UnsealableError("forward returns a number that is computed from a size outside the graph")
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
        names = getattr(value, "__match_args__" if is_result(type(value)) else "_fields", None)
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
        others = [set(getattr(one, "__dict__", ())) - set(wanted) for one in (rebuilt, built)]
        kept = getattr(rebuilt, "default_factory", None) is getattr(built, "default_factory", None)
        same = list(found) == list(wanted) and others[0] == others[1] and kept
        for name in wanted if same else ():
            _require_same(found[name], wanted[name])
        for name in sorted(others[0]) if same else ():
            _require_same(getattr(rebuilt, name), getattr(built, name))
    else:
        same = rebuilt == built or rebuilt != rebuilt  # noqa: PLR0124 (NaN)
    if not same:
        raise UnsealableError(f"forward returns a {type(built).__qualname__}, which pwcc cannot rebuild")
