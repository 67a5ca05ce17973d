"""``pwcc trust``: make a key to sign with, and say whose signatures count here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pwcc.cache.strict import Json
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption

if TYPE_CHECKING:
    from pwcc.cache.signing_keys import KeyId

trust = typer.Typer(
    name="trust",
    help="Make keys, and say whose signatures count here.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


def trusted_names() -> dict[KeyId, str]:
    """Return the names of the trusted keys, to show signatures by; what is wrong with them is a warning."""
    from pwcc.cache.errors import StoreError
    from pwcc.cache.trust import TrustedKeys, keys_directory

    try:
        return TrustedKeys(keys_directory()).names()
    except StoreError as error:
        output.word(f"warning: no key counts as trusted: {error}")
        return {}


@trust.command()
def keygen(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="The private key. Default: the user's signing key.")
    ] = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Make an Ed25519 key: FILE, readable by you only, and FILE.pub to give away. Nothing is overwritten."""
    from pwcc.cache.signing_keys import PrivateKey, signing_key_path

    path = file or signing_key_path()
    if file is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    key = PrivateKey.generate()
    public = key.write(path)
    if json:
        output.data_json(
            {
                "key": key.public.id,
                "private": str(path),
                "public": str(public),
                "public_key": key.public.raw.hex(),
            }
        )
        return
    output.data([f"key {key.public.id}", f"  private  {path}", f"  public   {public}"])
    output.word(f"next: sign with pwcc sign --key {path}; where it is loaded: pwcc trust add {public}")


@trust.command()
def add(
    key: Annotated[str, typer.Argument(metavar="FILE|KEY", help="A public key in PEM, or its 64 hex digits.")],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to call it. Default: the file's name.")
    ] = None,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Trust a public key: entries that its owner signed may be loaded with --require-signature."""
    from pwcc.cache.signing_keys import read_public
    from pwcc.cache.trust import TrustedKeys, keys_directory

    found = read_public(key)
    called = name or (found.id[:12] if key == found.raw.hex() else Path(key).name.removesuffix(".pub"))
    keys = TrustedKeys(keys_directory())
    new = keys.add(found, called)
    if json:
        output.data_json({"key": found.id, "name": called, "new": new, "directory": str(keys.root)})
        return
    output.data([f"{'trusted' if new else 'trusted already'}: {found.id} as {called}"])


@trust.command()
def ls(json: JsonOption = False, _debug: DebugOption = False) -> None:
    """List the trusted keys."""
    from pwcc.cache.trust import TrustedKeys, keys_directory
    from pwcc.cli.table import Column, table

    keys = TrustedKeys(keys_directory())
    found = keys.all()
    if json:
        rows: list[Json] = [
            {"key": item.key.id, "name": item.name, "public_key": item.key.raw.hex()} for item in found
        ]
        output.data_json({"directory": str(keys.root), "keys": rows})
    elif found:
        lines = [(item.key.id, item.name) for item in found]
        columns = (Column("KEY"), Column("NAME", elastic=True))
        output.data(table(columns, lines, width=output.width(), indent=""))
    else:
        output.word(f"no key is trusted: {keys.root} holds none")


@trust.command()
def rm(
    key: Annotated[str, typer.Argument(metavar="NAME|KEY", help="A key's name, or the start of its id.")],
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Stop trusting a key. What is loaded already stays loaded."""
    from pwcc.cache.trust import TrustedKeys, keys_directory

    removed = TrustedKeys(keys_directory()).remove(key)
    if json:
        output.data_json({"key": removed.key.id, "name": removed.name})
    else:
        output.data([f"no longer trusted: {removed.key.id} ({removed.name})"])
