"""Artifact: a piece's arguments compared with what it was compiled for; the debug mode's check.

Sealed programs hold no assertions on their inputs: a caller establishes them once a size. This says
whether it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pwcc.cache.errors import ArgumentError
from pwcc.cache.sealed import Dim, SealedPiece
from pwcc.compile.runtime.expressions import compile_expressions
from pwcc.compile.runtime.realign import ALIGNMENT


def input_checker(record: SealedPiece) -> Callable[[Sequence[object]], None]:
    """Return a function that raises ArgumentError for arguments that the piece was not compiled for.

    Compared are arity, kinds, dtypes, device type, sizes and strides (strides of dimensions with at most
    one element may differ), constants, equal symbols, and the alignment that is assumed.

    Raises:
        CorruptEntry: a size expression of the record leaves the grammar.
    """
    symbols, sources = _symbols(record)
    shapes = [compile_expressions(facts.shape, symbols) for facts in record.inputs]
    strides = [compile_expressions(facts.stride, symbols) for facts in record.inputs]
    values = [compile_expressions((facts.value or 0,), symbols) for facts in record.inputs]

    def check(args: Sequence[object]) -> None:
        if len(args) != len(record.inputs):
            raise ArgumentError(f"expected {len(record.inputs)} inputs, got {len(args)}")
        sizes = [_size(args[position], dim) for position, dim in sources]
        for index, (facts, arg) in enumerate(zip(record.inputs, args, strict=True)):
            where = f"input {index}"
            if facts.kind != "tensor":
                if arg != values[index](*sizes)[0]:
                    raise ArgumentError(f"expected {values[index](*sizes)[0]}, got {arg!r}", where=where)
                continue
            if not isinstance(arg, torch.Tensor) or arg.device.type != record.device_type:
                raise ArgumentError(
                    f"expected a tensor on {record.device_type}, got {type(arg).__name__}", where=where
                )
            if str(arg.dtype) != f"torch.{facts.dtype}":
                raise ArgumentError(f"expected dtype {facts.dtype}, got {arg.dtype}", where=where)
            _layout(arg, shapes[index](*sizes), strides[index](*sizes), where)
            if index in record.aligned and arg.data_ptr() % ALIGNMENT:
                raise ArgumentError(f"expected an address that {ALIGNMENT} divides", where=where)

    return check


def _layout(tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], where: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ArgumentError(f"expected shape {shape}, got {tuple(tensor.shape)}", where=where)
    got = tensor.stride()
    if tensor.numel() and any(size > 1 and a != b for size, a, b in zip(shape, got, stride, strict=True)):
        raise ArgumentError(f"expected strides {stride}, got {got}", where=where)


def _symbols(record: SealedPiece) -> tuple[list[str], list[tuple[int, int | None]]]:
    """Return the symbols and where each is first found: (input, dimension); None for the input itself."""
    found: dict[str, tuple[int, int | None]] = {}
    for index, facts in enumerate(record.inputs):
        dims: list[tuple[Dim | None, int | None]] = [(facts.value, None)]
        dims += [(dim, position) for position, dim in enumerate(facts.shape)]
        for dim, position in dims:
            if isinstance(dim, str) and dim.isidentifier():
                found.setdefault(dim, (index, position))
    return list(found), list(found.values())


def _size(arg: object, dim: int | None) -> int:
    if dim is None and isinstance(arg, int):
        return arg
    if dim is not None and isinstance(arg, torch.Tensor) and dim < arg.dim():
        return arg.shape[dim]
    raise ArgumentError(f"expected {'an integer' if dim is None else 'a tensor'}, got {type(arg).__name__}")
