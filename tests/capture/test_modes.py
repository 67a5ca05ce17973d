"""What a mode becomes for an entry and a kernel, and that every change is said."""

from __future__ import annotations

import pytest

from pwcc.cache.errors import UsageError
from pwcc.capture.modes import CaptureMode, parse_mode, resolve_mode
from pwcc.compile.ops.forward_context import RunMode


def test_routes() -> None:
    assert {mode: (mode.decode, mode.mixed) for mode in CaptureMode} == {
        CaptureMode.NONE: (RunMode.NONE, RunMode.NONE),
        CaptureMode.PIECEWISE: (RunMode.PIECEWISE, RunMode.PIECEWISE),
        CaptureMode.FULL: (RunMode.FULL, RunMode.FULL),
        CaptureMode.FULL_DECODE_ONLY: (RunMode.FULL, RunMode.NONE),
        CaptureMode.FULL_AND_PIECEWISE: (RunMode.FULL, RunMode.PIECEWISE),
    }


@pytest.mark.parametrize("mode", list(CaptureMode))
def test_an_entry_with_splits_keeps_its_mode_silently(mode: CaptureMode) -> None:
    assert resolve_mode(mode, splits=3) == (mode, ())


@pytest.mark.parametrize("mode", [CaptureMode.PIECEWISE, CaptureMode.FULL_AND_PIECEWISE])
def test_without_splits_pieces_are_the_model_and_that_is_said(mode: CaptureMode) -> None:
    found, (note,) = resolve_mode(mode, splits=0)
    assert found is CaptureMode.FULL
    assert note.startswith(f"{mode} became FULL")


@pytest.mark.parametrize(
    ("mode", "splits", "attention", "becomes"),
    [
        ("FULL", 3, "decode", "FULL_AND_PIECEWISE"),
        ("FULL", 0, "decode", "FULL_DECODE_ONLY"),
        ("PIECEWISE", 0, "decode", "FULL_DECODE_ONLY"),
        ("FULL_DECODE_ONLY", 3, "decode", "FULL_DECODE_ONLY"),
        ("FULL", 3, "never", "PIECEWISE"),
        ("FULL_DECODE_ONLY", 3, "never", "PIECEWISE"),
        ("NONE", 0, "never", "NONE"),
    ],
)
def test_what_the_kernel_allows(mode: str, splits: int, attention: str, becomes: str) -> None:
    found, notes = resolve_mode(CaptureMode(mode), splits=splits, attention=attention)  # type: ignore[arg-type]
    assert found == becomes
    assert bool(notes) is (mode != becomes)


def test_a_kernel_that_is_neither_captured_nor_split_off_is_refused() -> None:
    with pytest.raises(UsageError, match="does not split at it"):
        resolve_mode(CaptureMode.FULL, splits=0, attention="never")


def test_names() -> None:
    assert parse_mode("full-and-piecewise") is CaptureMode.FULL_AND_PIECEWISE
    with pytest.raises(UsageError, match="'fast'"):
        parse_mode("fast")
