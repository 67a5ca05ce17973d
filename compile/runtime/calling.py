"""Artifact: the calling convention of a program, as records: arguments, leaves, sizes, predicates, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.arguments import torch_value
from pwcc.compile.runtime.arrange import DEFAULTS, KINDS, Argument
from pwcc.compile.runtime.expressions import check_symbols

Dim = int | str

TOKENS = "s0"
"""The first size symbol of a program: the token count. Others are sizes of their own."""


@dataclass(frozen=True)
class Parameter:
    """One leaf of the arguments: a tensor with symbolic shape and stride, or a constant (None, scalar).

    ``name`` is that of the parameter of ``forward``, or the way to the leaf: ``state[0]``, ``state.key``.
    ``stride`` is empty where the program never reads the tensor's memory; ``written`` tells that it writes it.
    """

    name: str
    kind: str
    dtype: str = ""
    device: str = ""
    shape: tuple[Dim, ...] = ()
    stride: tuple[Dim, ...] = ()
    value: object = None
    written: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the canonical form."""
        if self.kind == "constant":
            return {"name": self.name, "kind": self.kind, "value": self.value}
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "device": self.device,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "written": self.written,
        }


@dataclass(frozen=True)
class SizeSymbol:
    """A size symbol: read from dimension ``dim`` of tensor parameter ``parameter``; inclusive range."""

    name: str
    parameter: int
    dim: int
    low: int
    high: int


@dataclass(frozen=True)
class ShapePredicate:
    """A condition in the symbols that must hold, and the user's source line that asked for it."""

    text: str
    where: str | None


@dataclass(frozen=True)
class Weight:
    """A tensor of the model that the program reads: all its names (the first binds it) and its layout.

    ``written`` tells that the program writes it; ``shares`` are then the positions of the weights that had
    memory in common with it when it was traced.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    written: bool = False
    shares: tuple[int, ...] = ()

    def to_json(self) -> dict[str, strict.Json]:
        """Return the canonical form; only of a weight that is written does it say so."""
        found: dict[str, strict.Json] = {
            "names": list(self.names),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stride": list(self.stride),
        }
        return {**found, "written": list(self.shares)} if self.written else found


@dataclass(frozen=True)
class CallingConvention:
    """How a program is called: leaves in signature order, symbols, predicates, weights, output template.

    ``arguments`` say how a call names and nests the leaves. Without them each leaf is an argument of its own
    that may be passed by position or name, and a constant is its argument's default.
    """

    parameters: tuple[Parameter, ...]
    symbols: tuple[SizeSymbol, ...]
    predicates: tuple[ShapePredicate, ...]
    weights: tuple[Weight, ...] = ()
    output: object = field(hash=False, default=None)
    arguments: tuple[Argument, ...] = field(hash=False, default=())

    def signature(self) -> tuple[Argument, ...]:
        """Return the arguments, spelled out."""
        return self.arguments or plain_arguments(self.parameters)

    def to_bytes(self) -> bytes:
        """Serialise canonically."""
        arguments = [argument.to_json() for argument in self.arguments]
        return strict.canonical(
            {
                **({"arguments": arguments} if arguments else {}),
                "parameters": [parameter.to_json() for parameter in self.parameters],
                "symbols": [
                    {"name": s.name, "parameter": s.parameter, "dim": s.dim, "low": s.low, "high": s.high}
                    for s in self.symbols
                ],
                "predicates": [{"text": p.text, "where": p.where} for p in self.predicates],
                "weights": [weight.to_json() for weight in self.weights],
                "output": self.output,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> CallingConvention:
        """Parse strictly.

        Raises:
            CorruptEntry: any field of the wrong form.
        """
        value = strict.loads(data, where=where)
        nested = isinstance(value, dict) and "arguments" in value
        fields = strict.Fields(value, where)
        convention = cls(
            parameters=fields.list_("parameters", _parse_parameter, max_items=1000),
            symbols=fields.list_("symbols", _parse_symbol, max_items=64),
            predicates=fields.list_("predicates", _parse_predicate),
            weights=fields.list_("weights", _parse_weight),
            output=fields.take("output"),
            arguments=fields.list_("arguments", _parse_argument, max_items=1000) if nested else (),
        )
        fields.done()
        check_symbols([symbol.name for symbol in convention.symbols])
        for symbol in convention.symbols:
            named = convention.parameters[symbol.parameter : symbol.parameter + 1]
            if not named or symbol.dim >= len(named[0].shape):
                raise CorruptEntry(f"symbol {symbol.name} names no dimension of a tensor", where=where)
        return convention


def plain_arguments(parameters: Sequence[Parameter]) -> tuple[Argument, ...]:
    """Return the arguments of leaves that are not nested: by position or name, constants being defaults."""
    return tuple(
        Argument(leaf.name, "either", "compiled" if leaf.kind == "constant" else "required", {"leaf": index})
        for index, leaf in enumerate(parameters)
    )


def _parse_argument(value: object, where: str) -> Argument:
    fields = strict.Fields(value, where)
    argument = Argument(fields.str_("name"), fields.str_("kind"), fields.str_("default"), fields.take("form"))
    fields.done()
    if argument.kind not in KINDS or argument.default not in DEFAULTS:
        raise CorruptEntry(f"unknown kind or default of argument {argument.name[:80]!r}", where=where)
    return argument


def _parse_parameter(value: object, where: str) -> Parameter:
    fields = strict.Fields(value, where)
    name, kind = fields.str_("name"), fields.str_("kind")
    if kind == "constant":
        parameter = Parameter(name, kind, value=fields.take("value"))
    elif kind == "tensor":
        parameter = Parameter(
            name,
            kind,
            dtype=fields.str_("dtype"),
            device=fields.str_("device"),
            shape=fields.list_("shape", _parse_dim, max_items=64),
            stride=fields.list_("stride", _parse_dim, max_items=64),
            written=fields.bool_("written"),
        )
        torch_value("dtype", parameter.dtype)
        if parameter.stride and len(parameter.stride) != len(parameter.shape):
            raise CorruptEntry(f"expected {len(parameter.shape)} strides of {name!r}", where=where)
    else:
        fields.fail("kind", "'tensor' or 'constant'", kind)
    fields.done()
    return parameter


def _parse_dim(value: object, where: str) -> Dim:
    return value if isinstance(value, str) else strict.as_int(value, where)


def _parse_symbol(value: object, where: str) -> SizeSymbol:
    fields = strict.Fields(value, where)
    symbol = SizeSymbol(
        fields.str_("name"),
        fields.int_("parameter"),
        fields.int_("dim"),
        fields.int_("low"),
        fields.int_("high"),
    )
    fields.done()
    return symbol


def _parse_weight(value: object, where: str) -> Weight:
    written = isinstance(value, dict) and "written" in value
    fields = strict.Fields(value, where)
    weight = Weight(
        fields.list_("names", strict.as_str, max_items=1000),
        fields.str_("dtype"),
        fields.list_("shape", strict.as_int, max_items=64),
        fields.list_("stride", strict.as_int, max_items=64),
        written,
        fields.list_("written", strict.as_int) if written else (),
    )
    fields.done()
    if not weight.names:
        raise CorruptEntry("a weight without a name", where=where)
    return weight


def _parse_predicate(value: object, where: str) -> ShapePredicate:
    fields = strict.Fields(value, where)
    predicate = ShapePredicate(fields.str_("text"), fields.opt_str("where"))
    fields.done()
    return predicate
