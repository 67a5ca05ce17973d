"""Artifact: a Triton kernel of a compiled piece, sealed: cubin, launch facts and launcher text."""

from __future__ import annotations

from collections.abc import Sequence

from pwcc.cache.errors import UnsealableError
from pwcc.cache.sealed import TritonKernel
from pwcc.compile.sealing.builder_paths import refuse_builder_paths
from pwcc.compile.sealing.compiled import CompiledPiece
from pwcc.compile.sealing.cpp import PutBlob
from pwcc.compile.sealing.launcher import launcher_text
from pwcc.compile.sealing.wrapper import KernelDefinition
from pwcc.compile.torch_private.triton_static import TunedKernel, tuned_kernel

_ELF = b"\x7fELF"


def seal_triton(
    piece: CompiledPiece, definition: KernelDefinition, paths: Sequence[str], put_blob: PutBlob
) -> tuple[TritonKernel, str]:
    """Store a kernel's cubin; return its record and the text of its launcher.

    Raises:
        UnsealableError: the static launcher cannot take the kernel, its grid cannot be written out, or
            its cubin holds a path of the building machine.
    """
    name = definition.name
    kernel = tuned_kernel(piece.module, name)
    launcher = launcher_text(name, kernel)
    check_cubin(name, kernel)
    refuse_builder_paths(
        kernel.cubin,
        paths,
        what=f"the cubin of kernel {name!r}",
        hint="compile with TRITON_DISABLE_LINE_INFO=1 in the environment",
    )
    record = TritonKernel(
        name=name,
        blob=put_blob(kernel.cubin),
        symbol=kernel.symbol,
        shared=kernel.shared,
        num_warps=kernel.num_warps,
        arg_types=kernel.arg_types,
        capability=kernel.capability,
        config=kernel.config,
        grid=kernel.grid,
        registers=kernel.registers,
        spills=kernel.spills,
    )
    return record, launcher


def check_cubin(name: str, kernel: TunedKernel) -> None:
    """Refuse bytes that are no ELF image with the kernel's symbol in it.

    Raises:
        UnsealableError: as said.
    """
    if not kernel.cubin.startswith(_ELF) or kernel.symbol.encode() + b"\0" not in kernel.cubin:
        raise UnsealableError(
            f"expected the cubin of kernel {name!r} to hold {kernel.symbol!r}, got other bytes"
        )
