"""Artifact: what a tuned Triton kernel of Inductor's is made of: cubin, launch facts, grid of the winner.

Read in 2.11.0 and 2.13.0: ``_inductor/runtime/triton_heuristics.py`` (CachingAutotuner,
StaticTritonCompileResult, GridExpr) and ``static_triton_launcher.py``. The wrapper module holds a
CachingAutotuner; after the first run it has one launcher, a generated function
``launcher(<parameters>, stream)`` whose global ``runner`` is the bound ``run`` of a
StaticallyLaunchedCudaKernel. 2.13's faster launcher is a copy kept elsewhere, this one stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from pwcc.cache.errors import UnsealableError


@dataclass(frozen=True)
class TunedKernel:
    """A kernel after autotuning.

    ``parameters`` are what the wrapper passes, in order; ``arguments`` are those of them that the cubin
    takes, ``scratch`` None arguments follow. ``arg_types`` has one letter for each of both. ``grid``
    holds three expressions in the parameters and in names that the ``prefix`` lines assign.
    """

    symbol: str
    cubin: bytes
    shared: int
    num_warps: int
    arg_types: str
    scratch: int
    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    prefix: tuple[str, ...]
    grid: tuple[str, str, str]
    config: str
    capability: str
    registers: int
    spills: int


def tuned_kernel(module: ModuleType, name: str) -> TunedKernel:
    """Return the tuned kernel that is attribute ``name`` of a loaded wrapper.

    Raises:
        UnsealableError: it is no CachingAutotuner, has not run yet, is not launched statically, is for
            ROCm, or its cubin is no longer in Triton's cache directory.
    """
    autotuner = getattr(module, name, None)
    launchers = getattr(autotuner, "launchers", None)
    if autotuner is None or launchers is None or not hasattr(autotuner, "inductor_meta"):
        _refuse(name, f"expected one of Inductor's autotuned kernels, got {type(autotuner).__name__}")
    if len(launchers) != 1:
        _refuse(
            name, f"expected one tuned launcher, got {len(launchers)}", hint="run the piece once before sealing"
        )
    launcher = launchers[0]
    kernel = _static_kernel(name, launcher)
    arguments = _arguments(kernel, autotuner.triton_meta)
    if len(arguments) != len(kernel.arg_tys):
        _refuse(name, f"expected {len(kernel.arg_tys)} kernel arguments, got {len(arguments)}: {arguments}")
    scratch = int(kernel.has_global_scratch) + int(getattr(kernel, "has_profile_scratch", False))
    grid = _grid(autotuner.inductor_meta, launcher.config)
    return TunedKernel(
        symbol=kernel.name,
        cubin=_cubin(name, kernel, autotuner.triton_meta),
        shared=int(kernel.shared),
        num_warps=int(kernel.num_warps),
        arg_types=kernel.arg_tys + "O" * scratch,
        scratch=scratch,
        parameters=_parameters(name, launcher),
        arguments=arguments,
        prefix=tuple(grid.prefix),
        grid=(str(grid.x_grid), str(grid.y_grid), str(grid.z_grid)),
        config=config_text(launcher.config),
        capability=_capability(name, autotuner.device_props.cc),
        registers=_count(getattr(kernel, "n_regs", None)),
        spills=_count(getattr(kernel, "n_spills", None)),
    )


@contextmanager
def line_info_disabled() -> Iterator[None]:
    """Keep source paths out of the cubins that this process compiles.

    Worker processes of Inductor read the environment instead: start them with
    ``TRITON_DISABLE_LINE_INFO=1``.
    """
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield


def _refuse(name: str, what: str, *, hint: str | None = None) -> NoReturn:
    raise UnsealableError(f"cannot seal Triton kernel {name!r}: {what}", hint=hint)


def _static_kernel(name: str, launcher: Any) -> Any:
    import torch

    runner = getattr(launcher, "__globals__", {}).get("runner")
    kernel = getattr(runner, "__self__", None)
    needed = ("arg_names", "declared_constexprs", "full_constexprs", "arg_tys", "hash", "has_global_scratch")
    if torch.version.hip is not None:
        _refuse(name, "ROCm kernels are not supported yet")
    if not isinstance(launcher, FunctionType) or not all(hasattr(kernel, item) for item in needed):
        _refuse(
            name,
            "torch's static launcher does not take it (cooperative, PDL, TMA descriptor or scratch memory)",
            hint="compile under pwcc.compile.sealing.profile.cuda_profile, whose strict mode says why",
        )
    return kernel


def _arguments(kernel: Any, triton_meta: Mapping[str, Any]) -> tuple[str, ...]:
    """As StaticTritonCompileResult.make_launcher does, from facts that tuning does not change."""
    declared = {name for index, name in enumerate(kernel.arg_names) if index in set(kernel.declared_constexprs)}
    absent = {
        name
        for name, value in triton_meta["constants"].items()
        if value is None and name not in declared and name not in triton_meta["signature"]
    }
    constexprs = set(kernel.full_constexprs)
    return tuple(
        name for index, name in enumerate(kernel.arg_names) if index not in constexprs and name not in absent
    )


def _parameters(name: str, launcher: FunctionType) -> tuple[str, ...]:
    code = launcher.__code__
    names = code.co_varnames[: code.co_argcount]
    if not names or names[-1] != "stream" or code.co_kwonlyargcount or code.co_flags & 0x0C:
        _refuse(name, f"expected a launcher that ends with 'stream', got parameters {names}")
    return names[:-1]


def _grid(inductor_meta: dict[str, Any], config: Any) -> Any:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    return GridExpr.from_meta(inductor_meta, config)


def _cubin(name: str, kernel: Any, triton_meta: Mapping[str, Any]) -> bytes:
    raw = getattr(kernel, "cubin_raw", None)
    if isinstance(raw, bytes):
        return raw
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    directory = Path(triton_cache_dir(triton_meta.get("device") or 0)) / triton_hash_to_path_key(kernel.hash)
    try:
        return (directory / f"{kernel.name}.cubin").read_bytes()
    except OSError as error:
        _refuse(name, f"its cubin is not in Triton's cache directory: {error}", hint="seal before clearing it")


def found_by_descent(module: ModuleType, name: str) -> bool:
    """Tell whether the one launcher of a kernel runs a configuration that coordinate descent found."""
    launchers = getattr(getattr(module, name, None), "launchers", None) or ()
    return any(bool(getattr(launcher.config, "found_by_coordesc", False)) for launcher in launchers)


def config_text(config: Any) -> str:
    """Return a Triton configuration as ``NAME=value`` in order of the names."""
    items: dict[str, Any] = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return " ".join(f"{key}={items[key]}" for key in sorted(items))


def _capability(name: str, cc: object) -> str:
    if not isinstance(cc, int) or cc < 10:
        _refuse(name, f"expected a compute capability such as 90, got {cc!r}")
    return f"{cc // 10}.{cc % 10}"


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else -1
