import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pwcc.cache.ids import BlobDigest, blob_digest
from pwcc.cache.operators import DecodeAttention
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.runtime import program_code
from pwcc.compile.runtime.piece import compile_program, run_program
from pwcc.compile.sealing.decode import DecodeForm, decode_forms, rows_and_width, seal_decode

pytest.importorskip("triton")
FORM = DecodeForm("bfloat16", 8, 2, 64, window=True, softcap=True, sinks="float32")


class Blobs(dict[BlobDigest, bytes]):
    def put(self, data: bytes) -> BlobDigest:
        digest = blob_digest(data)
        self[digest] = data
        return digest


Sealed = tuple[DecodeAttention, Blobs]


@pytest.fixture(scope="module")
def sealed() -> Sealed:
    blobs = Blobs()
    return seal_decode(FORM, "9.0", blobs.put), blobs


@pytest.mark.slow
def test_needs_no_gpu_and_names_every_blob_it_stores(sealed: Sealed) -> None:
    found, blobs = sealed
    record = SealedPiece.from_bytes(blobs[found.piece], where="test")
    assert set(record.blobs) | {found.piece} == set(blobs)
    assert [kernel.name for kernel in record.kernels] == ["decode", "decode_part", "decode_join"]
    assert all(blobs[kernel.blob].startswith(b"\x7fELF") for kernel in record.kernels)
    assert (found.dtype, found.heads, found.kv_heads, found.head_dim) == ("bfloat16", 8, 2, 64)
    assert found.window
    assert found.softcap
    assert found.sinks == "float32"


@pytest.mark.slow
def test_the_program_launches_one_kernel_for_whole_keys_and_two_for_split_ones(
    sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pwcc.compile.torch_private import primitives

    found, blobs = sealed
    record = SealedPiece.from_bytes(blobs[found.piece], where="test")
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(primitives, "launch_kernel", lambda *args: launched.append(args))
    monkeypatch.setattr(primitives, "get_raw_stream", lambda index: 7)
    monkeypatch.setattr(primitives, "empty_strided_cuda", lambda size, *_: torch.empty(size), raising=False)
    text = blobs[record.source]
    assert record.code is not None
    assert program_code.encode(text) == blobs[record.code.blob]
    call = run_program(compile_program(text, where="test"), where="test")(
        {"decode": 1, "decode_part": 2, "decode_join": 3}, {}, 0
    )
    q, k = torch.zeros(3, 8, 64), torch.zeros(3, 2, 64)
    table = torch.zeros(3, 5, dtype=torch.int32)
    for splits in (1, 4):
        assert call([q, k, k, k, k, k, table, k, q, q, 0.5, 2.0, 9, 4, splits, 64]) == ()
    whole, part, join = launched
    assert whole[:4] == (1, 2, 1, 3)  # function, then key heads, splits and sequences
    assert part[:4] == (2, 2, 4, 3)
    assert join[:4] == (3, 8, 3, 1)
    for function, arguments, kernel in zip(launched, (a[-2] for a in launched), record.kernels, strict=True):
        assert len(arguments) == len(kernel.arg_types) == len(function[6])
        assert function[-1] == 7
    rows, width = rows_and_width(FORM)
    assert join[-2][0].numel() == 3 * 2 * 4 * rows * (width + 2)


@pytest.mark.slow
def test_two_processes_seal_the_same_bytes_and_no_path(sealed: Sealed, tmp_path: Path) -> None:
    found, blobs = sealed
    script = (
        "from tests.compile.sealing.test_decode import FORM, Blobs; "
        "from pwcc.compile.sealing.decode import seal_decode; "
        "print(seal_decode(FORM, '9.0', Blobs().put).piece)"
    )
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "PYTHONHASHSEED": "7",
    }
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert ran.stdout.strip() == found.piece
    for data in blobs.values():
        assert not re.search(rb"/(home|work|tmp|usr|root)/", data)


@pytest.mark.parametrize(
    ("change", "sealable"),
    [
        ({}, True),
        ({"dtype": "float64"}, False),
        ({"head_dim": 20}, False),
        ({"head_dim": 512}, False),
        ({"heads": 7}, False),
        ({"sinks": "float64"}, False),
    ],
)
def test_a_form_that_the_kernels_do_not_take_is_left_to_the_default(
    change: dict[str, Any], sealable: bool
) -> None:
    from dataclasses import replace

    assert replace(FORM, **change).sealable is sealable


def test_forms_are_read_from_the_attention_calls_of_a_graph() -> None:
    import torch
    from torch import fx

    import pwcc.compile.ops.attention  # noqa: F401

    def tensor(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return node

    graph = fx.Graph()
    q, k, out = tensor(graph, "q", 4, 8, 64), tensor(graph, "k", 4, 2, 64), tensor(graph, "out", 4, 8, 64)
    op = torch.ops.pwcc.attention.default
    graph.call_function(torch.ops.pwcc.attention, (q, k, k, out, 0, 0.5))  # as Dynamo writes it
    graph.call_function(op, (q, k, k, out, 1, 0.5))
    graph.call_function(op, (q, k, k, out, 2, 0.5), {"window": 16})
    graph.output(())
    found = decode_forms([fx.GraphModule(torch.nn.Module(), graph)])
    assert {(form.window, form.softcap, form.sinks) for form in found} == {
        (False, False, None),
        (True, False, None),
    }
    assert {(form.dtype, form.heads, form.kv_heads, form.head_dim) for form in found} == {
        ("bfloat16", 8, 2, 64)
    }
