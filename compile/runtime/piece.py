"""Artifact: a sealed piece, loaded: its program bound to kernels, constants and one device.

A piece's program is a text of the form

    import torch
    from pwcc.compile.runtime.externs import EXTERNS
    from pwcc.compile.torch_private.primitives import empty_strided_cpu, reinterpret_tensor

    def bind(kernels, constants, device_index):
        cpp_fused_mul_0 = kernels['cpp_fused_mul_0']
        def call(args):
            ...
        return call

made by ``sealing/wrapper.py``. Loading compiles that text, maps the kernels and calls ``bind``: no
compiler is imported, no process is started, no file is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import cast

import torch

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import BlobDigest
from pwcc.cache.sealed import CppKernel, SealedPiece
from pwcc.compile.runtime import program_code
from pwcc.compile.runtime.kernels import TABLE, KernelTable, ReadBlob
from pwcc.compile.runtime.realign import PieceCall, realigning

Bind = Callable[[Mapping[str, object], Mapping[str, torch.Tensor], int], PieceCall]


@dataclass(frozen=True)
class LoadedPiece:
    """A piece that can be called.

    ``call`` takes the inputs as one list, which it empties, and returns the tuple of outputs. It checks
    nothing about them: the caller answers for dtypes, sizes, strides and device
    (``runtime/check.py`` compares them with ``record.inputs``), for the alignment of
    ``record.aligned``, for grad mode being off, and on CUDA for the current device being the piece's.
    """

    record: SealedPiece
    call: PieceCall


class PieceLoader:
    """Loads sealed pieces onto one device.

    ``read_blob`` returns a blob's verified bytes. Programs are compiled once per text and kernels
    loaded once per process and device, so layers that share a piece share its code.
    """

    def __init__(self, read_blob: ReadBlob, device: torch.device, *, kernels: KernelTable = TABLE) -> None:
        self._read_blob = read_blob
        self._device_type = device.type
        self._index = device.index if device.index is not None else 0
        self._kernels = kernels
        self._binds: dict[BlobDigest, Bind] = {}

    def load(self, record: SealedPiece) -> LoadedPiece:
        """Load one piece.

        Raises:
            CorruptEntry: the record is for another device type, its program does not compile or has no
                ``bind``, or a kernel does not load.
        """
        if record.device_type != self._device_type:
            raise CorruptEntry(f"expected a piece for {self._device_type}, got one for {record.device_type}")
        kernels: dict[str, object] = {}
        with self._current_device():
            for kernel in record.kernels:
                if isinstance(kernel, CppKernel):
                    kernels[kernel.name] = self._kernels.cpp(kernel, self._read_blob)
                else:
                    kernels[kernel.name] = self._kernels.triton(kernel, self._read_blob, self._index)
            call = self._bind(record)(kernels, self._constants(record), self._index)
        return LoadedPiece(record, realigning(call, record.realigned, record.mutated))

    @contextmanager
    def _current_device(self) -> Iterator[None]:
        """Make the device current: the driver loads a cubin into the calling thread's current context."""
        if self._device_type == "cpu":
            yield
            return
        with torch.cuda.device(self._index):
            torch.empty(1, device=f"cuda:{self._index}")  # a thread has no context before its first CUDA call
            yield

    def _bind(self, record: SealedPiece) -> Bind:
        found = self._binds.get(record.source)
        if found is None:
            where = f"piece {record.source[:12]}"
            blob, is_code = record.program(program_code.MAGIC)
            data = self._read_blob(blob)
            code = program_code.decode(data, where=where) if is_code else compile_program(data, where=where)
            found = self._binds[record.source] = run_program(code, where=where)
        return found

    def _constants(self, record: SealedPiece) -> Mapping[str, torch.Tensor]:
        if record.constants is None:
            return {}
        from safetensors import SafetensorError
        from safetensors.torch import load

        # torch.device("cpu", 0) differs from plain "cpu" in comparisons, so the index only names GPUs
        device = "cpu" if self._device_type == "cpu" else f"{self._device_type}:{self._index}"
        try:
            found = load(self._read_blob(record.constants))
        except (SafetensorError, KeyError) as error:  # KeyError: a dtype that this version does not know
            raise CorruptEntry(f"expected constants as safetensors, got {error}") from None
        return {name: value.to(device) for name, value in found.items()}


def compile_program(source: bytes, *, where: str) -> CodeType:
    """Compile a program's text.

    Raises:
        CorruptEntry: it is no Python.
    """
    try:
        return program_code.compile_text(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CorruptEntry(f"expected a program for this torch, got {error}", where=where) from error


def run_program(code: CodeType, *, where: str) -> Bind:
    """Run a program's module code and return its ``bind``.

    Raises:
        CorruptEntry: it names what this torch lacks, or defines no ``bind``.
    """
    namespace: dict[str, object] = {"__name__": "pwcc_piece"}
    try:
        exec(code, namespace)  # noqa: S102 (verified bytes of the entry)
    except ImportError as error:
        raise CorruptEntry(f"expected a program for this torch, got {error}", where=where) from error
    bind = namespace.get("bind")
    if not callable(bind):
        raise CorruptEntry("expected a program that defines bind", where=where)
    return cast("Bind", bind)
