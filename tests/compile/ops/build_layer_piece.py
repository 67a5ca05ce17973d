"""Compile and seal a piece with layer operators for a pretended GPU: ``-m ... OUT``; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

OUT = Path(sys.argv[1])
OUT.mkdir(parents=True)
os.environ |= {
    "TORCHINDUCTOR_CACHE_DIR": str(OUT / "inductor"),
    "TRITON_CACHE_DIR": str(OUT / "triton"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TRITON_DISABLE_LINE_INFO": "1",
}

import torch  # noqa: E402

from pwcc.cache.ids import BlobDigest, blob_digest  # noqa: E402
from pwcc.compile.ops.custom_ops import MODULES, write_out  # noqa: E402
from pwcc.compile.piece_compiler import input_facts  # noqa: E402
from pwcc.compile.piece_graph import PieceGraph  # noqa: E402
from pwcc.compile.rebuild import Variant, rebuild  # noqa: E402
from pwcc.compile.sealing.compiled import CompiledPiece  # noqa: E402
from pwcc.compile.sealing.profile import cuda_profile  # noqa: E402
from pwcc.compile.sealing.seal import seal  # noqa: E402
from pwcc.compile.torch_private import inductor  # noqa: E402
from tests.compile.ops.test_custom_ops import Block, piece_of  # noqa: E402
from tests.compile.sealing.pretend_cuda import Driver, replaced  # noqa: E402

VARIANT = Variant(1, 64)
blobs: dict[BlobDigest, bytes] = {}


def put(data: bytes) -> BlobDigest:
    blobs[blob_digest(data)] = data
    return blob_digest(data)


def sealed(graph: PieceGraph, keep: tuple[str, ...]) -> dict[str, Any]:
    """Return the record's kernels and calls, and the program."""
    moved = PieceGraph.from_bytes(graph.to_bytes().replace(b'"cpu"', b'"cuda"'), where="moved")
    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        replaced(stack)
        for name in ("joint_graph", "post_grad"):  # patterns are traced on real tensors of the device
            stack.enter_context(mock.patch(f"torch._inductor.fx_passes.{name}.lazy_init"))
        rebuilt = rebuild(moved, VARIANT, device)
        write_out(rebuilt.graph_module, keep=keep, device_type="cuda")
        options = cuda_profile(autotune=False)
        result = inductor.compile_graph(rebuilt.graph_module, rebuilt.inputs, rebuilt.fake_mode, options)
        for kernel in vars(result.module).values():
            if hasattr(kernel, "launchers"):
                kernel.precompile()
                kernel.launchers = kernel.launchers[-1:]  # what autotuning leaves
        piece = CompiledPiece(
            source=result.source,
            module=result.module,
            constants=result.constants,
            inputs_to_check=result.inputs_to_check,
            mutated_inputs=result.mutated_inputs,
            device_type="cuda",
            device_index=0,
            inputs=input_facts(moved, VARIANT),
            defers_input_alignment=result.defers_input_alignment,
            ops=moved.ops,
        )
        record, _ = seal(piece, put)
    return {
        "kernels": [kernel.name for kernel in record.kernels],
        "fallbacks": list(record.fallbacks),
        "mutated": list(record.mutated),
        "source": blobs[record.source].decode(),
    }


def main() -> None:
    graph = piece_of(Block().eval())
    import triton

    active: Any = triton.runtime.driver
    active.set_active(Driver())
    found = {"off": sealed(graph, ()), "on": sealed(graph, tuple(MODULES))}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


main()
