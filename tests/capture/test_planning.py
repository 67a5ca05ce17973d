"""From what is asked and what an entry can do to a plan."""

from __future__ import annotations

import pytest

from pwcc.cache.errors import UsageError
from pwcc.capture.modes import CaptureMode
from pwcc.capture.planning import plan_for
from tests.capture.toy import World, compiled_of


def test_defaults_hold_the_static_sizes(cpu: World) -> None:
    compiled = compiled_of(cpu.model, cpu.device, sizes=(3, 8, 60))
    plan = plan_for(compiled, max_num_seqs=16)
    assert plan.sizes == (1, 2, 3, 4, 8, 16, 24, 32)  # 60 is above: it runs unpadded
    assert plan.order == tuple(reversed(plan.sizes))
    assert (plan.mode, plan.notes, plan.max_tokens) == (CaptureMode.FULL_AND_PIECEWISE, (), 64)


def test_a_static_size_that_no_batch_would_reach_is_refused(cpu: World) -> None:
    compiled = compiled_of(cpu.model, cpu.device, sizes=(3,))
    with pytest.raises(UsageError, match="sizes 3 have a variant"):
        plan_for(compiled, sizes=(1, 4))
    assert plan_for(compiled, sizes=(1, 3, 4)).sizes == (1, 3, 4)


def test_an_entry_without_splits_says_what_its_mode_became(cpu: World) -> None:
    plan = plan_for(compiled_of(cpu.model, cpu.device, splits=0), mode=CaptureMode.PIECEWISE, sizes=(2,))
    assert (plan.requested, plan.mode) == (CaptureMode.PIECEWISE, CaptureMode.FULL)
    assert len(plan.notes) == 1


def test_mode_none_captures_nothing(cpu: World) -> None:
    plan = plan_for(cpu.compiled, mode=CaptureMode.NONE)
    assert (plan.sizes, list(plan.graph_keys())) == ((), [])


@pytest.mark.parametrize("wrong", [{"sizes": (65,)}, {"max_tokens": 65}, {"sizes": ()}, {"lazy_sizes": (5,)}])
def test_what_the_entry_cannot_do(cpu: World, wrong: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError):
        plan_for(cpu.compiled, **wrong)  # type: ignore[arg-type]
