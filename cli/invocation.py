"""The options that every command has, and the one object that remembers them for error reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass
class Invocation:
    """What one run of the program was asked about its output; filled while options are parsed."""

    json: bool = False
    debug: bool = False


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.ensure_object(Invocation).json = True
    return value


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.ensure_object(Invocation).debug = True
    return value


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON to stdout instead of text.", callback=_remember_json, is_eager=True
    ),
]
TrustDirOption = Annotated[
    bool,
    typer.Option(
        "--trust-dir", help="Use a cache that others than you and root could have written (PWCC_TRUST_DIR)."
    ),
]
RequireSignatureOption = Annotated[
    bool,
    typer.Option("--require-signature", help="Use only entries that a trusted key signed (see pwcc trust)."),
]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks of errors.", callback=_remember_debug, is_eager=True),
]
