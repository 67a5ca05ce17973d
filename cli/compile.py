"""``pwcc compile``: trace a model once, compile and seal its pieces, publish them as one entry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pwcc.cli import output, report_view
from pwcc.cli.invocation import DebugOption, JsonOption, RequireSignatureOption, TrustDirOption
from pwcc.cli.model_options import (
    ArgOption,
    ArgsFileOption,
    DeviceOption,
    DtypeOption,
    InputOption,
    ModelOption,
    SeedOption,
    TagOption,
    build_model,
)
from pwcc.cli.pass_options import CustomOpsOption, PassesOption
from pwcc.cli.policy_options import PolicyOptions, site_policy
from pwcc.cli.ranges import AllowGapsOption
from pwcc.cli.request_options import CpuBaseline
from pwcc.cli.spread import spread
from pwcc.cli.store_options import LayerOption


@spread
def compile_(
    *,
    model: ModelOption,
    sizes: Annotated[
        str,
        typer.Option(metavar="1,2,4,8", help="Token counts that get their own static variant; 1-4 is a range."),
    ] = "",
    ranges: Annotated[
        str,
        typer.Option(
            metavar="1-64,65-512",
            help="Token ranges that get a dynamic variant each. Default: one for 1 to --max-tokens.",
        ),
    ] = "",
    allow_gaps: AllowGapsOption = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest token count of the dynamic variants.")] = 8192,
    cache_dir: Annotated[
        Path | None,
        typer.Option(envvar="PWCC_CACHE_DIR", metavar="DIR", help="Cache to write. Default: the user's."),
    ] = None,
    arg: ArgOption = None,
    args_file: ArgsFileOption = None,
    inputs: InputOption = None,
    weights: Annotated[
        Literal["none", "random", "real"],
        typer.Option(help="Weights while compiling; none: only what a kernel must run on, and only then."),
    ] = "none",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    splitting_ops: Annotated[
        str, typer.Option(metavar="A::B,C::D", help="Operators to cut the graph at; '' to leave it whole.")
    ] = "pwcc::attention,pwcc::opaque",
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Tune the static variants exhaustively; takes much longer.")
    ] = False,
    autotune_from: Annotated[
        str | None,
        typer.Option(
            metavar="[DIR/]KEY", help="Take the winners of this entry's tuning; time nothing that it decides."
        ),
    ] = None,
    cpu_baseline: Annotated[
        CpuBaseline,
        typer.Option(
            help="CPU to compile for: native is this one; x86-64-v3 is AVX2, v4 AVX-512, v2 neither.",
        ),
    ] = "native",
    passes: PassesOption = "default",
    custom_ops: CustomOpsOption = "none",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. Default: by cores and memory.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name the entry, so that a load can ask for it.")
    ] = None,
    tag: TagOption = None,
    environment: PolicyOptions,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Compile nothing: exit 3 unless the entry is there.")
    ] = False,
    verify_hit: Annotated[
        bool,
        typer.Option(
            "--verify-hit",
            help="On a hit, compile again in private and compare every byte: exit 1 if anything differs.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan (splits, pieces, variants) and compile nothing.")
    ] = False,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the split graph, each piece's code and kernels, for reading."),
    ] = None,
    seed: SeedOption = 0,
    require_signature: RequireSignatureOption = False,
    trust_dir: TrustDirOption = False,
    layer: LayerOption = None,
    lock_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Seconds to wait for another process that compiles this. Default: no limit.",
        ),
    ] = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Compile a model into a cache directory.

    One trace; the graph is cut at attention; each distinct piece is compiled once per variant, checked
    against eager and published. A second identical run is a hit. PWCC_RECACHE=1 compiles anew all the same,
    PWCC_FROZEN=1 is --frozen, PWCC_DISABLE=1 refuses to use a cache. Prints what was done on stdout,
    progress on stderr.
    """
    from pwcc.cache.switches import Switches
    from pwcc.capture.sizes import parse_sizes
    from pwcc.cli.failures import unwinding
    from pwcc.cli.progress import progress
    from pwcc.cli.ranges import parse_ranges
    from pwcc.cli.splitting import parse_splitting_ops

    switches = Switches.read(frozen=frozen)
    if not dry_run:
        switches.require_cache("pwcc compile")
    policy = site_policy(environment)
    chosen = parse_sizes(sizes, max_tokens=max_tokens)
    spans = parse_ranges(ranges)
    cuts = parse_splitting_ops(splitting_ops)
    ready = build_model(
        model,
        arg=arg,
        args_file=args_file,
        inputs=inputs,
        device=device,
        dtype=dtype,
        weights=weights,
        seed=seed,
    )

    from pwcc.cache.store import default_root
    from pwcc.compile.precompile import plan, precompile

    if dry_run:
        with progress() as on_progress:
            planned = plan(
                ready.built.module,
                specs=ready.specs,
                sizes=chosen,
                ranges=spans,
                allow_gaps=allow_gaps,
                passes=passes,
                custom_ops=custom_ops,
                max_tokens=max_tokens,
                device=ready.device,
                identity=ready.built.identity,
                args=ready.built.args,
                splitting_ops=cuts,
                autotune=autotune or autotune_from is not None,
                cpu_baseline=cpu_baseline,
                profile=profile,
                dump=dump,
                on_progress=on_progress,
            )
        if cuts and not planned.splits:
            output.word(f"warning: the graph holds none of {', '.join(cuts)}, so it stays whole")
        if json:
            output.data_json({"plan": planned.to_json()})
        else:
            output.data(report_view.plan_lines(planned, width=output.width()))
        return
    with unwinding(), progress() as on_progress:
        report = precompile(
            ready.built.module,
            cache_dir=cache_dir or default_root(),
            specs=ready.specs,
            sizes=chosen,
            ranges=spans,
            allow_gaps=allow_gaps,
            autotune_from=autotune_from,
            passes=passes,
            custom_ops=custom_ops,
            max_tokens=max_tokens,
            device=ready.device,
            identity=ready.built.identity,
            args=ready.built.args,
            splitting_ops=cuts,
            autotune=autotune,
            cpu_baseline=cpu_baseline,
            jobs=jobs,
            profile=profile,
            frozen=frozen,
            tag=tag,
            policy=policy,
            verify_hit=verify_hit,
            require_signature=require_signature,
            trust_dir=trust_dir,
            layers=layer or None,
            lock_timeout_s=lock_timeout,
            dump=dump,
            observation=ready.built.observation,
            on_progress=on_progress,
        )
    for warning in report.warnings:
        output.word(f"warning: {warning}")
    if json:
        output.data_json(report.to_json())
    else:
        output.data(report_view.report_lines(report, width=output.width()))
    if verify_hit and report.verified is None:
        output.word("warning: --verify-hit compared nothing: there was no entry, so it was compiled")
    if report.verified is not None and not report.verified.ok:
        output.word(report_view.verify_error(report.verified))
        raise typer.Exit(1)
