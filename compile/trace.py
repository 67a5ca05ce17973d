"""Key: one Dynamo trace of a model, with every input's origin and every shape assumption named."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from pwcc.cache.errors import ArgumentError, SpecializationError, TraceError, UnsealableError
from pwcc.compile.runtime.calling import CallingConvention, Parameter, ShapePredicate, SizeSymbol, Weight
from pwcc.compile.runtime.held import named_tensors
from pwcc.compile.signature import definition, parameter_names
from pwcc.compile.torch_private import dynamo, symbols

_ASSERTS = frozenset(
    {
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


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
    ``symbol_names`` maps torch's symbols to ``s0, s1, ...``; ``guards`` are Dynamo's own objects.
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
        dynamic_dims: position of a tensor argument -> its dimensions that follow the token count.
        mode: see :class:`SizeMode`.
        low: smallest size that must be served (inclusive).
        high: largest size that must be served (inclusive).

    Raises:
        TraceError: a graph break or failed trace, with the user's file and line.
        SpecializationError: the code fixes a dimension that was asked to be dynamic.
        UnsealableError: side effects that only rewritten bytecode would perform, or an input of
            unknown origin.
    """
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
    forward: Callable[..., object] = model.forward
    try:
        raw = dynamo.fullgraph_capture(forward, examples, {})
    except dynamo.dynamo_errors() as error:
        message, where = dynamo.describe_failure(error)
        raised = TraceError(
            "the model does not trace into one graph: " + (message or type(error).__name__).splitlines()[0],
            where=where,
            hint="remove the graph break at that line; --debug shows Dynamo's own report",
        )
        raised.data_dependent = dynamo.is_data_dependent(error)
        raise raised from error
    if raw.side_effects:
        raise UnsealableError(
            f"forward writes {', '.join(raw.side_effects[:3])}, which compiled code would not do",
            where=definition(forward),
            hint="keep state in buffers that are updated in place, or outside the compiled module",
        )
    return _analyse(model, names[: len(inputs)], examples, dynamic_dims, raw, mode, low, high)


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


def _analyse(
    model: nn.Module,
    names: Sequence[str],
    examples: Sequence[object],
    dynamic_dims: Mapping[int, Sequence[int]],
    raw: dynamo.RawCapture,
    mode: SizeMode,
    low: int,
    high: int,
) -> Trace:
    placeholders = [node for node in raw.graph_module.graph.nodes if node.op == "placeholder"]
    origins = _origins(model, examples, placeholders, raw.example_inputs)
    fakes = {
        origin.parameter: node.meta["example_value"]
        for node, origin in origins.items()
        if isinstance(origin, ArgumentInput)
    }
    env = raw.shape_env
    low = max(low, 2) if mode is SizeMode.BACKED else low
    conditions = _extract_asserts(raw.graph_module, env)
    conditions += symbols.shape_guards(env)
    symbol_names: dict[Any, str] = {}
    size_symbols: list[SizeSymbol] = []
    parameters: list[Parameter] = []
    for index, (name, example) in enumerate(zip(names, examples, strict=True)):
        if not isinstance(example, torch.Tensor):
            parameters.append(Parameter(name, "constant", value=_constant(name, example)))
            continue
        fake = fakes.get(index, example)
        for dim in dynamic_dims.get(index, ()) if mode is not SizeMode.STATIC else ():
            if index not in fakes:
                continue  # an argument the graph never reads: its size does not matter
            expr = symbols.expression(fake.shape[dim], env)
            if not symbols.free_symbols(expr):
                raise SpecializationError(
                    f"the code fixes dimension {dim} of {name!r} to {expr}, which was asked to be dynamic",
                    where=definition(model.forward),
                    hint="look for a fixed-length buffer, reshape or branch on that size",
                )
            for symbol in symbols.free_symbols(expr):
                if symbol not in symbol_names and expr == symbol:
                    symbol_names[symbol] = f"s{len(symbol_names)}"
                    symbols.narrow(symbol, env, low, high)
                    size_symbols.append(SizeSymbol(symbol_names[symbol], index, dim, low, high))
        parameters.append(_tensor_parameter(name, fake, env, symbol_names))
    predicates = _predicates(conditions, env, symbol_names, size_symbols)
    output = _output_template(model, examples, origins, raw)
    held = dict(named_tensors(model))
    weights = tuple(
        _weight(origin.names, held[origin.names[0]])
        for origin in origins.values()
        if isinstance(origin, WeightInput)
    )
    calling = CallingConvention(tuple(parameters), tuple(size_symbols), predicates, weights, output)
    first = next(iter(inspect.signature(type(model).forward).parameters))
    bound = dict(zip(names, examples, strict=True))
    return Trace(
        graph_module=raw.graph_module,
        origins=origins,
        symbol_names=symbol_names,
        calling=calling,
        guards=raw.guards,
        local_scope={first: model, **bound},
        global_scope=raw.global_scope,
        traced_code=raw.traced_code,
        shape_env=env,
        mode=mode,
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
                hint="register it on the model as a buffer",
            )
    return origins


def _weight(names: tuple[str, ...], tensor: torch.Tensor) -> Weight:
    return Weight(names, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def _constant(name: str, value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ArgumentError(
        f"argument {name!r}: expected a tensor, None or a scalar, got {type(value).__name__}",
        hint="wrap the model so that its forward takes tensors",
    )


def _tensor_parameter(name: str, fake: Any, env: Any, names: Mapping[Any, str]) -> Parameter:
    def text(value: object) -> int | str:
        return symbols.to_text(symbols.expression(value, env), names)

    return Parameter(
        name,
        "tensor",
        dtype=str(fake.dtype).removeprefix("torch."),
        device=fake.device.type,
        shape=tuple(text(size) for size in fake.shape),
        stride=tuple(text(step) for step in fake.stride()),
    )


def _extract_asserts(graph_module: fx.GraphModule, env: Any) -> list[tuple[Any, str | None]]:
    """Remove assert nodes from the graph and return their conditions with the user's line."""
    graph = graph_module.graph
    found: list[tuple[Any, str | None]] = []
    for node in list(graph.nodes):
        if str(node.target) not in _ASSERTS:
            continue
        condition = node.args[0]
        if isinstance(condition, fx.Node) and str(node.target).startswith("aten._assert"):
            value = condition.meta.get("example_value")
            if isinstance(value, torch.SymBool):
                found.append((symbols.expression(value, env), source_line(node)))
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        value = node.meta.get("example_value")
        if node.op == "call_function" and not node.users and isinstance(value, (torch.SymBool, bool)):
            graph.erase_node(node)
    return found


def source_line(node: fx.Node) -> str | None:
    """Return ``file:line: code`` of the user's innermost frame behind a node."""
    lines = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    files = [index for index, line in enumerate(lines) if line.strip().startswith("File ")]
    if not files:
        return None
    last = files[-1]
    _, path, rest = lines[last].strip().split('"', 2)
    number = rest.split("line", 1)[1].split(",", 1)[0].strip()
    code = lines[last + 1].strip() if last + 1 < len(lines) else ""
    return f"{path}:{number}: {code}"


def _predicates(
    conditions: Sequence[tuple[Any, str | None]],
    env: Any,
    names: Mapping[Any, str],
    size_symbols: Sequence[SizeSymbol],
) -> tuple[ShapePredicate, ...]:
    """Turn conditions into predicates; those that the ranges imply are dropped."""
    bounds = {symbol.name: (symbol.low, symbol.high) for symbol in size_symbols}
    kept: dict[str, ShapePredicate] = {}
    for expr, where in conditions:
        simplified = env.simplify(expr)
        if any(symbol not in names for symbol in symbols.free_symbols(simplified)):
            raise UnsealableError(
                f"the graph depends on a value computed at run time: {simplified}", where=where
            )
        text = symbols.condition_text(simplified, names)
        if text is None or _implied(simplified, names, bounds):
            continue
        kept.setdefault(text, ShapePredicate(text, _portable_line(where)))
    return tuple(kept[text] for text in sorted(kept))


def _implied(expr: Any, names: Mapping[Any, str], bounds: Mapping[str, tuple[int, int]]) -> bool:
    """Tell whether a comparison that is linear in one symbol holds on that symbol's whole range."""
    import sympy

    free = symbols.free_symbols(expr)
    if len(free) != 1 or not isinstance(expr, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Ne)):
        return False
    low, high = bounds[names[free[0]]]
    difference = sympy.expand(expr.lhs - expr.rhs)
    if not difference.is_polynomial(free[0]) or sympy.degree(difference, free[0]) > 1:
        return False
    if isinstance(expr, sympy.Ne):
        root = -difference.subs(free[0], 0) / sympy.diff(difference, free[0])
        return not (root.is_integer and low <= root <= high)
    return all(bool(expr.subs(free[0], value)) for value in (low, high))


def _portable_line(where: str | None) -> str | None:
    """Keep the file's name, line and code; an absolute path would tie the entry to its builder."""
    if where is None:
        return None
    path, separator, rest = where.partition(":")
    return path.rsplit("/", 1)[-1] + separator + rest.partition(":")[0]


def narrowed(calling: CallingConvention) -> list[ShapePredicate]:
    """Return the predicates in a single symbol: sizes within the asked range that the trace excludes."""
    return [
        predicate
        for predicate in calling.predicates
        if sum(symbol.name in predicate.text for symbol in calling.symbols) <= 1
    ]


def _output_template(
    model: nn.Module, examples: Sequence[object], origins: Mapping[fx.Node, Origin], raw: dynamo.RawCapture
) -> object:
    """Run Dynamo's output bytecode over marker tensors and describe the structure that it builds."""
    output = next(node for node in raw.graph_module.graph.nodes if node.op == "output")
    results = output.args[0]
    markers = [torch.empty(0) for _ in results]
    built = raw.replay(lambda *_: tuple(markers))(model, *examples)
    weights = [origin.names[0] for origin in origins.values() if isinstance(origin, WeightInput)]
    held = dict(named_tensors(model))
    known: dict[int, object] = {id(held[name]): {"weight": i} for i, name in enumerate(weights)}
    tensors = [item for item in examples if isinstance(item, torch.Tensor)]
    known |= {id(item): {"argument": i} for i, item in enumerate(tensors)}
    known |= {id(marker): {"output": i} for i, marker in enumerate(markers)}
    return _describe(built, known)


def _describe(value: object, known: Mapping[int, object]) -> object:
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            raise UnsealableError("forward returns a tensor that is no output of its graph")
        return known[id(value)]
    if value is None or type(value) in (bool, int, float, str):
        return {"constant": value}
    if type(value) in (tuple, list):
        items = [_describe(item, known) for item in value]  # type: ignore[attr-defined]
        return {type(value).__name__: items}
    if type(value) is dict:
        return {"dict": [[key, _describe(item, known)] for key, item in value.items()]}
    fields = _fields(value)
    if fields is None:
        raise UnsealableError(
            f"forward returns a {type(value).__qualname__}, whose structure pwcc cannot rebuild"
        )
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    return {"class": name, "fields": [[key, _describe(item, known)] for key, item in fields.items()]}


def _fields(value: object) -> dict[str, object] | None:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return None
