"""The three switches: each is a yes or a no, at most one is on, and what each does to a cache."""

from __future__ import annotations

import pytest

from pwcc.cache.errors import CacheDisabled, UsageError
from pwcc.cache.switches import DISABLE, FROZEN, RECACHE, Switches


@pytest.mark.parametrize("value", ["", "0", "false", "False", "no", "off", " 0 "])
def test_a_no_is_off(value: str) -> None:
    assert Switches.read({DISABLE: value, RECACHE: value, FROZEN: value}) == Switches()


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", "on", " 1 "])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [(DISABLE, Switches(disable=True)), (RECACHE, Switches(recache=True)), (FROZEN, Switches(frozen=True))],
)
def test_a_yes_is_on(name: str, value: str, wanted: Switches) -> None:
    assert Switches.read({name: value}) == wanted


@pytest.mark.parametrize("name", [DISABLE, RECACHE, FROZEN])
@pytest.mark.parametrize("value", ["2", "maybe", "-1", "1 0", "\x00"])
def test_anything_else_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"expected {name} to be 1 or 0"):
        Switches.read({name: value})


def test_nothing_set_is_off_and_the_callers_frozen_counts() -> None:
    assert Switches.read({}) == Switches()
    assert Switches.read({}, frozen=True) == Switches(frozen=True)
    assert Switches.read({FROZEN: "1"}, frozen=True) == Switches(frozen=True)


@pytest.mark.parametrize(
    ("environ", "frozen", "said"),
    [
        ({RECACHE: "1", FROZEN: "1"}, False, f"{RECACHE} and {FROZEN}"),
        ({RECACHE: "1"}, True, f"{RECACHE} and --frozen"),
        ({DISABLE: "1", RECACHE: "1"}, False, f"{DISABLE} and {RECACHE}"),
        ({DISABLE: "1"}, True, f"{DISABLE} and --frozen"),
    ],
)
def test_two_at_once_contradict(environ: dict[str, str], frozen: bool, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Switches.read(environ, frozen=frozen)


def test_only_disable_keeps_a_cache_from_being_used() -> None:
    Switches(recache=True).require_cache("a load")
    Switches(frozen=True).require_cache("a load")
    with pytest.raises(CacheDisabled, match="a load has nothing to work with") as caught:
        Switches(disable=True).require_cache("a load")
    assert caught.value.exit_code == 2
