"""Constants of a piece: stored small and once, and not at all where they are weights."""

from __future__ import annotations

import types

import pytest
import torch
from safetensors.torch import load

from pwcc.cache.errors import UnsealableError
from pwcc.cache.ids import BlobDigest, blob_digest
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.sealing.compiled import CompiledPiece
from pwcc.compile.sealing.seal import MAX_CONSTANT_BYTES, seal

WRAPPER = """
from torch._C._dynamo.guards import _empty_strided_cpu
def call(args):
    args.clear()
    buf0 = torch.ops.aten.add.Tensor(_tensor_constant0, _tensor_constant1)
    return (buf0, )
"""


def sealed(first: torch.Tensor, second: torch.Tensor) -> tuple[SealedPiece, dict[BlobDigest, bytes]]:
    blobs: dict[BlobDigest, bytes] = {}

    def put(data: bytes) -> BlobDigest:
        blobs[blob_digest(data)] = data
        return blob_digest(data)

    piece = CompiledPiece(
        source="import torch\n" + WRAPPER,
        module=types.ModuleType("wrapper"),
        constants={"_tensor_constant0": first, "_tensor_constant1": second},
        inputs_to_check=(),
        mutated_inputs=(),
        device_type="cpu",
        device_index=None,
        inputs=(),
    )
    record, _ = seal(piece, put)
    return record, blobs


def test_a_slice_of_a_big_storage_is_stored_alone_and_equal_pieces_share_it() -> None:
    big = torch.arange(1_000_000.0).view(-1, 8)
    record, blobs = sealed(big[0:1], big[1:2])
    again, _ = sealed(big[0:1].clone(), big[1:2].clone())
    assert record.constants is not None
    assert record.constants == again.constants
    assert len(blobs[record.constants]) < 1000
    assert load(blobs[record.constants])["_tensor_constant1"].tolist() == big[1:2].tolist()


def test_a_constant_of_a_weights_size_is_refused_by_name() -> None:
    with pytest.raises(
        UnsealableError, match=r"the largest, '_tensor_constant1', is float32 \[300000\]"
    ) as raised:
        sealed(torch.zeros(8), torch.zeros(300_000))
    assert f"{MAX_CONSTANT_BYTES:,}" in raised.value.message
    assert "buffer" in str(raised.value.hint)
