"""Key: the global numeric modes of a process, as one flat map, read alike at compile and at load.

Reading must neither initialise an accelerator nor fail when torch's two APIs for float32 precision were
mixed (pytorch#159480: the legacy flag raises after the new one was set), so each entry is read alone
and a refusal is recorded as such: it differs from every value.

Left out, with reasons: the thread count (a requirement of CPU pieces, not a mode), ``cudnn.benchmark``
(chooses an algorithm at run time, for eager code too), grad and inference mode (compiled code always
runs without gradients), random seeds (random numbers are refused).

Private names, run on torch 2.11.0 and 2.13.0; each is left out where it does not exist:
``torch._C._get_fp32_precision_getter``, ``._get_blas_preferred_backend``,
``._get_linalg_preferred_backend``, ``torch.overrides._get_current_function_mode_stack``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from pwcc.compile.runtime.portable import Json, type_name

MIXED = "unreadable: legacy and new precision settings are mixed"
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")

_FLAGS: dict[str, Callable[[], Json]] = {
    "default_dtype": lambda: str(torch.get_default_dtype()),
    "default_device": lambda: torch.get_default_device().type,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "deterministic_fill": lambda: bool(getattr(torch.utils.deterministic, "fill_uninitialized_memory", True)),
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cuda.matmul.allow_fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "cuda.matmul.fp16_reduction": lambda: _json(
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "cuda.matmul.bf16_reduction": lambda: _json(
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "mkldnn.enabled": lambda: bool(getattr(torch.backends.mkldnn, "enabled", True)),
    "mkldnn.deterministic": lambda: bool(getattr(torch.backends.mkldnn, "deterministic", False)),
    "sdpa.flash": torch.backends.cuda.flash_sdp_enabled,
    "sdpa.efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "sdpa.math": torch.backends.cuda.math_sdp_enabled,
    "sdpa.cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "sdpa.math_reduction": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    "preferred_blas": lambda: _json(torch._C._get_blas_preferred_backend()),
    "preferred_linalg": lambda: _json(torch._C._get_linalg_preferred_backend()),
    "function_modes": lambda: [type_name(type(mode)) for mode in _function_modes()],
}
"""Entries that exist in every supported torch; one that this torch lacks is left out."""

_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""What ``torch.backends.<backend>.<operation>.fp32_precision`` reads."""


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
            state[name] = MIXED
    return state


def _entries() -> Iterator[tuple[str, Callable[[], Json]]]:
    yield from _FLAGS.items()
    precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        for backend, operation in _PRECISIONS:
            yield f"fp32_precision.{backend}.{operation}", functools.partial(precision, backend, operation)
    for device in AUTOCAST_DEVICES:
        yield f"autocast.{device}", functools.partial(_autocast, device)


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
