"""Artifact: one call checked against the calling convention before anything compiled runs.

Leaves are checked for None-ness, dtype, device, layout and constants; sizes against the symbols' ranges and
the recorded shape predicates. What was accepted once is remembered with a native guard over tensors of
exactly that form, so that the steady state costs one call of it, and one look-up where the size is another
than before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pwcc.cache.errors import ArgumentError, CorruptEntry, GuardViolation, SizeError
from pwcc.compile.runtime.arrange import Arrangement, picker
from pwcc.compile.runtime.calling import TOKENS, CallingConvention, Parameter, SizeSymbol
from pwcc.compile.runtime.expressions import compile_expressions
from pwcc.compile.runtime.memory import BoundMemory
from pwcc.compile.torch_private.tensor_guard import TensorCheck, tensor_check, unreadable

Strides = tuple[int, ...] | None
MAX_REMEMBERED_SIZES = 65_536  # one per distinct size tuple; a server's token counts are bounded by max_tokens


def same_constant(got: object, compiled: object) -> bool:
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
        self._arrangement = Arrangement(convention.signature(), [p.value for p in convention.parameters])
        self._bare = all(
            argument.kind != "keyword" and argument.form == {"leaf": index}
            for index, argument in enumerate(convention.signature())
        )
        self._only_tensors = self._bare and not self._constants
        either = self._bare and all(argument.kind == "either" for argument in convention.signature())
        self._rest = [picker(self._names[first:]) for first in range(len(self._names))] if either else []
        self._key = self._symbol_slots[0][0] if self._symbol_slots else 0
        self._ready: dict[torch.Size, tuple[TensorCheck, tuple[int, ...]]] = {}
        self._last: tuple[TensorCheck, tuple[int, ...]] | None = None  # what the call before met
        self._memory: BoundMemory | None = None
        self._shares = bool(self._written)

    def bound(self, weights: Sequence[torch.Tensor]) -> None:
        """Take note of the weights that calls now run with; of use only where the program writes a tensor."""
        held = self._convention.weights
        if self._tensor_parameters and (self._written or any(weight.written for weight in held)):
            self._memory = BoundMemory(held, weights)
            self._shares = True

    def forget(self) -> None:
        """Forget the sizes that were accepted; the next call is checked as a first one."""
        self._accepted.clear()
        self._ready.clear()
        self._last = None

    def leaf(self, args: Sequence[object], kwargs: Mapping[str, object], index: int) -> object:
        """Return one leaf of a call, unchecked; raises :class:`ArgumentError` for another structure."""
        if self._bare and not kwargs and len(args) > index:
            return args[index]
        return self._arrangement.leaves(args, kwargs)[index]

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """Check one call."""
        if kwargs or not self._bare or len(args) != len(self._names):
            args = self._named(args, kwargs) or self._arrangement.leaves(args, kwargs)
        for index, parameter in self._constants:
            value = args[index]
            if value is not parameter.value and not same_constant(value, parameter.value):
                raise ArgumentError(
                    f"argument {parameter.name!r} was compiled as {parameter.value!r}, got {_shown(value)}",
                    hint="compile an entry for this value; one entry holds one",
                )
        given = list(args) if self._only_tensors else [args[index] for index, _, _ in self._tensor_parameters]
        ready = self._last
        if ready is None or not ready[0](*given):
            if not given or type(given[self._key]) is not torch.Tensor:
                return self._check(given)
            ready = self._ready.get(given[self._key].shape)  # type: ignore[attr-defined]
            if ready is None or not ready[0](*given):
                return self._check(given)
            self._last = ready
        tensors: list[torch.Tensor] = given  # type: ignore[assignment]
        if self._shares:
            self._refuse_shared(tensors)
        return tensors, ready[1]

    def _named(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[object] | None:
        """Return the leaves of a call that gives every one, some by name; None for any other call."""
        if not kwargs or len(args) + len(kwargs) != len(self._rest):
            return None
        try:
            return (*args, *self._rest[len(args)](kwargs))
        except KeyError:
            return None

    def _check(self, given: Sequence[object]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """Check tensors one by one, and remember a native check of others like them."""
        tensors: list[torch.Tensor] = []
        for value, (_, parameter, dtype) in zip(given, self._tensor_parameters, strict=True):
            tensor = value if type(value) is torch.Tensor else _plain_tensor(parameter.name, value)
            if tensor.dtype is not dtype or tensor.device != self._device:
                raise ArgumentError(
                    f"argument {parameter.name!r}: expected {parameter.dtype} on {self._device}, "
                    f"got {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
                )
            problem = unreadable(tensor)
            if problem is not None:
                raise ArgumentError(
                    f"argument {parameter.name!r} is {problem}, which compiled code cannot read",
                    hint=f"pass {parameter.name}.resolve_conj().resolve_neg()"
                    if "view" in problem
                    else "pass a plain tensor of the compiled layout",
                )
            tensors.append(tensor)
        shapes = tuple(tensor.shape for tensor in tensors)
        accepted = self._accepted.get(shapes)
        if accepted is None:
            try:
                accepted = self._accept(shapes)
            except ZeroDivisionError:
                raise CorruptEntry("a size expression of the entry divides by zero for this call") from None
        sizes, strides = accepted
        for tensor, stride, (_, parameter, _) in zip(tensors, strides, self._tensor_parameters, strict=True):
            if stride is not None and tensor.stride() != stride:
                _require_stride(parameter.name, tensor, stride)
        if self._shares:
            self._refuse_shared(tensors)
        if tensors and len(self._ready) < MAX_REMEMBERED_SIZES:
            check = tensor_check(tensors)
            if check is not None:
                self._ready[shapes[self._key]] = (check, sizes)
        return tensors, sizes

    def _accept(self, shapes: tuple[torch.Size, ...]) -> tuple[tuple[int, ...], tuple[Strides, ...]]:
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
                    hint=_remedy(symbol, size),
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


def _require_stride(name: str, tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Strides of size-1 dimensions are free; any other difference is an error."""
    wrong = any(
        size > 1 and got != wanted
        for size, got, wanted in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )
    if wrong and tensor.numel():
        raise ArgumentError(
            f"argument {name!r}: expected stride {stride}, got {tensor.stride()}",
            hint="pass a tensor of the compiled layout, such as x.contiguous()",
        )


def _plain_tensor(name: str, value: object) -> torch.Tensor:
    if type(value) is torch.nn.Parameter:  # one of a tensor subclass is of that class
        return value
    got = "a tensor subclass, " if isinstance(value, torch.Tensor) else ""
    raise ArgumentError(f"argument {name!r} was compiled as a tensor, got {got}{type(value).__name__}")


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def _remedy(symbol: SizeSymbol, size: int) -> str:
    """Return what to do about a size outside its range."""
    if symbol.name != TOKENS:
        return "compile with wider bounds for it, as in --input 'NAME:float32[1<=m<=1024,64]'"
    if size < symbol.low:
        return "pass at least as many tokens"
    return "compile with a larger --max-tokens, or split the batch"
