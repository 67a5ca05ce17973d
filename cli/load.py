"""``pwcc load``: load an entry in this process, show that nothing was compiled, and check its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cache.errors import NumericsError
from pwcc.cache.strict import Json
from pwcc.cli import output, units
from pwcc.cli.invocation import DebugOption, JsonOption, RequireSignatureOption, TrustDirOption
from pwcc.cli.model_options import BuildOptions, EntryNameOption, ModelOption, TagOption
from pwcc.cli.policy_options import EnvExcludeOption, EnvIncludeOption, given_policy
from pwcc.cli.spread import spread
from pwcc.cli.store_options import LayerOption

if TYPE_CHECKING:
    from pwcc.compile.check import CheckReport


@spread
def load(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A cache directory; nothing is written to it.")
    ],
    *,
    model: ModelOption,
    check: Annotated[
        bool, typer.Option("--check", help="Run the recorded numerics checks again here.")
    ] = False,
    profile: EntryNameOption = None,
    tag: TagOption = None,
    env_include: EnvIncludeOption = None,
    env_exclude: EnvExcludeOption = None,
    how: BuildOptions,
    require_signature: RequireSignatureOption = False,
    trust_dir: TrustDirOption = False,
    layer: LayerOption = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Load a model from a cache directory and print the receipt. Never compiles: a miss is exit code 3."""
    from pwcc.cache.layers import find_layered, named, require_trust

    # What is wrong with the directory is said before torch is imported.
    below = named(layer or None)
    hint = f"run: pwcc compile --model {model} --cache-dir {directory}"
    require_trust(find_layered(directory, below, hint=hint), trust=trust_dir)
    ready = how.build(model)

    from pwcc.compile.input_values import make_call
    from pwcc.compile.load import load as load_entry

    compiled = load_entry(
        ready.built.module,
        cache_dir=directory,
        profile=profile,
        tag=tag,
        policy=given_policy(env_include, env_exclude),
        require_signature=require_signature,
        trust_dir=trust_dir,
        layers=below,
    )
    receipt = compiled.receipt
    for line in receipt.damaged:
        output.word(f"warning: an entry could not be used: {line}")
    module, device, seed = ready.built.module, ready.device, how.seed
    checked = (
        compiled.check(lambda tokens: make_call(module, ready.specs, tokens, device=device, seed=seed))
        if check
        else None
    )
    if json:
        found: dict[str, Json] = {
            "entry": compiled.manifest.entry_key,
            "receipt": receipt.to_json(),
            "check": None if checked is None else checked.to_json(),
        }
        output.data_json(found)
    else:
        output.data([f"loaded entry {compiled.manifest.entry_key}", *(f"  {line}" for line in receipt.lines())])
        if checked is not None:
            output.data(_check_lines(checked))
    if not receipt.is_clean:
        output.word("error: the load did something that a load must never do; see the receipt")
        raise typer.Exit(1)
    if checked is not None and not checked.ok:
        output.word("error: the loaded code and eager disagree by more than the tolerance")
        raise typer.Exit(NumericsError.exit_code)


def _check_lines(report: CheckReport) -> list[str]:
    """Say what failed, or what came closest to failing."""
    failed = [row for row in report.rows if not row.ok]
    total = units.count(len(report.rows), "comparison")
    lines = [
        f"check FAILED: {len(failed)} of {total}" if failed else f"check ok: {total}, closest to its tolerance:"
    ]
    for row in failed or [report.worst]:
        what = f"{row.what}, {units.count(row.size, 'token')}"
        lines.append(f"  {what}: error {row.error:.3g}, tolerance {row.tolerance:.3g}")
    return lines
