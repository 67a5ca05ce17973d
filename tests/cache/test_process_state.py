"""What a process says of itself is recorded, checked again, and asked of nothing but the table's functions."""

from __future__ import annotations

import platform
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pwcc.cache import observed
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.observed import ObservedInput
from pwcc.cache.process_state import STATES, VOLATILE, state_value


def distributed(**functions: Any) -> dict[str, object]:
    return {"torch.distributed": SimpleNamespace(**functions)}


def raising() -> int:
    raise ValueError("not initialised")


@pytest.mark.parametrize(
    ("modules", "value"),
    [
        (distributed(get_rank=lambda: 1), "1"),
        (distributed(get_rank=raising), "ValueError"),
        (distributed(), None),
        ({}, None),
    ],
)
def test_a_value_is_read_through_loaded_modules(modules: dict[str, object], value: str | None) -> None:
    assert state_value("torch.distributed.get_rank", "salt", modules) == value


def test_a_host_name_is_a_salted_digest() -> None:
    one = state_value("platform.node", "a", sys.modules)
    assert one is not None
    assert one.startswith("digest:")
    assert platform.node() not in one
    assert one != state_value("platform.node", "b", sys.modules)


def test_no_other_function_is_called() -> None:
    called: list[int] = []
    assert state_value("os.system", "salt", {"os": SimpleNamespace(system=lambda: called.append(1))}) is None
    assert called == []
    assert not set(STATES) & set(VOLATILE)
    with pytest.raises(CorruptEntry, match="a function that pwcc knows"):
        ObservedInput.parse(ObservedInput("state", "os.system", "0").to_json(), "entry")


def test_another_answer_is_a_named_change() -> None:
    record = ObservedInput("state", "torch.distributed.get_rank", "0", where="m.py:4")
    assert ObservedInput.parse(record.to_json(), "entry") == record

    def changes(rank: int) -> list[str]:
        modules = distributed(get_rank=lambda: rank)
        return [text for _, text in observed.changes([record], salt="s", environ={}, modules=modules)]

    assert changes(0) == []
    assert changes(1) == [
        "value of torch.distributed.get_rank (read at m.py:4): compiled with '0', now '1'",
    ]
