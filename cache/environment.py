"""Key: the environment variables that can change generated code, and those left out, with reasons.

A variable is a factor if its name matches a pattern of :data:`READ` and none of :data:`EXCLUDED`;
an exclusion always wins; a site adds to both (``policy.py``). Checked against all variables that torch
2.13 and Triton 3.9 read: each matches one of the two tables, or changes no code. Values are kept in the
clear when they are plain settings (numbers, flags, short words, lists of them) and as a salted digest
otherwise: what looks like a path or a long opaque string may name a user or be a secret. The salt keeps
such digests from being looked up in tables made for other programs; it is public, so a short guessable
secret is not protected by it, only not shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Final

from pwcc.cache.ids import factor_digest


@dataclass(frozen=True)
class Pattern:
    """A name pattern, in which ``*`` stands for any characters, and why it is read or left out."""

    glob: str
    reason: str


READ: Final = (
    Pattern("TORCH_*", "torch"),
    Pattern("TORCHDYNAMO_*", "Dynamo's config"),
    Pattern("TORCHINDUCTOR_*", "Inductor's config"),
    Pattern("INDUCTOR_*", "Inductor's config"),
    Pattern("AOT_INDUCTOR_*", "Inductor's C++ compile flags"),
    Pattern("AOTINDUCTOR_*", "Inductor"),
    Pattern("TORCHEXPORT_*", "torch.export"),
    Pattern("PYTORCH_*", "torch: JIT, ROCm architecture, allocator"),
    Pattern("PARTITIONER_*", "functorch's partitioner"),
    Pattern("TENSORIFY_PYTHON_SCALARS", "Dynamo: scalars as graph inputs or as constants"),
    Pattern("UNSAFE_SKIP_FSDP_MODULE_GUARDS", "Dynamo: guards"),
    Pattern("FAKE_ALLOW_META", "fake tensors"),
    Pattern("FX_PATCH_GETITEM", "torch.fx: how tracing sees indexing"),
    Pattern("AOT_PARTITIONER_*", "functorch's partitioner"),
    Pattern("AOTI_*", "Inductor's runtime checks"),
    Pattern("IS_FBCODE", "Inductor: other defaults inside one company"),
    Pattern("HALIDE_*", "Inductor's Halide backend"),
    Pattern("ENABLE_*TMA*", "Inductor's matmul templates"),
    Pattern("CUTLASS_EPILOGUE_FUSION", "Inductor's CUTLASS templates"),
    Pattern("CUTEDSL_*", "Inductor's CuteDSL templates"),
    Pattern("ATEN_CPU_CAPABILITY", "the CPU instruction set that ATen and Inductor choose"),
    Pattern("TRITON_*", "Triton's compiler"),
    Pattern("MLIR_*", "Triton's MLIR passes"),
    Pattern("LLVM_*", "Triton's LLVM passes"),
    Pattern("DISABLE_LLVM_OPT", "Triton's LLVM passes"),
    Pattern("DISABLE_PTXAS_OPT", "Triton's ptxas call"),
    Pattern("PTXAS_OPTIONS", "Triton's ptxas call"),
    Pattern("ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "Triton's layouts"),
    Pattern("AMDGCN_*", "Triton's AMD backend"),
    Pattern("NVPTX_*", "Triton's NVIDIA backend"),
    Pattern("CUDA_*", "CUDA runtime and driver"),
    Pattern("NVIDIA_TF32_OVERRIDE", "cuBLAS and cuDNN: TF32 on or off"),
    Pattern("CUBLAS*", "cuBLAS: workspace, emulation"),
    Pattern("CUDNN_*", "cuDNN"),
    Pattern("HIP_*", "HIP runtime"),
    Pattern("HIPBLASLT_*", "hipBLASLt: which kernels"),
    Pattern("ROCBLAS_*", "rocBLAS: which kernels"),
    Pattern("OMP_*", "OpenMP: Inductor bakes the thread count into C++ kernels"),
    Pattern("KMP_*", "LLVM and Intel OpenMP"),
    Pattern("MKL_*", "MKL: threads, instruction set, reproducibility"),
    Pattern("ONEDNN_*", "oneDNN: instruction set, default math mode"),
    Pattern("DNNL_*", "oneDNN, older name"),
    Pattern("OPENBLAS_*", "OpenBLAS: core type, threads"),
    Pattern("FBGEMM_*", "FBGEMM: instruction set of quantised kernels"),
    Pattern("MIOPEN_*", "MIOpen: which kernels"),
    Pattern("HSA_OVERRIDE_GFX_VERSION", "ROCm: the architecture that the device claims to be"),
    Pattern("CPATH", "gcc: headers before its own"),
    Pattern("C_INCLUDE_PATH", "gcc: headers"),
    Pattern("CPLUS_INCLUDE_PATH", "gcc: headers"),
)

_LOCATION: Final = "a location: what lies there is keyed by its own version or content"
_LOGGING: Final = "logging and dumps: changes what is printed or written, not the code"
_IDENTITY: Final = "the identity of a job, process or device: the device's class is a compiler factor"
_CREDENTIAL: Final = "a credential"
_NETWORK: Final = "an address or port of a remote cache or of a process group"
_SCHEDULE: Final = "how compile work is scheduled: processes, timeouts; the code is the same"
_PLACEMENT: Final = "where threads run and how they wait, not what they compute"
_IMAGE: Final = "set by container images; the real version is a compiler factor"
_KUBERNETES: Final = "set by Kubernetes for each service of a namespace, whatever its name"
_EAGER: Final = "what eager code does; a piece is compiled from the graph that was traced"
_OWN_CACHE: Final = "torch's own caches are off or private under the sealing profile"

EXCLUDED: Final = (
    Pattern("*_DIR", _LOCATION),
    Pattern("*_PATH", _LOCATION),
    Pattern("*_HOME", _LOCATION),
    Pattern("*_ROOT", _LOCATION),
    Pattern("*_LOGPATH", _LOCATION),
    Pattern("*_CACHE", _OWN_CACHE),
    Pattern("*_CACHE_DEFAULT", _OWN_CACHE),
    Pattern("*_CACHE_KEY_TAG", _OWN_CACHE),
    Pattern("TORCH_COMPILE_STICKY_PGO_*", _OWN_CACHE),
    Pattern("TORCH_CACHING_PRECOMPILE", _OWN_CACHE),
    Pattern("TRITON_ALWAYS_COMPILE", _OWN_CACHE),
    Pattern("TRITON_STORE_BINARY_ONLY", _OWN_CACHE),
    Pattern("TRITON_CACHE_MANAGER", _OWN_CACHE),
    Pattern("TRITON_REMOTE_CACHE_BACKEND", _OWN_CACHE),
    Pattern("TORCHINDUCTOR_NON_BLOCKING_REMOTE_CACHE_WRITE", _OWN_CACHE),
    Pattern("*_SERVICE_HOST", _KUBERNETES),
    Pattern("*_SERVICE_PORT*", _KUBERNETES),
    Pattern("*_PORT_*_TCP*", _KUBERNETES),
    Pattern("*_PORT_*_UDP*", _KUBERNETES),
    Pattern("*_HOST", _NETWORK),
    Pattern("*_IP", _NETWORK),
    Pattern("*_HOSTNAME", _NETWORK),
    Pattern("*_IFNAME", _NETWORK),
    Pattern("TRITON_REDIS_KEY_FORMAT", _OWN_CACHE),
    Pattern("*_PORT", _NETWORK),
    Pattern("*_URL", _NETWORK),
    Pattern("*_ADDR", _NETWORK),
    Pattern("*_ENDPOINT", _NETWORK),
    Pattern("*TOKEN*", _CREDENTIAL),
    Pattern("*SECRET*", _CREDENTIAL),
    Pattern("*PASSWORD*", _CREDENTIAL),
    Pattern("*PASSWD*", _CREDENTIAL),
    Pattern("*CREDENTIAL*", _CREDENTIAL),
    Pattern("*_API_KEY", _CREDENTIAL),
    Pattern("*_ACCESS_KEY*", _CREDENTIAL),
    Pattern("*_JOB_ID", _IDENTITY),
    Pattern("*_JOB_NAME", _IDENTITY),
    Pattern("*_RUN_ID", _IDENTITY),
    Pattern("*_PROCESS_NAME", _IDENTITY),
    Pattern("*_RANK", _IDENTITY),
    Pattern("*_WORLD_SIZE", _IDENTITY),
    Pattern("CUDA_VISIBLE_DEVICES", _IDENTITY),
    Pattern("HIP_VISIBLE_DEVICES", _IDENTITY),
    Pattern("CUDA_DEVICE_ORDER", _IDENTITY),
    Pattern("CUDA_MPS_*", _IDENTITY),
    Pattern("*_POD_NAME", _IDENTITY),
    Pattern("*_WORKER_ID", _IDENTITY),
    Pattern("TORCH_TNT_IN_USE", _IDENTITY),
    Pattern("CUDA_VERSION", _IMAGE),
    Pattern("CUDA_*_VERSION", _IMAGE),
    Pattern("CUDNN_VERSION", _IMAGE),
    Pattern("TORCH_VERSION", _IMAGE),
    Pattern("TRITON_VERSION", _IMAGE),
    Pattern("PYTORCH_VERSION", _IMAGE),
    Pattern("PYTORCH_BUILD_*", _IMAGE),
    Pattern("OMP_PLACES", _PLACEMENT),
    Pattern("OMP_PROC_BIND", _PLACEMENT),
    Pattern("OMP_WAIT_POLICY", _PLACEMENT),
    Pattern("OMP_STACKSIZE", _PLACEMENT),
    Pattern("GOMP_*", _PLACEMENT),
    Pattern("KMP_AFFINITY", _PLACEMENT),
    Pattern("KMP_HW_SUBSET", _PLACEMENT),
    Pattern("KMP_BLOCKTIME", _PLACEMENT),
    Pattern("KMP_STACKSIZE", _PLACEMENT),
    Pattern("PWCC_LOG", _LOGGING),
    Pattern("*_LOGS", _LOGGING),
    Pattern("*_LOGS_*", _LOGGING),
    Pattern("*_LOG_*", _LOGGING),
    Pattern("*_LOGGING*", _LOGGING),
    Pattern("*_LOGLEVEL", _LOGGING),
    Pattern("*_VERBOSE*", _LOGGING),
    Pattern("*_TRACE", _LOGGING),
    Pattern("*_TRACE_*", _LOGGING),
    Pattern("*_DUMP*", _LOGGING),
    Pattern("*_DISPLAY*", _LOGGING),
    Pattern("*_SVG", _LOGGING),
    Pattern("INDUCTOR_*_GRAPH", _LOGGING),
    Pattern("INDUCTOR_LOG_*", _LOGGING),
    Pattern("TORCH_SHOW_CPP_STACKTRACES", _LOGGING),
    Pattern("TORCH_COMPILE_CPROFILE", _LOGGING),
    Pattern("TORCH_COMPILE_STROBELIGHT", _LOGGING),
    Pattern("TORCHDYNAMO_EXTENDED_*", _LOGGING),
    Pattern("TRITON_PRINT_AUTOTUNING", _LOGGING),
    Pattern("TRITON_KERNEL_DUMP", _LOGGING),
    Pattern("MLIR_ENABLE_DIAGNOSTICS", _LOGGING),
    Pattern("MLIR_ENABLE_TIMING", _LOGGING),
    Pattern("LLVM_ENABLE_TIMING", _LOGGING),
    Pattern("CUDA_LOG_FILE", _LOGGING),
    Pattern("TORCHINDUCTOR_COMPILE_THREADS", _SCHEDULE),
    Pattern("TORCHINDUCTOR_WORKER_*", _SCHEDULE),
    Pattern("TORCHINDUCTOR_QUIESCE_*", _SCHEDULE),
    Pattern("TORCHINDUCTOR_*_TIMEOUT*", _SCHEDULE),
    Pattern("TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC", _SCHEDULE),
    Pattern("TORCH_WARM_POOL", _SCHEDULE),
    Pattern("TORCH_NCCL_*", "collectives are not compiled into pieces"),
    Pattern("TORCH_DISTRIBUTED_DEBUG", _LOGGING),
    Pattern("TORCH_FR_*", _LOGGING),
    Pattern("TORCH_CPP_LOG_LEVEL", _LOGGING),
    Pattern("TORCH_DISABLE_ADDR2LINE", _LOGGING),
    Pattern("TORCH_SYMBOLIZE_MODE", _LOGGING),
    Pattern("TORCH_ADDR2LINE_BINARY", _LOGGING),
    Pattern("FBGEMM_STATS_*", _LOGGING),
    Pattern("PYTORCH_API_USAGE_STDERR", _LOGGING),
    Pattern("PYTORCH_JIT*", _EAGER),
    Pattern("PYTORCH_TENSOREXPR*", _EAGER),
    Pattern("TRITON_TEST_*", "Triton's own tests"),
    Pattern("TRITON_WARMUP_*", _SCHEDULE),
    Pattern(
        "TORCH_CUDA_ARCH_LIST", "for building C++ extensions; the device's architecture is a compiler factor"
    ),
    Pattern("CUDA_LAUNCH_BLOCKING", "when a kernel runs, not what it is"),
    Pattern("CUDA_MODULE_LOADING", "when a kernel is loaded, not what it is"),
    Pattern("CUDA_CACHE_*", "the driver's JIT cache; pwcc stores cubins"),
    Pattern("PYTORCH_*ALLOC_CONF", "where tensors lie, not how they are computed"),
    Pattern("PYTORCH_NO_*MEMORY_CACHING", "where tensors lie, not how they are computed"),
    Pattern("OMP_DISPLAY_*", _LOGGING),
    Pattern("KMP_DUPLICATE_LIB_OK", "whether a second OpenMP runtime is an error"),
)

_PLAIN = re.compile(r"[A-Za-z0-9_.,:;=+\-| ]{0,64}")
_OPAQUE = re.compile(r"[A-Za-z0-9_\-]{20,}")  # longer than any setting's word: it could be a token
_SALT: Final = b"pwcc environment 1\0"


def environment_factors(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that are factors, by name; see the module's docstring."""
    return {name: shown_of(name, value) for name, value in sorted(environ.items()) if is_factor(name)}


def is_factor(name: str) -> bool:
    """Return whether a variable of this name is part of a key by the two tables."""
    return matches(READ, name) and not matches(EXCLUDED, name)


def matches(table: tuple[Pattern, ...], name: str) -> bool:
    """Return whether a pattern of ``table`` matches ``name``; case counts."""
    return _matcher(table).fullmatch(name) is not None


@cache
def _matcher(table: tuple[Pattern, ...]) -> re.Pattern[str]:
    # One expression of our own: a hundred fnmatch patterns take 20 ms to compile and 2 ms per environment.
    return re.compile("|".join(re.escape(pattern.glob).replace(r"\*", ".*") for pattern in table), re.DOTALL)


def exclusion(name: str) -> Pattern | None:
    """Return the exclusion that matches ``name``, if any."""
    return match(EXCLUDED, name)


def match(table: tuple[Pattern, ...], name: str) -> Pattern | None:
    """Return the first pattern of ``table`` that matches ``name``, if any."""
    return next((pattern for pattern in table if fnmatchcase(name, pattern.glob)), None)


def shown_of(name: str, value: str) -> str:
    """Return a variable's value as it is recorded; that of a credential never in the clear."""
    found = exclusion(name)
    return digested(value) if found is not None and found.reason == _CREDENTIAL else shown(value)


def shown(value: str) -> str:
    """Return a plain setting as it is, and anything else as ``digest:`` and 32 hex digits."""
    return value if _PLAIN.fullmatch(value) and not _OPAQUE.search(value) else digested(value)


def digested(value: str) -> str:
    """Return ``digest:`` and 32 hex digits of a salted value."""
    return f"digest:{factor_digest(_SALT + os.fsencode(value))}"
