"""Graph: which batches run as graphs, and what a mode becomes for one entry and one attention kernel."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from pwcc.cache.errors import UsageError
from pwcc.compile.ops.forward_context import RunMode

GraphSupport = Literal["always", "decode", "never"]
"""Whether an attention kernel may be captured: in any batch, in decode batches only, or not at all."""


class CaptureMode(StrEnum):
    """What is captured. Decode batches have one token per sequence; every other batch is mixed.

    ========================  ==================  ==================
    mode                      decode batches      mixed batches
    ========================  ==================  ==================
    ``NONE``                  dynamic variant     dynamic variant
    ``PIECEWISE``             graphs per piece    graphs per piece
    ``FULL``                  one graph           one graph
    ``FULL_DECODE_ONLY``      one graph           dynamic variant
    ``FULL_AND_PIECEWISE``    one graph           graphs per piece
    ========================  ==================  ==================
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode(self) -> RunMode:
        """How decode batches run."""
        return _ROUTES[self][0]

    @property
    def mixed(self) -> RunMode:
        """How all other batches run."""
        return _ROUTES[self][1]


_ROUTES: Final = {
    CaptureMode.NONE: (RunMode.NONE, RunMode.NONE),
    CaptureMode.PIECEWISE: (RunMode.PIECEWISE, RunMode.PIECEWISE),
    CaptureMode.FULL: (RunMode.FULL, RunMode.FULL),
    CaptureMode.FULL_DECODE_ONLY: (RunMode.FULL, RunMode.NONE),
    CaptureMode.FULL_AND_PIECEWISE: (RunMode.FULL, RunMode.PIECEWISE),
}


def parse_mode(text: str) -> CaptureMode:
    """Return the mode of this name, in any case and with ``-`` for ``_``.

    Raises:
        UsageError: there is none.
    """
    try:
        return CaptureMode(text.upper().replace("-", "_"))
    except ValueError:
        names = ", ".join(mode.value for mode in CaptureMode)
        raise UsageError(f"expected a capture mode, got {text!r}", hint=f"one of {names}") from None


def resolve_mode(
    mode: CaptureMode, *, splits: int, attention: GraphSupport = "always"
) -> tuple[CaptureMode, tuple[str, ...]]:
    """Return the mode that an entry with ``splits`` splitting calls can have, and notes on what changed.

    Without a splitting call the model is one piece, so its graph per piece *is* the full graph: ``PIECEWISE``
    and ``FULL_AND_PIECEWISE`` become ``FULL``. A kernel that cannot be captured in mixed batches leaves
    ``FULL`` for decode batches only; one that can never be captured leaves graphs per piece. Every change is a
    note; none is silent.

    Raises:
        UsageError: the kernel can never be captured and nothing is split off.
    """
    notes: list[str] = []
    found = mode
    if not splits and found in (CaptureMode.PIECEWISE, CaptureMode.FULL_AND_PIECEWISE):
        found = CaptureMode.FULL
        notes.append(f"{mode} became {found}: the entry has no splitting op, so the model is one piece")
    wants_full = RunMode.FULL in (found.decode, found.mixed)
    if attention == "never" and wants_full:
        if not splits:
            raise UsageError(
                "the attention kernel cannot be captured, and the entry does not split at it",
                hint="compile with --splitting-ops pwcc::attention, or use mode NONE",
            )
        notes.append(f"{found} became PIECEWISE: the attention kernel cannot be captured")
        found = CaptureMode.PIECEWISE
    elif attention == "decode" and found.mixed is RunMode.FULL:
        narrower = CaptureMode.FULL_AND_PIECEWISE if splits else CaptureMode.FULL_DECODE_ONLY
        notes.append(f"{found} became {narrower}: the attention kernel is captured in decode batches only")
        found = narrower
    return found, tuple(notes)
