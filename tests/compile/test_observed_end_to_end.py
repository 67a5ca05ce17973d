"""One cache, several environments: each fresh process gets its own answer, or a miss that names the input."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machine

pytestmark = pytest.mark.slow

MODEL = """
import json
import os
from pathlib import Path

import torch
from torch import nn

SCALE = json.loads((Path(__file__).parent / "scale.json").read_text())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.blocks = int(os.environ.get("TOY_BLOCKS", "2"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * SCALE
        if os.getenv("TOY_ACT") == "gelu":
            return nn.functional.gelu(y)
        return y if torch.is_grad_enabled() else y.relu()


def example_inputs(num_tokens: int) -> tuple[torch.Tensor]:
    return (torch.randn(num_tokens, 8),)
"""
SERVE = """
import json, sys, torch, branching, pwcc
torch.manual_seed(0)
model = branching.Branching().eval()
try:
    compiled = pwcc.load(model, cache_dir=sys.argv[1])
except pwcc.CacheMiss as miss:
    print(json.dumps({"miss": str(miss)}))
    sys.exit(3)
x = torch.randn(5, 8)
with torch.no_grad():
    error = (compiled(x) - model(x)).abs().max().item()
try:
    compiled(x)
    refused = ""
except pwcc.CallError as failure:
    refused = failure.message
receipt = compiled.receipt
print(json.dumps({"entry": compiled.manifest.entry_key, "error": error, "refused": refused,
                  "counts": [receipt.dynamo_frames, receipt.inductor_compiles, receipt.processes_started,
                             receipt.files_written]}))
"""


@dataclass(frozen=True)
class Shared:
    """One cache that was compiled under two values of a variable."""

    machine: Machine
    model: Path
    cache: Path
    entries: dict[str, str]

    def serve(self, root: Path, code: int = 0, scale: str = "2", **env: str) -> dict[str, Any]:
        """Serve in a fresh process, from another checkout, on a machine without a compiler."""
        root.mkdir()
        shutil.copy(self.model, root)
        (root / "scale.json").write_text(scale)
        (root / "serve.py").write_text(SERVE)
        machine = Machine.make(root / "machine", "other", bare=True)
        done = machine.run(root / "serve.py", self.cache, code=code, **env)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    root = tmp_path_factory.mktemp("branching")
    model = root / "branching.py"
    model.write_text(MODEL)
    (root / "scale.json").write_text("2")
    machine = Machine.make(root / "machine", "builder")
    entries = {}
    for act in ("gelu", "relu"):
        report = machine.pwcc_json(*options(model, root / "cache"), TOY_ACT=act)
        assert not report["hit"]
        assert report["build_observed"]
        entries[act] = report["entry_key"]
    return Shared(machine, model, root / "cache", entries)


def options(model: Path, cache: Path) -> tuple[str | Path, ...]:
    return "compile", "--model", f"{model}:Branching", "--device", "cpu", "--cache-dir", cache


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_each_process_gets_eagers_answer_for_its_own_value(shared: Shared, tmp_path: Path, act: str) -> None:
    served = shared.serve(tmp_path / "host", TOY_ACT=act, HOME="/nowhere", TOY_NOISE="1")
    assert served["entry"] == shared.entries[act]
    assert served["error"] < 1e-6
    assert served["counts"] == [0, 0, 0, 0]
    assert "grad mode" in served["refused"]  # a call with gradients enabled would take the other branch


@pytest.mark.parametrize(
    ("env", "scale", "said"),
    [
        ({"TOY_ACT": "tanh"}, "2", "environment variable TOY_ACT"),
        ({}, "2", "environment variable TOY_ACT"),
        ({"TOY_ACT": "gelu", "TOY_BLOCKS": "3"}, "2", "environment variable TOY_BLOCKS"),
        ({"TOY_ACT": "gelu"}, "3", "file scale.json beside module branching"),
    ],
)
def test_another_input_is_a_miss_that_names_it(
    shared: Shared, tmp_path: Path, env: dict[str, str], scale: str, said: str
) -> None:
    missed = shared.serve(tmp_path / "host", code=3, scale=scale, **env)
    assert said in missed["miss"]


def test_a_second_compile_is_a_hit_for_each_value(shared: Shared) -> None:
    for act, entry in shared.entries.items():
        report = shared.machine.pwcc_json(*options(shared.model, shared.cache), TOY_ACT=act)
        assert (report["hit"], report["entry_key"]) == (True, entry)


def test_inspect_shows_what_was_observed(shared: Shared) -> None:
    shown = shared.machine.pwcc("inspect", shared.cache, shared.entries["gelu"], "--full").stdout
    assert "build observed  yes" in shown
    for said in ("TOY_ACT", "TOY_BLOCKS", "scale.json", "branching.py"):
        assert said in shown
