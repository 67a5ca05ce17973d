from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest

from pwcc.cache.errors import CorruptEntry, FactorError
from pwcc.cache.sources import (
    SourceRecord,
    check,
    record_code,
    record_file,
    relative_path,
    resolve,
    source_factors,
)


def package(base: Path, body: str = "x = 1\n") -> Path:
    folder = base / "toy" / "inner"
    folder.mkdir(parents=True)
    (base / "toy" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text(body)
    return base


def module(name: str, **attributes: object) -> types.ModuleType:
    found = types.ModuleType(name)
    vars(found).update(attributes)
    return found


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("a.b.c", "/x/a/b/c.py", "a/b/c.py"),
        ("a.b", "/x/a/b/__init__.py", "a/b/__init__.py"),
        ("a", "/x/a/__init__.py", "a/__init__.py"),
        ("a", "/x/a.py", "a.py"),
        ("__main__", "/home/someone/train.py", "train.py"),
        ("_pwcc_user_model", "/home/someone/llama.py", "llama.py"),
        ("a.b", "/elsewhere/c.py", "c.py"),
        ("a.b.c", "/b/c.py", "c.py"),
    ],
)
def test_names_do_not_depend_on_the_place(name: str, file: str, expected: str) -> None:
    assert relative_path(name, Path(file)) == expected


def test_another_checkout_gives_equal_records(tmp_path: Path) -> None:
    one, two = package(tmp_path / "home" / "a"), package(tmp_path / "venv2" / "site-packages")
    records = [record_file("toy.inner.model", base / "toy/inner/model.py") for base in (one, two)]
    assert records[0] == records[1]
    assert str(tmp_path) not in str(records)


def test_resolution_order(tmp_path: Path) -> None:
    base, other = package(tmp_path / "a"), package(tmp_path / "b")
    record = record_file("toy.inner.model", base / "toy/inner/model.py")
    loaded = module("toy.inner.model", __file__=str(base / "toy/inner/model.py"))
    assert resolve(record, {"toy.inner.model": loaded}, [str(other)]) == base / "toy/inner/model.py"
    top = module("toy", __path__=[str(base / "toy")])
    assert resolve(record, {"toy": top}, [str(other)]) == base / "toy/inner/model.py"
    assert resolve(record, {}, [str(tmp_path), str(other)]) == other / "toy/inner/model.py"
    assert resolve(record, {"toy.inner.model": None, "toy": None}, []) is None


def test_another_main_script_is_not_taken_for_the_recorded_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "serve.py").write_text("y = 2\n")
    record = record_file("__main__", tmp_path / "train.py")
    modules = {"__main__": module("__main__", __file__=str(tmp_path / "serve.py"))}
    assert check([record], modules, [str(tmp_path)]) == []
    assert [change.reason for change in check([record], modules, [])] == [
        "__main__: train.py is not on this host"
    ]


def test_changes_are_named(tmp_path: Path) -> None:
    base = package(tmp_path)
    file = base / "toy/inner/model.py"
    record = record_file("toy.inner.model", file)
    assert check([record], {}, [str(base)]) == []
    file.write_text("x = 2\n")
    (change,) = check([record], {}, [str(base)])
    assert change.record == record
    assert "toy.inner.model: toy/inner/model.py changed" in change.reason


def test_resolving_imports_nothing_and_touches_no_lazy_attribute(tmp_path: Path) -> None:
    base = package(tmp_path, "raise SystemExit('imported')\n")

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    record = record_file("toy.inner.model", base / "toy/inner/model.py")
    before = set(sys.modules)
    modules: dict[str, types.ModuleType | None] = {
        "toy": Lazy("toy"),
        "toy.inner.model": Lazy("toy.inner.model"),
    }
    assert check([record], modules, [str(base)]) == []
    assert set(sys.modules) == before


def test_namespace_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spacey").mkdir()
    (tmp_path / "spacey" / "part.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import spacey  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    record = record_file("spacey.part", tmp_path / "spacey/part.py")
    assert resolve(record, {"spacey": spacey}, []) == tmp_path / "spacey/part.py"
    del sys.modules["spacey"]


def test_unreadable_source(tmp_path: Path) -> None:
    with pytest.raises(FactorError, match="toy"):
        record_file("toy", tmp_path / "none.py")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x.py", "a/../../x", "", ".", "a//b", "a\\b", "a/\0", "a\n.py"]
)
def test_traversal_is_refused(path: str) -> None:
    value = {"module": "m", "path": path, "digest": "0" * 32, "kind": "file"}
    with pytest.raises(CorruptEntry):
        SourceRecord.parse(value, "test")


def test_round_trip(tmp_path: Path) -> None:
    record = record_file("toy.inner.model", package(tmp_path) / "toy/inner/model.py")
    assert SourceRecord.parse(record.to_json(), "test") == record


def run(code: str, filename: str = "<string>") -> types.ModuleType:
    found = module("__main__")
    exec(compile(code, filename, "exec"), vars(found))
    return found


CELL = """
import functools
def wrap(f):
    @functools.wraps(f)
    def inner(*a): return f(*a)
    return inner
class Model:
    def forward(self, x):
        scale = lambda y: y * 2
        return scale(x) + 1
    @staticmethod
    def helper(x): return x in {1, 2, 3}
    @wrap
    def wrapped(self): return 1.5
    @property
    def width(self): return (1, b"x", None, ...)
def make():
    class Local:
        def forward(self): return 4
    return Local
"""


def code_at(found: types.ModuleType, reach: Callable[[types.ModuleType], object]) -> types.CodeType:
    function = reach(found)
    assert isinstance(function, types.FunctionType)
    return function.__code__


REACH: list[Callable[[types.ModuleType], object]] = [
    lambda m: m.Model.forward,
    lambda m: m.Model.helper,
    lambda m: m.Model.wrapped.__wrapped__,
    lambda m: m.Model.wrapped,
    lambda m: m.Model.width.fget,
    lambda m: m.make().forward,
]


@pytest.mark.parametrize("reach", REACH)
def test_code_without_a_file(reach: Callable[[types.ModuleType], object]) -> None:
    record = record_code("__main__", code_at(run(CELL), reach))
    again = run("\n\n\n" + CELL, "<ipython-input-7>")
    assert check([record], {"__main__": again}, []) == []
    changed = run(
        CELL.replace("4", "5").replace("1", "9").replace("3}", "4}").replace("return f", "print(f); return f")
    )
    (change,) = check([record], {"__main__": changed}, [])
    assert "changed" in change.reason
    (change,) = check([record], {}, [])
    assert "is not loaded" in change.reason
    assert check([record], {}, [], live_code={record.digest}) == []


def test_lambda_inside_a_method() -> None:
    forward = code_at(run(CELL), REACH[0])
    inner = next(const for const in forward.co_consts if isinstance(const, types.CodeType))
    assert check([record_code("__main__", inner)], {"__main__": run(CELL)}, []) == []


def test_factors_refuse_two_contents(tmp_path: Path) -> None:
    base = package(tmp_path)
    file = base / "toy/inner/model.py"
    first = record_file("toy.inner.model", file)
    assert source_factors([first, first]) == {"toy.inner.model:toy/inner/model.py": first.digest}
    file.write_text("x = 2\n")
    with pytest.raises(FactorError, match="two contents"):
        source_factors([first, record_file("toy.inner.model", file)])


def test_two_megabytes_of_sources_are_checked_quickly(tmp_path: Path) -> None:
    records = []
    for index in range(40):
        file = tmp_path / f"m{index}.py"
        file.write_text("x = 1  # a line of a source\n" * 2000)
        records.append(record_file(f"m{index}", file))
    best = 1.0
    for _ in range(3):
        start = perf_counter()
        assert check(records, sys.modules, [str(tmp_path)]) == []
        best = min(best, perf_counter() - start)
    assert best < 0.030  # the budget of the whole key check; 2 ms measured
