"""``pwcc key``: the factors of a model's keys that are known before a trace, and the environment policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cache.errors import UsageError
from pwcc.cache.strict import Json
from pwcc.cache.switches import Switches
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.policy_options import PolicyOptions, site_policy
from pwcc.cli.request_options import Asked, ask
from pwcc.cli.spread import spread

if TYPE_CHECKING:
    from pwcc.compile.here import Here


@spread
def key(
    *,
    model: Annotated[str | None, typer.Option("--model", metavar="X", help="As for compile.")] = None,
    show_policy: Annotated[
        bool, typer.Option("--show-policy", help="Print which environment variables are factors, and why.")
    ] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Show the traced factors of the entry that pwcc.load takes here. Default: PWCC_CACHE_DIR.",
        ),
    ] = None,
    asked: Asked,
    environment: PolicyOptions,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Print a model's lookup key and its factors; compiles nothing.

    The switches PWCC_DISABLE, PWCC_RECACHE and PWCC_FROZEN are shown and are no part of any key.
    What only a trace tells (sources, predicates, programs, and so the entry key) is shown where --cache-dir
    or PWCC_CACHE_DIR names a cache with an entry that would serve the model.
    """
    policy = site_policy(environment)
    if show_policy:
        from pwcc.cli.policy_view import policy_json, policy_lines

        if json:
            output.data_json(policy_json(policy, os.environ))
        else:
            output.data(policy_lines(policy, os.environ))
        return
    if model is None:
        raise UsageError("expected --model, or --show-policy")

    switches = Switches.read()
    ready, request = ask(model, asked, policy)

    from pwcc.cache.factors import FactorTree
    from pwcc.compile.build_factors import build_factors
    from pwcc.compile.here import Here

    here = Here.now(ready.built.module, request.target, tag=asked.tag)
    build = build_factors(request.options, request.target, request.identity, request.args, policy)
    tree = FactorTree.of(
        environment=build.environment, configuration=build.configuration, compiler=build.compiler
    )
    lookup = FactorTree.of(configuration=here.lookup_factors())
    directory = cache_dir or _named()
    recorded = None if directory is None else _recorded(directory, here, asked.profile)
    digests = tree.group_digests()
    found: dict[str, Json] = {
        "lookup_key": here.lookup_key,
        "entry_key": None if recorded is None else recorded["entry_key"],
        "lookup": {factor.name: factor.value for factor in lookup.configuration},
        "known": {
            name: {"digest": digests[name], "factors": {factor.name: factor.value for factor in factors}}
            for name, factors in tree.groups()
            if name != "sources"
        },
        "after_tracing": None if recorded is None else recorded["factors"],
        "switches": dict(switches.to_json()),
    }
    if json:
        output.data_json(found)
    else:
        from pwcc.cli.key_view import key_lines

        output.data(key_lines(found, width=output.width()))


def _named() -> Path | None:
    """Return the cache of PWCC_CACHE_DIR, unless nothing was compiled there yet."""
    from pwcc.cache import atomic, layout
    from pwcc.cache.store import named_root

    directory = named_root()
    if directory is None:
        return None
    with atomic.os_errors("opening the cache directory", directory):
        return None if layout.is_empty(directory) else directory


def _recorded(cache_dir: Path, here: Here, profile: str | None) -> dict[str, Json] | None:
    """Return the entry key and traced factors of the entry that a load would take, or None."""
    from pwcc.cache.store import Store
    from pwcc.compile.build_factors import TRACED
    from pwcc.compile.differences import read_factors
    from pwcc.compile.explain import explain_load

    store = Store.open(cache_dir)
    taken = next((v for v in explain_load(store, here, profile=profile).verdicts if v.taken), None)
    if taken is None:
        return None
    manifest = store.read_manifest(store.entry_ref(taken.lookup_key, taken.entry_key))
    factors = read_factors(store, manifest)
    traced = {factor.name: factor.value for factor in factors.configuration if factor.name in TRACED}
    sources: dict[str, Json] = {factor.name: factor.value for factor in factors.sources}
    return {"entry_key": taken.entry_key, "factors": {**traced, "sources": sources}}
