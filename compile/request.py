"""Key: what one compile was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import nn

from pwcc.cache.errors import UsageError
from pwcc.cache.host import cpu_flags
from pwcc.cache.policy import TABLES_ONLY, Policy
from pwcc.compile.build_factors import BuildOptions
from pwcc.compile.input_forms import Spec
from pwcc.compile.ops.custom_ops import DEFAULT_CUSTOM_OPS, parse_policy
from pwcc.compile.passes.registry import DEFAULT_PASSES, Passes, resolve
from pwcc.compile.ranges import Range, checked_ranges
from pwcc.compile.sealing.profile import Baseline, cpu_target
from pwcc.compile.target import Target, check_tag, target_of

DEFAULT_MAX_TOKENS = 8192


@dataclass(frozen=True)
class Given:
    """The caller's own objects behind a request, to notice that they were changed later."""

    splitting_ops: Sequence[str]
    sizes: Sequence[int]
    args: Mapping[str, object] | None
    ranges: Sequence[Range] = ()


@dataclass(frozen=True)
class Request:
    """Everything that one compile was asked for. ``sizes`` are ascending; ``max_tokens`` bounds the range."""

    specs: tuple[Spec, ...]
    sizes: tuple[int, ...]
    max_tokens: int
    target: Target
    identity: str
    args: Mapping[str, object]
    options: BuildOptions
    profile: str | None
    build_observed: bool
    given: Given
    policy: Policy = TABLES_ONLY


def make_request(
    model: nn.Module,
    *,
    specs: tuple[Spec, ...],
    sizes: Sequence[int],
    max_tokens: int,
    device: torch.device | str,
    identity: str,
    args: Mapping[str, object] | None,
    splitting_ops: Sequence[str],
    autotune: bool,
    cpu_baseline: str,
    profile: str | None,
    build_observed: bool,
    tag: str | None = None,
    policy: Policy = TABLES_ONLY,
    ranges: Sequence[Range] = (),
    allow_gaps: bool = False,
    passes: Passes = DEFAULT_PASSES,
    custom_ops: str = DEFAULT_CUSTOM_OPS,
) -> Request:
    """Check the arguments of ``precompile`` and return them as one value.

    Raises:
        UsageError: sizes or ranges outside ``1..max_tokens`` or ranges with gaps, a model in training mode,
            a device torch does not see, an unknown CPU baseline or one beyond this machine, a tag that is
            no plain name.
    """
    if max_tokens < 1:
        raise UsageError(f"expected --max-tokens of at least 1, got {max_tokens}")
    wrong = [size for size in sizes if not 1 <= size <= max_tokens]
    if wrong:
        raise UsageError(f"expected sizes within 1..{max_tokens}, got {wrong[0]}", hint="raise --max-tokens")
    if model.training:
        raise UsageError("expected a model in eval mode", hint="call model.eval()")
    target = target_of(device)
    if target.device.type == "cpu":
        _require_builder(cpu_baseline)
    options = BuildOptions(
        sizes=tuple(sorted(set(sizes))),
        max_tokens=max_tokens,
        splitting_ops=tuple(splitting_ops),
        autotune=autotune,
        cpu_baseline=cpu_baseline if target.device.type == "cpu" else None,
        inputs=tuple(str(spec) for spec in specs),
        profile=profile,
        tag=check_tag(tag),
        ranges=checked_ranges(ranges, sizes=sizes, max_tokens=max_tokens, allow_gaps=allow_gaps),
        passes=resolve(passes),
        custom_ops=parse_policy(custom_ops),
    )
    return Request(
        specs=specs,
        sizes=options.sizes,
        max_tokens=max_tokens,
        target=target,
        identity=identity,
        args=dict(args or {}),
        options=options,
        profile=profile,
        policy=policy,
        build_observed=build_observed,
        given=Given(splitting_ops, sizes, args, ranges),
    )


def _require_builder(baseline: str) -> None:
    """Refuse a baseline that this machine is below: every piece runs here once, to be tuned and checked."""
    known = get_args(Baseline)
    if baseline not in known:
        raise UsageError(f"expected a CPU baseline of {', '.join(known)}, got {baseline!r}")
    here = cpu_flags()
    lacking = sorted(set(cpu_target(cast(Baseline, baseline)).cpu_flags) - here) if here else []
    if lacking:
        raise UsageError(
            f"expected a machine of at least {baseline} to compile for it, this one lacks {' '.join(lacking)}",
            hint="compile on a newer machine, or for a lower --cpu-baseline",
        )
