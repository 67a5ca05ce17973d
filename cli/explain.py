"""``pwcc explain``: whether a cache would serve a model, here or on a recorded host, and why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.model_options import ModelOption
from pwcc.cli.policy_options import PolicyOptions, given_policy, site_policy
from pwcc.cli.request_options import Asked, ask
from pwcc.cli.spread import spread
from pwcc.cli.store_options import CacheDirOption, LayerOption

if TYPE_CHECKING:
    from pwcc.cache.explain import Answer


@spread
def explain(
    *,
    model: ModelOption,
    cache_dir: CacheDirOption = None,
    layer: LayerOption = None,
    asked: Asked,
    target: Annotated[
        Path | None,
        typer.Option(metavar="HOST.JSON", help="Answer for the host that 'pwcc env --json' described."),
    ] = None,
    environment: PolicyOptions,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Say whether a load and a compile would hit, and why not.

    Builds the model, without weights; traces and compiles nothing. Exit code 0 if one of the two would be
    a hit, 4 if only the host stands in the way, else 3.
    """
    from pwcc.cache import ownership
    from pwcc.cache.layers import find_layered, named
    from pwcc.cache.store import default_root
    from pwcc.cache.trust import restrict

    root = cache_dir or default_root()
    hint = f"run: pwcc compile --model ... --cache-dir {root}"
    store = find_layered(root, named(layer or None), hint=hint)  # as a load; before torch is imported
    restrict(store)  # as PWCC_REQUIRE_SIGNATURE says: what a load would refuse is no hit
    if not ownership.is_trusted_by_name(store.root):
        for concern in ownership.concerns(store.root):
            output.word(f"warning: pwcc.load refuses this directory without --trust-dir: {concern}")
    policy = site_policy(environment)
    record = None
    if target is not None:
        from pwcc.cache.host_record import read_host_record

        record = read_host_record(target)
        asked = dataclasses.replace(asked, device="cpu")  # the model is built here, for a host that is not here
    ready, request = ask(model, asked, policy)

    from pwcc.compile.build_factors import build_factors
    from pwcc.compile.explain import explain_compile, explain_load
    from pwcc.compile.here import Here

    here = Here.now(ready.built.module, request.target, tag=asked.tag)
    if record is not None:
        here = here.on(record)
    chosen = given_policy(environment.env_include, environment.env_exclude)
    answers = [explain_load(store, here, profile=asked.profile, policy=chosen)]
    if record is None:
        build = build_factors(request.options, request.target, request.identity, request.args, policy)
        answers.append(explain_compile(store, here, request, build))
    code = exit_code(answers)
    if json:
        output.data_json(
            {
                "lookup_key": here.lookup_key,
                "exit_code": code,
                "target": None if record is None else record.device.to_json(),
                "answers": [answer.to_json() for answer in answers],
            }
        )
    else:
        lines = [f"lookup key {here.lookup_key}"]
        if record is not None:
            lines.append(f"on {here.device_label}, torch {record.torch}")
            lines.append("the model's sources and what its own code reads are taken to be as here")
        output.data([*lines, *(line for answer in answers for line in answer.lines())])
    if code:
        raise typer.Exit(code)


def exit_code(answers: Sequence[Answer]) -> int:
    """Return 0 if something would hit, 4 if only the host keeps an entry from serving, else 3."""
    codes = [answer.outcome.exit_code for answer in answers]
    return 0 if 0 in codes else max(codes)
