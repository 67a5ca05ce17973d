"""Key: the sealing profile, the Inductor configuration under which every construct of a piece can be sealed.

Each key is set only where this torch has it; the values are part of the piece's key. Names were read in
2.11.0 and 2.13.0.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from pwcc.cache.errors import UsageError

Baseline = Literal["x86-64-v2", "x86-64-v3", "x86-64-v4", "native"]

_X86_64_V2: Final = ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
_X86_64_V3: Final = (*_X86_64_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_X86_64_V4: Final = (*_X86_64_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")


@dataclass(frozen=True)
class CpuTarget:
    """A CPU to compile for: ``march`` for the compiler, vector width, and the flags a host must have."""

    march: str
    vector_bits: int | None
    cpu_flags: tuple[str, ...]


_TARGETS: Final[Mapping[str, CpuTarget]] = {
    # Inductor has no SSE vectors: it writes plain loops, which g++ vectorises
    "x86-64-v2": CpuTarget("x86-64-v2", 1, _X86_64_V2),
    "x86-64-v3": CpuTarget("x86-64-v3", 256, _X86_64_V3),
    "x86-64-v4": CpuTarget("x86-64-v4", 512, _X86_64_V4),
}
# names of /proc/cpuinfo that change what -march=native emits; the others name kernel or firmware features
_CODE_FLAG_PREFIXES: Final = (
    "avx",
    "amx",
    "sse",
    "bmi",
    "gfni",
    "vaes",
    "vpclmul",
    "sha_ni",
    "adx",
    "sve",
    "asimd",
)


def cpu_target(baseline: Baseline) -> CpuTarget:
    """Return what a baseline means here: every host with its ``cpu_flags`` runs the code.

    Raises:
        UsageError: a named x86 level on another machine.
    """
    if baseline == "native":
        return CpuTarget("native", None, _host_code_flags())
    if platform.machine() != "x86_64":
        raise UsageError(f"expected --cpu-baseline native on {platform.machine()}, got {baseline!r}")
    return _TARGETS[baseline]


def _host_code_flags() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            known = set(_X86_64_V3)
            return tuple(sorted(f for f in value.split() if f in known or f.startswith(_CODE_FLAG_PREFIXES)))
    return ()


# What both device types share: nothing that the rewriting refuses, nothing cached outside our store.
_COMMON: Final[Mapping[str, object]] = {
    "graph_partition": False,  # one plain function 'call'
    "cpp_wrapper": False,
    "freezing": False,  # weights are inputs, never constants
    "memory_planning": False,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,  # nothing is tuned on CPU
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    "generate_intermediate_hooks": False,
    "profile_bandwidth": False,
    "annotate_training": False,
    "wrap_inductor_compiled_regions": False,
    "nan_asserts": False,
    "enable_auto_functionalized_v2": True,  # without it, in-place operators on views copy the base
    "size_asserts": True,  # those on inputs are dropped; those on a custom op's outputs catch a wrong fake
    "triton.cudagraphs": False,
    "triton.multi_kernel": 0,  # chooses among kernels at run time
    "triton.debug_sync_graph": False,
    "triton.debug_sync_kernel": False,
    "triton.proton_profiling": False,
}
_CPU: Final[Mapping[str, object]] = {
    "cpp.dynamic_threads": True,  # else the builder's thread count is compiled in
    "cpp.enable_kernel_profile": False,
    "cpp_cache_precompile_headers": False,  # 154 MB in TMPDIR, and its path in the object; costs no time here
    "aot_inductor.enable_line_tables": False,  # from 2.12: -g1 by default, which names every source path
    "aot_inductor.debug_symbols": False,
    "aot_inductor.debug_compile": False,
}
_CUDA: Final[Mapping[str, object]] = {
    # In a directory of this compile's own: equal kernels are tuned once, and pwcc keeps the files.
    "autotune_local_cache": True,
    "use_static_triton_launcher": True,
    "strict_static_triton_launcher": True,  # a kernel that it refuses fails the compile, by name
    "static_launch_user_defined_triton_kernels": True,
    "triton.store_cubin": False,  # excludes the static launcher; its cubins lie in Triton's cache
    "triton.autotune_at_compile_time": False,  # tuning runs at the first call, on real inputs
    "triton.cooperative_reductions": False,  # their grid barrier needs a cooperative launch
    "triton.enable_pdl": False,  # a launch attribute that the static launcher lacks
    "triton.enable_persistent_tma_matmul": False,  # descriptors are made on the host
    "triton.use_tensor_descriptor": False,
    "triton.enable_template_tma_store": False,
    "triton.unique_kernel_names": True,
    "triton.unique_user_kernel_names": True,
    "combo_kernels": False,
}
_TUNED: Final[Mapping[str, object]] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",  # CUTLASS, CK and CuteDSL templates cannot be sealed
    "coordinate_descent_tuning": True,
    "autotune_in_subproc": False,
}


def cpu_profile(baseline: Baseline, *, driver: Path | None = None) -> dict[str, object]:
    """Return Inductor options for CPU pieces that run on any host with ``cpu_target(baseline).cpu_flags``.

    ``driver`` is the compiler driver of ``sealing/driver.py``. Without it 2.11 compiles for the builder's
    own CPU whatever is asked, and objects hold the path of torch's headers, which sealing refuses.
    """
    target = cpu_target(baseline)
    options = {**_COMMON, **_CPU, "cpp.simdlen": target.vector_bits, "cpp.march": target.march}
    if _torch_has_vectors(target):
        options["cpp.vec_isa_ok"] = True  # skips up to three probe builds, 1.5 s each with a cold cache
    if driver is not None:
        options["cpp.cxx"] = (None, str(driver))
    return known_options(options)


def _torch_has_vectors(target: CpuTarget) -> bool:
    """Tell whether torch's own kernels run here with vectors as wide as Inductor may choose.

    That is what Inductor's probe of an instruction set finds out: whether torch was built for it, with the
    vector functions of Sleef that generated code calls.
    """
    here = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability(), 0)
    wanted = target.vector_bits
    if wanted is None:
        wanted = 512 if "avx512f" in target.cpu_flags else 256
    return wanted <= here


def cuda_profile(*, autotune: bool) -> dict[str, object]:
    """Return Inductor options for CUDA pieces; ``autotune`` adds exhaustive tuning, for static sizes."""
    return known_options({**_COMMON, **_CUDA, **(_TUNED if autotune else {})})


def known_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that this torch's Inductor has."""
    from torch._inductor import config

    return {name: value for name, value in options.items() if _has(config, name)}


def _has(config: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True
