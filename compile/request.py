"""Key: what one compile was asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from pwcc.cache.errors import UsageError
from pwcc.cache.policy import TABLES_ONLY, Policy
from pwcc.compile.build_factors import BuildOptions
from pwcc.compile.inputs import InputSpec
from pwcc.compile.sealing.profile import Isa
from pwcc.compile.target import Target, check_tag, target_of

DEFAULT_MAX_TOKENS = 8192


@dataclass(frozen=True)
class Given:
    """The caller's own objects behind a request, to notice that they were changed later."""

    splitting_ops: Sequence[str]
    sizes: Sequence[int]
    args: Mapping[str, object] | None


@dataclass(frozen=True)
class Request:
    """Everything that one compile was asked for. ``sizes`` are ascending; ``max_tokens`` bounds the range."""

    specs: tuple[InputSpec, ...]
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
    specs: tuple[InputSpec, ...],
    sizes: Sequence[int],
    max_tokens: int,
    device: torch.device | str,
    identity: str,
    args: Mapping[str, object] | None,
    splitting_ops: Sequence[str],
    autotune: bool,
    cpu_isa: str,
    profile: str | None,
    build_observed: bool,
    tag: str | None = None,
    policy: Policy = TABLES_ONLY,
) -> Request:
    """Check the arguments of ``precompile`` and return them as one value.

    Raises:
        UsageError: sizes outside ``1..max_tokens``, a model in training mode, a device torch does not see, an
            unknown ISA, a tag that is no plain name.
    """
    if max_tokens < 1:
        raise UsageError(f"expected --max-tokens of at least 1, got {max_tokens}")
    wrong = [size for size in sizes if not 1 <= size <= max_tokens]
    if wrong:
        raise UsageError(f"expected sizes within 1..{max_tokens}, got {wrong[0]}", hint="raise --max-tokens")
    if model.training:
        raise UsageError("expected a model in eval mode", hint="call model.eval()")
    target = target_of(device)
    if cpu_isa not in get_args(Isa):
        raise UsageError(f"expected a CPU ISA of {', '.join(get_args(Isa))}, got {cpu_isa!r}")
    options = BuildOptions(
        sizes=tuple(sorted(set(sizes))),
        max_tokens=max_tokens,
        splitting_ops=tuple(splitting_ops),
        autotune=autotune,
        cpu_isa=cpu_isa if target.device.type == "cpu" else None,
        inputs=tuple(str(spec) for spec in specs),
        profile=profile,
        tag=check_tag(tag),
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
        given=Given(splitting_ops, sizes, args),
    )
