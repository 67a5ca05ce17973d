"""Key: a piece's graph in canonical form, the thing that is hashed, compiled and re-checked.

A piece graph holds operations by qualified name, constants, and inputs by dtype, symbolic shape,
stride and device *type*. It holds no variable names, positions, source lines or device indices, so
that equal layers are one piece. Values are numbered: inputs first, then one per node. Arguments are
JSON with one-key objects for what JSON lacks:

=====================  ==========================================================
``{"v": 7}``           value number 7
``{"s": "2*s0"}``      an integer expression in the piece's symbols
``{"dtype": "int64"}`` a dtype; likewise ``device``, ``layout``, ``memory_format``
``{"slice": [a,b,c]}`` a slice; ``{"ellipsis": true}``; ``{"tuple": [...]}``
``{"dict": [[k, v]]}`` a mapping; ``{"float": "inf"}`` a float that JSON lacks
``{"complex": "1j"}``  a complex number, as Python writes it
=====================  ==========================================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import FactorDigest, factor_digest
from pwcc.compile.runtime.arguments import check_argument, decode_argument, torch_value, values_in
from pwcc.compile.runtime.expressions import check_symbols, compile_expressions, parse_expression
from pwcc.compile.runtime.targets import require_attribute, require_method, resolve_target

SCHEMA = 1
ENTER = "torch.amp.autocast_mode._enter_autocast"
EXIT = "torch.amp.autocast_mode._exit_autocast"
ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
Dim = int | str


@dataclass(frozen=True)
class TensorInput:
    """A tensor input: dtype name, device type, and shape, stride and offset in elements."""

    dtype: str
    device: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    offset: Dim = 0

    def to_json(self) -> dict[str, object]:
        """Return the canonical form."""
        return {
            "kind": "tensor",
            "dtype": self.dtype,
            "device": self.device,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "offset": self.offset,
        }

    def check(self, symbols: Sequence[str], where: str) -> None:
        """Refuse an unknown dtype, another number of strides than sizes, and unknown symbols."""
        torch_value("dtype", self.dtype)
        if len(self.shape) != len(self.stride):
            raise CorruptEntry(f"expected {len(self.shape)} strides, got {len(self.stride)}", where=where)
        for dim in (*self.shape, *self.stride, self.offset):
            if isinstance(dim, str):
                parse_expression(dim, symbols)


@dataclass(frozen=True)
class SymbolInput:
    """A size that arrives as an integer: the symbol's name in this piece.

    A size other than the token count has its own inclusive range, whatever the variant; see ``Variant``.
    """

    symbol: str
    low: int | None = None
    high: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return the canonical form; only a size other than the token count says its range."""
        found: dict[str, object] = {"kind": "symbol", "symbol": self.symbol}
        return found if self.low is None else {**found, "low": self.low, "high": self.high}

    @property
    def is_tokens(self) -> bool:
        """Tell whether it is the token count, whose value or range is the variant's."""
        return self.low is None

    def at(self, tokens: int) -> int:
        """Return a size to try the piece with, beside so many tokens: the same, within the own range."""
        return tokens if self.low is None or self.high is None else max(self.low, min(self.high, tokens))


PieceInput = TensorInput | SymbolInput


@dataclass(frozen=True)
class PieceNode:
    """One operation: ``call_function`` by qualified name, or ``call_method`` by method name."""

    op: str
    target: str
    args: object
    kwargs: object

    def to_json(self) -> list[object]:
        """Return the canonical form."""
        return [self.op, self.target, self.args, self.kwargs]

    def check(self, made: int, symbols: Sequence[str], where: str) -> None:
        """Refuse arguments of another form, and methods and attributes that no piece needs."""
        if (
            not isinstance(self.args, list)
            or not isinstance(self.kwargs, dict)
            or list(self.kwargs) != ["dict"]
        ):
            raise CorruptEntry("expected a list of arguments and a dict of keyword arguments", where=where)
        check_argument(self.args, made, symbols, where)
        check_argument(self.kwargs, made, symbols, where)
        if self.op == "call_method":
            require_method(self.target)
            if not self.args:
                raise CorruptEntry(f"expected a tensor for the method {self.target!r}", where=where)
        if self.target == "builtins.getattr":
            require_attribute(self.args[1] if len(self.args) == 2 else None)


@dataclass(frozen=True)
class PieceGraph:
    """A piece in canonical form. Symbols come first among the inputs, in order ``s0, s1, ...``."""

    inputs: tuple[PieceInput, ...]
    nodes: tuple[PieceNode, ...]
    outputs: tuple[object, ...]

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the size symbols, in input order."""
        return tuple(item.symbol for item in self.inputs if isinstance(item, SymbolInput))

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Inclusive ranges of the sizes that are not the token count, by symbol."""
        return {
            item.symbol: (item.low, item.high)
            for item in self.inputs
            if isinstance(item, SymbolInput) and item.low is not None and item.high is not None
        }

    def sizes_at(self, tokens: int) -> tuple[int, ...]:
        """Values of the symbols to try the piece with, for so many tokens; see :meth:`SymbolInput.at`."""
        return tuple(item.at(tokens) for item in self.inputs if isinstance(item, SymbolInput))

    @property
    def ops(self) -> tuple[str, ...]:
        """Targets of the nodes, in order."""
        return tuple(node.target for node in self.nodes)

    @functools.cached_property
    def written_outputs(self) -> tuple[int, ...]:
        """Positions of the outputs whose values mean something: not memory that is only allocated here."""
        memory: dict[int, int] = {}  # value -> the allocation that it is, or is a view of
        written: set[int] = set()
        for number, node in enumerate(self.nodes, len(self.inputs)):
            name = _plain_name(node.target)
            used = values_in((node.args, node.kwargs))
            if name in ALLOCATIONS:
                memory[number] = number
            elif name in _VIEWS and used and used[0] in memory and not set(used[1:]) & set(memory):
                memory[number] = memory[used[0]]
            else:
                written.update(memory[value] for value in used if value in memory)
        return tuple(
            position
            for position, output in enumerate(self.outputs)
            if not any(memory.get(value, -1) not in {*written, -1} for value in values_in(output))
        )

    @functools.cached_property
    def digest(self) -> FactorDigest:
        """Structural digest (XXH3-128 of the canonical bytes)."""
        return factor_digest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Serialise; the same graph gives the same bytes."""
        return strict.canonical(
            {
                "schema": SCHEMA,
                "inputs": [item.to_json() for item in self.inputs],
                "nodes": [node.to_json() for node in self.nodes],
                "outputs": list(self.outputs),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> PieceGraph:
        """Parse what :meth:`to_bytes` wrote.

        Raises:
            CorruptEntry: another schema, or any field of the wrong form.
        """
        fields = strict.Fields(strict.loads(data, where=where), where)
        fields.int_("schema", low=SCHEMA, high=SCHEMA)
        graph = cls(
            inputs=fields.list_("inputs", _parse_input),
            nodes=fields.list_("nodes", _parse_node),
            outputs=fields.list_("outputs", lambda value, _: value),
        )
        fields.done()
        graph._check(where)
        return graph

    def _check(self, where: str) -> None:
        """Refuse what :func:`interpret` could not run: values before they exist, unknown tags and symbols."""
        symbols = self.symbols
        check_symbols(symbols)
        if any(isinstance(item, SymbolInput) for item in self.inputs[len(symbols) :]):
            raise CorruptEntry("expected the symbols first among a piece's inputs", where=where)
        for item in self.inputs:
            if isinstance(item, TensorInput):
                item.check(symbols, where)
        for made, node in enumerate(self.nodes, len(self.inputs)):
            node.check(made, symbols, where)
        for output in self.outputs:
            if not isinstance(output, dict) or list(output) != ["v"]:
                raise CorruptEntry(f"expected a value as an output, got {repr(output)[:80]}", where=where)
            check_argument(output, len(self.inputs) + len(self.nodes), symbols, where)


_VIEWS = frozenset(
    """
    view view_as reshape transpose permute t T mT unsqueeze squeeze expand unbind split chunk narrow select
    getitem getattr flatten unflatten detach as_strided movedim swapaxes
    """.split()  # noqa: SIM905 (a table)
)


def _plain_name(target: str) -> str:
    parts = target.split(".")
    return parts[3] if parts[:2] == ["torch", "ops"] and len(parts) > 3 else parts[-1]


def _parse_dim(value: object, where: str) -> Dim:
    return value if isinstance(value, str) else strict.as_int(value, where)


def _parse_input(value: object, where: str) -> PieceInput:
    fields = strict.Fields(value, where)
    kind = fields.str_("kind")
    if kind == "symbol":
        name, ranged = fields.str_("symbol"), isinstance(value, dict) and "low" in value
        low = fields.int_("low", low=0) if ranged else None
        symbol = SymbolInput(name, low, fields.int_("high", low=low or 0) if ranged else None)
        fields.done()
        return symbol
    if kind != "tensor":
        fields.fail("kind", "'tensor' or 'symbol'", kind)
    offset = _parse_dim(fields.take("offset"), where)
    tensor = TensorInput(
        dtype=fields.str_("dtype"),
        device=fields.str_("device"),
        shape=fields.list_("shape", _parse_dim),
        stride=fields.list_("stride", _parse_dim),
        offset=offset,
    )
    fields.done()
    return tensor


def _parse_node(value: object, where: str) -> PieceNode:
    if not isinstance(value, list) or len(value) != 4 or value[0] not in ("call_function", "call_method"):
        raise CorruptEntry("expected a node of four items", where=where)
    return PieceNode(value[0], strict.as_str(value[1], where), value[2], value[3])


# --- running a canonical graph eagerly -------------------------------------------------------------


def interpret(
    graph: PieceGraph, inputs: Sequence[object], *, device: torch.device, upcast: bool = False
) -> tuple[object, ...]:
    """Run a piece eagerly, operation by operation; the reference that sealed pieces are checked against.

    With ``upcast`` every reduced-precision dtype in the graph becomes float32, as must the inputs; products
    that give 16 bits only are widened after.

    Raises:
        CorruptEntry: an operation may not be called, does not exist here, or fails.
    """
    symbols = graph.symbols
    sizes = tuple(cast(int, value) for value in inputs[: len(symbols)])

    def size(text: str) -> object:
        return compile_expressions([text], symbols)(*sizes)[0]

    def one(value: object, *, widen: bool = upcast) -> object:
        return decode_argument(_widen(value) if widen else value, values, size, device)

    if len(inputs) != len(graph.inputs):
        raise CorruptEntry(f"expected {len(graph.inputs)} inputs of a piece, got {len(inputs)}")
    values: list[object] = list(inputs)
    regions: list[object] = []
    try:
        for node in graph.nodes:
            widen = upcast and node.target not in _NARROW
            args = cast(Sequence[object], one(node.args, widen=widen))
            kwargs = cast(Mapping[str, object], one(node.kwargs, widen=widen))
            try:
                values.append(_run(node, args, kwargs, regions, upcast))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
                raise CorruptEntry(
                    f"the operation {node.target} of a piece failed: {type(error).__name__}: {error}"
                ) from error
    finally:  # the thread's autocast state is the caller's
        while regions:
            resolve_target(EXIT)(regions.pop())
    return tuple(one(output) for output in graph.outputs)


def _run(
    node: PieceNode, args: Sequence[object], kwargs: Mapping[str, object], regions: list[object], upcast: bool
) -> object:
    if node.target == ENTER:
        if len(args) != 4 or kwargs:
            raise CorruptEntry(f"expected four arguments of an autocast region, got {len(args)}")
        device, dtype, enabled, cached = args
        regions.append(resolve_target(ENTER)(device, dtype, enabled and not upcast, cached))
        return regions[-1]
    if node.target == EXIT:
        if not regions or list(args) != [regions[-1]]:
            raise CorruptEntry("a piece leaves an autocast region that it is not in")
        return resolve_target(EXIT)(regions.pop())
    if node.op != "call_method":
        made = resolve_target(node.target)(*args, **kwargs)
        narrow = upcast and node.target in _NARROW and isinstance(made, torch.Tensor)
        return made.float() if narrow else made  # type: ignore[attr-defined]
    if not isinstance(args[0], torch.Tensor):
        raise CorruptEntry(f"expected a tensor for the method {node.target!r}, got {type(args[0]).__name__}")
    name = "float" if upcast and node.target in ("half", "bfloat16") else node.target
    return getattr(args[0], name)(*args[1:], **kwargs)


REDUCED = frozenset({"bfloat16", "float16"})
# With one scale a row, CUDA's products of 8-bit matrices give bfloat16 and refuse float32.
_NARROW = frozenset({"torch._scaled_mm", "torch.ops.aten._scaled_mm", "torch.ops.aten._scaled_mm.default"})


def _widen(value: object) -> object:
    if isinstance(value, list):
        return [_widen(item) for item in value]
    if isinstance(value, dict):
        if value.get("dtype") in REDUCED:
            return {"dtype": "float32"}
        return {key: _widen(item) for key, item in value.items()}
    return value
