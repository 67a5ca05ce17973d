"""What a compile would be asked for, as options of the commands that only ask about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pwcc.cli.model_options import (
    ArgOption,
    ArgsFileOption,
    DeviceOption,
    DtypeOption,
    InputOption,
    ReadyModel,
    TagOption,
    build_model,
)
from pwcc.cli.pass_options import CustomOpsOption, PassesOption
from pwcc.cli.ranges import AllowGapsOption, parse_ranges

if TYPE_CHECKING:
    from pwcc.cache.policy import Policy
    from pwcc.compile.request import Request

SizesOption = Annotated[str, typer.Option("--sizes", metavar="1,2,4,8", help="As for compile.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="As for compile.")]
SplittingOption = Annotated[str, typer.Option("--splitting-ops", metavar="A::B,C::D", help="As for compile.")]
AutotuneOption = Annotated[bool, typer.Option("--autotune", help="As for compile.")]
CpuBaseline = Literal["x86-64-v2", "x86-64-v3", "x86-64-v4", "native"]
CpuBaselineOption = Annotated[CpuBaseline, typer.Option("--cpu-baseline", help="As for compile.")]
RangesOption = Annotated[str, typer.Option("--ranges", metavar="1-64,65-512", help="As for compile.")]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="As for compile and load.")
]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of one compile, as the user gave them."""

    sizes: SizesOption = ""
    max_tokens: MaxTokensOption = 8192
    arg: ArgOption = None
    args_file: ArgsFileOption = None
    inputs: InputOption = None
    device: DeviceOption = None
    dtype: DtypeOption = None
    splitting_ops: SplittingOption = "pwcc::attention,pwcc::opaque"
    autotune: AutotuneOption = False
    cpu_baseline: CpuBaselineOption = "native"
    ranges: RangesOption = ""
    allow_gaps: AllowGapsOption = False
    passes: PassesOption = "default"
    custom_ops: CustomOpsOption = "none"
    profile: ProfileOption = None
    tag: TagOption = None


def ask(model: str, given: Asked, policy: Policy) -> tuple[ReadyModel, Request]:
    """Build the model, without weights, and return it with the request; traces nothing.

    Raises:
        UsageError: a wrong option. ModelError: the model's own code failed.
    """
    from pwcc.capture.sizes import parse_sizes
    from pwcc.cli.splitting import parse_splitting_ops

    sizes = parse_sizes(given.sizes, max_tokens=given.max_tokens)
    cuts = parse_splitting_ops(given.splitting_ops)
    ready = build_model(
        model,
        arg=given.arg,
        args_file=given.args_file,
        inputs=given.inputs,
        device=given.device,
        dtype=given.dtype,
        weights="none",
    )

    from pwcc.compile.request import make_request

    request = make_request(
        ready.built.module,
        specs=ready.specs,
        sizes=sizes,
        max_tokens=given.max_tokens,
        device=ready.device,
        identity=ready.built.identity,
        args=ready.built.args,
        splitting_ops=cuts,
        autotune=given.autotune,
        cpu_baseline=given.cpu_baseline,
        ranges=parse_ranges(given.ranges),
        allow_gaps=given.allow_gaps,
        passes=given.passes,
        custom_ops=given.custom_ops,
        profile=given.profile,
        build_observed=False,
        tag=given.tag,
        policy=policy,
    )
    return ready, request
