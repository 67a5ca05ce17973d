"""What goes into a key: everything that changes the code, and nothing that only says where it was made."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import pwcc
from pwcc.cache.factors import FactorTree
from pwcc.compile import build_factors as factors
from pwcc.compile.build_factors import BuildFactors, BuildOptions, build_factors, portable_args, source_records
from pwcc.compile.models.llama import Llama
from pwcc.compile.runtime.portable import describe
from pwcc.compile.runtime.predicates import Predicate, Rule
from pwcc.compile.target import target_of
from pwcc.compile.torch_private.inductor import config_changes
from pwcc.compile.user_code import import_file
from tests.conftest import Machine

OPTIONS = BuildOptions(
    sizes=(1, 2),
    max_tokens=8192,
    splitting_ops=("pwcc::attention",),
    autotune=False,
    cpu_baseline="native",
    inputs=("input_ids:int64[n]",),
    profile=None,
)


def built(options: BuildOptions = OPTIONS, identity: str = "builtin:x", **args: object) -> BuildFactors:
    return build_factors(options, target_of("cpu"), identity, args)


def recorded(made: BuildFactors, *, observed: bool = False) -> FactorTree:
    """The tree as an entry stores it, with the factors that only a trace tells."""
    traced = dict.fromkeys(factors.TRACED, "traced") | {"build observed": observed}
    return FactorTree.from_json(json.loads(json.dumps(made.tree((), traced).to_json())))


def test_the_same_request_matches_what_it_recorded() -> None:
    assert built(layers=2).matches(recorded(built(layers=2)))
    assert built().matches(recorded(built(), observed=True))  # what was seen of the build is no request


@pytest.mark.parametrize(
    "other",
    [
        built(replace(OPTIONS, sizes=(1,))),
        built(replace(OPTIONS, max_tokens=4096)),
        built(replace(OPTIONS, splitting_ops=())),
        built(replace(OPTIONS, autotune=True)),
        built(replace(OPTIONS, cpu_baseline="x86-64-v3")),
        built(replace(OPTIONS, inputs=("input_ids:int32[n]",))),
        built(replace(OPTIONS, profile="small")),
        built(identity="builtin:y"),
        built(layers=3),
    ],
)
def test_another_request_does_not_match(other: BuildFactors) -> None:
    assert not other.matches(recorded(built()))


def test_the_environment_that_changes_code_is_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recorded(built())
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert built().matches(before)
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert not built().matches(before)


def test_changed_inductor_settings_are_a_factor_and_restored_ones_are_not() -> None:
    from torch._inductor import config

    assert config_changes() == {}
    before = recorded(built())
    with config.patch({"freezing": True, "cpp.simdlen": 512}):
        changes = config_changes()
        assert changes == {
            "torch._inductor.config.freezing": "True",
            "torch._inductor.config.cpp.simdlen": "512",
        }
        assert not built().matches(before)
    # patch leaves "overridden with the default" behind; a second compile in one process must still hit
    assert config_changes() == {}
    assert built().matches(before)


COMPILER = """#!/bin/sh
echo "g++ (Some OS 1.0) {version}"
"""

PRINT = """
from pwcc.compile.build_factors import piece_factors
from pwcc.compile.target import target_of
print(piece_factors(target_of("cpu")))
"""


def test_another_compiler_is_another_piece(machine: Machine) -> None:
    path = machine.folder("bin") / "g++"
    found: list[str] = []
    for version in ("12.2", "13.1", "12.2"):
        path.write_text(COMPILER.format(version=version))
        path.chmod(0o755)
        found.append(machine.run("-c", PRINT, CXX=str(path)).stdout)
    assert found[0] == found[2] != found[1]
    without = machine.run("-c", PRINT, CXX="/nonexistent/c++").stdout
    assert without not in found


def test_pwccs_own_code_is_a_factor() -> None:
    digest = factors.own_code_digest()
    assert len(digest) == 32
    compiler = factors.compiler_factors(target_of("cpu"))
    assert compiler["pwcc code"] == digest
    assert compiler["pwcc"] == pwcc.__version__
    assert str(torch.version.git_version) in str(compiler["torch"])


def test_own_code_is_all_that_decides_what_is_in_an_entry() -> None:
    root = Path(factors.__file__).parent
    named = (*factors._NOT_IN_ENTRIES, *factors._IN_ENTRIES_TOO)
    assert [name for name in named if not (root / name).exists()] == []
    found = {path.relative_to(root).as_posix() for path in factors.own_code(root)}
    decide = "segments regions sizes encoding steps rederive kernel_launches trace conditions outputs"
    assert {f"{name}.py" for name in decide.split()} <= found
    assert {"sealing/seal.py", "torch_private/inductor.py", "ops/fused/kernels.py"} <= found
    assert not {"load.py", "passes/noop.py", "runtime/binding.py", "ops/paged_attention.py"} & found


def test_a_new_file_of_the_compiler_is_own_code(tmp_path: Path) -> None:
    shutil.copytree(Path(factors.__file__).parent, tmp_path / "compile")
    before = factors.own_code(tmp_path / "compile")
    (tmp_path / "compile" / "new_stage.py").write_text("")
    assert {path.name for path in factors.own_code(tmp_path / "compile")} - {p.name for p in before} == {
        "new_stage.py"
    }


def test_arguments_are_portable() -> None:
    class Odd:
        pass

    given: dict[str, object] = {
        "a": 1,
        "b": [1.5, None, ("x", True)],
        "c": {"d": torch.float16, "e": torch.device("cuda", 1)},
        "f": Odd(),
    }
    found = portable_args(given)
    assert json.loads(json.dumps(found)) == {
        "a": 1,
        "b": [1.5, None, ["x", True]],
        "c": {"d": "torch.float16", "e": "cuda:1"},
        "f": f"{__name__}.test_arguments_are_portable.<locals>.Odd",
    }


# Sources


def code_of(function: object) -> types.CodeType:
    assert isinstance(function, types.FunctionType)
    return function.__code__


def test_a_file_is_one_record_without_its_place() -> None:
    codes = [code_of(Llama.forward), code_of(Llama.__init__), code_of(torch.nn.Linear.forward)]
    (record,) = source_records(codes)
    assert (record.module, record.path, record.kind) == (
        "pwcc.compile.models.llama",
        "pwcc/compile/models/llama.py",
        "file",
    )


def test_a_model_file_is_recorded_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "sources_of_a_model.py"
    path.write_text("def forward(x):\n    return x\n")
    module = import_file(path)
    (record,) = source_records([module.forward.__code__])
    assert (record.module, record.path) == ("sources_of_a_model", "sources_of_a_model.py")
    before = record.digest
    path.write_text("def forward(x):\n    return x  # the same\n")
    (edited,) = source_records([import_file(path).forward.__code__])
    assert edited.digest != before
    sys.modules.pop(module.__name__, None)


def test_code_without_a_file_is_recorded_by_its_content() -> None:
    module = types.ModuleType("a_notebook")
    sys.modules["a_notebook"] = module
    try:
        exec(compile("def forward(x):\n    return x + 1\n", "<cell 1>", "exec"), module.__dict__)
        (record,) = source_records([module.forward.__code__])
        assert (record.module, record.path, record.kind) == ("a_notebook", "forward", "code")
        exec(compile("\n\ndef forward(x):\n    return x + 1\n", "<cell 2>", "exec"), module.__dict__)
        (moved,) = source_records([module.forward.__code__])
        assert moved == record
        exec(compile("def forward(x):\n    return x + 2\n", "<cell 3>", "exec"), module.__dict__)
        (changed,) = source_records([module.forward.__code__])
        assert changed.digest != record.digest
    finally:
        del sys.modules["a_notebook"]


def test_a_difference_is_told_by_the_factor_that_changed() -> None:
    before = recorded(built())
    changes = built(replace(OPTIONS, max_tokens=4096)).changes(before)
    assert [change.path for change in changes] == ["configuration/options.max_tokens"]
    assert str(changes[0]).startswith("configuration/options.max_tokens: built with ")
    assert built().changes(before) == []


def test_files_of_named_classes_and_functions_are_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pwcc_base.py").write_text(
        "class Meta(type):\n    scale = 2\n\n\nclass Base(metaclass=Meta):\n    pass\n"
    )
    (tmp_path / "pwcc_kind.py").write_text(
        "from pwcc_base import Base\n\n\nclass Kind(Base):\n    pass\n\n\ndef pick():\n    return 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("pwcc_kind")
    try:
        rules = [Rule((), "same", describe(kind.Kind)), Rule((), "same", describe(kind.pick))]
        modules = factors.named_modules([Predicate("model", rule) for rule in rules])
        recorded = factors.source_records([], modules)
        assert {record.module for record in recorded} == {"pwcc_base", "pwcc_kind"}  # torch and Python are not
    finally:
        for name in ("pwcc_kind", "pwcc_base"):
            sys.modules.pop(name, None)


def test_a_named_tuples_constructor_is_no_source_of_its_own() -> None:
    """Python makes it from the class, whose file is a source."""

    class Made(NamedTuple):
        a: int
        b: int

    assert factors.is_generated(Made.__new__.__code__)
    assert not factors.is_generated(eval("lambda _cls, a: a").__code__)
