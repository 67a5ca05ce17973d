"""``pwcc version``: the version, also as ``pwcc --version``."""

from __future__ import annotations

import typer

from pwcc import __version__
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption


def version(json: JsonOption = False, _debug: DebugOption = False) -> None:
    """Print the version."""
    if json:
        output.data_json({"pwcc": __version__})
    else:
        output.data([f"pwcc {__version__}"])


def print_version(value: bool) -> None:
    """Handle the option ``--version``: print and leave."""
    if value:
        output.data([f"pwcc {__version__}"])
        raise typer.Exit
