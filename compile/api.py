"""Artifact: the library's ``precompile``, with the defaults that a caller of a live model expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from pwcc.cache.policy import TABLES_ONLY, Policy
from pwcc.cache.store import default_root
from pwcc.compile import precompile as stages
from pwcc.compile.input_forms import Spec
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_tree import identity
from pwcc.compile.ops.custom_ops import DEFAULT_CUSTOM_OPS
from pwcc.compile.passes.registry import DEFAULT_PASSES, Passes
from pwcc.compile.ranges import Range
from pwcc.compile.report import CompileReport, OnProgress, silent
from pwcc.compile.request import DEFAULT_MAX_TOKENS
from pwcc.compile.split import DEFAULT_SPLITTING_OPS
from pwcc.compile.target import device_of, parse_device

Inputs = Sequence[str | Spec] | Callable[[int], object] | None


def precompile(
    model: nn.Module,
    *,
    cache_dir: str | Path | None = None,
    sizes: Sequence[int] = (),
    max_tokens: int = DEFAULT_MAX_TOKENS,
    inputs: Inputs = None,
    device: torch.device | str | None = None,
    splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS,
    autotune: bool = False,
    cpu_baseline: str = "native",
    jobs: int | None = None,
    profile: str | None = None,
    frozen: bool = False,
    tag: str | None = None,
    verify_hit: bool = False,
    policy: Policy = TABLES_ONLY,
    require_signature: bool = False,
    trust_dir: bool = False,
    lock_timeout_s: float | None = None,
    layers: Sequence[str | Path] | None = None,
    on_progress: OnProgress = silent,
    ranges: Sequence[Range] = (),
    allow_gaps: bool = False,
    autotune_from: str | None = None,
    passes: Passes = DEFAULT_PASSES,
    custom_ops: str = DEFAULT_CUSTOM_OPS,
) -> CompileReport:
    """Compile a live model into a cache directory, or find that it is there already.

    The model was built by the caller, so what its construction read is unknown: the entry is marked
    "build unobserved" and ``inspect`` shows it so.

    Args:
        model: a module in eval mode. Parameters may be on the meta device if ``device`` is given; they
            are then given memory there.
        cache_dir: the cache directory; default: ``PWCC_CACHE_DIR``, else the user's for pwcc.
        sizes: token counts that get a static variant each, within ``1..max_tokens``.
        max_tokens: largest token count that the dynamic variant serves; it starts at 1.
        ranges: inclusive ranges such as ``((1, 64), (65, 8192))`` that get a dynamic variant each, instead of
            one for all sizes. A call runs a static variant, else the tightest range that holds its size.
        allow_gaps: let ranges and sizes leave token counts out; a call of such a size raises SizeError.
        inputs: declarations such as ``["input_ids:int64[n]"]``, or a function of a token count that
            returns example tensors; default: the forward's annotations.
        device: ``cpu`` or ``cuda[:i]``; default is where the model's tensors lie.
        splitting_ops: operations that run outside every piece, ``ns::name``.
        autotune: max-autotune and coordinate descent for the static variants.
        autotune_from: ``KEY`` of an entry of this cache, or ``DIR/KEY``, whose tuning is taken instead of
            timing anything anew; implies ``autotune``.
        cpu_baseline: ``native``, or ``x86-64-v2``, ``v3`` (AVX2) or ``v4`` (AVX-512) in full; CPU entries only.
        jobs: compile processes; None decides by cores, memory and work.
        profile: a name that ``load`` can ask for.
        passes: graph passes inside Inductor, in order: a text such as ``"default"``, ``"none"`` or
            ``"noop,my.module:MyPass"``, or a sequence of names and passes.
        custom_ops: which of pwcc's own layer operators keep their kernels: ``"none"``, ``"all"``,
            ``"+name"``, ``"-name"``, with commas between.
        frozen: raise ``CacheMiss`` instead of compiling.
        tag: a name for this part of a model that has several, as ``encoder``; ``load`` takes the same.
        policy: which environment variables are factors beside those of pwcc's own tables.
        verify_hit: on a hit, compile once more in private and compare every byte: ``report.verified``.
        require_signature: an entry that no trusted key signed is no hit, and no piece is used again.
        trust_dir: use the directory although others than this user and root could have written it.
        layers: cache directories to read below ``cache_dir``, upper first; never written. Default:
            ``PWCC_LAYERS``.
        lock_timeout_s: how long to wait for another process that compiles this model; None is without limit.
        on_progress: called with every step.

    Returns:
        What was done; ``hit`` tells that nothing was compiled.

    Raises:
        PwccError: see :func:`pwcc.compile.precompile.precompile`.
    """
    target = device_of(model) if device is None else parse_device(device)
    declarations = () if inputs is None or callable(inputs) else tuple(inputs)
    examples = inputs if callable(inputs) else getattr(model, "example_inputs", None)
    return stages.precompile(
        model,
        cache_dir=default_root() if cache_dir is None else Path(cache_dir),
        specs=input_specs(model, declarations=declarations, example_inputs=examples),
        sizes=sizes,
        max_tokens=max_tokens,
        device=target,
        identity=identity(model),
        splitting_ops=splitting_ops,
        autotune=autotune,
        cpu_baseline=cpu_baseline,
        jobs=jobs,
        profile=profile,
        frozen=frozen,
        tag=tag,
        verify_hit=verify_hit,
        policy=policy,
        require_signature=require_signature,
        trust_dir=trust_dir,
        lock_timeout_s=lock_timeout_s,
        layers=layers,
        on_progress=on_progress,
        ranges=ranges,
        allow_gaps=allow_gaps,
        autotune_from=autotune_from,
        passes=passes,
        custom_ops=custom_ops,
    )
