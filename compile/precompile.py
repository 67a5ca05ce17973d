"""Artifact: from a live model to a published entry, or to the entry that is there already."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from pwcc.cache import last_use
from pwcc.cache.errors import UsageError
from pwcc.cache.layers import create_layered, find_layered, require_trust
from pwcc.cache.layers import named as named_layers
from pwcc.cache.policy import TABLES_ONLY, Policy
from pwcc.cache.store import Store
from pwcc.cache.switches import FROZEN, RECACHE, Switches
from pwcc.cache.telemetry import logger_of, span
from pwcc.cache.trust import restrict
from pwcc.compile.autotune import find_pins
from pwcc.compile.build_factors import build_factors
from pwcc.compile.dump import dump_programs, dumping, trace_programs
from pwcc.compile.frozen import Frozen
from pwcc.compile.hit import find_entry, hit_report
from pwcc.compile.input_forms import Spec
from pwcc.compile.job import Job
from pwcc.compile.load import lookup
from pwcc.compile.observation import Observation
from pwcc.compile.ops.custom_ops import DEFAULT_CUSTOM_OPS
from pwcc.compile.passes.registry import DEFAULT_PASSES, Passes
from pwcc.compile.ranges import Range
from pwcc.compile.report import CompilePlan, CompileReport, OnProgress, Progress, silent
from pwcc.compile.request import make_request
from pwcc.compile.split import DEFAULT_SPLITTING_OPS
from pwcc.compile.tracing import make_plan, trace_all
from pwcc.compile.turns import NO_LOCKS, keeping_up, taking_turns
from pwcc.compile.verify_hit import compile_again


def precompile(
    model: nn.Module,
    *,
    cache_dir: Path,
    specs: tuple[Spec, ...],
    sizes: Sequence[int],
    max_tokens: int,
    device: torch.device | str,
    identity: str,
    args: Mapping[str, object] | None = None,
    splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS,
    autotune: bool = False,
    cpu_baseline: str = "native",
    jobs: int | None = None,
    profile: str | None = None,
    frozen: bool = False,
    dump: Path | None = None,
    on_progress: OnProgress = silent,
    observation: Observation | None = None,
    tag: str | None = None,
    verify_hit: bool = False,
    policy: Policy = TABLES_ONLY,
    require_signature: bool = False,
    trust_dir: bool = False,
    lock_timeout_s: float | None = None,
    layers: Sequence[str | Path] | None = None,
    ranges: Sequence[Range] = (),
    allow_gaps: bool = False,
    autotune_from: str | None = None,
    passes: Passes = DEFAULT_PASSES,
    custom_ops: str = DEFAULT_CUSTOM_OPS,
) -> CompileReport:
    """Compile a model into a cache directory, or find that it is there already.

    Args:
        model: the module in eval mode; parameters may be on the meta device (their values are not read).
        cache_dir: the cache directory; created if it does not exist.
        specs: one per argument of ``forward`` without a plain default, see
            :func:`pwcc.compile.inputs.input_specs`.
        sizes: token counts that get a static variant each.
        ranges: inclusive ranges of token counts that get a dynamic variant each, instead of the one
            ``1..max_tokens``; they may overlap.
        allow_gaps: let ranges and sizes leave token counts out; a call of such a size raises SizeError.
        max_tokens: largest token count that the dynamic variant serves; it starts at 1.
        passes: graph passes inside Inductor, see :func:`pwcc.compile.passes.registry.resolve`.
        custom_ops: which of pwcc's own operators keep their kernels, see :mod:`pwcc.compile.ops.custom_ops`.
        device: ``cpu`` or ``cuda[:i]``.
        identity: portable name of the model, as ``builtin:llama-tiny`` or ``module:Class``.
        args: arguments the model was built with, for the key.
        splitting_ops: operations that run outside every piece, ``ns::name``.
        autotune: max-autotune and coordinate descent for the static variants.
        autotune_from: ``KEY`` of an entry of this cache, or ``DIR/KEY``, whose tuning is taken instead of
            timing anything anew; implies ``autotune``. What it does not decide is tuned, with a warning.
        cpu_baseline: ``native``, or ``x86-64-v2``, ``v3`` (AVX2) or ``v4`` (AVX-512) in full.
        jobs: compile processes; None decides by cores, memory and work.
        profile: a name that ``load`` can ask for.
        frozen: raise instead of compiling; so does ``PWCC_FROZEN=1``. ``PWCC_RECACHE=1`` ignores entries and
            pieces that are there, compiles and replaces them.
        dump: write the split graph, pieces, wrappers and ``stitch.py`` here.
        policy: which environment variables are factors beside those of pwcc's own tables.
        on_progress: called with every step.
        require_signature: an entry that no trusted key signed is no hit, and no piece is used again.
        trust_dir: use the directory although others could have written it, see :mod:`pwcc.cache.ownership`.
        lock_timeout_s: how long to wait for another process that compiles this model; None is without limit.
        layers: cache directories to read below ``cache_dir``, see :mod:`pwcc.cache.layers`; an entry found
            there is a hit, pieces found there are used, what is published is complete in ``cache_dir``.
            None is ``PWCC_LAYERS``.
        tag: a name for this part of a model that has several; only a load with the same tag finds it.
        verify_hit: on a hit, compile once more into a private store and compare; see ``verified`` of the
            report, which is None where nothing was found. Nothing is repaired.
        observation: what was seen while the model was built, see ``BuiltModel.observation``; None for a model
            that was built elsewhere, whose entry is marked "build unobserved".

    Raises:
        CacheMiss: ``frozen`` and no entry is there.
        CacheDisabled: ``PWCC_DISABLE`` is on.
        TraceError, SpecializationError, UnsealableError, PieceCompileError, NumericsError: see each.
        StoreError: the directory cannot be written. No entry is left by a failure; finished pieces are kept,
            and a later compile uses them. UntrustedStore: others could have written it. LockTimeout.
    """
    started = time.perf_counter()
    switches = Switches.read(frozen=frozen)
    switches.require_cache("a compile")
    if verify_hit and switches.recache:
        raise UsageError(f"{RECACHE} ignores what a cache holds, so there is no hit to verify")
    request = make_request(
        model,
        specs=specs,
        sizes=sizes,
        max_tokens=max_tokens,
        device=device,
        identity=identity,
        args=args,
        splitting_ops=splitting_ops,
        autotune=autotune or autotune_from is not None,
        cpu_baseline=cpu_baseline,
        profile=profile,
        build_observed=observation is not None and observation.complete,
        tag=tag,
        policy=policy,
        ranges=ranges,
        allow_gaps=allow_gaps,
        passes=passes,
        custom_ops=custom_ops,
    )
    below = named_layers(layers)
    if switches.frozen:
        hint = f"restore the cache, or run without --frozen and {FROZEN} to compile"
        store = find_layered(cache_dir, below, hint=hint)
    else:
        store = create_layered(cache_dir, below)
    require_trust(store, trust=trust_dir)  # pieces found there become part of what is published
    restrict(store, require_signature)
    pins = None if autotune_from is None else find_pins(autotune_from, store, trust=trust_dir)
    on_progress(Progress("lookup"))
    key, tree_digest = lookup(model, request.target, tag)
    measure = functools.partial(
        build_factors, request.options, request.target, request.identity, request.args, request.policy
    )
    build = measure()
    frozen_as = Frozen(model, request, build, key, tree_digest, measure)

    def job(where: Store, dump_to: Path | None) -> Job:
        return Job(
            store=where,
            model=model,
            request=request,
            build=build,
            frozen=frozen_as,
            on_progress=on_progress,
            jobs=jobs,
            dump=dump_to,
            observation=observation,
            recache=switches.recache,
            pins=pins,
        )

    found = None if switches.recache else find_entry(store, model, request, key, build)
    if found is not None:
        logger_of("compile").info("hit: %s", found[1])
        last_use.record(store, found[0].entry_key)
        report = hit_report(found, request, time.perf_counter() - started, dump=dump)
        if not verify_hit:
            return report
        verified = compile_again(
            store, found[0], request, lambda where: job(where, None).run(key, tree_digest, started)
        )
        return replace(report, verified=verified)
    if switches.frozen:
        from pwcc.compile.explain import frozen_miss
        from pwcc.compile.here import Here

        raise frozen_miss(Here.now(model, request.target, tag=tag), store, request, build)
    with taking_turns(store, key, on_progress, timeout_s=lock_timeout_s) as locked:
        found = None if switches.recache else find_entry(store, model, request, key, build)
        if found is not None:
            return hit_report(found, request, time.perf_counter() - started, dump=dump)
        with dumping(dump), span("compile", model=identity, device=str(request.target.device)):
            report = keeping_up(lambda: job(store, dump).run(key, tree_digest, started), on_progress)
        return report if locked else replace(report, warnings=(*report.warnings, NO_LOCKS))


def plan(
    model: nn.Module,
    *,
    specs: tuple[Spec, ...],
    sizes: Sequence[int],
    max_tokens: int,
    device: torch.device | str,
    identity: str,
    args: Mapping[str, object] | None = None,
    splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS,
    autotune: bool = False,
    cpu_baseline: str = "native",
    profile: str | None = None,
    dump: Path | None = None,
    on_progress: OnProgress = silent,
    ranges: Sequence[Range] = (),
    allow_gaps: bool = False,
    passes: Passes = DEFAULT_PASSES,
    custom_ops: str = DEFAULT_CUSTOM_OPS,
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
        cpu_baseline=cpu_baseline,
        profile=profile,
        build_observed=False,
        ranges=ranges,
        allow_gaps=allow_gaps,
        passes=passes,
        custom_ops=custom_ops,
    )
    on_progress(Progress("trace"))
    with dumping(dump):
        traced = trace_all(model, request)
        trace_programs(0, traced)
        if dump is not None:
            dump_programs(dump, traced)
    return make_plan(model, request, traced)
