"""A machine with an H200, as far as Inductor and Triton ask: kernels compile, none is loaded or launched.

The replaced names are torch's and Triton's internals, so this breaks with releases that move them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface
import triton
from torch import fx
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from triton.backends.compiler import GPUTarget

from pwcc.cache.ids import BlobDigest
from pwcc.cache.sealed import SealedPiece
from pwcc.compile.piece_compiler import input_facts
from pwcc.compile.piece_graph import PieceGraph
from pwcc.compile.rebuild import Variant, rebuild
from pwcc.compile.sealing.compiled import CompiledPiece
from pwcc.compile.sealing.profile import cuda_profile
from pwcc.compile.sealing.seal import seal
from pwcc.compile.torch_private import inductor

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
    stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", answer(None)))
    raw_stream = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", answer(0), create=True)
    stack.enter_context(raw_stream)


def seal_for_gpu(
    graph: PieceGraph,
    variant: Variant,
    put_blob: Callable[[bytes], BlobDigest],
    edit: Callable[[fx.GraphModule], object] = lambda _: None,
) -> SealedPiece:
    """Compile and seal a graph, traced on the CPU, for the pretended GPU; ``edit`` is what passes would do."""
    moved = PieceGraph.from_bytes(graph.to_bytes().replace(b'"cpu"', b'"cuda"'), where="moved")
    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        replaced(stack)
        for name in ("joint_graph", "post_grad"):  # patterns are traced on real tensors of the device
            stack.enter_context(mock.patch(f"torch._inductor.fx_passes.{name}.lazy_init"))
        rebuilt = rebuild(moved, variant, device)
        edit(rebuilt.graph_module)
        result = inductor.compile_graph(
            rebuilt.graph_module, rebuilt.inputs, rebuilt.fake_mode, cuda_profile(autotune=False)
        )
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
            inputs=input_facts(moved, variant),
            defers_input_alignment=result.defers_input_alignment,
            ops=moved.ops,
        )
        return seal(piece, put_blob)[0]
