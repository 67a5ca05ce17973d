"""The real ``pwcc compile``, killed or robbed of its cache: a whole entry follows each time."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from pwcc.cache.findings import Kind
from pwcc.cache.store import Store
from pwcc.cache.verify import verify
from tests.conftest import REPOSITORY, Machine

pytestmark = pytest.mark.slow

MODEL = """
import torch

class Plain(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))

    def example_inputs(self, tokens: int):
        return (torch.randn(tokens, 16),)
"""


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    (tmp_path / "crash_model.py").write_text(MODEL)
    return ["--model", f"{tmp_path}/crash_model.py:Plain", "--device", "cpu"]


def argv(model: list[str], root: Path) -> list[str]:
    return ["compile", *model, "--splitting-ops", "", "--cache-dir", str(root)]


def test_a_compile_killed_before_and_after_its_work(machine: Machine, model: list[str], tmp_path: Path) -> None:
    root = tmp_path / "cache"
    launcher = str(REPOSITORY / "tests/failpoint_main.py")
    for point, visible in (("compile.compiled", 0), ("publish.renamed", 1)):
        machine.run(launcher, point, *argv(model, root), code=-signal.SIGKILL)
        store = Store.open(root)
        assert len(list(store.entries())) == visible
        found = verify(store, now=time.time())
        assert {finding.kind for finding in found.findings} <= {Kind.LEFTOVER}
    report = machine.pwcc_json(*argv(model, root))
    assert report["hit"]  # what the killed one had published is whole
    assert list((root / "v1/tmp").iterdir()) == []
    assert machine.pwcc_json("load", root, *model)["receipt"]["clean"]


def test_a_cache_that_is_removed_while_it_is_compiled(
    machine: Machine, model: list[str], tmp_path: Path
) -> None:
    """``rm -rf`` at the worst moments; the compile makes the directory again and publishes."""
    root = tmp_path / "cache"
    stop = threading.Event()
    removed = 0

    def remove() -> None:
        nonlocal removed
        while not stop.wait(0.02):
            if removed < 2 and list((root / "v1").glob("blobs/sha256/*/*" if removed else "locks/*.lock")):
                shutil.rmtree(root, ignore_errors=True)
                removed += 1

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        done = machine.pwcc(*argv(model, root), "--json")
    finally:
        stop.set()
        thread.join()
    assert removed == 2
    report = json.loads(done.stdout)
    assert not report["hit"]
    store = Store.open(root)
    assert [ref.entry_key for ref in store.entries()] == [report["entry_key"]]
    assert verify(store, now=time.time()).exit_code == 0
    assert machine.pwcc_json("load", root, *model)["receipt"]["clean"]
