"""Graph: the arguments that graphs read: the runner's own buffers, or buffers of the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from pwcc.cache.errors import ArgumentError, MovedInputError, UsageError
from pwcc.compile.compiled_model import LoadedProgram
from pwcc.compile.runtime.calling import TOKENS, Parameter

Input = Literal["copy"] | Tensor
Copies = list[tuple[Tensor, Tensor]]


class StaticArguments:
    """One buffer per tensor argument, of the largest size; rows beyond a batch hold ``fill``.

    ``copy`` buffers belong to the runner and are written by every call. A tensor given for an argument is a
    *persistent* buffer of the caller's: a call must pass rows from its start, nothing is copied, and its rows
    beyond the batch are the caller's business (graphs read them: ids must stay in range). Views per size are
    made once. Not thread-safe: the runner holds its lock.
    """

    def __init__(
        self,
        programs: Sequence[LoadedProgram],
        *,
        largest: int,
        device: torch.device,
        inputs: Mapping[str, Input] | None = None,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        parameters = _tensor_parameters(programs)
        inputs, fill = dict(inputs or {}), dict(fill or {})
        _known(inputs, parameters, "inputs")
        _known(fill, parameters, "fill")
        _require_apart({name: given for name, given in inputs.items() if isinstance(given, Tensor)})
        self.largest = largest
        self.names = tuple(parameters)
        self._fill = {name: fill.get(name, 0) for name in parameters}
        self._by_token = {name: _follows_tokens(name, programs) for name in parameters}
        self._persistent: dict[str, int] = {}
        self.buffers: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            shape = _extents(name, parameter, largest)
            given = inputs.get(name, "copy")
            dtype = getattr(torch, parameter.dtype)
            if name in fill:
                _require_value(name, fill[name], dtype)
            if isinstance(given, Tensor):
                _require_fits(name, given, shape, parameter, device, by_token=self._by_token[name])
                self._persistent[name] = given.data_ptr()
                self.buffers[name] = given.detach()
            else:
                if parameter.written:
                    raise UsageError(
                        f"the model writes argument {name!r}, so a copy of it would take the writes",
                        hint=f"pass the caller's own buffer: inputs={{{name!r}: buffer}}",
                    )
                if given != "copy":
                    raise UsageError(
                        f"inputs[{name!r}]: expected 'copy' or a buffer, got {given!r}",
                        hint="a tensor makes the argument persistent",
                    )
                self.buffers[name] = torch.full(shape, self._fill[name], dtype=dtype, device=device)
        self._dirty = 0
        self._views: dict[int, list[Tensor]] = {}

    def at(self, size: int) -> list[Tensor]:
        """Return the arguments in signature order, cut to ``size`` tokens."""
        found = self._views.get(size)
        if found is None:
            found = self._views[size] = [
                buffer[:size] if self._by_token[name] else buffer for name, buffer in self.buffers.items()
            ]
        return found

    def named(self, size: int) -> dict[str, Tensor]:
        """Return the same by name."""
        return dict(zip(self.names, self.at(size), strict=True))

    def load(self, tensors: Sequence[Tensor], count: int) -> Copies:
        """Return the copies that bring a batch of ``count`` tokens in, and clear rows of a larger one before.

        Raises:
            MovedInputError: a persistent argument does not lie at its buffer's start; names it.
        """
        copies: Copies = []
        for (name, buffer), tensor in zip(self.buffers.items(), tensors, strict=True):
            address = self._persistent.get(name)
            if address is None:
                rows = self._by_token[name]
                copies.append((buffer[:count] if rows else buffer, tensor))
                if rows and self._dirty > count:
                    buffer[count : self._dirty].fill_(self._fill[name])
            elif tensor.data_ptr() != address:
                raise MovedInputError(
                    f"argument {name!r} is persistent and was captured at {address:#x}, "
                    f"got a tensor at {tensor.data_ptr():#x}",
                    hint="write into the captured buffer and pass its first rows, or make it a copied input",
                )
        self._dirty = count
        return copies

    def clear(self) -> None:
        """Fill every row of the runner's own buffers."""
        for name, buffer in self.buffers.items():
            if name not in self._persistent and self._by_token[name]:
                buffer.fill_(self._fill[name])
        self._dirty = 0


def grouped_copies(copies: Copies) -> None:
    """Run copies, those of one dtype together: one launch each on a GPU, where all are dense."""
    groups: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in copies:
        dense = target.is_contiguous() and source.is_contiguous()
        targets, sources = groups.setdefault((target.dtype, dense), ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _tensor_parameters(programs: Sequence[LoadedProgram]) -> dict[str, Parameter]:
    for program in programs:
        symbols = program.calling.symbols
        if any(symbol.name != TOKENS for symbol in symbols):
            names = ", ".join(symbol.name for symbol in symbols)
            raise UsageError(
                f"graphs are found by one token count, and the entry has other sizes, too ({names})",
                hint="declare the inputs so that all dynamic dimensions are the token count",
            )
    _require_flat(programs[0])
    widest = max(programs, key=lambda program: (bool(program.calling.symbols), program.high))
    found = {p.name: p for p in widest.calling.parameters if p.kind == "tensor"}
    if not found:
        raise UsageError("graphs need an argument that is a tensor, and the model has none")
    return found


def _require_flat(program: LoadedProgram) -> None:
    """Refuse arguments that graphs cannot be given by name: nested ones, and constants without a default."""
    tensors = {index for index, leaf in enumerate(program.calling.parameters) if leaf.kind == "tensor"}
    for argument in program.calling.signature():
        leaf = argument.form.get("leaf") if isinstance(argument.form, dict) else None
        named = leaf in tensors and argument.kind != "positional"
        if not named and argument.default != "compiled":
            raise UsageError(
                f"graphs take tensors by name, and argument {argument.name!r} is positional-only, nested or a "
                "constant that is not its default",
                hint="use mode NONE, or wrap the model so that its forward takes tensors",
            )


def _known(given: Mapping[str, object], parameters: Mapping[str, Parameter], what: str) -> None:
    for name in given:
        if name not in parameters:
            raise UsageError(
                f"{what} names {name!r}, which is no tensor argument of the model",
                hint=f"its tensor arguments are {', '.join(parameters)}",
            )


def _require_value(name: str, value: object, dtype: torch.dtype) -> None:
    """Refuse a fill that the argument's dtype cannot hold, such as a NaN among token ids."""
    try:
        if not isinstance(value, (int, float)):
            raise TypeError
        held = torch.full((), value, dtype=dtype).item()
        if not dtype.is_floating_point and held != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        text = str(dtype).removeprefix("torch.")
        raise UsageError(f"fill[{name!r}]: expected a value of {text}, got {value!r}") from None


def _require_apart(buffers: Mapping[str, Tensor]) -> None:
    """Refuse persistent buffers that share memory: writing one argument would write the other."""
    spans = sorted((b.data_ptr(), b.data_ptr() + b.numel() * b.element_size(), n) for n, b in buffers.items())
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise UsageError(
                f"persistent inputs {name!r} and {other!r} share memory", hint="give each a buffer of its own"
            )


def _follows_tokens(name: str, programs: Sequence[LoadedProgram]) -> bool:
    shapes = [p.shape for program in programs for p in program.calling.parameters if p.name == name]
    return any(shape and isinstance(shape[0], str) for shape in shapes)


def _extents(name: str, parameter: Parameter, largest: int) -> tuple[int, ...]:
    first, *rest = parameter.shape or (1,)
    if any(isinstance(dim, str) for dim in rest) or (isinstance(first, str) and not first.isidentifier()):
        raise UsageError(
            f"argument {name!r} has shape {parameter.shape}: only its first dimension may be the token count",
            hint="use mode NONE",
        )
    if not parameter.shape:
        return ()
    return (largest if isinstance(first, str) else first, *(int(dim) for dim in rest))


def _require_fits(
    name: str,
    buffer: Tensor,
    shape: tuple[int, ...],
    parameter: Parameter,
    device: torch.device,
    *,
    by_token: bool,
) -> None:
    got = (str(buffer.dtype).removeprefix("torch."), buffer.device)
    if got != (parameter.dtype, device):
        raise ArgumentError(
            f"persistent input {name!r}: expected {parameter.dtype} on {device}, got {got[0]} on {got[1]}"
        )
    rows = buffer.shape[0] if by_token and buffer.dim() else 0
    if tuple(buffer.shape[1:]) != shape[1:] or (rows < shape[0] if by_token else tuple(buffer.shape) != shape):
        least = f"at least {shape[0]} rows of {shape[1:]}" if by_token else f"shape {shape}"
        raise ArgumentError(
            f"persistent input {name!r}: expected {least}, got shape {tuple(buffer.shape)}",
            hint="make it as large as the largest captured size",
        )
    if not buffer.is_contiguous():
        raise ArgumentError(f"persistent input {name!r}: expected a contiguous buffer")
