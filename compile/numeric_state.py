"""Key: the global numeric modes of a process, as one flat map, read alike at compile and at load.

Modes are recorded by what they do, not by the call that set them. torch has two APIs for float32
precision (``set_float32_matmul_precision`` and ``allow_tf32``; and the tree of ``fp32_precision``), and
reading the older one raises after the newer one was used (pytorch#159480). Both end in one precision per
backend and operation, which the kernels read; that is the factor. ``none`` means that nobody chose, which
computes in full float32, as ``ieee`` does.

Modes of every backend count on every device: the model's own code may read any of them. Left out, with
reasons: the thread count (compiled CPU code asks for it when it runs, see docs/guards.md),
``cudnn.benchmark`` (chooses an algorithm at run time, for eager code too), grad and inference mode
(compiled code always runs without gradients), random seeds (random numbers are refused), ``opt_einsum``
(its order of contraction is part of the traced graph).

Private names, run on torch 2.11.0 and 2.13.0; each is left out where it does not exist:
``torch._C._get_fp32_precision_getter``, ``._get_blas_preferred_backend``,
``._get_linalg_preferred_backend``, ``._get_sdp_priority_order``,
``torch.overrides._get_current_function_mode_stack``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from pwcc.compile.runtime.portable import Json, type_name

UNREADABLE = "unreadable"
FULL_PRECISION = "ieee"
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def _priority() -> Json:
    """Return the order of SDPA's backends, cuDNN's left out: torch moves it when it first meets a device."""
    cudnn = torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
    return [kind for kind in torch._C._get_sdp_priority_order() if kind != cudnn]


_FLAGS: dict[str, Callable[[], Json]] = {
    "default_dtype": lambda: str(torch.get_default_dtype()),
    "default_device": lambda: torch.get_default_device().type,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "deterministic_fill": lambda: bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)),
    "cuda.matmul.allow_fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "cuda.matmul.fp16_reduction": lambda: _json(
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda.matmul.bf16_reduction": lambda: _json(
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "mkldnn.enabled": lambda: bool(getattr(torch.backends.mkldnn, "enabled", True)),
    "mkldnn.deterministic": lambda: bool(getattr(torch.backends.mkldnn, "deterministic", False)),
    "sdpa.flash": torch.backends.cuda.flash_sdp_enabled,
    "sdpa.efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "sdpa.math": torch.backends.cuda.math_sdp_enabled,
    "sdpa.cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "sdpa.math_reduction": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "sdpa.priority": _priority,
    "mha_fastpath": torch.backends.mha.get_fastpath_enabled,
    "preferred_blas": lambda: _json(torch._C._get_blas_preferred_backend()),
    "preferred_linalg": lambda: _json(torch._C._get_linalg_preferred_backend()),
    "function_modes": lambda: [type_name(type(mode)) for mode in _function_modes()],
}
"""Modes by name; one that this torch lacks is left out."""

_LEGACY: dict[str, Callable[[], Json]] = {
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
}
"""What stands for float32 precision in a torch that has only the older API."""

_PRECISIONS = (
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""Backends and operations; what is set for all operations or backends shows in each of its own.

``mkldnn`` as a whole is read by a pass of Inductor's, beside its operations.
"""


def numeric_state() -> dict[str, Json]:
    """Return every global mode that changes the numbers compiled code gives, by name.

    CPU-only builds return the same names. Takes well under a millisecond and initialises no device.
    """
    state: dict[str, Json] = {}
    for name, get in _entries():
        try:
            state[name] = get()
        except AttributeError:  # a mode that this torch does not have
            continue
        except RuntimeError:
            state[name] = UNREADABLE
    return state


def _entries() -> Iterator[tuple[str, Callable[[], Json]]]:
    yield from _FLAGS.items()
    precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:
        yield from _LEGACY.items()
    else:
        for backend, operation in _PRECISIONS:
            yield (
                f"fp32_precision.{backend}.{operation}",
                functools.partial(_effective, precision, backend, operation),
            )
    for device in AUTOCAST_DEVICES:
        yield f"autocast.{device}", functools.partial(_autocast, device)


def _effective(precision: Callable[[str, str], str], backend: str, operation: str) -> Json:
    found = precision(backend, operation)
    return FULL_PRECISION if found == "none" else found


def _json(value: object) -> Json:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return [_json(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


def _autocast(device: str) -> Json:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else False


def _function_modes() -> list[object]:
    """Active ``__torch_function__`` modes, without the one that only sets the default device."""
    from torch import overrides
    from torch.utils._device import DeviceContext

    stack: list[object] = getattr(overrides, "_get_current_function_mode_stack", list)()
    return [mode for mode in stack if not isinstance(mode, DeviceContext)]
