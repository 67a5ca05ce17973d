"""A function that kernels of another module call."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton


@triton.jit
def doubled(x):
    return x * 2
