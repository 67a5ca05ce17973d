"""Levels by number and name, and which configuration is in force."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from pwcc.cache.errors import UsageError
from pwcc.cache.switches import Switches
from pwcc.compile.levels import (
    CompileConfig,
    CompileLevel,
    compile_config,
    configure,
    context_config,
    current_config,
    in_force,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    configure()
    yield
    configure()


@pytest.mark.parametrize("value", [2, "2", "DYNAMO_ONCE", "dynamo_once", CompileLevel.DYNAMO_ONCE])
def test_a_level_by_number_or_name(value: int | str) -> None:
    assert CompileLevel.of(value) is CompileLevel.DYNAMO_ONCE
    assert CompileConfig(level=value).level is CompileLevel.DYNAMO_ONCE


@pytest.mark.parametrize("value", [4, -1, "", "once", "Piecewise "])
def test_no_such_level(value: int | str) -> None:
    with pytest.raises(UsageError, match="expected a compile level of 0 "):
        CompileLevel.of(value)


def test_the_default_is_the_product() -> None:
    found = current_config(environ={})
    assert (found.level, found.mode, found.first_call) == (CompileLevel.PIECEWISE, "load-or-compile", "eager")
    assert (found.sizes, found.max_tokens) == ((), 8192)


def test_argument_over_context_over_process_over_environment_over_default() -> None:
    environ = {"PWCC_LEVEL": "1"}
    assert current_config(environ=environ).level is CompileLevel.DYNAMO_AS_IS
    configure(level=2, sizes=[4], tag="process")
    assert current_config(environ=environ).level is CompileLevel.DYNAMO_ONCE
    with compile_config(level=3, tag="context"):
        found = current_config(environ=environ)
        assert (found.level, found.sizes, found.tag) == (CompileLevel.PIECEWISE, (4,), "context")
        found = current_config(CompileConfig(level=0), environ=environ)
        assert (found.level, found.sizes, found.tag) == (CompileLevel.NO_COMPILATION, (4,), "context")
    assert current_config(environ=environ).tag == "process"
    configure()
    assert current_config(environ={}).sizes == ()


def test_blocks_nest_and_are_the_threads_own() -> None:
    with compile_config(level=0, sizes=(1,)):
        with compile_config(sizes=(2,)):
            inner = context_config()
            assert inner is not None
            assert (inner.level, inner.sizes) == (CompileLevel.NO_COMPILATION, (2,))
            seen: list[object] = []
            thread = threading.Thread(target=lambda: seen.append(context_config()))
            thread.start()
            thread.join()
            assert seen == [None]
        outer = context_config()
        assert outer is not None
        assert outer.sizes == (1,)
    assert context_config() is None


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "compile"},
        {"first_call": "never"},
        {"sizes": "1,2"},
        {"splitting_ops": "pwcc::attention"},
        {"level": 7},
        {"colour": "red"},
    ],
)
def test_values_that_no_option_has_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        configure(**options)
    with pytest.raises(UsageError), compile_config(**options):
        pass
    assert current_config(environ={}) == current_config(environ={})


def test_a_bad_level_in_the_environment_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a compile level"):
        current_config(environ={"PWCC_LEVEL": "fast"})
    assert current_config(environ={"PWCC_LEVEL": " "}).level is CompileLevel.PIECEWISE


def test_switches_change_the_level_or_the_mode() -> None:
    config = current_config(environ={})
    assert in_force(config, Switches()) == config
    assert in_force(config, Switches(frozen=True)).mode == "load"
    for level in CompileLevel:
        found = in_force(CompileConfig(level=level), Switches(disable=True)).level
        assert found == min(level, CompileLevel.DYNAMO_AS_IS)


def test_what_goes_to_a_compile_and_to_a_load() -> None:
    config = CompileConfig(level=3, mode="load", sizes=(1,), tag="a", jobs=2, cache_dir="c", ranges=[(1, 4)])
    assert config.compile_options() == {"tag": "a", "jobs": 2, "cache_dir": "c", "ranges": ((1, 4),)}
    assert config.load_options() == {"tag": "a", "cache_dir": "c"}


def test_every_option_is_one_of_precompile_or_load() -> None:
    from pwcc.compile.api import precompile
    from pwcc.compile.load import load

    how = ("level", "mode", "first_call")
    given: dict[str, Any] = {field.name: () for field in fields(CompileConfig) if field.name not in how}
    everything = CompileConfig(**given)
    compile_options = inspect.signature(precompile).parameters
    assert [name for name in everything.compile_options() if name not in compile_options] == []
    assert "sizes" in compile_options
    load_options = inspect.signature(load).parameters
    assert [name for name in everything.load_options() if name not in load_options] == []
    assert set(everything.load_options()) < set(everything.compile_options())


def test_setting_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys, pwcc; pwcc.configure(level=2); print(pwcc.current_config().level, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "2 False\n"
