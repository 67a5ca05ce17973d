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
=====================  ==========================================================
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import FactorDigest, factor_digest
from pwcc.compile.runtime.expressions import compile_expressions

SCHEMA = 1
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


@dataclass(frozen=True)
class SymbolInput:
    """A size that arrives as an integer: the symbol's name in this piece."""

    symbol: str

    def to_json(self) -> dict[str, object]:
        """Return the canonical form."""
        return {"kind": "symbol", "symbol": self.symbol}


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
    def ops(self) -> tuple[str, ...]:
        """Targets of the nodes, in order."""
        return tuple(node.target for node in self.nodes)

    @functools.cached_property
    def written_outputs(self) -> tuple[int, ...]:
        """Positions of the outputs whose values mean something: not memory that is only allocated here."""
        first = len(self.inputs)
        bare = {first + i for i, node in enumerate(self.nodes) if node.target.rsplit(".", 1)[-1] in ALLOCATIONS}
        used = {value for node in self.nodes for value in _values_in((node.args, node.kwargs))}
        return tuple(
            position
            for position, output in enumerate(self.outputs)
            if not set(_values_in(output)) & (bare - used)
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
        return graph


def _values_in(item: object) -> list[int]:
    if isinstance(item, (list, tuple)):
        return [value for element in item for value in _values_in(element)]
    if isinstance(item, dict):
        if "v" in item:
            return [item["v"]]
        return [value for element in item.values() for value in _values_in(element)]
    return []


def _parse_dim(value: object, where: str) -> Dim:
    return value if isinstance(value, str) else strict.as_int(value, where)


def _parse_input(value: object, where: str) -> PieceInput:
    fields = strict.Fields(value, where)
    kind = fields.str_("kind")
    if kind == "symbol":
        symbol = SymbolInput(fields.str_("symbol"))
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

_ROOTS = ("torch", "operator", "_operator", "math", "builtins")
_BUILTINS = frozenset({"getattr", "max", "min", "abs", "float", "int", "bool", "sum", "round", "len"})


@functools.cache
def resolve_target(target: str) -> Callable[..., object]:
    """Return the function behind a qualified name such as ``torch._C._nn.linear``.

    Only names under ``torch``, ``operator``, ``math`` and a few builtins resolve.

    Raises:
        CorruptEntry: the name is outside those roots or does not exist.
    """
    root, *path = target.split(".")
    if root not in _ROOTS or not path or (root == "builtins" and path[0] not in _BUILTINS):
        raise CorruptEntry(f"a piece may not call {target!r}")
    found: object = importlib.import_module("operator" if root == "_operator" else root)
    for part in path:
        try:
            found = getattr(found, part)
        except AttributeError:
            raise CorruptEntry(
                f"the operation {target!r} does not exist in this process",
                hint="import the library that registers it before loading",
            ) from None
    if not callable(found):
        raise CorruptEntry(f"{target!r} is not callable")
    return found


def decode_argument(
    value: object, values: Sequence[object], size: Callable[[str], object], device: torch.device
) -> object:
    """Turn an encoded argument into what the operation takes; ``size`` evaluates an expression."""
    if isinstance(value, list):
        return [decode_argument(item, values, size, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, held),) = value.items()
    match tag:
        case "v":
            return values[held]
        case "s":
            return size(held)
        case "dtype" | "layout" | "memory_format":
            return getattr(torch, held)
        case "device":
            return torch.device(held) if held != device.type else device
        case "slice":
            return slice(*(decode_argument(item, values, size, device) for item in held))
        case "ellipsis":
            return ...
        case "tuple":
            return tuple(decode_argument(item, values, size, device) for item in held)
        case "dict":
            return {key: decode_argument(item, values, size, device) for key, item in held}
        case "float":
            return float(held)
        case _:
            raise CorruptEntry(f"unknown argument tag {tag!r} in a piece graph")


def interpret(
    graph: PieceGraph, inputs: Sequence[object], *, device: torch.device, upcast: bool = False
) -> tuple[object, ...]:
    """Run a piece eagerly, operation by operation; the reference that sealed pieces are checked against.

    With ``upcast`` every reduced-precision dtype in the graph becomes float32, as must the inputs.
    """
    symbols = graph.symbols
    sizes = tuple(cast(int, value) for value in inputs[: len(symbols)])

    def size(text: str) -> object:
        return compile_expressions([text], symbols)(*sizes)[0]

    def one(value: object) -> object:
        return decode_argument(_widen(value) if upcast else value, values, size, device)

    values: list[object] = list(inputs)
    for node in graph.nodes:
        args = cast(Sequence[object], one(node.args))
        kwargs = cast(Mapping[str, object], one(node.kwargs))
        if node.op == "call_method":
            name = "float" if upcast and node.target in ("half", "bfloat16") else node.target
            values.append(getattr(args[0], name)(*args[1:], **kwargs))
        else:
            values.append(resolve_target(node.target)(*args, **kwargs))
    return tuple(one(output) for output in graph.outputs)


REDUCED = frozenset({"bfloat16", "float16"})


def _widen(value: object) -> object:
    if isinstance(value, list):
        return [_widen(item) for item in value]
    if isinstance(value, dict):
        if value.get("dtype") in REDUCED:
            return {"dtype": "float32"}
        return {key: _widen(item) for key, item in value.items()}
    return value


def encode_constant(value: object) -> object:
    """Encode a leaf that is neither a node nor a symbol.

    Raises:
        TypeError: the value has no portable form.
    """
    simple: dict[type, str] = {
        torch.dtype: "dtype",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case torch.device():
            return {"device": value.type}
        case _ if value is ...:
            return {"ellipsis": True}
        case _ if type(value) in simple:
            return {simple[type(value)]: str(value).removeprefix("torch.")}
        case _:
            raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


_SEARCHED = (
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C._special",
    "torch._C._linalg",
    "torch._C._fft",
    "torch._C",
    "builtins",
    "math",
)


def target_name(target: Callable[..., object]) -> str | None:
    """Return the qualified name under which :func:`resolve_target` finds ``target``, or None."""
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return "torch.ops." + target._qualified_op_name.replace("::", ".")
    name = getattr(target, "__name__", "")
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    own = getattr(target, "__module__", None)
    names = dict.fromkeys((getattr(target, "__qualname__", name), name))
    for module in (*((own,) if own else ()), *_SEARCHED):
        for candidate in (f"{module}.{found}" for found in names):
            try:
                if resolve_target(candidate) == target:  # builtin methods are equal, not identical
                    return candidate
            except (CorruptEntry, ImportError):
                continue
    return None
