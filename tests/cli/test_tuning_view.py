"""Tuning results as text."""

from __future__ import annotations

from pwcc.cache.ids import EntryKey
from pwcc.cache.tuning import Candidate, EntryTuning, PieceTuning, TunedChoice
from pwcc.cli.tuning_view import tuning_lines


def test_winners_with_what_they_beat() -> None:
    tried = (Candidate("X=64", 4.5), Candidate("X=128", 3.25), Candidate("X=256", None))
    choices = (
        TunedChoice("operation", "mm 1x64 64x8", "extern_mm", candidates=(Candidate("extern_mm", 7.0),)),
        TunedChoice("kernel", "triton_poi_0", "X=128", descent=True, candidates=tried),
        TunedChoice("kernel", "triton_poi_1", "X=8"),
    )
    held = EntryTuning(EntryKey("0" * 32), {"p0 n=1": PieceTuning(choices, 4, {"ab/c.best_config": "{}"})})
    assert tuning_lines(held.to_json(), width=80) == [
        "tuning: microseconds as measured; not part of what is digested",
        "  p0 n=1: 4 timing runs",
        "    CHOICE        WINNER       US  TRIED  SLOWEST",
        "    mm 1x64 64x8  extern_mm  7.00      1     7.00",
        "    triton_poi_0  X=128 (d)  3.25      3     4.50",
        "    triton_poi_1  X=8           -      -        -",
    ]


def test_nothing_and_unreadable() -> None:
    assert tuning_lines({}, width=80)[1].startswith("  none: nothing was tuned")
    assert tuning_lines({"problem": "cut off"}, width=80)[1] == "  unreadable: cut off"
