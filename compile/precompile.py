"""Artifact: from a live model to a published entry, or to the entry that is there already."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from pwcc.cache.errors import CacheMiss, StoreError
from pwcc.cache.store import Store
from pwcc.compile.build_factors import build_factors
from pwcc.compile.dump import dump_program
from pwcc.compile.hit import find_entry, hit_report
from pwcc.compile.inputs import InputSpec
from pwcc.compile.job import Job
from pwcc.compile.load import lookup
from pwcc.compile.report import CompilePlan, CompileReport, OnProgress, Progress, silent
from pwcc.compile.request import make_request
from pwcc.compile.tracing import make_plan, stitch_of, trace_all

LOCK_SILENCE_S = 1.0  # how long to wait for another process without a word


def precompile(
    model: nn.Module,
    *,
    cache_dir: Path,
    specs: tuple[InputSpec, ...],
    sizes: Sequence[int],
    max_tokens: int,
    device: torch.device | str,
    identity: str,
    args: Mapping[str, object] | None = None,
    splitting_ops: Sequence[str] = ("pwcc::attention",),
    autotune: bool = False,
    cpu_isa: str = "native",
    jobs: int | None = None,
    profile: str | None = None,
    frozen: bool = False,
    dump: Path | None = None,
    on_progress: OnProgress = silent,
    build_observed: bool = False,
) -> CompileReport:
    """Compile a model into a cache directory, or find that it is there already.

    Args:
        model: the module in eval mode; parameters may be on the meta device (their values are not read).
        cache_dir: the cache directory; created if it does not exist.
        specs: one per tensor argument of ``forward``, see :func:`pwcc.compile.inputs.input_specs`.
        sizes: token counts that get a static variant each.
        max_tokens: largest token count that the dynamic variant serves; it starts at 1.
        device: ``cpu`` or ``cuda[:i]``.
        identity: portable name of the model, as ``builtin:llama-tiny`` or ``module:Class``.
        args: arguments the model was built with, for the key.
        splitting_ops: operations that run outside every piece, ``ns::name``.
        autotune: max-autotune and coordinate descent for the static variants.
        cpu_isa: ``native``, ``avx2`` or ``avx512``.
        jobs: compile processes; None decides by cores, memory and work.
        profile: a name that ``load`` can ask for.
        frozen: raise instead of compiling.
        dump: write the split graph, pieces, wrappers and ``stitch.py`` here.
        on_progress: called with every step.
        build_observed: whether what the model's construction read was recorded; nothing does so yet.

    Raises:
        CacheMiss: ``frozen`` and no entry is there.
        TraceError, SpecializationError, UnsealableError, PieceCompileError, NumericsError: see each.
        StoreError: the directory cannot be written. No entry is left by a failure.
    """
    started = time.perf_counter()
    request = make_request(
        model,
        specs=specs,
        sizes=sizes,
        max_tokens=max_tokens,
        device=device,
        identity=identity,
        args=args,
        splitting_ops=splitting_ops,
        autotune=autotune,
        cpu_isa=cpu_isa,
        profile=profile,
        build_observed=False,
    )
    store = _open_frozen(cache_dir) if frozen else Store.create(cache_dir)
    on_progress(Progress("lookup"))
    key, tree_digest = lookup(model, request.target)
    build = build_factors(request.options, request.target, request.identity, request.args)
    found, reasons = find_entry(store, model, request, key, build)
    if found is not None:
        return hit_report(found, request, time.perf_counter() - started, dump=dump)
    if frozen:
        raise CacheMiss(
            f"no entry of these options for {identity} (lookup key {key[:12]})",
            reasons=reasons or ["the cache holds no entry for this model on this torch, device and mode"],
            where=str(cache_dir),
            hint="run without --frozen to compile it",
        )
    with _lock(store, key, on_progress):
        found, _ = find_entry(store, model, request, key, build)
        if found is not None:
            return hit_report(found, request, time.perf_counter() - started, dump=dump)
        job = Job(
            store=store,
            model=model,
            request=request,
            build=build,
            on_progress=on_progress,
            jobs=jobs,
            dump=dump,
        )
        return job.run(key, tree_digest, started)


def plan(
    model: nn.Module,
    *,
    specs: tuple[InputSpec, ...],
    sizes: Sequence[int],
    max_tokens: int,
    device: torch.device | str,
    identity: str,
    args: Mapping[str, object] | None = None,
    splitting_ops: Sequence[str] = ("pwcc::attention",),
    autotune: bool = False,
    cpu_isa: str = "native",
    profile: str | None = None,
    dump: Path | None = None,
    on_progress: OnProgress = silent,
) -> CompilePlan:
    """Trace and split, compile nothing, and say what would be compiled. Raises as :func:`precompile`."""
    request = make_request(
        model,
        specs=specs,
        sizes=sizes,
        max_tokens=max_tokens,
        device=device,
        identity=identity,
        args=args,
        splitting_ops=splitting_ops,
        autotune=autotune,
        cpu_isa=cpu_isa,
        profile=profile,
        build_observed=False,
    )
    on_progress(Progress("trace"))
    traced = trace_all(model, request)
    if dump is not None:
        for number, item in enumerate(traced):
            dump_program(dump, number, item.trace, item.program, stitch_of(item))
    return make_plan(model, request, traced)


def _open_frozen(cache_dir: Path) -> Store:
    """Open a cache for ``frozen``: nothing there, as after a restore that found nothing, is a miss."""
    if not cache_dir.exists() or (cache_dir.is_dir() and not any(cache_dir.iterdir())):
        raise CacheMiss(
            "no entry: the cache directory is empty or does not exist",
            where=str(cache_dir),
            hint="restore the cache, or run without --frozen to compile",
        )
    return Store.open(cache_dir)


@contextlib.contextmanager
def _lock(store: Store, key: str, on_progress: OnProgress) -> Iterator[None]:
    """Hold the lookup key's lock; say that it takes long only if it does."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(store.lock(key, timeout_s=LOCK_SILENCE_S))
        except StoreError:  # held by another process; what else may be wrong shows at the second attempt
            on_progress(Progress("lock", detail="waiting for another process that compiles this model"))
            held.enter_context(store.lock(key))
        yield
