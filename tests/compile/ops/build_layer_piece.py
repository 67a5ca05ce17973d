"""Compile and seal a piece with layer operators for a pretended GPU: ``-m ... OUT``; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

OUT = Path(sys.argv[1])
OUT.mkdir(parents=True)
os.environ |= {
    "TORCHINDUCTOR_CACHE_DIR": str(OUT / "inductor"),
    "TRITON_CACHE_DIR": str(OUT / "triton"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TRITON_DISABLE_LINE_INFO": "1",
}

from pwcc.compile.ops.custom_ops import MODULES, write_out  # noqa: E402
from pwcc.compile.piece_compiler import MemoryBlobs  # noqa: E402
from pwcc.compile.piece_graph import PieceGraph  # noqa: E402
from pwcc.compile.rebuild import Variant  # noqa: E402
from tests.compile.ops.test_custom_ops import Block, piece_of  # noqa: E402
from tests.compile.sealing.pretend_cuda import Driver, seal_for_gpu  # noqa: E402

VARIANT = Variant(1, 64)
blobs = MemoryBlobs()


def sealed(graph: PieceGraph, keep: tuple[str, ...]) -> dict[str, Any]:
    """Return the record's kernels and calls, and the program."""
    record = seal_for_gpu(
        graph, VARIANT, blobs.put_blob, lambda module: write_out(module, keep=keep, device_type="cuda")
    )
    return {
        "kernels": [kernel.name for kernel in record.kernels],
        "fallbacks": list(record.fallbacks),
        "mutated": list(record.mutated),
        "source": blobs.read_blob(record.source).decode(),
    }


def main() -> None:
    graph = piece_of(Block().eval())
    import triton

    active: Any = triton.runtime.driver
    active.set_active(Driver())
    found = {"off": sealed(graph, ()), "on": sealed(graph, tuple(MODULES))}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


main()
