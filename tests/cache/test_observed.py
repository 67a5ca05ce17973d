"""Observed inputs: what holds on a host, what does not, and what is never written down."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from pwcc.cache import observed
from pwcc.cache.code_digest import digest_code
from pwcc.cache.errors import CorruptEntry
from pwcc.cache.observed import ObservedInput, changes, environment_value

SALT = "a" * 32


def said(
    *records: ObservedInput, environ: dict[str, str] | None = None, **modules: types.ModuleType
) -> list[str]:
    found = changes(records, salt=SALT, environ=environ or {}, modules={**sys.modules, **modules})
    return [reason for _, reason in found]


def variable(name: str, value: str | None) -> ObservedInput:
    return ObservedInput("environment", name, environment_value(name, value, SALT), where="m.py:3")


def test_a_variable_must_be_what_it_was() -> None:
    assert said(variable("A", "2"), environ={"A": "2"}) == []
    assert said(variable("A", None)) == []
    assert said(variable("A", "2"), environ={"A": "3"}) == [
        "environment variable A (read at m.py:3): compiled with '2', now '3'"
    ]
    assert said(variable("A", None), environ={"A": ""}) == [
        "environment variable A (read at m.py:3): compiled with nothing, now ''"
    ]
    assert said(variable("A", "2")) == [
        "environment variable A (read at m.py:3): compiled with '2', now nothing"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PLACE", "/home/somebody/models"),
        ("MY_API_KEY", "hunter2"),
        ("DB_PASSWORD", "1234"),
        ("auth_header", "abc"),
        ("X", "deadbeefdeadbeefdeadbeef"),
    ],
)
def test_no_secret_is_written_down(name: str, value: str) -> None:
    kept = environment_value(name, value, SALT)
    assert kept is not None
    assert kept.startswith("digest:")
    assert value not in kept
    assert kept == environment_value(name, value, SALT)  # same inputs, same bytes
    assert kept != environment_value(name, value, "b" * 32)  # each model's entries have a salt of their own
    assert kept != environment_value(name + "2", value, SALT)
    message = said(variable(name, value), environ={name: value + "x"})[0]
    assert value not in message


def test_a_file_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.json"
    path.write_text("1")
    record = ObservedInput("file", "a.json", observed.place_value("file", str(path)), "cwd", "m.py:1")
    assert said(record) == []
    os.utime(path, (0, 0))
    assert said(record) == []
    path.write_text("2")
    assert said(record)[0].startswith("file a.json (read at m.py:1): compiled with digest:")
    path.unlink()
    assert said(record)[0].endswith("now nothing")


def test_an_absent_file_that_appears_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = ObservedInput("file", "a.json", None, "cwd")
    asked = ObservedInput("path", "a.json", None, "cwd")
    assert said(record, asked) == []
    (tmp_path / "a.json").write_text("1")
    assert len(said(record, asked)) == 2


def test_a_directory_is_known_by_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("")
    record = ObservedInput("directory", ".", observed.place_value("directory", "."), "cwd")
    (tmp_path / "a").write_text("other content")
    assert said(record) == []
    (tmp_path / "b").write_text("")
    assert len(said(record)) == 1


def test_a_pipe_and_a_long_file_do_not_hold_a_load_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert observed.place_value("file", str(tmp_path / "pipe")) == "not a regular file"
    with (tmp_path / "long").open("wb") as stream:
        stream.truncate(observed.MAX_FILE + 1)
    assert observed.place_value("file", str(tmp_path / "long")) == f"{observed.MAX_FILE + 1} bytes"


def test_a_probed_module() -> None:
    assert said(ObservedInput("module", "pwcc_fastmod", None)) == []
    assert said(ObservedInput("module", "json", "present")) == []
    assert said(ObservedInput("module", "pwcc_fastmod", None), pwcc_fastmod=types.ModuleType("x")) == [
        "module pwcc_fastmod: compiled with nothing, now 'present'"
    ]


def test_a_function_that_was_replaced() -> None:
    module = types.ModuleType("toy")
    exec("class C:\n    def f(self): return 1", vars(module))
    digest = digest_code(vars(module)["C"].f.__code__)
    tag = observed.code_tag()
    record = ObservedInput("function", "C.f", f"{tag}:{digest}", "toy")
    assert said(record, toy=module) == []
    assert said(record) == []  # not loaded: nothing of it was replaced
    vars(module)["C"].f = lambda self: 2
    assert said(record, toy=module) == [
        "code of toy:C.f is not what was compiled: its module is loaded in another version, or it was "
        "replaced in this process"
    ]
    other = ObservedInput("function", "C.f", f"cpython-399.0:{digest}", "toy")
    assert said(other, toy=module) == []  # another Python's byte code says nothing


def test_a_library_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "libops.so"
    path.write_bytes(b"1")
    record = ObservedInput("library", "libops.so", observed.library_value(str(path)))
    there = changes([record], salt=SALT, environ={}, modules={}, libraries=[str(path)])
    assert there == []
    assert len(changes([record], salt=SALT, environ={}, modules={})) == 1
    path.write_bytes(b"2")
    assert len(changes([record], salt=SALT, environ={}, modules={}, libraries=[str(path)])) == 1


def test_records_are_parsed_as_they_were_written() -> None:
    for record in (
        variable("A", None),
        ObservedInput("file", "../a.json", "digest:1", "module:pkg.m", "m.py:2"),
        ObservedInput("mode", "grad", "off"),
    ):
        assert ObservedInput.parse(record.to_json(), "x") == record


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"kind": "file", "anchor": "cwd", "name": "../../etc/passwd"},
        {"kind": "file", "anchor": "nowhere", "name": "a"},
        {"kind": "library", "name": "../a.so"},
        {"value": 3},
        {"more": 1},
        {"name": 3},
    ],
)
def test_a_hostile_record_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CorruptEntry):
        ObservedInput.parse({**variable("A", "1").to_json(), **change}, "manifest")


def test_each_record_is_a_factor_by_name() -> None:
    records = [
        variable("A", "1"),
        ObservedInput("file", "a.json", "digest:1", "cwd"),
        ObservedInput("module", "m", None),
        ObservedInput("function", "f", "x:y", "m"),
    ]
    assert observed.factors(records) == {
        "environment": {"A (observed)": "1"},
        "sources": {"file:cwd:a.json": "digest:1", "module:m": None},
    }
    assert observed.is_observed_factor("A (observed)")
    assert not observed.is_observed_factor("TORCHINDUCTOR_X")


def test_another_optimization_level_is_named_and_another_python_tells_nothing() -> None:
    python, _, level = observed.code_tag().rpartition(".")
    other = "1" if level != "1" else "2"

    def changed(tag: str) -> list[str]:
        record = ObservedInput("function", "absent", f"{tag}:0", __name__)
        return [said for _, said in observed.changes([record], salt="", environ={}, modules=sys.modules)]

    (said,) = changed(f"{python}.{other}")
    assert f"optimization level (-O, PYTHONOPTIMIZE): compiled with {other}, now {level}" in said
    assert changed(f"other-399.{other}") == []
