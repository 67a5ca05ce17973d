"""Artifact: the private torch functions that a sealed program calls, importable without a compiler.

Every name below exists in 2.11.0 and 2.13.0 unless it says otherwise; a missing one fails the import of
the piece that needs it, by name. Importing this module adds nothing but torch to ``sys.modules``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

import torch

# torch/csrc/dynamo/guards.cpp: allocation and view helpers without dispatcher overhead
_GUARDS: Final = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
_NAMES: Final = {
    "assert_size_stride": "assert_size_stride",
    "assert_size_stride_grouped": "assert_size_stride_grouped",  # from 2.14: several inputs in one call
    "assert_alignment": "assert_alignment",
    "copy_if_misaligned": "copy_if_misaligned",  # from 2.12
    "empty_strided_cpu": "_empty_strided_cpu",
    "empty_strided_cpu_pinned": "_empty_strided_cpu_pinned",
    "empty_strided_cuda": "_empty_strided_cuda",
    "reinterpret_tensor": "_reinterpret_tensor",
}


def _no_cuda(*_: object) -> NoReturn:
    raise RuntimeError("this torch has no CUDA")


get_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)

# torch/csrc/inductor/static_launcher/cuda.cpp: (function, grid x 3, num_warps, shared, types, args, stream)
_LAUNCHER: Final = getattr(torch._C, "_StaticCudaLauncher", None)
launch_kernel: Callable[..., None] = getattr(_LAUNCHER, "_launch_kernel", _no_cuda)


def load_cubin(path: str, symbol: str, shared: int, device_index: int) -> tuple[int, object]:
    """Load a cubin file and return its function handle and whatever must stay alive with it.

    2.11 returns (function, registers, spills) and never unloads; 2.13 puts the module first.

    Raises:
        RuntimeError: this torch has no CUDA, or the driver refuses the cubin.
    """
    if _LAUNCHER is None:
        _no_cuda()
    handle: tuple[int, ...] = _LAUNCHER._load_kernel(path, symbol, shared, device_index)
    return (handle[0], None) if len(handle) == 3 else (handle[1], handle[0])


def tensor_data_ptr_address() -> int:
    """Return the address of the C function by which Inductor's C++ kernels read a tensor's pointer."""
    return int(_GUARDS._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]


def __getattr__(name: str) -> Callable[..., Any]:
    """Resolve a helper of torch's guards module by the name that sealed programs use."""
    private = _NAMES.get(name)
    if private is None or not hasattr(_GUARDS, private):
        raise AttributeError(f"this torch ({torch.__version__}) has no {name!r}")
    found: Callable[..., Any] = getattr(_GUARDS, private)
    globals()[name] = found
    return found
