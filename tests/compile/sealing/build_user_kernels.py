"""Trace, compile and seal a model's own Triton kernels for a pretended GPU: ``-m ... OUT``; prints JSON."""

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
from pwcc.compile.input_declarations import parse_declaration  # noqa: E402
from pwcc.compile.kernel_launches import kernel_codes  # noqa: E402
from pwcc.compile.piece_compiler import input_facts  # noqa: E402
from pwcc.compile.piece_graph import PieceGraph  # noqa: E402
from pwcc.compile.predicates import collect  # noqa: E402
from pwcc.compile.rebuild import Variant, rebuild  # noqa: E402
from pwcc.compile.request import make_request  # noqa: E402
from pwcc.compile.runtime.predicates import PredicateSet  # noqa: E402
from pwcc.compile.sealing.compiled import CompiledPiece  # noqa: E402
from pwcc.compile.sealing.profile import cuda_profile  # noqa: E402
from pwcc.compile.sealing.seal import seal  # noqa: E402
from pwcc.compile.torch_private import inductor  # noqa: E402
from pwcc.compile.tracing import trace_all  # noqa: E402
from tests.compile.sealing.pretend_cuda import Driver, replaced  # noqa: E402
from tests.compile.user_kernels import Counts, Launches, Looked  # noqa: E402

VARIANT = Variant(1, 16)
blobs: dict[BlobDigest, bytes] = {}


def put(data: bytes) -> BlobDigest:
    blobs[blob_digest(data)] = data
    return blob_digest(data)


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
    moved = PieceGraph.from_bytes(graph.to_bytes().replace(b'"cpu"', b'"cuda"'), where="moved")
    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        replaced(stack)
        for name in ("joint_graph", "post_grad"):  # patterns are traced on real tensors of the device
            stack.enter_context(mock.patch(f"torch._inductor.fx_passes.{name}.lazy_init"))
        rebuilt = rebuild(moved, VARIANT, device)
        result = inductor.compile_graph(
            rebuilt.graph_module, rebuilt.inputs, rebuilt.fake_mode, cuda_profile(autotune=False)
        )
        for kernel in vars(result.module).values():
            if hasattr(kernel, "launchers"):
                kernel.precompile()
                kernel.launchers = kernel.launchers[-1:]  # what autotuning leaves
        record, _ = seal(
            CompiledPiece(
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
            ),
            put,
        )
    return {
        "program": blobs[record.source].decode(),
        "mutated": list(record.mutated),
        "kernels": {kernel.symbol: [kernel.config, list(kernel.grid)] for kernel in record.kernels},  # type: ignore[union-attr]
        "cubins": {kernel.symbol: len(blobs[kernel.blob]) for kernel in record.kernels},  # type: ignore[union-attr]
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
found["leaks"] = [name for name, data in blobs.items() if str(OUT).encode() in data]
print(json.dumps(found))
