"""Artifact: where Inductor keeps the shared object of a C++ kernel, and which vector ISA it picks.

Run on 2.11.0 and 2.13.0. ``async_compile.cpp_pybinding`` leaves the extension module's ``kernel``
function in the wrapper module; a C function knows its module by ``__self__``, and the module its file.
"""

from __future__ import annotations

from pathlib import Path
from types import BuiltinFunctionType, ModuleType

from pwcc.cache.errors import UnsealableError


def shared_object(module: ModuleType, name: str) -> Path:
    """Return the file of the C++ kernel that is attribute ``name`` of a loaded wrapper.

    Raises:
        UnsealableError: the attribute is missing, not yet compiled, or not a function of an extension
            module.
    """
    function = getattr(module, name, None)
    owner = getattr(function, "__self__", None)
    file = getattr(owner, "__file__", None)
    if not isinstance(function, BuiltinFunctionType) or not isinstance(owner, ModuleType) or not file:
        raise UnsealableError(
            f"expected C++ kernel {name!r} to be a function of a loaded extension module, "
            f"got {type(function).__name__}"
        )
    return Path(file)


def vector_isa_flags() -> tuple[str, ...]:
    """Return the compiler's ``-m`` flags of the vector ISA that Inductor picks under the current config."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return tuple(flag for flag in pick_vec_isa().build_arch_flags().split() if flag.startswith("-m"))


def inductor_directories() -> tuple[str, ...]:
    """Return the directories whose paths Inductor's builds may mention: torch's own and its cache."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(Path(torch.__file__).parent.parent), cache_dir()
