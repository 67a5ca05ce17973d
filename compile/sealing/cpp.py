"""Artifact: a C++ kernel of a compiled piece, sealed: the built shared object and what it requires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pwcc.cache.errors import CorruptEntry, UnsealableError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.requirements import Requirement, library_requirements
from pwcc.cache.sealed import CppKernel
from pwcc.compile.sealing.builder_paths import refuse_builder_paths
from pwcc.compile.sealing.compiled import CompiledPiece
from pwcc.compile.sealing.wrapper import KernelDefinition
from pwcc.compile.torch_private.inductor_cpp import shared_object

PutBlob = Callable[[bytes], BlobDigest]

_ENTRY: Final = b"PyInit_kernel"
_OPENMP: Final = (b"libgomp.so.1", b"libomp.so", b"libomp.so.5", b"libiomp5.so")


def seal_cpp(
    piece: CompiledPiece, definition: KernelDefinition, paths: Sequence[str], put_blob: PutBlob
) -> tuple[CppKernel, tuple[Requirement, ...]]:
    """Store a kernel's shared object and return its record and requirements.

    Raises:
        UnsealableError: the kernel's file cannot be found or read, is no such module, or holds a path
            of the building machine.
    """
    name = definition.name
    file = shared_object(piece.module, name)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UnsealableError(f"cannot read the shared object of kernel {name!r}: {error}") from error
    if _ENTRY not in data:
        raise UnsealableError(f"expected kernel {name!r} to export PyInit_kernel, got a shared object without")
    refuse_builder_paths(
        data,
        paths,
        what=f"kernel {name!r}",
        hint="compile under pwcc.compile.sealing.profile.cpu_profile with its compiler driver",
    )
    try:
        needed = library_requirements(data, where=name)
    except CorruptEntry as error:
        raise UnsealableError(f"kernel {name!r}: {error}") from error
    # the names stand NUL-terminated in the string table of the dynamic section
    openmp = tuple(library.decode() for library in _OPENMP if b"\0" + library + b"\0" in data)
    extra = (Requirement("openmp", openmp),) if openmp else ()
    return CppKernel(name, put_blob(data), definition.arg_types), (*needed, *extra)
