"""Compile and seal a CUDA piece on a machine without a GPU: ``build_cuda_piece.py OUT``.

Inductor and Triton run for real and make sm_90 cubins; only what asks the driver is replaced, and no
kernel is loaded or launched. Prints the sealed program and the record as JSON. The replaced names are
torch's and Triton's internals, so this breaks with releases that move them; the GPU tests do not need it.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
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
import torch._dynamo.device_interface  # noqa: E402
import triton  # noqa: E402
from torch._guards import TracingContext, tracing  # noqa: E402
from torch._inductor import compile_fx, config  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.runtime.hints import DeviceProperties  # noqa: E402
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from pwcc.cache.ids import BlobDigest, blob_digest  # noqa: E402
from pwcc.compile.sealing.compiled import CompiledPiece, InputFacts  # noqa: E402
from pwcc.compile.sealing.profile import cuda_profile  # noqa: E402
from pwcc.compile.sealing.seal import seal  # noqa: E402

FACTS: dict[str, Any] = {
    "type": "cuda",
    "index": 0,
    "multi_processor_count": 132,
    "cc": 90,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="",
    minor=0,
    total_memory=141 << 30,
    shared_memory_per_block_optin=232448,
    **FACTS,
)
DEVICE = DeviceProperties(**{key: value for key, value in FACTS.items() if key in DeviceProperties._fields})


class Driver:
    """Triton's driver, as far as compiling asks it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class NoGuard:
    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def pretend_to_load(kernel: Any, _device: int) -> None:
    kernel.function, kernel.module, kernel.n_regs, kernel.n_spills = 7, None, 32, 0
    kernel.cubin_path = kernel.cubin_raw = None  # as the real one does


def answer(value: object) -> Callable[..., object]:
    return lambda *_: value


def replaced(stack: ExitStack) -> None:
    activate = answer(None)
    active: Any = triton.runtime.driver
    active.set_active(Driver())
    answers: dict[str, object] = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch.cuda.set_device": None,
        "torch.cuda.synchronize": None,
        "torch.cuda._lazy_init": None,
        "torch.cuda.get_device_properties": PROPERTIES,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.get_device_name": "NVIDIA H200",
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch.utils._triton.has_triton": True,
        "torch._inductor.utils.is_big_gpu": True,
    }
    for name, value in answers.items():
        stack.enter_context(mock.patch(name, answer(value)))
    stack.enter_context(mock.patch.object(DeviceProperties, "create", staticmethod(answer(DEVICE))))
    stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", activate))
    stack.enter_context(mock.patch.object(torch._dynamo.device_interface, "DeviceGuard", NoGuard))
    stack.enter_context(mock.patch.object(StaticallyLaunchedCudaKernel, "load_kernel", pretend_to_load))
    stack.enter_context(mock.patch.object(StaticallyLaunchedCudaKernel, "close", answer(None), create=True))
    raw_stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", answer(0), create=True)
    stack.enter_context(raw_stream)


def piece(x: torch.Tensor, norm: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    normed = (x.float() * torch.rsqrt(variance + 1e-5)).to(x.dtype) * norm
    gate, up = torch.addmm(b, normed, w).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up, x.float().sum(-1)


blobs: dict[BlobDigest, bytes] = {}


def put(data: bytes) -> BlobDigest:
    blobs[blob_digest(data)] = data
    return blob_digest(data)


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
        seal(request, put)
    except Exception as error:
        untuned = f"{type(error).__name__}: {error}"
    for autotuner in vars(module).values():
        if hasattr(autotuner, "launchers"):
            autotuner.launchers = autotuner.launchers[-1:]  # what autotuning leaves
    record, _ = seal(request, put)
print(
    json.dumps(
        {
            "untuned": untuned,
            "program": blobs[record.source].decode(),
            "record": record.to_json(),
            "cubins": {kernel.name: len(blobs[kernel.blob]) for kernel in record.kernels},
            "leaks": [name for name, data in blobs.items() if str(OUT).encode() in data],
        }
    )
)
