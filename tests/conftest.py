"""What the whole session shares: the program as a process, and entries that it compiled, once per model."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Machine:
    """A user on a machine of their own: directories and names that no entry may hold.

    ``bare`` machines serve: no compiler in reach, and a compiler's caches that would be seen filling up.
    """

    root: Path
    env: Mapping[str, str]

    @classmethod
    def make(cls, root: Path, name: str, *, bare: bool = False) -> Machine:
        folders = {part: root / f"{part}-of-{name}" for part in ("home", "tmp", "work", "bin", "caches")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        names = {
            "HOME": "home",
            "TMPDIR": "tmp",
            "TORCHINDUCTOR_CACHE_DIR": "caches",
            "TRITON_CACHE_DIR": "caches",
        }
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PWCC_", "COLUMNS"))}
        env |= {key: str(folders[part]) for key, part in names.items()}
        env |= {"USER": name, "LOGNAME": name, "PYTHONDONTWRITEBYTECODE": "1"}
        if bare:
            env |= {"PATH": str(folders["bin"]), "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
        return cls(root, env)

    def folder(self, part: str) -> Path:
        """One of home, tmp, work, bin and caches."""
        (found,) = self.root.glob(f"{part}-of-*")
        return found

    def run(
        self, *argv: str | Path, code: int | None = 0, through: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with ``argv`` here, ``through`` a command; its exit code must be ``code``."""
        done = subprocess.run(
            [*through, sys.executable, *map(str, argv)],
            check=False,
            capture_output=True,
            text=True,
            env={**self.env, **env},
            cwd=self.folder("work"),
            timeout=500,
        )
        assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def pwcc(
        self, *argv: str | Path, code: int | None = 0, through: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the program here."""
        return self.run("-m", "pwcc", *argv, code=code, through=through, **env)

    def pwcc_json(
        self, *argv: str | Path, code: int | None = 0, through: Sequence[str] = (), **env: str
    ) -> dict[str, Any]:
        """Run the program here and return its answer."""
        done = self.pwcc(*argv, "--json", code=code, through=through, **env)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@dataclass(frozen=True)
class Warm:
    """A cache that holds one compiled entry. Tests read it; one that writes works on a :meth:`copy`.

    ``model`` are the options that name the model, ``options`` those of the compile, ``report`` its answer.
    """

    root: Path
    machine: Machine
    model: tuple[str, ...]
    options: tuple[str, ...]
    report: dict[str, Any]

    def copy(self, to: Path) -> Path:
        """Return a copy of the cache at ``to``."""
        shutil.copytree(self.root, to)
        return to


def warm(root: Path, name: str, model: tuple[str, ...], options: tuple[str, ...]) -> Warm:
    """Compile a model in a process of its own, on a machine of its own."""
    machine = Machine.make(root / "machine", name)
    model = (*model, "--device", "cpu")
    report = machine.pwcc_json("compile", *model, *options, "--cache-dir", root / "cache")
    return Warm(root / "cache", machine, model, options, report)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine that compiles."""
    return Machine.make(tmp_path / "machine", "somebody")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """llama-tiny with 2 layers at sizes 1 and 2, for this CPU: 9 compiles."""
    model = ("--model", "llama-tiny", "--arg", "layers=2")
    return warm(tmp_path_factory.mktemp("llama"), "pinocchio", model, ("--sizes", "1,2"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """A Hugging Face directory of a tiny Qwen3 at size 2, for any AVX2 CPU: 6 compiles."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    root = tmp_path_factory.mktemp("qwen3")
    directory = root / "qwen3-config"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3))
    return warm(root, "geppetto", ("--model", str(directory)), ("--sizes", "2", "--cpu-baseline", "x86-64-v3"))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """A copy of examples/tiny_decoder.py with 2 layers at size 2, for any AVX2 CPU: 6 compiles."""
    root = tmp_path_factory.mktemp("decoder")
    path = root / "tiny_decoder.py"
    shutil.copy(REPOSITORY / "examples/tiny_decoder.py", path)
    model = ("--model", f"{path}:factory", "--arg", "layers=2")
    return warm(root, "mangiafuoco", model, ("--sizes", "2", "--cpu-baseline", "x86-64-v3"))
