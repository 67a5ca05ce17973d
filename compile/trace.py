"""Key: one Dynamo trace of a model, with every input's origin and every shape assumption named."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from pwcc.cache.errors import SpecializationError
from pwcc.compile.argument_forms import Flat, flatten, map_tensors
from pwcc.compile.capturing import capture
from pwcc.compile.conditions import Said, predicates, take_asserts
from pwcc.compile.inlining import inline_bodies
from pwcc.compile.origins import ArgumentInput, Origin, WeightInput, origins_of, weights_of
from pwcc.compile.outputs import output_template
from pwcc.compile.runtime.calling import TOKENS, CallingConvention, Parameter, SizeSymbol
from pwcc.compile.signature import definition
from pwcc.compile.torch_private import dynamo, symbols, writes
from pwcc.compile.torch_private.numpy_numbers import fold_numbers

COUNT = "n"
"""How declarations write the token count; other names are sizes of their own."""

Dims = Sequence[int] | Mapping[int, str]
"""The dynamic dimensions of a tensor: those that are the token count, or the name of each one's size."""


class SizeMode(Enum):
    """How a size is traced.

    UNBACKED assumes nothing of the size but its range, which begins at 1; BACKED may add guards and
    holds from 2 on; STATIC fixes the example's size.
    """

    UNBACKED = "unbacked"
    BACKED = "backed"
    STATIC = "static"


@dataclass
class Trace:
    """One graph and all that was assumed about it.

    ``graph_module`` holds placeholders and operations only; ``origins`` maps each tensor placeholder;
    ``symbol_names`` maps torch's symbols to the program's; several may be one. ``guards`` and ``raw`` are
    Dynamo's own objects. ``lines`` are the user's ``file:line: code`` of the predicates, by text.
    """

    graph_module: fx.GraphModule
    origins: dict[fx.Node, Origin]
    symbol_names: dict[Any, str]
    calling: CallingConvention
    guards: Sequence[Any]
    local_scope: Mapping[str, object]
    global_scope: Mapping[str, object]
    traced_code: tuple[types.CodeType, ...]
    shape_env: Any
    mode: SizeMode
    lines: Mapping[str, str] = field(default_factory=dict)
    raw: dynamo.RawCapture | None = None


@dataclass(frozen=True)
class Size:
    """One size of a trace by its declared name: how it is traced, and the range that must be served."""

    mode: SizeMode
    low: int
    high: int

    @property
    def traced_low(self) -> int:
        """The smallest size that the trace holds for."""
        return max(self.low, 2) if self.mode is SizeMode.BACKED else self.low


def trace(
    model: nn.Module,
    inputs: Sequence[object],
    dynamic_dims: Mapping[int, Dims],
    *,
    mode: SizeMode,
    low: int,
    high: int,
    keywords: Mapping[str, object] | None = None,
    others: Mapping[str, Size] | None = None,
) -> Trace:
    """Trace ``model.forward`` once, without a graph break.

    Args:
        model: in eval mode; its weights may be uninitialised memory, values are not read.
        inputs: one example per positional parameter of ``forward``, in signature order: tensors, None,
            scalars, and containers of them.
        dynamic_dims: position of a tensor among all leaves of the arguments -> its dynamic dimensions. Those
            of one name are one number: a call in which they differ is refused.
        mode: how the token count is traced, see :class:`SizeMode`.
        low: smallest token count that must be served (inclusive).
        high: largest token count that must be served (inclusive).
        keywords: examples that are passed by name.
        others: sizes by name beside the token count, whose examples should differ from it and each other.

    Raises:
        TraceError: a graph break or failed trace, with the user's file and line.
        SpecializationError: the code fixes a dimension that was asked to be dynamic.
        UnsealableError: side effects that only rewritten bytecode would perform, or an input of
            unknown origin.
    """
    sizes = {COUNT: Size(mode, low, high), **(others or {})}
    named = {
        leaf: dict(dims) if isinstance(dims, Mapping) else dict.fromkeys(dims, COUNT)
        for leaf, dims in dynamic_dims.items()
    }
    args = [map_tensors(item, torch.clone) for item in inputs]
    kwargs = {name: map_tensors(item, torch.clone) for name, item in (keywords or {}).items()}
    flat = flatten(model, args, kwargs)
    _mark(flat.leaves, named, sizes)
    raw = capture(model, args, kwargs)
    inline_bodies(raw.graph_module)
    fold_numbers(raw.graph_module)
    return _Analysis(model, flat, named, sizes, raw, args, kwargs).trace()


def _mark(leaves: Sequence[object], named: Mapping[int, Mapping[int, str]], sizes: Mapping[str, Size]) -> None:
    for index, dims in named.items():
        tensor = leaves[index]
        if not isinstance(tensor, torch.Tensor):
            continue
        for dim, name in dims.items():
            size = sizes[name]
            if size.mode is SizeMode.UNBACKED:
                dynamo.mark_unbacked(tensor, dim)
            elif size.mode is SizeMode.BACKED:
                dynamo.mark_dynamic(tensor, dim, low=size.low, high=size.high)


class _Analysis:
    """Turns one raw capture into a :class:`Trace`."""

    def __init__(
        self,
        model: nn.Module,
        flat: Flat,
        named: Mapping[int, Mapping[int, str]],
        sizes: Mapping[str, Size],
        raw: dynamo.RawCapture,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        self._model = model
        self._flat = flat
        self._raw = raw
        self._env = raw.shape_env
        self._sizes = sizes
        self._call = (args, kwargs)
        self._dims = {
            leaf: {dim: name for dim, name in dims.items() if sizes[name].mode is not SizeMode.STATIC}
            for leaf, dims in named.items()
            if isinstance(flat.leaves[leaf], torch.Tensor)
        }
        used = dict.fromkeys(name for dims in self._dims.values() for name in dims.values())
        others = [name for name in used if name != COUNT]
        self._names = {COUNT: TOKENS, **{name: f"s{index}" for index, name in enumerate(others, start=1)}}
        self._files = tuple({code.co_filename for code in raw.traced_code})
        self._symbol_names: dict[Any, str] = {}
        self._size_symbols: list[SizeSymbol] = []

    def trace(self) -> Trace:
        raw, env, graph = self._raw, self._env, self._raw.graph_module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        origins = origins_of(self._model, self._flat.leaves, placeholders, raw.example_inputs)
        fakes = {
            origin.parameter: node.meta["example_value"]
            for node, origin in origins.items()
            if isinstance(origin, ArgumentInput)
        }
        conditions = symbols.shape_guards(env, raw.assert_lines, self._files)
        conditions += take_asserts(raw.graph_module, env)  # after those whose lines are exact
        said = self._bind_symbols(fakes)
        checked, lines = predicates(conditions, env, self._symbol_names, self._size_symbols, said)
        weights = [origin.names for origin in origins.values() if isinstance(origin, WeightInput)]
        output, returned = output_template(
            self._model, self._call, self._flat.leaves, self._program_dims, weights, raw, self._symbol_names
        )
        written = writes.written(graph, fakes)
        parameters = tuple(
            self._parameter(index, fakes.get(index), index in written)
            for index in range(len(self._flat.leaves))
        )
        calling = CallingConvention(
            parameters,
            tuple(self._size_symbols),
            checked,
            weights_of(self._model, origins, returned, graph),
            output,
            self._flat.beyond_plain(parameters),
        )
        first = next(iter(inspect.signature(type(self._model).forward).parameters))
        return Trace(
            graph_module=raw.graph_module,
            origins=origins,
            symbol_names=self._symbol_names,
            calling=calling,
            guards=raw.guards,
            local_scope={first: self._model, **self._flat.by_name},
            global_scope=raw.global_scope,
            traced_code=raw.traced_code,
            shape_env=env,
            mode=self._sizes[COUNT].mode,
            lines=lines,
            raw=raw,
        )

    @property
    def _program_dims(self) -> dict[int, dict[int, str]]:
        return {
            leaf: {dim: self._names[name] for dim, name in dims.items()} for leaf, dims in self._dims.items()
        }

    def _bind_symbols(self, fakes: Mapping[int, Any]) -> list[Said]:
        """Name the symbols of the dynamic dimensions; say of each that is another expression what it equals."""
        found: list[tuple[str, Any, Any]] = []
        sources: dict[str, SizeSymbol] = {}
        for leaf, dims in self._dims.items():
            fake = fakes.get(leaf, self._raw.arguments.get(self._flat.names[leaf]))
            for dim, declared in dims.items():
                name, size = self._names[declared], self._sizes[declared]
                sources.setdefault(name, SizeSymbol(name, leaf, dim, size.traced_low, size.high))
                if fake is None:
                    continue  # the trace never looked at this argument
                expr = symbols.expression(fake.shape[dim], self._env)
                if not symbols.free_symbols(expr):
                    raise self._fixed(leaf, dim, declared, fake, expr)
                found.append((name, expr, fake.shape[dim]))
                for symbol in symbols.free_symbols(expr):
                    if symbol not in self._symbol_names:
                        self._symbol_names[symbol] = name
                        if not symbols.narrow(symbol, self._env, size.traced_low, size.high):
                            raise self._impossible(size)
        self._size_symbols += [sources[name] for name in self._names.values() if name in sources]
        texts = [(name, symbols.to_text(expr, self._symbol_names), size) for name, expr, size in found]
        return [(f"{name} == {text}", self._line_of(size)) for name, text, size in texts if text != name]

    def _line_of(self, size: object) -> str | None:
        """Return the user's line at which a size became another expression."""
        symbol = symbols.original_symbol(size)
        where = None if symbol is None else symbols.fixed_by(symbol, self._env, self._files)
        return where or definition(self._model.forward)

    def _impossible(self, size: Size) -> SpecializationError:
        return SpecializationError(
            f"the code holds for no size from {size.traced_low} to {size.high}",
            where=definition(self._model.forward),
            hint="look for a torch._check or a fixed-length buffer",
        )

    def _fixed(self, leaf: int, dim: int, declared: str, fake: Any, expr: Any) -> SpecializationError:
        asked = "the token count" if declared == COUNT else f"the size {declared!r}"
        return SpecializationError(
            f"the code fixes dimension {dim} of {self._flat.names[leaf]!r} to {expr}, "
            f"which was asked to be {asked}",
            where=self._line_of(fake.shape[dim]),
            hint="look for a fixed-length buffer, reshape or branch on that size",
        )

    def _parameter(self, index: int, fake: Any, written: bool) -> Parameter:
        name, example = self._flat.names[index], self._flat.leaves[index]
        if not isinstance(example, torch.Tensor):
            return Parameter(name, "constant", value=example)

        def text(value: object) -> int | str:
            return symbols.to_text(symbols.expression(value, self._env), self._symbol_names)

        dims = self._dims.get(index, {})
        shape = [self._names[dims[dim]] if dim in dims else size for dim, size in enumerate(example.shape)]
        return Parameter(
            name,
            "tensor",
            dtype=str(example.dtype).removeprefix("torch."),
            device=example.device.type,
            shape=tuple(shape if fake is None else (text(size) for size in fake.shape)),
            stride=() if fake is None else tuple(text(step) for step in fake.stride()),
            written=written,
        )
