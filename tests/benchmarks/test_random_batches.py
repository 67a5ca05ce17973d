"""The soak script: it passes on the real runner, goes on where it ended, and notices what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY, Warm

pytestmark = pytest.mark.slow
BENCHMARKS = REPOSITORY / "benchmarks"


def run(script: str, *options: str | Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_random_batches_equal_eager_over_two_runs(llama: Warm, tmp_path: Path) -> None:
    cache, state = llama.copy(tmp_path / "cache"), tmp_path / "state.json"
    options = ("--smoke", "--cache-dir", cache, "--state", state, "--chunk", "20")
    code, first = run("random_batches.py", *options, "--budget", "0")
    assert (code, first["done"], first["ok"]) == (1, 20, False)
    before = json.loads(state.read_text())["chunks"]["0"]
    code, found = run("random_batches.py", *options)
    assert code == 0, found
    assert (found["done"], found["failures"]) == (50, [])
    assert json.loads(state.read_text())["chunks"]["0"] == before
    assert sum(found["modes"].values()) == 50
    assert min(found["modes"].values()) > 0
    assert min(found["kinds"].values()) > 5
    assert found["worst"]["logits"] < 1e-4


def test_every_safety_error_shows(llama: Warm, tmp_path: Path) -> None:
    cache = llama.copy(tmp_path / "cache")
    code, found = run("capture_safety.py", *llama.model, "--device", "cpu", "--cache-dir", cache)
    assert code == 0, found
    assert {name: one["ok"] for name, one in found.items()} == dict.fromkeys(found, True)
    assert len(found) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_with_real_graphs(tmp_path: Path) -> None:
    model = (
        "--model",
        "llama-tiny",
        "--arg",
        "layers=2",
        "--device",
        "cuda",
        "--cache-dir",
        tmp_path / "cache",
    )
    code, found = run("random_batches.py", *model, "--batches", "100", "--chunk", "50", "--max-num-seqs", "32")
    assert code == 0, found
    assert min(found["modes"].values()) > 0
    code, found = run("capture_safety.py", *model, "--room", "1")  # less than a graph's pool needs at the least
    assert code == 0, found


@pytest.fixture(scope="module")
def soak(llama: Warm) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module: Any = importlib.import_module("random_batches")
        parser = module.parser_of_options()
        parser.set_defaults(
            **{**module.SMOKE, "cache_dir": llama.root, "sizes": "1,2,4,8,16", "max_num_seqs": 8}
        )
        made = module.Soak(parser.parse_args([]))
        yield made
        made.runner.close()
        for name in ("random_batches", "traffic"):
            sys.modules.pop(name)


Call = Callable[..., torch.Tensor]


def wrong_logits(soak: Any, run: Call) -> Call:
    def call(*args: Any) -> torch.Tensor:
        got = run(*args)
        got[-1] *= 1.001
        return got

    return call


def no_writes(soak: Any, run: Call) -> Call:
    def call(*args: Any) -> torch.Tensor:
        before = [tensor.clone() for tensor in soak.cache.values]
        got = run(*args)
        for tensor, old in zip(soak.cache.values, before, strict=True):
            tensor.copy_(old)
        return got

    return call


def stray_writes(soak: Any, run: Call) -> Call:
    def call(*args: Any) -> torch.Tensor:
        got = run(*args)
        soak.cache.keys[1][-1, -1] += 1  # of no sequence: the smoke's batches do not fill the cache
        return got

    return call


def reused_outputs(soak: Any, run: Call) -> Call:
    buffer = torch.zeros(4096, 512)

    def call(*args: Any) -> torch.Tensor:
        got = run(*args)
        buffer[: len(got)] = got
        return buffer[: len(got)]

    return call


@pytest.mark.parametrize(
    ("break_", "said"),
    [
        (wrong_logits, "logits"),
        (no_writes, "keys and values"),
        (stray_writes, "the rest of the cache"),
        (reused_outputs, "the logits of the batch before"),
    ],
)
def test_what_is_wrong_is_noticed(
    soak: Any, monkeypatch: pytest.MonkeyPatch, break_: Callable[[Any, Call], Call], said: str
) -> None:
    assert soak.chunk(1, 5)["failures"] == []
    real = soak.runner
    wrong = break_(soak, real)

    class Broken:
        stats = real.stats

        def __call__(self, *args: Any) -> torch.Tensor:
            return wrong(*args)

    monkeypatch.setattr(soak, "runner", Broken())
    failures = soak.chunk(1, 5)["failures"]
    assert any(f": {said} " in failure for failure in failures), failures
