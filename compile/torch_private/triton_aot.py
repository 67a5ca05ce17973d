"""Artifact: a Triton kernel of ours compiled for a capability, in the form torch's static launcher takes.

Run on Triton 3.6 and 3.9 with torch 2.11.0 and 2.13.0: ``triton.compile(ASTSource)`` needs no GPU, and
``StaticallyLaunchedCudaKernel`` (``_inductor/runtime/static_triton_launcher.py``) gives one letter per
argument; the letters are written here so that nothing of Inductor is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pwcc.cache.errors import UnsealableError

_LETTERS: Final = {"i32": "i", "i64": "l", "fp32": "f"}


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and how to launch it; ``scratch`` None arguments follow the kernel's own."""

    symbol: str
    cubin: bytes
    shared: int
    num_warps: int
    arg_types: str
    scratch: int


def compile_kernel(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    aligned: tuple[str, ...],
    capability: int,
    num_warps: int,
    num_stages: int,
) -> CompiledKernel:
    """Compile a ``@triton.jit`` function ahead of time.

    ``signature`` maps each argument to Triton's type (``*bf16``, ``i32``); ``constants`` its constexprs;
    ``aligned`` names arguments that are multiples of 16; ``capability`` is 90 for sm_90.

    Raises:
        UnsealableError: the kernel needs scratch memory, which the static launcher does not give.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    # Triton 3.10 changes the default of fused multiply-add; stated, the cubin stays the same.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata = kernel.metadata
    scratch = 0
    for name in ("global_scratch_size", "profile_scratch_size"):
        if hasattr(metadata, name):
            if getattr(metadata, name):
                raise UnsealableError(f"cannot seal kernel {metadata.name!r}: it needs {name} bytes")
            scratch += 1
    types = [signature[name] for name in names if name in signature]
    letters = "".join("O" if kind.startswith("*") else _LETTERS[kind] for kind in types)
    return CompiledKernel(
        symbol=metadata.name,
        cubin=kernel.asm["cubin"],
        shared=int(metadata.shared),
        num_warps=int(metadata.num_warps),
        arg_types=letters + "O" * scratch,
        scratch=scratch,
    )
