"""The plan: what it captures in which order, its rules, and its JSON, strictly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pwcc.cache.errors import CorruptEntry, UsageError
from pwcc.cache.ids import EntryKey
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import CapturePlan, GraphKey, Measured
from pwcc.compile.ops.forward_context import BatchDescriptor, RunMode

PLAN = CapturePlan(
    entry_key=EntryKey("0" * 32),
    mode=CaptureMode.FULL_AND_PIECEWISE,
    requested=CaptureMode.FULL_AND_PIECEWISE,
    sizes=(1, 4, 8),
    order=(8, 4, 1),
    max_num_seqs=3,
    max_tokens=64,
    max_seq_len=128,
    waste_limit=4.0,
    lazy_sizes=(4,),
    notes=("said",),
    measured=(Measured(RunMode.FULL, 8, True, 0.5, 1024, 1, None),),
)


def test_round_trip() -> None:
    data = PLAN.to_bytes()
    assert CapturePlan.from_bytes(data, where="plan") == PLAN
    assert CapturePlan.from_bytes(data, where="plan").to_bytes() == data


def test_recordings_are_ordered_pieces_then_decode_and_decode_ends_where_sequences_do() -> None:
    found = [(key.mode.value, key.batch.num_tokens, key.batch.uniform_decode) for key in PLAN.graph_keys()]
    assert found == [
        ("PIECEWISE", 8, False),
        ("PIECEWISE", 4, False),
        ("PIECEWISE", 1, False),
        ("FULL", 4, True),
        ("FULL", 1, True),
    ]
    full = [k.batch.uniform_decode for k in replace(PLAN, mode=CaptureMode.FULL).graph_keys()]
    assert full == [False, False, False, True, True]
    assert list(replace(PLAN, mode=CaptureMode.NONE).graph_keys()) == []


def test_one_recording_of_pieces_serves_both_kinds_of_batch() -> None:
    decode = BatchDescriptor(4, True)
    assert GraphKey.of(RunMode.PIECEWISE, decode) == GraphKey.of(RunMode.PIECEWISE, BatchDescriptor(4))
    assert GraphKey.of(RunMode.FULL, decode) == GraphKey(RunMode.FULL, decode)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": (4, 1, 8)},
        {"order": (8, 4)},
        {"lazy_sizes": (5,)},
        {"max_seq_len": 0},
        {"waste_limit": 0.5},
        {"pad_multiple": 4},
        {"sizes": (), "order": (), "lazy_sizes": ()},
        {"max_tokens": 7},
    ],
)
def test_rules(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected a capture plan in which"):
        replace(PLAN, **wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"mode": "FAST"},
        {"sizes": [1, 4]},
        {"sizes": [1, 4, "8"]},
        {"instantiate": "never"},
        {"on_failure": ""},
        {"entry_key": "../../x"},
        {"notes": ["\x1b[2J"]},
        {"measured": [{}]},
        {"surprise": 1},
        {"max_tokens": 2**40},
        {"background": 1},
    ],
)
def test_a_damaged_plan_is_one_clear_error(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptEntry):
        CapturePlan.from_bytes(json.dumps({**PLAN.to_json(), **change}).encode(), where="plan")


@pytest.mark.parametrize("name", list(PLAN.to_json()))
def test_a_missing_field_is_an_error(name: str) -> None:
    body = PLAN.to_json()
    del body[name]
    with pytest.raises(CorruptEntry):
        CapturePlan.from_bytes(json.dumps(body).encode(), where="plan")
