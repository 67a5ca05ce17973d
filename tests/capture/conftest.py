"""The same properties on two devices: the fake backend on the CPU, real graphs where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.capture.toy import World


def _cuda() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not _cuda(), reason="needs a CUDA device")]
        ),
    ]
)
def world(request: pytest.FixtureRequest) -> World:
    return World(torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu"))


@pytest.fixture
def cpu() -> World:
    return World(torch.device("cpu"))
