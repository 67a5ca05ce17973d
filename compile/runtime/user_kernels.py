"""Artifact: a Triton kernel of the model's own code, launched by name from a piece's graph.

Only compiling and re-checking a piece run this: a sealed piece holds the kernel's machine code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx.node import has_side_effect

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.torch_private import user_kernels


@has_side_effect  # its tensors are written: a graph may not lose it because nothing uses its result
def launch(
    *,
    kernel: str,
    digest: str,
    constants: Mapping[str, object],
    grid: Sequence[object],
    arguments: Mapping[str, object],
    written: Sequence[str],
) -> None:
    """Launch ``kernel``, ``module:name``, whose source must be the one that was traced.

    Args:
        kernel: where the kernel is found.
        digest: of its source, see :func:`pwcc.compile.torch_private.user_kernels.source_digest`.
        constants: its constexpr arguments.
        grid: three sizes per configuration that it tries, or once for all.
        arguments: tensors and scalars by parameter name.
        written: which of them it writes; only what reads graphs looks at it.

    Raises:
        CorruptEntry: it is not in this process, or its source is another one.
    """
    found = find(kernel)
    if user_kernels.source_digest(found) != digest:
        raise CorruptEntry(
            f"the Triton kernel {kernel!r} is not the one that was compiled",
            hint="deploy the sources that were compiled, or compile again",
        )
    user_kernels.call(found, constants, grid, arguments)


def find(kernel: str) -> Any:
    """Return the kernel at ``module:name``; imports nothing.

    Raises:
        CorruptEntry: there is no Triton kernel of that name in this process.
    """
    module, _, name = kernel.partition(":")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not user_kernels.is_kernel(found):
        raise CorruptEntry(
            f"the Triton kernel {kernel[:80]!r} is not in this process",
            hint="import the module that defines it first",
        )
    return found
