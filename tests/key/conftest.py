"""One compiled entry for both lists: what changes a key, and what must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pwcc
from pwcc.cache.errors import CacheMiss
from pwcc.compile.compiled_model import CompiledModel
from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.precompile import precompile
from pwcc.compile.report import CompileReport
from tests.conftest import Warm, warm
from tests.key import project

TAG = "first"


@dataclass(frozen=True)
class Keyed:
    """The compiled entry, and the project that it was compiled from."""

    warm: Warm
    root: Path

    @property
    def cache(self) -> Path:
        return self.warm.root

    @property
    def entry(self) -> str:
        return str(self.warm.report["entry_key"])

    def load(self, model: nn.Module, cache: Path | None = None, **options: Any) -> CompiledModel:
        """Load as a serving host does; raises CacheMiss."""
        return pwcc.load(model, cache_dir=cache or self.cache, **{"tag": TAG, **options})

    def recompile(self, model: nn.Module, cache: Path | None = None, **options: Any) -> CompileReport:
        """Ask for the same compile again, frozen: a hit, or CacheMiss."""
        given: dict[str, Any] = {
            "specs": (parse_declaration(project.INPUT),),
            "sizes": (2,),
            "max_tokens": 64,
            "device": "cpu",
            "identity": "file:keyed_model.py:factory",
            "cpu_baseline": "x86-64-v3",
            "tag": TAG,
            "frozen": True,
        }
        return precompile(model, cache_dir=cache or self.cache, **{**given, **options})


def reasons_of(call: Callable[[], object]) -> Sequence[str]:
    """The reasons of the miss that a call must end in."""
    with pytest.raises(CacheMiss) as caught:
        call()
    assert caught.value.exit_code == 3, caught.value
    return caught.value.reasons


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    """The project's model at size 2, for any AVX2 CPU, tagged: 2 compiles."""
    root = tmp_path_factory.mktemp("keyed")
    path = project.write(root / "project")
    model = ("--model", f"{path}:factory", "--input", project.INPUT)
    options = ("--sizes", "2", "--max-tokens", "64", "--cpu-baseline", "x86-64-v3", "--tag", TAG)
    return Keyed(warm(root, "medoro", model, options), root / "project")


@pytest.fixture
def module(keyed: Keyed) -> Iterator[ModuleType]:
    """The model's module, imported from the project's own place."""
    with project.imported(keyed.root) as found:
        yield found


@pytest.fixture
def model(module: ModuleType) -> nn.Module:
    """A fresh model of the compiled configuration, with weights."""
    return model_of(module)


def model_of(module: ModuleType, **options: object) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = module.Tiny(**options)
    return made.eval().requires_grad_(False)
