"""Compile and seal a CUDA piece on a machine without a GPU: ``-m tests.compile.sealing.build_cuda_piece OUT``.

Inductor and Triton run for real and make sm_90 cubins; only what asks the driver is replaced, and no
kernel is loaded or launched. Prints the sealed program and the record as JSON. The replaced names are
torch's and Triton's internals, so this breaks with releases that move them; the GPU tests do not need it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
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

import torch  # noqa: E402
from torch._guards import TracingContext, tracing  # noqa: E402
from torch._inductor import compile_fx, config  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

from pwcc.compile.piece_compiler import MemoryBlobs  # noqa: E402
from pwcc.compile.sealing.compiled import CompiledPiece, InputFacts  # noqa: E402
from pwcc.compile.sealing.profile import cuda_profile  # noqa: E402
from pwcc.compile.sealing.seal import seal  # noqa: E402
from tests.compile.sealing.pretend_cuda import replaced  # noqa: E402


def piece(x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    normed = (x.float() * torch.rsqrt(variance + 1e-5)).to(x.dtype) * norm
    gate, up = torch.addmm(b, normed, w).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up, x.float().sum(-1)


blobs = MemoryBlobs()


mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
with mode:
    shapes = [(8, 64), (64,), (64, 256), (256,)]
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda:0") for shape in shapes]
    graph = make_fx(piece, select_decomp_table(), tracing_mode="fake")(*inputs)
context = TracingContext(mode)
with ExitStack() as stack:
    replaced(stack)
    with torch.no_grad(), tracing(context), config.patch(cuda_profile(autotune=False)):
        compiled: Any = compile_fx.compile_fx_inner(graph, inputs, static_input_idxs=[1, 2, 3])
    module = next(
        m for m in PyCodeCache.modules if m.__file__ and Path(m.__file__).read_text() == compiled.source_code
    )
    untuned = "none"
    facts = [InputFacts("tensor", "bfloat16", tuple(item.shape), item.stride()) for item in inputs]
    request = CompiledPiece(
        source=compiled.source_code,
        module=module,
        constants=compiled.constants or {},
        inputs_to_check=compiled.inputs_to_check,
        mutated_inputs=tuple(compiled.mutated_input_idxs),
        device_type="cuda",
        device_index=0,
        inputs=facts,
        static_inputs=(1, 2, 3),
        defers_input_alignment=getattr(compiled, "_defers_input_alignment", False),
    )
    try:
        seal(request, blobs.put_blob)
    except Exception as error:
        untuned = f"{type(error).__name__}: {error}"
    for autotuner in vars(module).values():
        if hasattr(autotuner, "launchers"):
            autotuner.launchers = autotuner.launchers[-1:]  # what autotuning leaves
    record, _ = seal(request, blobs.put_blob)
print(
    json.dumps(
        {
            "untuned": untuned,
            "program": blobs.read_blob(record.source).decode(),
            "record": record.to_json(),
            "cubins": {kernel.name: len(blobs.read_blob(kernel.blob)) for kernel in record.kernels},
            "leaks": [name for name, data in blobs.blobs.items() if str(OUT).encode() in data],
        }
    )
)
