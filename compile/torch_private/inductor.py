"""The seam to Inductor: compile one rebuilt piece and return the wrapper, its module and its facts.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used: ``compile_fx.compile_fx`` with an
``inner_compile`` hook (gives the CompiledFxGraph before AOTAutograd wraps it), ``CompiledFxGraph``'s
fields, ``codecache.PyCodeCache.modules`` (the loaded wrapper), ``TracingContext.fw_metadata`` (what
AOTAutograd's runtime wrapper would do), ``config.patch``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.torch_private import symbols


@dataclass(frozen=True)
class InductorResult:
    """One compiled piece.

    ``run`` is Inductor's own callable (list of inputs -> outputs); ``guards`` are conditions on sizes
    that lowering added, as (sympy expression, source line).
    """

    run: Callable[[list[Any]], Sequence[Any]]
    source: str
    module: ModuleType
    constants: Mapping[str, torch.Tensor]
    inputs_to_check: tuple[int, ...]
    mutated_inputs: tuple[int, ...]
    output_strides: tuple[tuple[str, ...] | None, ...]
    defers_input_alignment: bool
    guards: tuple[tuple[Any, str | None], ...]


NO_LINE_INFO = "TRITON_DISABLE_LINE_INFO"
"""The variable that is set while pieces compile, whatever the user set it to."""


@contextlib.contextmanager
def private_caches(directory: Path) -> Iterator[None]:
    """Set what Inductor and Triton read from the environment only: their directories, and no line info.

    Cubins with line info name the builder's paths.
    """
    wanted = {
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        NO_LINE_INFO: "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def fresh_workers(directory: Path) -> Iterator[None]:
    """Run with Inductor worker processes that know only ``directory``; none outlives the context.

    Worker processes keep the environment they were started with, so ones from before must go.
    """
    with private_caches(directory):
        _stop_workers()
        try:
            yield
        finally:
            _stop_workers()


def _stop_workers() -> None:
    module: Any = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.shutdown_compile_workers()


def compile_graph(
    graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, options: Mapping[str, object]
) -> InductorResult:
    """Compile one graph under ``options`` (Inductor config patches); raises what Inductor raises."""
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config
    from torch._inductor.codecache import PyCodeCache

    compiled: list[Any] = []
    drawn: list[str] = []

    def inner(graph: fx.GraphModule, examples: Sequence[Any], **rest: Any) -> Any:
        drawn.extend(random_operations(graph))
        result = compile_fx.compile_fx_inner(graph, examples, **rest)
        compiled.append(result)
        return result

    before = len(PyCodeCache.modules)
    autograd = {"enable_autograd_cache": False}
    with (
        torch.no_grad(),
        symbols.tracing(fake_mode) as context,
        config.patch(dict(options)),
        functorch_config.patch(autograd),
    ):
        run: Any = compile_fx.compile_fx(graph_module, list(inputs), inner_compile=inner)
        _refuse_runtime_wrappers(context.fw_metadata)
    if drawn:
        raise UnsealableError(
            f"the piece draws random numbers ({', '.join(dict.fromkeys(drawn))})",
            hint="call model.eval(), or draw them outside the compiled module and pass them in",
        )
    if len(compiled) != 1 or not hasattr(compiled[0], "source_code"):
        raise UnsealableError(
            f"expected one compiled graph of a piece, Inductor made {len(compiled)} "
            f"({', '.join(type(item).__name__ for item in compiled)})"
        )
    graph = compiled[0]
    modules = [m for m in PyCodeCache.modules[before:] if _source(m) == graph.source_code]
    if not modules:
        modules = [m for m in PyCodeCache.modules if _source(m) == graph.source_code]
    if not modules:
        raise UnsealableError("Inductor's wrapper module of a piece was not found")
    if getattr(graph, "frozen_param_names", None) or getattr(graph, "torchbind_constants", None):
        raise UnsealableError("Inductor folded weights or script objects into a piece (freezing)")
    return InductorResult(
        run=lambda values: run(*values),  # a GraphModule that returns a tuple is called unboxed
        source=graph.source_code,
        module=modules[-1],
        constants=dict(graph.constants or {}),
        inputs_to_check=tuple(graph.inputs_to_check),
        mutated_inputs=tuple(graph.mutated_input_idxs),
        output_strides=tuple(graph.output_strides or ()),
        defers_input_alignment=bool(getattr(graph, "_defers_input_alignment", False)),
        guards=tuple(symbols.shape_guards(fake_mode.shape_env)),
    )


def random_operations(graph: fx.GraphModule) -> list[str]:
    """Return the operations that draw random numbers; attention without dropout draws none."""
    found: list[str] = []
    for node in graph.graph.nodes:
        target = node.target
        if (
            not isinstance(target, torch._ops.OpOverload)
            or torch.Tag.nondeterministic_seeded not in target.tags
        ):
            continue
        names = [argument.name for argument in target._schema.arguments]
        if "dropout_p" in names:
            index = names.index("dropout_p")
            default = target._schema.arguments[index].default_value
            given = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", default)
            if given == 0:
                continue
        found.append(str(target))
    return found


def _source(module: ModuleType) -> str | None:
    path = getattr(module, "__file__", None)
    try:
        return Path(path).read_text() if path else None
    except OSError:
        return None


def _refuse_runtime_wrappers(metadata: Any) -> None:
    """Refuse what AOTAutograd would do around the compiled graph and a sealed piece would not."""
    if metadata is None:
        raise UnsealableError("AOTAutograd left no metadata about a piece, so its runtime wrapper is unknown")
    reasons: list[str] = []
    for index, info in enumerate(metadata.input_info):
        if info.mutates_metadata or getattr(info, "mutates_storage_metadata", False):
            reasons.append(f"input {index} has its metadata (shape or strides) changed")
        if getattr(info, "mutation_inductor_storage_resize", False):
            reasons.append(f"input {index} has its storage resized")
    if any(type(meta).__name__ == "SubclassCreationMeta" for meta in metadata.subclass_inp_meta or ()):
        reasons.append("an input is a tensor subclass")
    if getattr(metadata, "tokens", None):
        reasons.append("the piece has ordered side effects (tokens)")
    if getattr(metadata, "is_rng_op_functionalized", False):
        reasons.append("the piece draws random numbers through functionalised state")
    if reasons:
        raise UnsealableError("a piece needs AOTAutograd's runtime wrapper: " + "; ".join(reasons))


def failed_operation(error: BaseException) -> str | None:
    """Return the operation that Inductor names in a failure, such as ``aten.foo.default``."""
    text = str(error)
    match = re.search(r"target: ([\w.:]+)", text) or re.search(r"node (?:named )?%?(\w+)", text)
    return match.group(1) if match else None


def config_changes() -> dict[str, object]:
    """Return Inductor and functorch settings that differ from their defaults, if those are imported at all.

    Only values with a portable form are returned by value; others by type name.
    """
    changes: dict[str, object] = {}
    for name in ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config"):
        module: Any = sys.modules.get(name)
        if module is None or not hasattr(module, "_is_default"):
            continue
        for key, entry in module._config.items():
            # "Overridden with the default" is no change: config.patch leaves what it patched in that state.
            if entry.alias is None and not module._is_default(key) and getattr(module, key) != entry.default:
                value = getattr(module, key)
                portable = isinstance(value, (bool, int, float, str, type(None), list, tuple))
                changes[f"{name}.{key}"] = repr(value) if portable else type(value).__name__
    return changes
