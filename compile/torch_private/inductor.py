"""The seam to Inductor: compile one rebuilt piece and return the wrapper, its module and its facts.

Run on torch 2.11.0+cu130 and 2.13.0+cpu. Private names used: ``compile_fx.compile_fx`` with an
``inner_compile`` hook (gives the CompiledFxGraph before AOTAutograd wraps it), ``CompiledFxGraph``'s
fields, ``codecache.PyCodeCache.modules`` (the loaded wrapper), ``_dynamo.utils.count_calls`` (replaced while
Inductor runs, which gives no wrapper for a graph without operations),
``config.post_grad_custom_post_pass`` with ``custom_graph_pass.CustomGraphPass``,
``decomposition.select_decomp_table``, ``TracingContext.fw_metadata`` (what AOTAutograd's runtime wrapper would
do), ``config.patch``.
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

from pwcc.cache.errors import UnsealableError, UsageError
from pwcc.compile.torch_private import fused_lowering, symbols


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


def warm_up(device: str) -> None:
    """Do what the first piece of a process pays for, while no piece is there yet: imports, tables, the device.

    One matrix product is compiled, which needs no kernel of Inductor's. Call it within :func:`private_caches`.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, x)),))
    off = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with torch.no_grad(), config.patch(off), functorch_config.patch({"enable_autograd_cache": False}):
        run: Any = compile_fx.compile_fx(fx.GraphModule({}, graph), [torch.ones(2, 2, device=device)])
        run(torch.ones(2, 2, device=device))


@contextlib.contextmanager
def _graphs_without_calls() -> Iterator[None]:
    """Compile also a graph in which nothing is left to do, such as ``x.contiguous()``; Inductor skips those."""
    from torch._dynamo import utils

    original = utils.count_calls
    utils.count_calls = lambda g: max(original(g), 1)
    try:
        yield
    finally:
        utils.count_calls = original


def compile_graph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    options: Mapping[str, object],
    *,
    passes: Callable[[fx.Graph], None] | None = None,
) -> InductorResult:
    """Compile one graph under ``options`` (Inductor config patches); raises what Inductor raises.

    ``passes`` rewrites the graph once, in place, after Inductor's own rewriting of it and before it undoes
    functionalisation.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config
    from torch._inductor.codecache import PyCodeCache

    fused_lowering.install_for(graph_module.graph)
    compiled: list[Any] = []
    drawn: list[str] = []

    def inner(graph: fx.GraphModule, examples: Sequence[Any], **rest: Any) -> Any:
        drawn.extend(random_operations(graph))
        _refuse_lost_offsets(graph)
        with _graphs_without_calls():
            result = compile_fx.compile_fx_inner(graph, examples, **rest)
        compiled.append(result)
        return result

    before = len(PyCodeCache.modules)
    autograd = {"enable_autograd_cache": False}
    with (
        torch.no_grad(),
        symbols.tracing(fake_mode) as context,
        config.patch({**options, **pass_options(passes)}),
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


def _refuse_lost_offsets(graph: fx.GraphModule) -> None:
    """Refuse an in-place operator on a view whose offset in its base depends on a size.

    Inductor of 2.11 and 2.13 asks the lowered view for the offset and gets 0: it would write elsewhere.
    """
    for node in graph.graph.nodes:
        if node.target is not torch.ops.higher_order.auto_functionalized_v2:
            continue
        for name, value in node.kwargs.items():
            if name.endswith("_storage_offset") and isinstance(value, fx.Node):
                raise UnsealableError(
                    f"{node.args[0]} writes a view that begins at an offset which depends on a size, "
                    "and Inductor loses such an offset",
                    hint="give the operator a tensor of its own, or the base and an index",
                )


def pass_options(passes: Callable[[fx.Graph], None] | None) -> dict[str, object]:
    """Return the setting under which Inductor calls ``passes``.

    Raises:
        UsageError: the process has set a pass of its own there, which no key would hold.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if passes is None:
        return {}
    if config.post_grad_custom_post_pass is not None:
        raise UsageError(
            "torch._inductor.config.post_grad_custom_post_pass is set, and it is not in the key",
            hint="make it a pass of pwcc, named by --passes module:Class, or compile with --passes none",
        )
    run = passes

    class Hook(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            run(graph)

        def uuid(self) -> None:
            return None  # nothing of Inductor's is cached outside our store

    return {"post_grad_custom_post_pass": Hook()}


def compile_whole(graph_module: fx.GraphModule, fake_mode: Any) -> Callable[..., Sequence[Any]]:
    """Compile a traced graph as ``torch.compile`` would, for calls without gradients; in this process only.

    Its placeholders tell what it takes (``example_value``); returns a callable of the real values.
    """
    from torch._inductor import compile_fx

    examples = [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), symbols.tracing(fake_mode):
        run: Any = compile_fx.compile_fx(graph_module, examples)
    function: Callable[..., Sequence[Any]] = run
    return function


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
