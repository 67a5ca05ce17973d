"""Key: rebuild a canonical piece for Inductor, with fresh fake tensors and a fresh shape environment.

What Inductor sees is a function of the canonical graph and the variant alone: nothing of the traced
model, its names or its process can leak into the compiled piece, and any worker process rebuilds the same.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.compile.piece_graph import (
    Dim,
    PieceGraph,
    SymbolInput,
    TensorInput,
)
from pwcc.compile.runtime.arguments import decode_argument
from pwcc.compile.runtime.expressions import compile_expressions, parse_expression
from pwcc.compile.runtime.targets import resolve_target
from pwcc.compile.torch_private import symbols


@dataclass(frozen=True)
class Variant:
    """Which token counts a compiled piece serves: one, or an inclusive range.

    Sizes other than the token count stay symbols in every variant, in the ranges that the piece says.
    """

    low: int
    high: int
    static: bool = False

    @property
    def kind(self) -> str:
        """``static`` or ``dynamic``."""
        return "static" if self.static else "dynamic"

    @property
    def hint(self) -> int:
        """A size to warm up and check with: the size itself, or a middling one of the range."""
        return self.low if self.static else max(self.low, min(self.high, 64))

    @property
    def check_sizes(self) -> tuple[int, ...]:
        """Sizes to check against eager: the ends where compiled ranges go wrong (1, 2), and the hint."""
        return tuple(sorted({self.low, min(self.low + 1, self.high), self.hint}))

    def fixes(self, item: SymbolInput) -> bool:
        """Tell whether a size is a number in this variant and not a symbol."""
        return self.static and item.is_tokens

    def __str__(self) -> str:
        return f"n={self.low}" if self.static else f"n={self.low}..{self.high}"

    def to_json(self) -> dict[str, object]:
        """Return the canonical form."""
        return {"low": self.low, "high": self.high, "static": self.static}

    @classmethod
    def from_json(cls, value: object, where: str) -> Variant:
        """Parse what :meth:`to_json` gave."""
        fields = strict.Fields(value, where)
        variant = cls(fields.int_("low"), fields.int_("high"), fields.bool_("static"))
        fields.done()
        return variant


@dataclass
class Rebuilt:
    """A piece as Inductor takes it: module, fake example inputs (symbols first), and their fake mode."""

    graph_module: fx.GraphModule
    inputs: list[Any]
    fake_mode: Any


_OPERATORS: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


_PAIRWISE: dict[str, Callable[..., object]] = {"max": torch.sym_max, "min": torch.sym_min}
_SYMBOLIC_CALLS: dict[str, Callable[..., object]] = {
    "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
    "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
}


def rebuild(
    piece: PieceGraph,
    variant: Variant,
    device: torch.device,
    lines: Sequence[str | None] = (),
    *,
    backed: bool = False,
) -> Rebuilt:
    """Return the piece as a GraphModule with fake inputs on ``device``.

    ``lines`` are the user's source lines per node, for messages; they do not reach compiled code.
    With ``backed`` the sizes of a dynamic variant have a hint, and what the compiler asks of them is
    recorded as guards; without, it may ask nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without 0/1 specialisation every question about a size, 1 included, shows as a guard.
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False) if backed else ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=env)

    def new_size(item: SymbolInput) -> Any:
        if variant.fixes(item):
            return variant.low
        low = variant.low if item.low is None else item.low
        high = variant.high if item.high is None else item.high
        if backed:
            return symbols.new_backed_size(env, item.symbol, low, high, hint=item.at(variant.hint))
        return symbols.new_unbacked_size(env, low, high)

    sizes: dict[str, Any] = {
        item.symbol: new_size(item) for item in piece.inputs if isinstance(item, SymbolInput)
    }
    graph = fx.Graph()
    inputs: list[Any] = []
    values: list[Any] = []
    nodes: dict[str, Any] = {}
    for index, item in enumerate(piece.inputs):
        placeholder = graph.placeholder(f"i{index}")
        if isinstance(item, SymbolInput):
            example: Any = sizes[item.symbol]
            nodes[item.symbol] = variant.low if variant.fixes(item) else placeholder
        else:
            example = _fake_input(item, piece.symbols, sizes, fake_mode, device)
        placeholder.meta["example_value"] = placeholder.meta["val"] = example
        inputs.append(example)
        values.append(placeholder)

    def size(text: str) -> object:
        return _emit(parse_expression(text, piece.symbols), nodes, graph)

    for index, node in enumerate(piece.nodes):
        args = cast(Sequence[Any], decode_argument(node.args, values, size, device))
        kwargs = cast(dict[str, Any], decode_argument(node.kwargs, values, size, device))
        if node.op == "call_method":
            made = graph.call_method(node.target, tuple(args), kwargs)
        else:
            made = graph.call_function(resolve_target(node.target), tuple(args), kwargs)
        if index < len(lines) and lines[index]:
            made.meta["pwcc_line"] = lines[index]
        values.append(made)
    graph.output(tuple(cast(Any, decode_argument(output, values, size, device)) for output in piece.outputs))
    return Rebuilt(fx.GraphModule(torch.nn.Module(), graph), inputs, fake_mode)


def _fake_input(
    item: TensorInput, names: Sequence[str], sizes: Mapping[str, Any], fake_mode: Any, device: torch.device
) -> torch.Tensor:
    def evaluate(dims: Sequence[Dim]) -> tuple[Any, ...]:
        return compile_expressions(dims, names, calls=_SYMBOLIC_CALLS)(*(sizes[name] for name in names))

    shape, stride, (offset,) = evaluate(item.shape), evaluate(item.stride), evaluate((item.offset,))
    target = device if item.device == device.type else torch.device(item.device)
    with fake_mode:
        tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, item.dtype), device=target)
        if isinstance(offset, int) and offset == 0:
            return tensor
        return tensor.as_strided(shape, stride, offset)


def _emit(tree: ast.expr, sizes: Mapping[str, Any], graph: fx.Graph) -> Any:
    """Emit graph nodes that compute a size expression from the size placeholders."""
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _call(graph, _OPERATORS[type(op)], [_emit(left, sizes, graph), _emit(right, sizes, graph)])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _call(graph, operator.neg, [_emit(operand, sizes, graph)])
        case ast.Call(func=ast.Name(id=name), args=args):
            emitted = [_emit(arg, sizes, graph) for arg in args]
            return functools.reduce(lambda one, other: _call(graph, _PAIRWISE[name], [one, other]), emitted)
        case _:
            raise CorruptEntry(f"expected a size, got the expression {ast.unparse(tree)[:80]!r}")


def _call(graph: fx.Graph, function: Callable[..., object], args: list[Any]) -> Any:
    if not any(isinstance(arg, fx.Node) for arg in args):
        return function(*args)
    return graph.call_function(function, tuple(args))
