"""The zoo's modules, which are scripts beside the package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import REPOSITORY

ZOO = REPOSITORY / "zoo"
NAMES = frozenset(path.stem for path in ZOO.glob("*.py"))

Load = Callable[[str], Any]


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """A function that imports one of the zoo's modules; they are gone afterwards."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    monkeypatch.syspath_prepend(str(ZOO))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
