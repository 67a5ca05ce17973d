"""The seam to CUDA facts that torch does not publish. Run on torch 2.11.0+cu130."""

from __future__ import annotations

from collections.abc import Callable

import torch


def driver_version() -> str | None:
    """Return the CUDA version that the installed driver supports, such as ``13.0``; None without CUDA."""
    read: Callable[[], int] | None = getattr(torch._C, "_cuda_getDriverVersion", None)
    if read is None:
        return None
    try:
        raw = read()
    except RuntimeError:
        return None
    return f"{raw // 1000}.{raw % 1000 // 10}" if raw else None
