"""The server example's modules, imported as ``python examples/serve.py`` finds them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def module(name: str) -> Any:
    """Import one of them."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


@pytest.fixture(scope="session")
def scheduling() -> Any:
    return module("serving.scheduler")


@pytest.fixture(scope="session")
def engines() -> Any:
    return module("serving.engine")
