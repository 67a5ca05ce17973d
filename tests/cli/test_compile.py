"""``pwcc compile`` up to the point where it would trace: what is refused, and how."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Run = Callable[..., subprocess.CompletedProcess[str]]

MODEL = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self, width: int = 8, eps: float = 1e-5):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)

def broken():
    raise ArithmeticError("negative factor")

def nothing():
    return None
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "wide.py"
    path.write_text(MODEL)
    return path


def compile_(run: Run, model: str, *argv: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return run("compile", "--model", model, "--cache-dir", cache, "--device", "cpu", *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--sizes", "1,0"), "expected sizes of at least 1, got '0'"),
        (("--sizes", "1,-2"), "got '-2'"),
        (("--sizes", "8192,8193"), "expected sizes of at most 8192 tokens, got '8193'"),
        (("--sizes", "1,9", "--max-tokens", "8"), "expected sizes of at most 8 tokens, got '9'"),
        (("--splitting-ops", "attention"), "expected an operator such as pwcc::attention, got 'attention'"),
        (("--passes", "nop"), "expected a pass of noop, "),
        (("--passes", "fix_functionalization"), "needs noop before it"),
        (("--custom-ops", "+rms"), "pwcc has no custom operator 'rms'"),
        (("--arg", "layers"), "expected --arg key=value, got 'layers'"),
        (("--arg", "layrs=1"), "llama-tiny has no parameter 'layrs'"),
        (("--arg", "layers=two"), "expects layers to be int"),
        (("--args-file", "no.json"), "cannot read the arguments file"),
        (("--device", "gpu"), "expected a device such as cpu, cuda or cuda:1, got 'gpu'"),
        (("--device", "meta"), "expected a cpu or cuda device, got meta"),
        (("--dtype", "float31"), "'float31' is not a torch dtype"),
        (("--input", "input_ids"), "cannot read the input declaration 'input_ids'"),
        (("--input", "ids:int64[n]"), "has no parameter 'ids'"),
    ],
)
def test_usage(run: Run, tmp_path: Path, argv: tuple[str, ...], message: str) -> None:
    done = compile_(run, "llama-tiny", *argv, "--json", cache=tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("UsageError", 2)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama-tiny", "did you mean llama-tiny"),
        ("no_such_package.module:attr", "no module named 'no_such_package'"),
        ("no.py:factory", "no such file: 'no.py'"),
        ("{model}", "names a file but nothing in it"),
        ("{model}:Wid", "did you mean Wide?"),
        ("{model}:nothing", "returned a NoneType, expected a torch.nn.Module"),
        ("{model}:Wide", "pass --input 'hidden:float32[n,WIDTH]'"),
        ("{folder}", "has no config.json"),
    ],
)
def test_an_unknown_model(run: Run, tmp_path: Path, model: Path, name: str, message: str) -> None:
    done = compile_(run, name.format(model=model, folder=tmp_path), cache=tmp_path / "cache")
    assert done.returncode == 2
    assert message in done.stderr


def test_a_factory_that_raises(run: Run, tmp_path: Path, model: Path) -> None:
    done = compile_(run, f"{model}:broken", cache=tmp_path / "cache")
    assert done.returncode == 1
    line = MODEL.splitlines().index('    raise ArithmeticError("negative factor")') + 1
    assert "ArithmeticError: negative factor" in done.stderr
    assert f"wide.py:{line}" in done.stderr
    assert "Traceback" not in done.stderr


def test_arguments_of_a_file_are_overridden_by_those_of_the_command(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"layers": 1, "eps": "wrong"}')
    done = compile_(run, "llama-tiny", "--args-file", str(path), cache=tmp_path / "cache")
    assert "expects eps to be float" in done.stderr
    done = compile_(
        run,
        "llama-tiny",
        "--args-file",
        str(path),
        "--arg",
        "eps=1e-6",
        "--arg",
        "layers=x",
        cache=tmp_path / "cache",
    )
    assert "expects layers to be int" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_a_device_that_is_not_here(run: Run, tmp_path: Path) -> None:
    done = run("compile", "--model", "llama-tiny", "--device", "cuda", "--cache-dir", tmp_path / "cache")
    assert done.returncode == 2
    assert "expected a CUDA device for cuda, but torch sees none" in done.stderr


def test_a_directory_that_holds_something_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    done = compile_(run, "llama-tiny", cache=tmp_path / "other")
    assert done.returncode == 1
    assert "expected an empty directory or a pwcc cache, found file" in done.stderr


def test_frozen_in_an_empty_cache_is_a_miss(run: Run, tmp_path: Path) -> None:
    from pwcc.cache.store import Store

    Store.create(tmp_path / "cache")
    done = compile_(run, "llama-tiny", "--frozen", "--json", cache=tmp_path / "cache")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["type"] == "CacheMiss"


def test_the_environment_names_the_cache(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWCC_CACHE_DIR", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    done = run("compile", "--model", "llama-tiny", "--device", "cpu")
    assert done.returncode == 1
    assert f"at: {tmp_path / 'other'}" in done.stderr
