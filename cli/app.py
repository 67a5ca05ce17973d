"""The program: its commands, its global options, and ``main``, which turns every ending into an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pwcc.cli import failures, output
from pwcc.cli.capture import capture
from pwcc.cli.compile import compile_
from pwcc.cli.diff import diff
from pwcc.cli.env import env
from pwcc.cli.explain import explain
from pwcc.cli.export import export
from pwcc.cli.gc import gc
from pwcc.cli.import_ import import_
from pwcc.cli.inspect import inspect
from pwcc.cli.invocation import DebugOption, Invocation
from pwcc.cli.key import key
from pwcc.cli.load import load
from pwcc.cli.pin import pin
from pwcc.cli.report import report
from pwcc.cli.rm import rm
from pwcc.cli.sign import sign
from pwcc.cli.trust import trust
from pwcc.cli.verify import verify
from pwcc.cli.version import print_version, version

app = typer.Typer(
    name="pwcc",
    # Rich help pages cost 50 ms and a good part of the 150 ms that `pwcc --help` may take.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 miss, 4 a match that this host lacks a requirement of.",
)


@app.callback()
def pwcc(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
    _debug: DebugOption = False,
) -> None:
    """Compile a PyTorch model once; load it elsewhere with nothing traced, compiled or unpickled."""


app.command("compile")(compile_)
app.command()(load)
app.command()(capture)
app.command()(explain)
app.command()(key)
app.command()(inspect)
app.command()(report)
app.command()(diff)
app.command()(env)
app.command()(verify)
app.command()(sign)
app.add_typer(trust)
app.command()(gc)
app.command()(rm)
app.command()(pin)
app.command()(export)
app.command("import")(import_)
app.command()(version)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on ``argv`` (``sys.argv`` without its first item by default); return the exit code.

    Prints expected failures as one message, others as a bug; never raises except on a broken interpreter.
    """
    output.replace_unencodable(sys.stdout, sys.stderr)
    invocation = Invocation()
    try:
        return _run(argv, invocation)
    except typer.Exit as stop:  # stdout or stderr was closed while a failure was reported
        return stop.exit_code


def _run(argv: Sequence[str] | None, invocation: Invocation) -> int:
    try:
        typer.main.get_command(app).main(
            args=None if argv is None else list(argv), prog_name="pwcc", obj=invocation
        )
    except SystemExit as stop:  # how typer ends, after it printed usage errors itself
        if stop.code in (failures.INTERRUPTED, *failures.TERMINATED):
            return failures.report_interrupt(stop.code)
        if isinstance(stop.code, str):
            output.word(stop.code)
            return 1
        return stop.code or 0
    except KeyboardInterrupt:
        return failures.report_interrupt()
    except Exception as error:  # noqa: BLE001  the last handler of the program
        return failures.report(error, invocation)
    return 0
