"""The seam to Dynamo: one fullgraph trace, its guards, its traced code and its output bytecode.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used, and what breaks if they change:
``convert_frame.fullgraph_capture`` (the trace itself), ``get_metrics_context`` and ``dynamo_timed``
(without them the trace fails with "Cannot increment"), ``decorators.mark_unbacked``,
``output_graph.guards``, ``CaptureOutput`` runtime environment (output structure),
``SideEffects.codegen_update_mutated`` (wrapped during a trace to see what the rewritten bytecode would
change; ``store_attr_mutations``, ``mutation_user_stacks`` and a dict variable's ``original_items`` say how
and where),
``Distribution._validate_args`` (read, to be put back),
``ShapeEnv.tracked_fakes`` (arguments that no operation reads),
``ShapeEnv.guard_or_defer_runtime_assert`` (wrapped during a trace to note the user's line of each
assert, which torch does not keep; without it the line is that of a nearby operation).
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import logging
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pwcc.compile.torch_private.dataflow import same_dataflow
from pwcc.compile.torch_private.folded import Folded, folded_values

_TORCH = str(Path(torch.__file__).parent)
# They log a failed trace at length; it reaches the user as one error instead.
_LOUD = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")


class SideEffectError(Exception):
    """The forward changes Python objects that exist outside it; ``names`` say which, ``where`` the line.

    ``code`` is the bytecode that Dynamo wrote to do it, after the graph ran.
    """

    def __init__(self, names: Sequence[str], where: str | None, code: types.CodeType | None = None) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)
        self.where = where
        self.code = code


class FoldedError(Exception):
    """The trace folded a value that differs by process; ``folded`` says which, where, and what to write."""

    def __init__(self, folded: Folded) -> None:
        super().__init__(folded.what)
        self.folded = folded


class NoOperationsError(Exception):
    """The forward holds no tensor operation."""


@dataclass
class RawCapture:
    """What one trace returned. ``guards``, ``fake_mode`` and ``shape_env`` are torch's own objects.

    ``arguments`` are the fake tensors of the forward's arguments by name, those the trace looked at;
    ``assert_lines`` the user's line of each runtime assert, by its expression. ``bytecode`` is what Dynamo
    wrote in place of the forward; ``replay`` makes a function of it, given what runs the graph.
    """

    graph_module: fx.GraphModule
    example_inputs: list[object]
    fake_mode: Any
    shape_env: Any
    guards: Sequence[Any]
    traced_code: tuple[types.CodeType, ...]
    arguments: Mapping[str, Any]
    assert_lines: Mapping[Any, str]
    global_scope: Mapping[str, object]
    bytecode: types.CodeType | None
    replay: Callable[[Callable[..., object]], Callable[..., object]]


def freezes_weights() -> bool:
    """Tell whether Inductor is asked to fold weights into code, for which Dynamo makes them constants."""
    from torch._inductor import config

    return bool(config.freezing)


@contextlib.contextmanager
def quiet_trace() -> Iterator[None]:
    """Enter what a trace needs: no grad, metrics and timing contexts, and a clean Dynamo before and after.

    Torch's own reports of a failed trace are kept off the log and the warnings. Distributions do not check
    their arguments meanwhile: the check branches on values, which no graph can hold.
    """
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    loud = [logger for logger in map(logging.getLogger, _LOUD) if not logger.disabled]
    torch._dynamo.reset()
    try:
        for logger in loud:
            logger.disabled = True
        with (
            warnings.catch_warnings(action="ignore"),
            torch.no_grad(),
            get_metrics_context(),
            dynamo_timed("pwcc_trace"),
            _distributions_unchecked(),
        ):
            yield
    finally:
        for logger in loud:
            logger.disabled = False
        torch._dynamo.reset()


@contextlib.contextmanager
def _distributions_unchecked() -> Iterator[None]:
    from torch.distributions import Distribution

    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def fullgraph_capture(
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    finish: Callable[[fx.GraphModule], None] = lambda graph_module: None,
) -> RawCapture:
    """Trace ``forward`` once into one graph; raises what Dynamo raises.

    ``finish`` rewrites the graph while Dynamo's tables still hold what it names.

    A forward that iterates over a set of strings is traced a second time with the set in reverse order: the
    order is another in every process, so both graphs must compute the same.

    Raises:
        SideEffectError: the forward changes Python objects that exist outside it.
        FoldedError: the graph depends on a value that differs by process and that Dynamo guards not.
        NoOperationsError: the forward holds no tensor operation.
    """
    from torch._dynamo import convert_frame

    with (
        quiet_trace(),
        _assert_lines() as lines,
        _side_effects() as effects,
        folded_values(user_line) as folded,
    ):
        out: Any = convert_frame.fullgraph_capture(forward, args, kwargs)
        if out.backend_input is not None:
            finish(out.backend_input.graph_module)
    if folded.refused:
        raise FoldedError(folded.refused[0])
    if folded.ordered:
        with quiet_trace(), folded_values(user_line, descending=True):
            reverse: Any = convert_frame.fullgraph_capture(forward, args, kwargs)
            if reverse.backend_input is not None:
                finish(reverse.backend_input.graph_module)
        graphs = [one.backend_input and one.backend_input.graph_module for one in (out, reverse)]
        if all(graphs) and not same_dataflow(*graphs):
            raise FoldedError(folded.ordered[0])
    if effects:
        where = next((line for line in effects.values() if line), None)
        raise SideEffectError(tuple(effects), where, getattr(out.graph_capture_output, "bytecode", None))
    captured = out.graph_capture_output
    backend = out.backend_input
    if backend is None:
        raise NoOperationsError
    output_graph = captured.output_graph
    shape_env = backend.fake_mode.shape_env

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
        shape_env=shape_env,
        guards=list(output_graph.guards),
        traced_code=tuple(dict.fromkeys(captured.traced_code)),
        arguments=_arguments(shape_env),
        assert_lines=lines,
        global_scope=captured.f_globals,
        bytecode=getattr(captured, "bytecode", None),
        replay=replay,
    )


def _arguments(shape_env: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        match = re.fullmatch(r"L\['(\w+)'\]", _source_name(tracked.source))
        if match and isinstance(tracked.fake, torch.Tensor):
            found[match.group(1)] = tracked.fake
    return found


def _source_name(source: Any) -> str:
    name = getattr(source, "name", "")  # a method in 2.11, a property in 2.13
    return str(name() if callable(name) else name)


@contextlib.contextmanager
def _side_effects() -> Iterator[dict[str, str | None]]:
    """Note what the traced code changes outside itself, by name, with the user's line."""
    from torch._dynamo.side_effects import SideEffects

    found: dict[str, str | None] = {}
    original: Any = SideEffects.codegen_update_mutated

    def noting(effects: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in effects._get_modified_vars():
            existed = type(getattr(variable, "mutation_type", None)).__name__.endswith("Existing")
            if existed and not _is_restored(effects, variable):
                stacks = effects.mutation_user_stacks.get(variable) or [None]
                base = _plain(_source_name(variable.source))
                writes = [name for name in effects.store_attr_mutations.get(variable, ()) if name != base]
                for name in [f"{base}.{write}" for write in writes] or _rebound(variable, base):
                    found.setdefault(name, user_line(stacks[0]))
        return original(effects, *args, **kwargs)

    with _replaced(SideEffects, "codegen_update_mutated", noting):
        yield found


_TABLES = {"_buffers": "buffer", "_parameters": "parameter", "_modules": "submodule"}


def _rebound(variable: Any, base: str) -> list[str]:
    """Name what changed in an object without attributes: of a module's table, each entry that is new."""
    owner, _, table = base.rpartition(".")
    items, before = (getattr(variable, name, None) for name in ("items", "original_items"))
    if table not in _TABLES or not isinstance(items, dict) or not isinstance(before, dict):
        return [base]
    now, then = ({_key(key): value for key, value in held.items()} for held in (items, before))
    changed = [key for key in {**then, **now} if key is not None and now.get(key) is not then.get(key)]
    return [f"{owner}.{key} (a {_TABLES[table]} that is rebound)" for key in changed] or [base]


def _key(key: Any) -> str | None:
    value = getattr(getattr(key, "vt", key), "value", None)
    return value if isinstance(value, str) else None


def _is_restored(effects: Any, variable: Any) -> bool:
    """Tell whether an object's attributes end as they were: set and reset, as a context variable is."""
    writes = effects.store_attr_mutations.get(variable)
    if not writes:
        return False
    held = getattr(getattr(variable, "value", None), "__dict__", {})
    return all(
        name in held
        and value.is_python_constant()
        and type(held[name]) is type(value.as_python_constant())
        and held[name] == value.as_python_constant()
        for name, value in writes.items()
    )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _plain(name: str) -> str:
    """Turn ``L['self']._modules['lin']`` into ``self.lin``."""
    text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)


@contextlib.contextmanager
def _assert_lines() -> Iterator[dict[Any, str]]:
    """Note the user's line of every runtime assert that is deferred in the block."""
    from torch._guards import TracingContext
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    lines: dict[Any, str] = {}
    original: Any = getattr(ShapeEnv, "guard_or_defer_runtime_assert", None)
    if original is None:
        yield lines
        return

    def noting(env: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(env, "num_deferred_runtime_asserts", 0)
        result = original(env, *args, **kwargs)
        if getattr(env, "num_deferred_runtime_asserts", 0) > before:
            where = user_line(TracingContext.extract_stack())
            for asserts in env.deferred_runtime_asserts.values():
                if where is not None and asserts:
                    lines.setdefault(asserts[-1].expr, where)
        return result

    with _replaced(ShapeEnv, "guard_or_defer_runtime_assert", noting):
        yield lines


def user_line(frames: Sequence[traceback.FrameSummary] | None) -> str | None:
    """Return ``file:line: code`` of the innermost frame outside torch, else of the innermost."""
    shown = [frame for frame in frames or () if not frame.filename.startswith("<frozen")]
    own = [frame for frame in shown if not frame.filename.startswith(_TORCH)]
    if not shown:
        return None
    last = (own or shown)[-1]
    return f"{last.filename}:{last.lineno}" + (f": {last.line}" if last.line else "")


def mark_unbacked(tensor: torch.Tensor, dim: int) -> None:
    """Make ``dim`` a symbol of which the trace may assume that it is 1 or more, and nothing else.

    Where torch cannot be told, it may be 0, too: then ``x + x[:1]`` is an assumption.
    """
    from torch._dynamo import decorators

    if "min" in inspect.signature(decorators.mark_unbacked).parameters:
        decorators.mark_unbacked(tensor, dim, min=1)
    else:
        decorators.mark_unbacked(tensor, dim)


def mark_dynamic(tensor: torch.Tensor, dim: int, *, low: int, high: int) -> None:
    """Make ``dim`` a symbol in ``[max(low, 2), high]`` that the trace may guard on."""
    torch._dynamo.mark_dynamic(tensor, dim, min=max(low, 2), max=high)


_INNER_ERROR = re.compile(
    r"""got (?P<kind>\w+(?:Error|Exception))\((?P<quote>['"])(?P<text>.*?)(?P=quote)\)""", re.DOTALL
)


def fails_itself(error: BaseException) -> bool:
    """Tell whether the traced code raised an error of its own, rather than doing what cannot be traced."""
    from torch._dynamo import exc

    text = str(getattr(error, "msg", None) or error)
    return bool(_INNER_ERROR.search(text)) or not isinstance(error, exc.TorchDynamoException)


def describe_failure(error: BaseException) -> tuple[str, str | None]:
    """Return (what happened, the user's innermost ``file:line: code``) of a failed trace."""
    text = str(getattr(error, "msg", None) or error).strip()
    lines = [line.strip() for line in text.splitlines()] or [""]
    context = next((line for line in lines if line.startswith("Developer debug context:")), "").partition(":")[
        2
    ]
    message = lines[0] + (f" ({context.strip()[:200]})" if context.strip() else "")
    inner = _INNER_ERROR.search(text)
    if inner:  # the code itself fails, on fake tensors as it would on real ones
        message = f"{inner['kind']}: {inner['text']}"
    return message, user_line(getattr(error, "real_stack", None))


def is_data_dependent(error: BaseException) -> bool:
    """Tell whether a trace failed because the code asks for the value of an unbacked size."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GuardOnDataDependentSymNode):
            return True
        seen = seen.__cause__ or seen.__context__
    return "data-dependent expression" in str(error) or "ConstraintViolation" in type(error).__name__


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """Exception classes of a failed trace: Dynamo's own, and errors of the traced code that it lets pass."""
    from torch._dynamo import exc

    own = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ArithmeticError)
    return (exc.TorchDynamoException, *own)
