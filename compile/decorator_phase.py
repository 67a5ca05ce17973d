"""Artifact: where a decorated module stands, as one value: its phase, level, entry, sizes and error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pwcc.compile.levels import CompileLevel


class Phase(Enum):
    """Where a decorated module stands; see :mod:`pwcc.compile.decorator_state`."""

    NEW = "new"
    EAGER = "eager"
    COMPILING = "compiling"
    FILLING = "filling"
    SERVING = "serving"
    FAILED = "failed"


@dataclass(frozen=True)
class CompileState:
    """One look at a decorated module.

    ``entry`` and ``sizes`` are those of the entry that serves (level 3). ``error`` is why a compile beside
    this process failed. ``is_compiled`` tells whether calls run compiled code.
    """

    phase: Phase
    level: CompileLevel | None
    entry: str | None
    sizes: tuple[int, ...]
    error: Exception | None
    is_compiled: bool
