"""Artifact: level 2: one trace, compiled whole in this process; calls run the code object that Dynamo wrote.

For comparison: no splitting, no cache, and the compile is part of the first call. What a trace assumed is
checked like at level 3 (sizes, dtypes, None-ness), once per form of a call; Dynamo evaluates no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pwcc.cache.errors import SizeError, TraceError
from pwcc.compile.input_forms import Spec
from pwcc.compile.inputs import input_specs
from pwcc.compile.levels import CompileConfig
from pwcc.compile.model_tree import identity
from pwcc.compile.request import make_request
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.target import device_of
from pwcc.compile.torch_private.inductor import compile_whole
from pwcc.compile.trace import Trace
from pwcc.compile.tracing import trace_all

Function = Callable[..., Any]


class Once:
    """A module traced once; call it like the module. Its weights are read from the module at each call."""

    def __init__(self, module: nn.Module, programs: Sequence[tuple[int, int, Binder, Function]]) -> None:
        self._module = module
        self._programs = tuple(programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code that Dynamo wrote.

        Raises:
            CallError: a call that the trace does not hold for.
        """
        _, _, binder, function = self._programs[0]
        if len(self._programs) > 1:
            binder, function = self._serving(args, kwargs)
        binder.bind(args, kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return function(self._module, *args, **kwargs)
        return function(self._module, *args, **kwargs)

    def _serving(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Binder, Function]:
        refused: SizeError | None = None
        for _, _, binder, function in self._programs:
            try:
                binder.bind(args, kwargs)
            except SizeError as error:
                refused = error
            else:
                return binder, function
        raise refused or SizeError("no program serves this size")


def trace_once(module: nn.Module, inputs: Sequence[Spec], config: CompileConfig) -> Once:
    """Trace a module, compile its graph whole, and return what runs it.

    Raises:
        UsageError, TraceError, SpecializationError, UnsealableError: as a compile at level 3 would.
    """
    device = device_of(module)
    request = make_request(
        module,
        specs=input_specs(module, declarations=tuple(inputs)),
        sizes=(),
        max_tokens=config.max_tokens or 1,
        device=device,
        identity=identity(module),
        args=None,
        splitting_ops=(),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=False,
    )
    traced = trace_all(module, request)
    return Once(
        module,
        [(item.low, item.high, Binder(item.trace.calling, device), _function(item.trace)) for item in traced],
    )


def _function(trace: Trace) -> Function:
    """Compile a trace's graph with Inductor and put it behind Dynamo's bytecode."""
    raw = trace.raw
    if raw is None:
        raise TraceError("the trace holds no bytecode of Dynamo's")
    return raw.replay(compile_whole(raw.graph_module, raw.fake_mode))
