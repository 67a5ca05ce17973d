"""A capture says what it did in the log of its part."""

from __future__ import annotations

import logging

import pytest

from pwcc.capture.modes import CaptureMode
from tests.capture.toy import World


@pytest.mark.parametrize("background", [False, True])
def test_a_capture_is_logged(cpu: World, caplog: pytest.LogCaptureFixture, *, background: bool) -> None:
    caplog.set_level(logging.INFO, "pwcc.capture")
    runner = cpu.runner(CaptureMode.PIECEWISE, plan={"background": background})
    runner.capture()
    if background:
        runner.join()
    (line,) = [record for record in caplog.records if record.name == "pwcc.capture"]
    assert line.getMessage().startswith("capture: ")
    assert "backend fake" in line.getMessage()
