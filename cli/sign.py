"""``pwcc sign``: put a signature beside entries, after their every byte was verified."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pwcc.cache.errors import UsageError
from pwcc.cache.strict import Json
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption


def sign(
    entries: Annotated[
        list[str] | None, typer.Argument(metavar="[ENTRY...]", help="The first hex digits of entries' keys.")
    ] = None,
    *,
    cache_dir: Annotated[
        Path | None,
        typer.Option(envvar="PWCC_CACHE_DIR", metavar="DIR", help="The cache. Default: the user's."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A private key. Default: what trust keygen made.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Sign every entry of the cache.")] = False,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Sign entries: their manifests, which name every blob by digest. Nothing of them is executed."""
    from pwcc.cache.signing import sign_entry
    from pwcc.cache.signing_keys import PrivateKey, is_exposed, signing_key_path
    from pwcc.cache.store import Store, default_root
    from pwcc.cli.choice import choose_entry

    if bool(entries) == all_:
        raise UsageError("expected the entries to sign, or --all", hint="pwcc inspect DIR lists them")
    store = Store.open(cache_dir or default_root())
    chosen = list(store.entries()) if all_ else [choose_entry(store, prefix) for prefix in entries or ()]
    path = key or signing_key_path()
    private = PrivateKey.read(path)
    if is_exposed(path):
        output.word(f"warning: others may read the private key {path}; chmod 600 it")
    signed: list[Json] = []
    for ref in dict.fromkeys(chosen):
        sign_entry(store, ref, private)
        signed.append(ref.entry_key)
        if not json:
            output.data([f"signed {ref.entry_key} with {private.public.id[:12]}"])
    if json:
        output.data_json({"key": private.public.id, "entries": signed})
    elif not signed:
        output.word("the cache holds no entry")
