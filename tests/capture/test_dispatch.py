"""The dispatcher's order: exact FULL, non-uniform FULL, PIECEWISE, NONE; and why it fell."""

from __future__ import annotations

from dataclasses import replace

from pwcc.capture.dispatch import Dispatch, Dispatcher, Fall
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import GraphKey
from pwcc.compile.ops.forward_context import BatchDescriptor, RunMode
from tests.capture.test_plan import PLAN

FULL = replace(PLAN, mode=CaptureMode.FULL, waste_limit=None)
BOTH = replace(PLAN, waste_limit=None)


def ready(dispatcher: Dispatcher, mode: RunMode, size: int, uniform: bool = False) -> None:
    dispatcher.enable(GraphKey(mode, BatchDescriptor(size, uniform)))


def test_the_order() -> None:
    dispatcher = Dispatcher(FULL)
    assert dispatcher.dispatch(3, True) == Dispatch(RunMode.NONE, BatchDescriptor(3, True), Fall.NOT_READY)
    ready(dispatcher, RunMode.PIECEWISE, 4)
    assert dispatcher.dispatch(3, True) == Dispatch(RunMode.PIECEWISE, BatchDescriptor(4, True), Fall.NOT_READY)
    ready(dispatcher, RunMode.FULL, 4)
    assert dispatcher.dispatch(3, True) == Dispatch(RunMode.FULL, BatchDescriptor(4, False))
    ready(dispatcher, RunMode.FULL, 4, uniform=True)
    assert dispatcher.dispatch(3, True) == Dispatch(RunMode.FULL, BatchDescriptor(4, True))
    assert dispatcher.dispatch(3, False) == Dispatch(RunMode.FULL, BatchDescriptor(4, False))
    dispatcher.disable(GraphKey(RunMode.FULL, BatchDescriptor(4)))
    assert dispatcher.dispatch(3, False) == Dispatch(RunMode.PIECEWISE, BatchDescriptor(4), Fall.NOT_READY)


def test_falls_are_told_apart() -> None:
    dispatcher = Dispatcher(BOTH)
    ready(dispatcher, RunMode.FULL, 4, uniform=True)
    ready(dispatcher, RunMode.PIECEWISE, 4)
    assert dispatcher.dispatch(4, True, full=False).fall is Fall.TOO_LONG
    assert dispatcher.dispatch(4, False).fall is None
    assert dispatcher.dispatch(9, False) == Dispatch(RunMode.NONE, BatchDescriptor(9), Fall.ABOVE_LARGEST)
    assert Dispatcher(PLAN).dispatch(1, True).fall is Fall.NOT_READY
    assert Dispatcher(replace(PLAN, waste_limit=1.0)).dispatch(3, True).fall is Fall.WASTE
    none = Dispatcher(replace(PLAN, mode=CaptureMode.NONE))
    assert none.dispatch(3, True) == Dispatch(RunMode.NONE, BatchDescriptor(3, True), Fall.MODE)
    decode_only = Dispatcher(replace(BOTH, mode=CaptureMode.FULL_DECODE_ONLY))
    assert decode_only.dispatch(3, False).fall is Fall.MODE


def test_the_true_size_is_kept_where_nothing_is_padded() -> None:
    """The dynamic variant runs at the true token count, each time another."""
    dispatcher = Dispatcher(BOTH)
    assert [dispatcher.dispatch(n, False).batch.num_tokens for n in (5, 6, 5)] == [5, 6, 5]
