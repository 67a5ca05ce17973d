"""Artifact: the calling convention of a program, checked before anything compiled runs.

Parameters are checked for arity, None-ness, dtype, device, layout and constants; sizes against the
symbols' ranges and the recorded shape predicates. Sizes that were accepted once are remembered, so
that the steady state costs one set look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pwcc.cache import strict
from pwcc.cache.errors import ArgumentError, CorruptEntry, GuardViolation, SizeError
from pwcc.compile.runtime.arguments import torch_value
from pwcc.compile.runtime.expressions import check_symbols, compile_expressions
from pwcc.compile.runtime.memory import BoundMemory

Dim = int | str
Strides = tuple[int, ...] | None
MAX_REMEMBERED_SIZES = 65_536  # one per distinct size tuple; a server's token counts are bounded by max_tokens


@dataclass(frozen=True)
class Parameter:
    """One parameter of ``forward``: a tensor with symbolic shape and stride, or a constant (None, scalar).

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
    """How a program is called: parameters in signature order, symbols, predicates, weights, output template."""

    parameters: tuple[Parameter, ...]
    symbols: tuple[SizeSymbol, ...]
    predicates: tuple[ShapePredicate, ...]
    weights: tuple[Weight, ...] = ()
    output: object = field(hash=False, default=None)

    def to_bytes(self) -> bytes:
        """Serialise canonically."""
        return strict.canonical(
            {
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
        fields = strict.Fields(strict.loads(data, where=where), where)
        convention = cls(
            parameters=fields.list_("parameters", _parse_parameter, max_items=1000),
            symbols=fields.list_("symbols", _parse_symbol, max_items=64),
            predicates=fields.list_("predicates", _parse_predicate),
            weights=fields.list_("weights", _parse_weight),
            output=fields.take("output"),
        )
        fields.done()
        check_symbols([symbol.name for symbol in convention.symbols])
        for symbol in convention.symbols:
            named = convention.parameters[symbol.parameter : symbol.parameter + 1]
            if not named or symbol.dim >= len(named[0].shape):
                raise CorruptEntry(f"symbol {symbol.name} names no dimension of a tensor", where=where)
        return convention


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


def _same_constant(got: object, compiled: object) -> bool:
    """Tell whether two scalars are one: of one type, and -0.0 is not 0.0."""
    if type(got) is not type(compiled):
        return False
    return repr(got) == repr(compiled) if isinstance(got, float) else got == compiled


class Binder:
    """Turns a call's arguments into flat tensors and checked sizes.

    ``bind(args, kwargs)`` returns ``(tensors, sizes)``: the tensor arguments in signature order and
    the symbols' values. Raises :class:`ArgumentError`, :class:`SizeError` or :class:`GuardViolation`.
    """

    def __init__(self, convention: CallingConvention, device: torch.device) -> None:
        self._convention = convention
        self._names = [parameter.name for parameter in convention.parameters]
        self._device = device
        self._tensor_parameters = [
            (index, parameter, getattr(torch, parameter.dtype))
            for index, parameter in enumerate(convention.parameters)
            if parameter.kind == "tensor"
        ]
        self._constants = [
            (index, parameter)
            for index, parameter in enumerate(convention.parameters)
            if parameter.kind == "constant"
        ]
        names = [symbol.name for symbol in convention.symbols]
        dims = [dim for _, parameter, _ in self._tensor_parameters for dim in parameter.shape]
        strides = [dim for _, parameter, _ in self._tensor_parameters for dim in parameter.stride]
        self._shapes = compile_expressions(dims, names)
        self._strides = compile_expressions(strides, names)
        self._predicates = compile_expressions([predicate.text for predicate in convention.predicates], names)
        position = {index: slot for slot, (index, _, _) in enumerate(self._tensor_parameters)}
        self._symbol_slots = [(position[symbol.parameter], symbol.dim) for symbol in convention.symbols]
        self._written = [
            slot for slot, (_, parameter, _) in enumerate(self._tensor_parameters) if parameter.written
        ]
        self._accepted: dict[tuple[object, ...], tuple[tuple[int, ...], tuple[Strides, ...]]] = {}
        self._memory: BoundMemory | None = None
        self._lazy = [
            (slot, parameter.name, torch.is_conj if dtype.is_complex else torch.is_neg)
            for slot, (_, parameter, dtype) in enumerate(self._tensor_parameters)
            if dtype.is_complex or dtype.is_floating_point  # torch makes such views of these only
        ]

    def bound(self, weights: Sequence[torch.Tensor]) -> None:
        """Take note of the weights that calls now run with; of use only where the program writes a tensor."""
        held = self._convention.weights
        if self._tensor_parameters and (self._written or any(weight.written for weight in held)):
            self._memory = BoundMemory(held, weights)

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """Check one call."""
        if kwargs or len(args) != len(self._names):
            args = self._arrange(args, kwargs)
        for index, parameter in self._constants:
            if not _same_constant(args[index], parameter.value):
                raise ArgumentError(
                    f"argument {parameter.name!r} was compiled as {parameter.value!r}, "
                    f"got {_shown(args[index])}",
                    hint="compile an entry for this value",
                )
        tensors: list[torch.Tensor] = []
        for index, parameter, dtype in self._tensor_parameters:
            tensor = args[index]
            if type(tensor) is not torch.Tensor:
                tensor = _plain_tensor(parameter.name, tensor)
            if tensor.dtype is not dtype or tensor.device != self._device:
                raise ArgumentError(
                    f"argument {parameter.name!r}: expected {parameter.dtype} on {self._device}, "
                    f"got {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
                )
            tensors.append(tensor)
        shapes = tuple(tensor.shape for tensor in tensors)
        accepted = self._accepted.get(shapes)
        if accepted is None:
            try:
                accepted = self._accept(shapes, tensors)
            except ZeroDivisionError:
                raise CorruptEntry("a size expression of the entry divides by zero for this call") from None
        sizes, strides = accepted
        for tensor, stride in zip(tensors, strides, strict=True):
            if stride is not None and tensor.stride() != stride:
                self._check_stride(tensor, stride, tensors)
        if self._lazy:
            self._refuse_lazy(tensors)
        if self._written or self._memory is not None:
            self._refuse_shared(tensors)
        return tensors, sizes

    def _arrange(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
        if len(args) > len(self._names):
            raise ArgumentError(f"expected at most {len(self._names)} arguments {self._names}, got {len(args)}")
        filled = dict(zip(self._names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self._names:
                raise ArgumentError(f"unexpected argument {name!r}; expected {self._names}")
            if name in filled:
                raise ArgumentError(f"argument {name!r} given twice")
            filled[name] = value
        for _, parameter in self._constants:
            filled.setdefault(parameter.name, parameter.value)
        missing = [name for name in self._names if name not in filled]
        if missing:
            raise ArgumentError(f"missing arguments {missing}; expected {self._names}")
        return [filled[name] for name in self._names]

    def _accept(
        self, shapes: tuple[torch.Size, ...], tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[int, ...], tuple[Strides, ...]]:
        for shape, (_, parameter, _) in zip(shapes, self._tensor_parameters, strict=True):
            if len(shape) != len(parameter.shape):
                raise ArgumentError(
                    f"argument {parameter.name!r}: expected {len(parameter.shape)} dimensions, "
                    f"got {tuple(shape)}"
                )
        sizes = tuple(shapes[slot][dim] for slot, dim in self._symbol_slots)
        for symbol, size in zip(self._convention.symbols, sizes, strict=True):
            if not symbol.low <= size <= symbol.high:
                raise SizeError(
                    f"size {size} of {self._names[symbol.parameter]!r} (dimension {symbol.dim}) is outside "
                    f"the compiled range [{symbol.low}, {symbol.high}]",
                    hint="pass at least as many tokens"
                    if size < symbol.low
                    else "compile with a larger --max-tokens, or split the batch",
                )
        expected = iter(self._shapes(*sizes))
        for shape, (_, parameter, _) in zip(shapes, self._tensor_parameters, strict=True):
            wanted = tuple(next(expected) for _ in shape)
            if tuple(shape) != wanted:
                raise ArgumentError(
                    f"argument {parameter.name!r}: expected shape {wanted}{self._beside(parameter)}, "
                    f"got {tuple(shape)}"
                )
        for predicate, holds in zip(self._convention.predicates, self._predicates(*sizes), strict=True):
            if not holds:
                named = {s.name: size for s, size in zip(self._convention.symbols, sizes, strict=True)}
                raise GuardViolation(
                    f"the compiled code holds only where {predicate.text}; this call has {named}",
                    where=predicate.where,
                    hint="compile an entry for this size",
                )
        strides = iter(self._strides(*sizes))
        accepted = (
            sizes,
            tuple(
                tuple(next(strides) for _ in shape) if parameter.stride or not shape else None
                for shape, (_, parameter, _) in zip(shapes, self._tensor_parameters, strict=True)
            ),
        )
        if len(self._accepted) < MAX_REMEMBERED_SIZES:
            self._accepted[shapes] = accepted
        return accepted

    def _beside(self, parameter: Parameter) -> str:
        """Name the argument that decided the sizes, if it is another one."""
        deciding = {self._names[symbol.parameter] for symbol in self._convention.symbols} - {parameter.name}
        return f" beside {', '.join(map(repr, sorted(deciding)))}" if deciding else ""

    def _check_stride(
        self, tensor: torch.Tensor, stride: tuple[int, ...], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Strides of size-1 dimensions are free; any other difference is an error."""
        wrong = any(
            size > 1 and got != wanted
            for size, got, wanted in zip(tensor.shape, tensor.stride(), stride, strict=True)
        )
        if wrong and tensor.numel():
            slot = next(index for index, item in enumerate(tensors) if item is tensor)
            raise ArgumentError(
                f"argument {self._tensor_parameters[slot][1].name!r}: expected stride {stride}, "
                f"got {tensor.stride()}",
                hint="pass a tensor of the compiled layout, such as x.contiguous()",
            )

    def _refuse_lazy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a view that conjugates or negates when it is read: compiled code reads what lies there."""
        for slot, name, is_lazy in self._lazy:
            if is_lazy(tensors[slot]):
                raise ArgumentError(
                    f"argument {name!r} is a lazily conjugated or negated view, "
                    "which compiled code cannot read",
                    hint=f"pass {name}.resolve_conj().resolve_neg()",
                )

    def _refuse_shared(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse what shares memory with a written argument or weight: they were traced as separate."""
        if self._memory is not None:
            for slot, (_, parameter, _) in enumerate(self._tensor_parameters):
                self._memory.refuse(parameter.name, tensors[slot], written=parameter.written)
        starts = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        for written in self._written:
            for slot, start in enumerate(starts):
                if slot != written and start == starts[written] and start:
                    names = [self._tensor_parameters[index][1].name for index in (written, slot)]
                    raise ArgumentError(
                        f"arguments {names[0]!r} and {names[1]!r} share memory, "
                        f"and the model writes {names[0]!r}",
                        hint=f"pass {names[1]!r} as a copy",
                    )


def _plain_tensor(name: str, value: object) -> torch.Tensor:
    if isinstance(value, torch.nn.Parameter | torch.nn.Buffer):
        return value.detach()
    got = "a tensor subclass, " if isinstance(value, torch.Tensor) else ""
    raise ArgumentError(f"argument {name!r} was compiled as a tensor, got {got}{type(value).__name__}")


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)[:80]


# --- output template -------------------------------------------------------------------------------


def build_output(template: object) -> Callable[[Sequence[object], Sequence[object], Sequence[object]], object]:
    """Compile an output template to a function of (graph outputs, tensor arguments, weights).

    Templates: ``{"output": i}``, ``{"argument": i}``, ``{"weight": i}``, ``{"constant": x}``,
    ``{"float": "inf"}``, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, t], ...]}`` and
    ``{"class": "module:qualname", "fields": [[name, t], ...]}`` for dataclasses, mappings with a
    constructor by keyword (Hugging Face's ModelOutput) and named tuples.
    """
    if not isinstance(template, dict):
        raise CorruptEntry("expected an output template")
    if "class" in template:
        return _build_class(template)
    if len(template) != 1:
        raise CorruptEntry("expected an output template of one key")
    ((tag, held),) = template.items()
    match tag:
        case "output" if type(held) is int and held >= 0:
            return lambda outputs, arguments, weights: outputs[held]
        case "argument" if type(held) is int and held >= 0:
            return lambda outputs, arguments, weights: arguments[held]
        case "weight" if type(held) is int and held >= 0:
            return lambda outputs, arguments, weights: weights[held]
        case "constant" if held is None or isinstance(held, (bool, int, float, str)):
            return lambda outputs, arguments, weights: held
        case "float" if held in ("inf", "-inf", "nan"):
            number = float(held)
            return lambda outputs, arguments, weights: number
        case "tuple" | "list" if isinstance(held, list):
            items = [build_output(item) for item in held]
            kind = tuple if tag == "tuple" else list
            return lambda outputs, arguments, weights: kind(item(outputs, arguments, weights) for item in items)
        case "dict" if isinstance(held, list):
            pairs = [(_hashable(key), build_output(item)) for key, item in map(_pair, held)]
            return lambda outputs, arguments, weights: {
                key: item(outputs, arguments, weights) for key, item in pairs
            }
        case _:
            raise CorruptEntry(f"unknown output template {repr(template)[:80]}")


def _pair(item: object) -> tuple[object, object]:
    if not isinstance(item, list) or len(item) != 2:
        raise CorruptEntry(f"expected a name and a template, got {repr(item)[:80]}")
    return item[0], item[1]


def _hashable(key: object) -> object:
    if key is not None and not isinstance(key, (bool, int, str)):
        raise CorruptEntry(f"expected a key, got {repr(key)[:80]}")
    return key


def _build_class(
    template: Mapping[str, object],
) -> Callable[[Sequence[object], Sequence[object], Sequence[object]], object]:
    module, _, qualname = str(template["class"]).partition(":")
    found: object = sys.modules.get(module)  # never imported from here: the live model brought it
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise CorruptEntry(f"the output's class {template['class']!r} is not in this process")
    if not (_is_record(found) or issubclass(found, Mapping)):
        raise CorruptEntry(f"expected a dataclass, named tuple or mapping, got {template['class']!r}")
    held = template.get("fields")
    if not isinstance(held, list):
        raise CorruptEntry("expected a list of fields")
    fields = [(str(name), build_output(item)) for name, item in map(_pair, held)]
    constructor: Callable[..., object] = found
    return lambda outputs, arguments, weights: constructor(
        **{name: item(outputs, arguments, weights) for name, item in fields}
    )


def _is_record(cls: type) -> bool:
    return hasattr(cls, "__dataclass_fields__") or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
