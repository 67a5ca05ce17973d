"""Two builds of one model give the same bytes, whoever makes them, where, and after what."""

from __future__ import annotations

from pathlib import Path

import pytest

from pwcc.cli import main
from tests.conftest import Machine
from tests.key.conftest import Keyed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]


def test_another_user_with_another_hash_seed(keyed: Keyed, tmp_path: Path) -> None:
    """Another process, HOME, TMPDIR, directory for Inductor, cwd and hash seed."""
    root = keyed.warm.copy(tmp_path / "cache")
    machine = Machine.make(tmp_path / "machine", "lucignolo")
    options = (*keyed.warm.model, *keyed.warm.options, "--cache-dir", str(root), "--verify-hit")
    report = machine.pwcc_json("compile", *options, PYTHONHASHSEED="31337")
    assert report["hit"]
    assert report["verified"]["ok"], report["verified"]["differences"]
    assert report["verified"]["compared"] > 10


def test_a_process_that_compiled_other_models_before(
    keyed: Keyed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This one: counters of Dynamo and Inductor, symbols, kernel names and ids have moved on."""
    root = keyed.warm.copy(tmp_path / "cache")
    other = ["--input", "x:float32[n,8]", "--max-tokens", "32", "--cpu-baseline", "x86-64-v3", "--cache-dir"]
    model = keyed.warm.model[1].removesuffix(":factory") + ":Norm"
    arguments = ["--arg", "size=8", "--arg", "eps=1e-3"]
    assert main(["compile", "--model", model, *arguments, *other, str(tmp_path / "other")]) == 0
    options = [*keyed.warm.model, *keyed.warm.options, "--cache-dir", str(root), "--verify-hit"]
    assert main(["compile", *options]) == 0, capsys.readouterr().err
    assert "verified: compiled again, all " in capsys.readouterr().out
