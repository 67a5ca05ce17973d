"""Sealed-piece records: canonical, round-tripping, and strict about what they read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import blob_digest
from pwcc.cache.requirements import Requirement
from pwcc.cache.sealed import CppKernel, InputFacts, SealedPiece, TritonKernel

TRITON = TritonKernel(
    name="triton_poi_fused_1",
    blob=blob_digest(b"cubin"),
    symbol="triton_poi_fused_1",
    shared=256,
    num_warps=4,
    arg_types="OOiOO",
    capability="9.0",
    config="XBLOCK=256 num_stages=1 num_warps=4",
    grid=("-(xnumel // -256)", "1", "1"),
    registers=32,
    spills=0,
)
CPP = CppKernel("cpp_fused_0", blob_digest(b"so"), ("const float*", "int64_t"))


def record(device_type: str = "cuda") -> SealedPiece:
    return SealedPiece(
        source=blob_digest(b"program"),
        code=None,
        device_type=device_type,
        inputs=(
            InputFacts("symint", value="u0"),
            InputFacts("tensor", "bfloat16", ("u0", 64), (64, 1)),
            InputFacts("int", value=3),
            InputFacts("tensor", "float32", ("2*u0 + 1",), (1,)),
        ),
        outputs=2,
        mutated=(3,),
        realigned=(1, 3),
        aligned=(),
        kernels=(TRITON,) if device_type == "cuda" else (CPP,),
        externs=("addmm", "mm"),
        fallbacks=("aten::sort.stable",),
        ops=("aten.mm.default",),
        constants=blob_digest(b"constants"),
        tuned=True,
        requirements=(Requirement("cuda_capability", "9.0"),),
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_round_trip_and_canonical_bytes(device_type: str) -> None:
    piece = record(device_type)
    data = piece.to_bytes()
    assert SealedPiece.from_bytes(data, where="piece.json") == piece
    assert (
        SealedPiece.from_bytes(data, where="piece.json").to_bytes() == data == strict.canonical(piece.to_json())
    )


def test_blobs_are_named_once() -> None:
    piece = record()
    assert piece.blobs == (piece.source, TRITON.blob, piece.constants)


def edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            data = data[part]  # type: ignore[index]
        data[last] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("schema", 2), "schema 1"),
        (edit("surprise", 1), "unknown fields"),
        (edit("source", "../../etc/passwd"), "64 hex digits"),
        (edit("device_type", "tpu"), "one of"),
        (edit("outputs", -1), "an integer in"),
        (edit("tuned", 1), "true or false"),
        (edit("mutated", [4]), "tensor input in 'mutated'"),
        (edit("realigned", [0]), "tensor input in 'realigned'"),
        (edit("aligned", [-1]), "tensor input in 'aligned'"),
        (edit("inputs.0.kind", "pickle"), "one of"),
        (edit("inputs.1.dtype", "float32; import os"), "identifier"),
        (edit("inputs.1.shape", [1.5, 64]), "an integer"),
        (edit("inputs.1.stride", [1]), "2 strides"),
        (edit("inputs.1.extra", 1), "unknown fields"),
        (edit("kernels.0.kind", "ptx"), "'cpp' or 'triton'"),
        (edit("kernels.0.name", "a-b"), "identifier"),
        (edit("kernels.0.symbol", "a b"), "identifier"),
        (edit("kernels.0.num_warps", 0), "an integer in"),
        (edit("kernels.0.shared", 2**40), "an integer in"),
        (edit("kernels.0.arg_types", "O;"), "argument type letters"),
        (edit("kernels.0.grid", ["1", "1"]), "three grid expressions"),
        (edit("kernels.0.config", "\x1b[31m"), "printable"),
        (edit("kernels", [TRITON.to_json(), TRITON.to_json()]), "duplicate"),
        (edit("device_type", "cpu"), "does not run on cpu"),
        (edit("externs", ["os.system"]), "identifier"),
        (edit("constants", "x"), "64 hex digits"),
    ],
)
def test_each_wrong_field_is_a_named_error(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data: dict[str, Any] = strict.loads(record().to_bytes(), where="x")  # type: ignore[assignment]
    change(data)
    with pytest.raises(CorruptEntry, match=message):
        SealedPiece.from_bytes(strict.canonical(data), where="piece.json")


def test_every_field_is_required() -> None:
    data: dict[str, Any] = strict.loads(record().to_bytes(), where="x")  # type: ignore[assignment]
    for name in data:
        with pytest.raises(CorruptEntry, match=f"a field '{name}'"):
            SealedPiece.parse({key: value for key, value in data.items() if key != name}, "piece.json")


def test_reading_a_record_imports_no_torch() -> None:
    code = (
        "import sys; from pwcc.cache.sealed import SealedPiece; "
        f"SealedPiece.from_bytes({record().to_bytes()!r}, where='x'); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
