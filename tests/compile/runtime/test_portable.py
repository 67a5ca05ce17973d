"""Described values read as Python writes them, and a script has one name in every process."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from torch import nn

from pwcc.compile.build_factors import module_names
from pwcc.compile.runtime.hooks import module_hooks, show_hooks
from pwcc.compile.runtime.portable import NotPortable, describe, show


def plain() -> None:
    """Stand for a function of a module."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"DPE", "b'DPE'"),
        ({b"DPE": 1}, "{b'DPE': 1}"),
        (plain, f"function {__name__}:plain"),
        ((1.5, "x"), "tuple(1.5, 'x')"),
    ],
)
def test_a_value_is_shown_as_python_writes_it(value: object, text: str) -> None:
    assert show(describe(value)) == text


def test_code_without_a_name_of_its_own_is_shown_with_few_digits() -> None:
    def inner() -> None: ...

    home = f"function {__name__}:{inner.__qualname__}"
    assert show(describe(inner)) == f"{home} at line {inner.__code__.co_firstlineno}"
    value = describe(lambda: 1)
    assert isinstance(value, list)
    digest = str(value[-1])
    assert len(digest) == 64
    assert show(value).endswith(f" with code {digest[:12]}")


def test_a_function_of_numpys_own_has_a_name_and_a_users_has_none() -> None:
    assert describe(np.sqrt) == describe(np.sqrt) != describe(np.log)
    assert show(describe(np.sqrt)) == "builtin numpy sqrt"
    with pytest.raises(NotPortable, match="numpy:ufunc"):
        describe(np.frompyfunc(lambda x: x, 1, 1))


def test_hooks_are_shown_by_name() -> None:
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    text = show_hooks(module_hooks(module))
    assert text.count(f"function {__name__}:test_hooks_are_shown_by_name.<locals>.<lambda> with code ") == 2
    assert max(map(len, text.split())) < 64 + len(__name__)
    assert show_hooks([]) == "no hooks"


def test_a_spawned_child_knows_the_script_as_the_parent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    child = ModuleType("__mp_main__")
    child.__file__ = str(pytest.__file__) + ".script"
    monkeypatch.setitem(sys.modules, "__main__", child)
    monkeypatch.setitem(sys.modules, "__mp_main__", child)
    assert module_names()[child.__file__] == "__main__"
    model = type("M", (nn.Module,), {"__module__": "__mp_main__"})
    assert describe(model) == ["class", "__main__:M"]
    assert describe(child) == ["module", "__main__"]
