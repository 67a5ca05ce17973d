"""The seam to Dynamo: one fullgraph trace, its guards, its traced code and its output bytecode.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used, and what breaks if they change:
``convert_frame.fullgraph_capture`` (the trace itself), ``get_metrics_context`` and ``dynamo_timed``
(without them the trace fails with "Cannot increment"), ``decorators.mark_unbacked``,
``output_graph.guards`` / ``side_effects``, ``CaptureOutput`` runtime environment (output structure).
"""

from __future__ import annotations

import builtins
import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass
class RawCapture:
    """What one trace returned. ``guards``, ``fake_mode`` and ``shape_env`` are torch's own objects."""

    graph_module: fx.GraphModule
    example_inputs: list[object]
    fake_mode: Any
    shape_env: Any
    guards: Sequence[Any]
    traced_code: tuple[types.CodeType, ...]
    side_effects: tuple[str, ...]
    global_scope: Mapping[str, object]
    replay: Callable[[Callable[..., object]], Callable[..., object]]


@contextlib.contextmanager
def quiet_trace() -> Iterator[None]:
    """Enter what a trace needs: no grad, metrics and timing contexts, and a clean Dynamo before and after."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    torch._dynamo.reset()
    try:
        with torch.no_grad(), get_metrics_context(), dynamo_timed("pwcc_trace"):
            yield
    finally:
        torch._dynamo.reset()


def fullgraph_capture(
    forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> RawCapture:
    """Trace ``forward`` once into one graph; raises what Dynamo raises."""
    from torch._dynamo import convert_frame

    with quiet_trace():
        out: Any = convert_frame.fullgraph_capture(forward, args, kwargs)
    captured = out.graph_capture_output
    backend = out.backend_input
    if backend is None:
        raise ValueError("the forward holds no tensor operation")
    output_graph = captured.output_graph

    def replay(compiled: Callable[..., object]) -> Callable[..., object]:
        environment = captured.get_runtime_env()
        scope = {
            **{name: getattr(builtins, name) for name in environment.external_refs if hasattr(builtins, name)},
            **captured.f_globals,
        }
        function: Callable[..., object] = environment.forward_callable(
            backend.backend_id, compiled, extra_globals=scope
        )
        return function

    return RawCapture(
        graph_module=backend.graph_module,
        example_inputs=list(backend.example_inputs),
        fake_mode=backend.fake_mode,
        shape_env=backend.fake_mode.shape_env,
        guards=list(output_graph.guards),
        traced_code=tuple(dict.fromkeys(captured.traced_code)),
        side_effects=_side_effects(output_graph),
        global_scope=captured.f_globals,
        replay=replay,
    )


def _side_effects(output_graph: Any) -> tuple[str, ...]:
    """Names of attribute writes that only the rewritten bytecode would perform."""
    effects = getattr(output_graph, "side_effects", None)
    found: list[str] = []
    for variable, writes in getattr(effects, "store_attr_mutations", {}).items():
        source = getattr(variable, "source", None)
        if source is None:  # an object made inside the trace; it cannot be seen outside
            continue
        name = getattr(source, "name", "?")
        base = str(name() if callable(name) else name)
        found.extend(f"{base}.{attribute}" for attribute in writes)
    return tuple(found)


def mark_unbacked(tensor: torch.Tensor, dim: int) -> None:
    """Make ``dim`` a symbol about which the trace may assume nothing."""
    from torch._dynamo import decorators

    decorators.mark_unbacked(tensor, dim)


def mark_dynamic(tensor: torch.Tensor, dim: int, *, low: int, high: int) -> None:
    """Make ``dim`` a symbol in ``[max(low, 2), high]`` that the trace may guard on."""
    torch._dynamo.mark_dynamic(tensor, dim, min=max(low, 2), max=high)


def describe_failure(error: BaseException) -> tuple[str, str | None]:
    """Return (what happened, the user's innermost ``file:line in function``) of a failed trace."""
    message = str(getattr(error, "msg", None) or error).strip()
    stack = getattr(error, "real_stack", None) or []
    frames = [frame for frame in stack if not frame.filename.startswith("<frozen")]
    where = None
    if frames:
        last = frames[-1]
        where = f"{last.filename}:{last.lineno} in {last.name}" + (f": {last.line}" if last.line else "")
    return message, where


def is_data_dependent(error: BaseException) -> bool:
    """Tell whether a trace failed because the code asks for the value of an unbacked size."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GuardOnDataDependentSymNode):
            return True
        seen = seen.__cause__ or seen.__context__
    return "data-dependent" in str(error) or "ConstraintViolation" in type(error).__name__


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """Exception classes by which Dynamo reports that it could not trace."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException, RuntimeError, TypeError, ValueError, AssertionError)
