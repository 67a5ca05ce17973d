"""Artifact: sealing, from a compiled piece to blobs and a record that a host without a compiler can load."""

from __future__ import annotations

import ast
from collections.abc import Collection

import torch
from safetensors.torch import save

from pwcc.cache.errors import UnsealableError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.requirements import Requirement, merge
from pwcc.cache.sealed import CompiledProgram, Kernel, SealedPiece
from pwcc.compile.runtime import program_code
from pwcc.compile.sealing.builder_paths import builder_paths, refuse_builder_paths
from pwcc.compile.sealing.compiled import CompiledPiece
from pwcc.compile.sealing.cpp import PutBlob, seal_cpp
from pwcc.compile.sealing.program import program_text
from pwcc.compile.sealing.returned import returned_inputs
from pwcc.compile.sealing.rewrite import Rewritten, rewrite
from pwcc.compile.sealing.triton import seal_triton
from pwcc.compile.sealing.wrapper import parse_wrapper
from pwcc.compile.torch_private.inductor_cpp import inductor_directories

MAX_CONSTANT_BYTES = 1 << 20  # tables of constants take kilobytes; what is larger is a weight


def seal(piece: CompiledPiece, put_blob: PutBlob) -> tuple[SealedPiece, BlobDigest]:
    """Seal one piece; return its record and the digest of the record's own blob.

    ``put_blob`` stores bytes and returns their digest. Sealing the same piece again stores the same
    bytes.

    Raises:
        UnsealableError: names the construct that cannot be sealed. Nothing that was stored by then is
            referred to.
    """
    rewritten = rewrite(
        parse_wrapper(piece.source),
        constants=piece.constants.keys(),
        device_type=piece.device_type,
        device_index=piece.device_index,
    )
    _check_inputs(piece, rewritten)
    paths = builder_paths([*inductor_directories(), *piece.builder_paths])
    kernels: list[Kernel] = []
    launchers: dict[str, str] = {}
    requirements: list[Requirement] = []
    for definition in rewritten.outside.kernels.values():
        if definition.factory == "triton":
            triton, launcher = seal_triton(piece, definition, paths, put_blob)
            kernels.append(triton)
            launchers[definition.name] = launcher
            requirements.append(Requirement("cuda_capability", triton.capability))
        else:
            cpp, needed = seal_cpp(piece, definition, paths, put_blob)
            kernels.append(cpp)
            requirements += needed
            if piece.cpu_flags:
                requirements.append(Requirement("cpu_flags", tuple(sorted(piece.cpu_flags))))
    constants = _seal_constants(piece, rewritten, put_blob)
    program = program_text(rewritten, launchers)
    refuse_builder_paths(program, paths, what="the piece's program", hint="report the wrapper that holds it")
    record = SealedPiece(
        source=put_blob(program),
        code=CompiledProgram(program_code.MAGIC, put_blob(program_code.encode(program))),
        device_type=piece.device_type,
        inputs=tuple(piece.inputs),
        outputs=rewritten.outputs,
        mutated=tuple(sorted(piece.mutated_inputs)),
        realigned=_realigned(piece, returned_inputs(rewritten.call, rewritten.arguments)),
        aligned=_assumed_aligned(piece),
        kernels=tuple(kernels),
        externs=tuple(sorted(rewritten.outside.externs)),
        fallbacks=tuple(sorted(_operator_name(path) for path in rewritten.outside.fallbacks)),
        ops=tuple(piece.ops),
        constants=constants,
        tuned=piece.tuned,
        passes=piece.passes,
        requirements=merge(requirements),
    )
    return record, put_blob(record.to_bytes())


def _check_inputs(piece: CompiledPiece, rewritten: Rewritten) -> None:
    """Refuse input facts that contradict what Inductor's own assertions state about the inputs."""
    names = rewritten.arguments
    if len(piece.inputs) != len(names):
        raise UnsealableError(
            f"expected {len(piece.inputs)} inputs in Inductor's wrapper, got {len(names)}",
            where=", ".join(names),
        )
    for name, size, stride in rewritten.stated:
        facts = piece.inputs[names.index(name)]
        for text, known in ((size, facts.shape), (stride, facts.stride)):
            stated = _constants_of(text)
            differ = len(stated) != len(known) or any(
                isinstance(b, int) and a is not None and a != b for a, b in zip(stated, known, strict=False)
            )
            if differ:
                raise UnsealableError(f"expected input {name!r} as {list(known)}, Inductor compiled {text}")


def _constants_of(text: str) -> list[int | None]:
    """The integers of a tuple's text, None for an expression."""
    tree = ast.parse(text, mode="eval").body
    elements = tree.elts if isinstance(tree, ast.Tuple) else []
    return [
        item.value if isinstance(item, ast.Constant) and isinstance(item.value, int) else None
        for item in elements
    ]


def _realigned(piece: CompiledPiece, returned: Collection[int]) -> tuple[int, ...]:
    """The inputs that the outer callable still checks: from 2.12 the code copies what it only reads.

    That leaves what it writes, and what it returns a view of, which must be a view of the caller's tensor.
    """
    checked = set(piece.inputs_to_check)
    if piece.defers_input_alignment:
        checked &= {*piece.mutated_inputs, *returned}
    return tuple(sorted(checked))


def _assumed_aligned(piece: CompiledPiece) -> tuple[int, ...]:
    if piece.device_type == "cpu":
        return ()  # vector code for CPUs loads unaligned
    static = set(piece.static_inputs) - set(piece.inputs_to_check)
    return tuple(sorted(index for index in static if piece.inputs[index].kind == "tensor"))


def _seal_constants(piece: CompiledPiece, rewritten: Rewritten, put_blob: PutBlob) -> BlobDigest | None:
    tensors: dict[str, torch.Tensor] = {}
    for name in rewritten.outside.constants:
        value = piece.constants[name]
        if not isinstance(value, torch.Tensor) or value.is_sparse or not value.is_contiguous():
            raise UnsealableError(
                f"expected constant {name!r} to be a contiguous tensor", where=repr(type(value))
            )
        tensors[name] = value.detach().cpu().clone()
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MAX_CONSTANT_BYTES:
        largest = max(tensors, key=lambda name: tensors[name].nbytes)
        dtype, shape = str(tensors[largest].dtype).removeprefix("torch."), list(tensors[largest].shape)
        raise UnsealableError(
            f"the piece's code holds {size:,} bytes of constants, more than {MAX_CONSTANT_BYTES:,}; "
            f"the largest, {largest!r}, is {dtype} {shape}",
            hint="register it on the model as a buffer: weights are bound at load, never stored",
        )
    return put_blob(save(tensors)) if tensors else None


def _operator_name(path: str) -> str:
    """``torch.ops.aten.sort.stable`` -> ``aten::sort.stable``."""
    namespace, *rest = path.split(".")[2:]
    return f"{namespace}::{'.'.join(rest)}"
