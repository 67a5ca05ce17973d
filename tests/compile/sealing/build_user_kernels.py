"""Trace, compile and seal a model's own Triton kernels for a pretended GPU: ``-m ... OUT``; prints JSON."""

from __future__ import annotations

import json
import os
import sys
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

from pwcc.compile.input_declarations import parse_declaration  # noqa: E402
from pwcc.compile.kernel_launches import kernel_codes  # noqa: E402
from pwcc.compile.piece_compiler import MemoryBlobs  # noqa: E402
from pwcc.compile.piece_graph import PieceGraph  # noqa: E402
from pwcc.compile.predicates import collect  # noqa: E402
from pwcc.compile.rebuild import Variant  # noqa: E402
from pwcc.compile.request import make_request  # noqa: E402
from pwcc.compile.runtime.predicates import PredicateSet  # noqa: E402
from pwcc.compile.tracing import trace_all  # noqa: E402
from tests.compile.sealing.pretend_cuda import Driver, seal_for_gpu  # noqa: E402
from tests.compile.user_kernels import Counts, Launches, Looked  # noqa: E402

VARIANT = Variant(1, 16)
blobs = MemoryBlobs()


def traced(model: torch.nn.Module) -> Any:
    request = make_request(
        model.eval(),
        specs=(parse_declaration("x:float32[n,8]"),),
        sizes=(),
        max_tokens=16,
        device="cpu",
        identity="test",
        args={},
        splitting_ops=(),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=True,
    )
    import triton

    active: Any = triton.runtime.driver
    active.set_active(Driver())
    with mock.patch("torch.utils._triton.has_triton", return_value=True):
        return trace_all(model, request)[0]


def sealed(graph: PieceGraph) -> dict[str, Any]:
    """Compile and seal a graph, traced on the CPU, for the pretended GPU."""
    record = seal_for_gpu(graph, VARIANT, blobs.put_blob)
    return {
        "program": blobs.read_blob(record.source).decode(),
        "mutated": list(record.mutated),
        "kernels": {kernel.symbol: [kernel.config, list(kernel.grid)] for kernel in record.kernels},  # type: ignore[union-attr]
        "cubins": {kernel.symbol: len(blobs.read_blob(kernel.blob)) for kernel in record.kernels},  # type: ignore[union-attr]
    }


def guards(model: torch.nn.Module, trace: Any) -> list[str]:
    found = collect(trace.guards, model=model, local_scope=trace.local_scope, global_scope=trace.global_scope)
    return PredicateSet.of(found.predicates).lines()


found: dict[str, Any] = {}
for model in (Launches(), Counts(), Looked()):
    item = traced(model)
    (step,) = item.program.pieces
    found[type(model).__name__] = {
        "graph": json.loads(step.graph.to_bytes()),
        "written": [weight.names[0] for weight in item.trace.calling.weights if weight.written],
        "arguments written": [p.name for p in item.trace.calling.parameters if p.written],
        "guards": guards(model, item.trace),
        "codes": sorted({code.co_name for code in kernel_codes(item.trace.graph_module.graph)}),
        # writing an input of a pretended device needs a torch that is linked with CUDA
        **({} if isinstance(model, Counts) else sealed(step.graph)),
    }
found["leaks"] = [name for name, data in blobs.blobs.items() if str(OUT).encode() in data]
print(json.dumps(found))
