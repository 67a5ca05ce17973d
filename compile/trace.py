"""Key: one Dynamo trace of a model, with every input's origin and every shape assumption named."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from pwcc.cache.errors import ArgumentError, SpecializationError, TraceError, UnsealableError
from pwcc.compile.conditions import Condition, predicates, source_line, take_asserts
from pwcc.compile.outputs import output_template
from pwcc.compile.runtime.calling import CallingConvention, Parameter, ShapePredicate, SizeSymbol, Weight
from pwcc.compile.runtime.held import named_tensors
from pwcc.compile.runtime.hooks import global_hooks, replaced_calls
from pwcc.compile.signature import definition, parameter_names
from pwcc.compile.torch_private import dynamo, symbols, writes

TOKENS = "s0"
"""The one size symbol of a program: every dynamic dimension is the token count."""


class SizeMode(Enum):
    """How the token dimension is traced.

    UNBACKED assumes nothing of the size but its range and holds from 1 on; BACKED may add guards and
    holds from 2 on; STATIC fixes the example's size.
    """

    UNBACKED = "unbacked"
    BACKED = "backed"
    STATIC = "static"


@dataclass(frozen=True)
class WeightInput:
    """A graph input that the model holds: all its names, the first is canonical."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class ArgumentInput:
    """A graph input that is a tensor argument: its position among the parameters of ``forward``."""

    parameter: int


Origin = WeightInput | ArgumentInput


@dataclass
class Trace:
    """One graph and all that was assumed about it.

    ``graph_module`` holds placeholders and operations only; ``origins`` maps each tensor placeholder;
    ``symbol_names`` maps torch's symbols to the program's; several may be one. ``guards`` are Dynamo's own
    objects. ``lines`` are the user's ``file:line: code`` of the predicates, by text.
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


def trace(
    model: nn.Module,
    inputs: Sequence[object],
    dynamic_dims: Mapping[int, Sequence[int]],
    *,
    mode: SizeMode,
    low: int,
    high: int,
) -> Trace:
    """Trace ``model.forward`` once, without a graph break.

    Args:
        model: in eval mode; its weights may be uninitialised memory, values are not read.
        inputs: one example per parameter of ``forward``, in signature order (None and scalars allowed).
        dynamic_dims: position of a tensor argument -> its dimensions that are the token count. They are
            one number: a call in which they differ is refused.
        mode: see :class:`SizeMode`.
        low: smallest size that must be served (inclusive).
        high: largest size that must be served (inclusive).

    Raises:
        TraceError: a graph break or failed trace, with the user's file and line.
        SpecializationError: the code fixes a dimension that was asked to be dynamic.
        UnsealableError: side effects that only rewritten bytecode would perform, or an input of
            unknown origin.
    """
    if type(model).__call__ is not nn.Module.__call__:
        raise UnsealableError(
            "the model overrides __call__, which a compiled forward would not run",
            where=definition(type(model).__call__),
            hint="move what it does into forward, or wrap the model in a module that calls it",
        )
    if replaced_calls():
        raise UnsealableError(
            f"torch's own {', '.join(replaced_calls())} was replaced, which compiled code would not run",
            hint="compile in a process that leaves nn.Module as it is",
        )
    if global_hooks():
        raise UnsealableError(
            f"modules have global hooks ({', '.join(global_hooks())}), which compiled code would not run",
            hint="remove them before compiling",
        )
    if model._forward_hooks or model._forward_pre_hooks:
        raise UnsealableError(
            "the model has forward hooks on its root, which a compiled forward would not run",
            hint="remove them, or wrap the model in a module that calls it",
        )
    names = parameter_names(model)
    if len(inputs) > len(names):
        raise ArgumentError(f"expected at most {len(names)} inputs {names}, got {len(inputs)}")
    examples = tuple(item.clone() if isinstance(item, torch.Tensor) else item for item in inputs)
    _mark(examples, dynamic_dims, mode, low, high)
    raw = _capture(model.forward, examples)
    return _Analysis(model, names[: len(inputs)], examples, dynamic_dims, raw, mode, low, high).trace()


def _capture(forward: Callable[..., object], examples: tuple[object, ...]) -> dynamo.RawCapture:
    try:
        return dynamo.fullgraph_capture(forward, examples, {})
    except dynamo.SideEffectError as error:
        raise UnsealableError(
            f"forward changes {', '.join(error.names[:3])}, which compiled code would not do",
            where=error.where or definition(forward),
            hint="keep state in buffers that are updated in place, or outside the compiled module",
        ) from error
    except dynamo.FoldedError as error:
        raise UnsealableError(
            f"the graph would hold {error.folded.what}",
            where=error.folded.where or definition(forward),
            hint=error.folded.hint,
        ) from error
    except dynamo.NoOperationsError:
        raise TraceError("forward holds no tensor operation to compile", where=definition(forward)) from None
    except dynamo.dynamo_errors() as error:
        message, where = dynamo.describe_failure(error)
        if dynamo.fails_itself(error):
            what, hint = (
                "forward fails",
                "check the inputs (--input, example_inputs) and the model: it fails in eager too",
            )
        else:
            what, hint = "the model does not trace into one graph", "remove the graph break at that line"
        raised = TraceError(
            f"{what}: {message or type(error).__name__}",
            where=where or definition(forward),
            hint=f"{hint}; --debug shows Dynamo's own report",
        )
        raised.data_dependent = dynamo.is_data_dependent(error)
        raise raised from error


def _mark(
    examples: Sequence[object], dynamic_dims: Mapping[int, Sequence[int]], mode: SizeMode, low: int, high: int
) -> None:
    for index, dims in dynamic_dims.items():
        tensor = examples[index]
        if not isinstance(tensor, torch.Tensor) or mode is SizeMode.STATIC:
            continue
        for dim in dims:
            if mode is SizeMode.UNBACKED:
                dynamo.mark_unbacked(tensor, dim)
            else:
                dynamo.mark_dynamic(tensor, dim, low=low, high=high)


class _Analysis:
    """Turns one raw capture into a :class:`Trace`."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        examples: Sequence[object],
        dynamic_dims: Mapping[int, Sequence[int]],
        raw: dynamo.RawCapture,
        mode: SizeMode,
        low: int,
        high: int,
    ) -> None:
        self._model = model
        self._names = names
        self._examples = examples
        self._dims = {} if mode is SizeMode.STATIC else dynamic_dims
        self._raw = raw
        self._env = raw.shape_env
        self._mode = mode
        self._low = max(low, 2) if mode is SizeMode.BACKED else low
        self._high = high
        self._files = tuple({code.co_filename for code in raw.traced_code})
        self._symbol_names: dict[Any, str] = {}
        self._size_symbols: list[SizeSymbol] = []

    def trace(self) -> Trace:
        raw, env = self._raw, self._env
        placeholders = [node for node in raw.graph_module.graph.nodes if node.op == "placeholder"]
        origins = _origins(self._model, self._examples, placeholders, raw.example_inputs)
        fakes = {
            origin.parameter: node.meta["example_value"]
            for node, origin in origins.items()
            if isinstance(origin, ArgumentInput)
        }
        conditions = symbols.shape_guards(env, raw.assert_lines, self._files)
        conditions += take_asserts(raw.graph_module, env)  # after those whose lines are exact
        conditions += self._bind_symbols(fakes)
        checked, lines = predicates(conditions, env, self._symbol_names, self._size_symbols)
        weights = [origin.names for origin in origins.values() if isinstance(origin, WeightInput)]
        output, returned = output_template(self._model, self._examples, weights, raw)
        held = dict(named_tensors(self._model))
        written = writes.written(raw.graph_module.graph, fakes)
        bound = [node.meta["example_value"] for node, o in origins.items() if isinstance(o, WeightInput)]
        read = [_weight(names, held[names[0]]) for names in (*weights, *returned)]
        calling = CallingConvention(
            tuple(
                self._parameter(index, fakes.get(index), index in written) for index in range(len(self._names))
            ),
            tuple(self._size_symbols),
            checked,
            tuple(_marked(read, raw.graph_module.graph, bound)),
            output,
        )
        first = next(iter(inspect.signature(type(self._model).forward).parameters))
        return Trace(
            graph_module=raw.graph_module,
            origins=origins,
            symbol_names=self._symbol_names,
            calling=calling,
            guards=raw.guards,
            local_scope={first: self._model, **dict(zip(self._names, self._examples, strict=True))},
            global_scope=raw.global_scope,
            traced_code=raw.traced_code,
            shape_env=env,
            mode=self._mode,
            lines=lines,
        )

    def _bind_symbols(self, fakes: Mapping[int, Any]) -> list[Condition]:
        """Name the symbols of the dynamic dimensions; return the condition of each that is not a symbol."""
        conditions: list[Condition] = []
        for index, dims in self._dims.items():
            example = self._examples[index]
            if not isinstance(example, torch.Tensor):
                continue
            fake = fakes.get(index, self._raw.arguments.get(self._names[index]))
            for dim in dims:
                if not self._size_symbols:
                    self._size_symbols.append(SizeSymbol(TOKENS, index, dim, self._low, self._high))
                if fake is None:
                    continue  # the trace never looked at this argument
                expr = symbols.expression(fake.shape[dim], self._env)
                free = symbols.free_symbols(expr)
                if not free:
                    raise self._fixed(index, dim, fake, expr)
                for symbol in free:
                    self._symbol_names.setdefault(symbol, TOKENS)
                    symbols.narrow(symbol, self._env, self._low, self._high)
                if expr != free[0]:
                    conditions.append((symbols.equal(expr, free[0]), definition(self._model.forward)))
        return conditions

    def _fixed(self, index: int, dim: int, fake: Any, expr: Any) -> SpecializationError:
        symbol = symbols.original_symbol(fake.shape[dim])
        where = None if symbol is None else symbols.fixed_by(symbol, self._env, self._files)
        return SpecializationError(
            f"the code fixes dimension {dim} of {self._names[index]!r} to {expr}, "
            "which was asked to be the token count",
            where=where or definition(self._model.forward),
            hint="look for a fixed-length buffer, reshape or branch on that size",
        )

    def _parameter(self, index: int, fake: Any, written: bool) -> Parameter:
        name, example = self._names[index], self._examples[index]
        if not isinstance(example, torch.Tensor):
            return Parameter(name, "constant", value=_constant(name, example))

        def text(value: object) -> int | str:
            return symbols.to_text(symbols.expression(value, self._env), self._symbol_names)

        dims = self._dims.get(index, ())
        shape = [TOKENS if dim in dims else size for dim, size in enumerate(example.shape)]
        return Parameter(
            name,
            "tensor",
            dtype=str(example.dtype).removeprefix("torch."),
            device=example.device.type,
            shape=tuple(shape if fake is None else (text(size) for size in fake.shape)),
            stride=() if fake is None else tuple(text(step) for step in fake.stride()),
            written=written,
        )


def _origins(
    model: nn.Module, examples: Sequence[object], placeholders: Sequence[fx.Node], inputs: Sequence[object]
) -> dict[fx.Node, Origin]:
    held: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        held.setdefault(id(tensor), []).append(name)
    positions = {id(item): index for index, item in enumerate(examples) if isinstance(item, torch.Tensor)}
    origins: dict[fx.Node, Origin] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            continue  # a size symbol; it is computed from the arguments
        if id(value) in positions:
            origins[node] = ArgumentInput(positions[id(value)])
        elif id(value) in held:
            origins[node] = WeightInput(tuple(held[id(value)]))
        else:
            raise UnsealableError(
                f"the graph reads a tensor that is neither an argument nor held by the model: {node.target}",
                where=next((line for user in node.users if (line := source_line(user))), None),
                hint="register it on the model as a buffer",
            )
    return origins


def _marked(weights: Sequence[Weight], graph: fx.Graph, fakes: Sequence[Any]) -> list[Weight]:
    """Mark the weights that the graph writes; ``fakes`` are those of its inputs, which come first."""
    read = dict(enumerate(fakes))
    written = writes.written(graph, read)
    shares = writes.sharing(read) if written else {}
    return [
        replace(weight, written=True, shares=shares[index]) if index in written else weight
        for index, weight in enumerate(weights)
    ]


def _weight(names: tuple[str, ...], tensor: torch.Tensor) -> Weight:
    if tensor.is_conj() or tensor.is_neg():
        raise UnsealableError(
            f"{names[0]!r} is a lazily conjugated or negated view, which compiled code cannot read",
            hint="replace it by its resolve_conj().resolve_neg()",
        )
    return Weight(names, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def _constant(name: str, value: object) -> object:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float) and type(value) is float and math.isfinite(value):
        return value
    raise ArgumentError(
        f"argument {name!r}: expected a tensor, None or a finite scalar, got {value!r:.80}",
        hint="wrap the model so that its forward takes tensors",
    )


def narrowed(calling: CallingConvention) -> list[ShapePredicate]:
    """Return the predicates in a single symbol: sizes within the asked range that the trace excludes."""
    return [
        predicate
        for predicate in calling.predicates
        if sum(symbol.name in predicate.text for symbol in calling.symbols) <= 1
    ]
