"""What ``spread`` makes of a command: the options in their order, and instances of the classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from pwcc.cli.spread import spread


@dataclass(frozen=True, kw_only=True)
class Place:
    device: Annotated[str | None, typer.Option("--device", help="Where.")] = None
    args_file: Annotated[Path | None, typer.Option("--args-file")] = None
    arg: Annotated[list[str] | None, typer.Option("--arg")] = None


@dataclass(frozen=True, kw_only=True)
class Amount:
    count: Annotated[int, typer.Option("--count", min=1)] = 3


got: list[tuple[Path, str, Place, bool, Amount]] = []


@spread
def build(
    directory: Annotated[Path, typer.Argument()],
    *,
    model: Annotated[str, typer.Option("--model")],
    place: Place,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    amount: Amount,
) -> None:
    """Build it."""
    got.append((directory, model, place, quick, amount))


app = typer.Typer(rich_markup_mode=None)
app.command()(build)


def run(*argv: str) -> str:
    got.clear()
    return CliRunner().invoke(app, argv).output


def test_a_command_gets_the_instances() -> None:
    assert (
        run("d", "--model", "m", "--device", "cpu", "--args-file", "a.toml", "--arg", "x", "--arg", "y") == ""
    )
    place = Place(device="cpu", args_file=Path("a.toml"), arg=["x", "y"])
    assert got == [(Path("d"), "m", place, False, Amount())]


def test_defaults_are_those_of_the_class() -> None:
    assert run("d", "--model", "m", "--quick") == ""
    assert got == [(Path("d"), "m", Place(), True, Amount(count=3))]


def test_the_help_lists_fields_where_the_parameter_stood() -> None:
    text = run("--help")
    places = [
        text.index(name) for name in ("--model", "--device", "--args-file", "--arg ", "--quick", "--count")
    ]
    assert places == sorted(places)
    assert "Build it." in text
    assert "Where." in text


def test_limits_of_a_field_are_kept() -> None:
    assert "Invalid value for '--count'" in run("d", "--model", "m", "--count", "0")
    assert got == []


def test_an_option_declared_twice_is_a_mistake() -> None:
    def twice(*, count: int, amount: Amount) -> None: ...

    with pytest.raises(TypeError, match=r"expected each option of twice once, got count, count"):
        spread(twice)
