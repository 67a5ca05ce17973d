"""The options that say how pieces are rewritten: graph passes, and which operators keep their kernels."""

from __future__ import annotations

from typing import Annotated

import typer

PassesOption = Annotated[
    str,
    typer.Option(
        "--passes",
        metavar="A,B",
        help="Graph passes in order: names, module:Class, name(option=1); none; default.",
    ),
]
CustomOpsOption = Annotated[
    str,
    typer.Option(
        "--custom-ops",
        metavar="none,+A",
        help="Which of pwcc's own operators keep their kernels: all, none, +name, -name.",
    ),
]
