"""pwcc: compile a PyTorch model piecewise once, load it elsewhere with nothing compiled.

Importing the package is cheap: torch is imported by the first name that needs it. In a process that has
imported torch already, :func:`load` is imported at once, so that a server's first load does not pay for it.

- :func:`precompile`: compile a live model into a cache directory.
- :func:`load`: find and load the entry that fits a live model on this host; returns a
  :class:`CompiledModel` whose ``receipt`` is a :class:`LoadReceipt`.
- :func:`support_compile`: decorate a module class, so that its instances load or compile at their first call;
  :class:`CompileConfig`, :class:`CompileLevel`, :func:`configure` and :func:`compile_config` say how.
- :class:`CacheMiss`, :class:`HostMismatch`, :class:`CallError`: what a server handles.
- :func:`forward_context`: what the attention op reads while a model runs.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from pwcc.cache.errors import CacheMiss, CallError, HostMismatch, PwccError

if TYPE_CHECKING:
    from pwcc.compile.api import precompile
    from pwcc.compile.compiled_model import CompiledModel
    from pwcc.compile.decorator import support_compile
    from pwcc.compile.decorator_phase import CompileState
    from pwcc.compile.decorator_state import compile_state, rebind, wait_for_compile
    from pwcc.compile.levels import CompileConfig, CompileLevel, compile_config, configure, current_config
    from pwcc.compile.load import load
    from pwcc.compile.ops.forward_context import forward_context
    from pwcc.compile.receipt import LoadReceipt
    from pwcc.compile.report import CompileReport

__version__ = "0.1.0"

_LAZY = {
    "precompile": "pwcc.compile.api",
    "load": "pwcc.compile.load",
    "support_compile": "pwcc.compile.decorator",
    "rebind": "pwcc.compile.decorator_state",
    "compile_state": "pwcc.compile.decorator_state",
    "wait_for_compile": "pwcc.compile.decorator_state",
    "CompileState": "pwcc.compile.decorator_phase",
    "CompileConfig": "pwcc.compile.levels",
    "CompileLevel": "pwcc.compile.levels",
    "compile_config": "pwcc.compile.levels",
    "configure": "pwcc.compile.levels",
    "current_config": "pwcc.compile.levels",
    "CompiledModel": "pwcc.compile.compiled_model",
    "LoadReceipt": "pwcc.compile.receipt",
    "CompileReport": "pwcc.compile.report",
    "forward_context": "pwcc.compile.ops.forward_context",
}

__all__ = [
    "CacheMiss",
    "CallError",
    "CompileConfig",
    "CompileLevel",
    "CompileReport",
    "CompileState",
    "CompiledModel",
    "HostMismatch",
    "LoadReceipt",
    "PwccError",
    "__version__",
    "compile_config",
    "compile_state",
    "configure",
    "current_config",
    "forward_context",
    "load",
    "precompile",
    "rebind",
    "support_compile",
    "wait_for_compile",
]


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'pwcc' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "torch" in sys.modules:
    from pwcc.compile.load import load
