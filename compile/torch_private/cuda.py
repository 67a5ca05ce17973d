"""The seam to the CUDA driver: what torch does not publish of it.

``cuDriverGetVersion`` is called in the driver library that torch has loaded already; torch 2.11 and 2.13
have no public call for it.
"""

from __future__ import annotations

import ctypes


def driver_version() -> str | None:
    """Return the CUDA version that the installed driver supports, such as ``13.0``; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"
