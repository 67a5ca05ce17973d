"""Loading sealed pieces: programs and records that others wrote, and what a bare process imports."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import BlobDigest, blob_digest
from pwcc.cache.sealed import CppKernel, InputFacts, SealedPiece
from pwcc.compile.runtime.kernels import KernelTable
from pwcc.compile.runtime.piece import PieceLoader

PROGRAM = b"""
import torch
from pwcc.compile.runtime.externs import EXTERNS
from pwcc.compile.torch_private.primitives import empty_strided_cpu

def bind(kernels, constants, _device_index):
    _extern_mm = EXTERNS['mm']
    shift = constants['shift']
    def call(args):
        a, b = args
        args.clear()
        buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        _extern_mm(a, b, out=buf0)
        return (buf0 + shift, _device_index)
    return call
"""


class Blobs(dict[BlobDigest, bytes]):
    reads = 0

    def put(self, data: bytes) -> BlobDigest:
        digest = blob_digest(data)
        self[digest] = data
        return digest

    def read(self, digest: BlobDigest) -> bytes:
        self.reads += 1
        return self[digest]


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
def record(blobs: Blobs) -> SealedPiece:
    matrix = InputFacts("tensor", "float32", (2, 2), (2, 1))
    return SealedPiece(
        source=blobs.put(PROGRAM),
        code=None,
        device_type="cpu",
        inputs=(matrix, matrix),
        outputs=2,
        mutated=(),
        realigned=(),
        aligned=(),
        kernels=(),
        externs=("mm",),
        fallbacks=(),
        ops=(),
        constants=blobs.put(save({"shift": torch.ones(2)})),
        tuned=False,
        requirements=(),
    )


def test_loads_and_runs(blobs: Blobs, record: SealedPiece) -> None:
    piece = PieceLoader(blobs.read, torch.device("cpu")).load(record)
    args: list[object] = [torch.eye(2), torch.full((2, 2), 3.0)]
    result, index = piece.call(args)
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, torch.full((2, 2), 4.0))
    assert index == 0
    assert args == []


def test_equal_programs_are_compiled_once(blobs: Blobs, record: SealedPiece) -> None:
    loader = PieceLoader(blobs.read, torch.device("cpu"))
    first, second = loader.load(record), loader.load(record)
    assert first.call.__code__ is second.call.__code__
    assert blobs.reads == 3  # the program once, its constants twice


def test_a_piece_without_realignment_is_called_without_a_layer(blobs: Blobs, record: SealedPiece) -> None:
    loader = PieceLoader(blobs.read, torch.device("cpu"))
    assert loader.load(record).call.__qualname__ == "bind.<locals>.call"
    assert loader.load(dataclasses.replace(record, realigned=(0,))).call.__qualname__.startswith("realigning")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"def bind(:", "expected a program for this torch"),
        (b"\xff\xfe", "expected a program for this torch"),
        (b"from pwcc.compile.torch_private.primitives import teleport", "teleport"),
        (b"x = 1", "defines bind"),
    ],
)
def test_a_program_that_is_none_is_a_corrupt_entry(
    blobs: Blobs, record: SealedPiece, program: bytes, message: str
) -> None:
    changed = dataclasses.replace(record, source=blobs.put(program))
    with pytest.raises(CorruptEntry, match=message):
        PieceLoader(blobs.read, torch.device("cpu")).load(changed)


def test_another_device_type_is_refused(blobs: Blobs, record: SealedPiece) -> None:
    with pytest.raises(CorruptEntry, match="for cpu"):
        PieceLoader(blobs.read, torch.device("cuda", 0)).load(record)


def test_a_kernel_that_is_none_is_refused_and_not_remembered(blobs: Blobs, record: SealedPiece) -> None:
    kernel = CppKernel("cpp_fused_0", blobs.put(b"\x7fELF but not more"), ("float*",))
    table = KernelTable()
    loader = PieceLoader(blobs.read, torch.device("cpu"), kernels=table)
    for _ in range(2):
        with pytest.raises(CorruptEntry, match="a kernel that loads"):
            loader.load(dataclasses.replace(record, kernels=(kernel,)))
    assert table.loaded == 0


def test_the_runtime_imports_no_compiler() -> None:
    code = (
        "import sys\n"
        "import pwcc.compile.runtime.piece, pwcc.compile.runtime.check, safetensors.torch\n"
        "heavy = [n for n in sys.modules if n.split('.')[0] in ('triton', 'sympy')"
        " or n.startswith(('torch._dynamo', 'torch._inductor'))]\n"
        "print(heavy)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_missing_blob_passes_through(record: SealedPiece) -> None:
    def gone(digest: BlobDigest) -> bytes:
        raise FileNotFoundError(digest)

    read: Callable[[BlobDigest], bytes] = gone
    with pytest.raises(FileNotFoundError):
        PieceLoader(read, torch.device("cpu")).load(record)
