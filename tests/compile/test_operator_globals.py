"""Constants that an operator's opened code reads are recorded: a change is a miss, never a stale answer."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import TraceError
from pwcc.compile.operator_globals import reads_of
from pwcc.compile.piece_cache import code_behind
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.torch_private import operators
from tests.compile.test_witness import see

TABLES = """
SCALE = 2.0
SIZES = (1, 2, ("a", None))
CALLS = 0

class Config:
    def __init__(self):
        self.width = 8

CONFIG = Config()

def helper(x):
    return x * INNER

INNER = 5
"""
OPENED = """
import math
import torch
import opened_tables
from opened_tables import helper
library = torch.library.Library("pwcc_opened", "FRAGMENT")
K = 3.0
MANY = [1, 2]

def body(x):
    def inner(y):
        return y + K
    y = inner(x) * opened_tables.SCALE + opened_tables.CONFIG.width + math.pi + len(MANY)
    return helper(y) + opened_tables.SIZES[0]

library.define("op(Tensor x) -> Tensor")
library.impl("op", body, "CompositeImplicitAutograd")
"""
OPAQUE = """
import torch
CALLS = 0
PADDING = 4

@torch.library.custom_op("pwcc_opaque::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return torch.cat((x, x.new_zeros(PADDING, *x.shape[1:])))

@op.register_fake
def _(x):
    return x.new_empty(x.shape[0] + PADDING, *x.shape[1:])
"""
Make = Callable[[str, str], ModuleType]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Write a module and import it; operators that it registered are taken back."""
    made: list[ModuleType] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        made.append(importlib.import_module(name))
        return made[-1]

    yield write
    for module in made:
        del sys.modules[module.__name__]
        library = getattr(module, "library", None) or getattr(getattr(module, "op", None), "_lib", None)
        if library is not None:
            library._destroy()


@pytest.fixture
def opened(make: Make) -> tuple[ModuleType, ModuleType]:
    tables = make("opened_tables", TABLES)
    return make("opened_operator", OPENED), tables


def read(*names: str) -> dict[str, object]:
    found = reads_of(operators.behind(names)).constants
    return {p.root + "".join(f".{step[1]}" for step in p.rule.steps if len(step) > 1): p for p in found}


def test_what_an_opened_body_reads_is_recorded(opened: tuple[ModuleType, ModuleType]) -> None:
    assert list(read("pwcc_opened::op")) == [
        "module:opened_operator.K",
        "module:opened_tables.CONFIG.width",
        "module:opened_tables.INNER",
        "module:opened_tables.SCALE",
        "module:opened_tables.SIZES",
    ]
    files = reads_of(operators.behind(["pwcc_opened::op"])).files
    assert [Path(file).name for file in files] == ["opened_operator.py", "opened_tables.py"]


@pytest.mark.parametrize(("name", "value"), [("SCALE", 2.5), ("SCALE", 2), ("SIZES", (1, 2)), ("INNER", 6)])
def test_another_value_is_a_violation_and_another_piece(
    opened: tuple[ModuleType, ModuleType], name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = PredicateSet.of(reads_of(operators.behind(["pwcc_opened::op"])).constants)
    before = code_behind(["torch.ops.pwcc_opened.op.default"])
    assert recorded.check(nn.Module(), limit=9) == []
    assert code_behind(["torch.ops.pwcc_opened.op.default"]) == before
    monkeypatch.setattr(opened[1], name, value)
    (violation,) = recorded.check(nn.Module(), limit=9)
    assert name in violation.path
    assert code_behind(["torch.ops.pwcc_opened.op.default"]) != before


def test_of_an_opaque_operator_only_the_fake_is_read(make: Make) -> None:
    make("opaque_operator", OPAQUE)
    assert list(read("pwcc_opaque::op")) == ["module:opaque_operator.PADDING"]


def test_operators_of_torch_are_not_read() -> None:
    assert read("aten::softmax", "aten::einsum") == {}


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.pwcc_opened.op(self.linear(x))
        return made


def test_an_entry_records_them_and_refuses_code_that_is_not_its_files(
    opened: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Calls()
    seen = see(model)
    recorded = PredicateSet.of(seen.predicates)
    assert recorded.check(model, limit=9) == []
    assert {"opened_operator.py", "opened_tables.py"} <= {Path(record.path).name for record in seen.sources}
    monkeypatch.setattr(opened[1], "SCALE", 7.0)
    assert ["SCALE" in violation.path for violation in recorded.check(model, limit=9)] == [True]
    file = Path(str(opened[0].__file__))
    file.write_text(file.read_text().replace("y + K", "y - K"))
    with pytest.raises(TraceError, match=r"opened_operator\.py was changed after opened_operator was imported"):
        see(model)
