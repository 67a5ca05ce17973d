"""What traced code reads is found in its byte code, and what cannot be followed is said with its line."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from typing import Any

import pytest
import torch

from pwcc.compile.code_scan import Found, scan


def found_in(body: str) -> Found:
    text = (
        "import os\nimport os as o\nimport torch\nimport importlib.util\nfrom os import environ, getenv as g\n"
        "from importlib.util import find_spec\ndef f(self, x, c=None, *a):\n" + textwrap.indent(body, "    ")
    )
    namespace: dict[str, Any] = {}
    exec(compile(text, "/somewhere/m.py", "exec"), namespace)
    return scan([(namespace["f"].__code__, namespace)])


@pytest.mark.parametrize(
    "body",
    [
        "return os.environ['A']",
        "return os.environ.get('A')",
        "return o.environ.get('A', 'x' if c else 'y')",
        "return os.getenv('A', default=c)",
        "return g('A') == x",
        "return 'A' in environ",
        "return c if 'A' not in o.environ else x",
        "e = os.environ\nreturn e['A']",
        "read = os.getenv\nreturn read('A')",
        "import os as inside\nreturn inside.environ['A']",
        "from os import getenv as inside\nreturn inside('A')",
        "return self.os.environ['A']",
        "return [y for y in x if os.getenv('A')]",
        "return lambda: os.getenv('A')",
        "return x(*a, os.getenv('A'), k=c)",
        "return x(k=os.getenv('A'), **c)",
        "try:\n    return os.environ['A']\nexcept KeyError:\n    return None",
        "with c(os.getenv('A')):\n    return x",
        "while x:\n    x = c or os.environ.get('A') or x\nreturn x",
        "return f'{os.getenv(\"A\")}'",
        "if (y := os.getenv('A')) is None:\n    return x\nreturn y",
        "return os.environb[b'A']",
        "return (os.environ if c else os.environ)['A']",
    ],
)
def test_a_constant_name_is_found(body: str) -> None:
    found = found_in(body)
    assert list(found.variables) == ["A"], found.computed
    assert found.computed == []


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return os.environ[c]", "a variable"),
        ("return os.environ.get('A' + c)", "a variable"),
        ("return os.getenv(f'A_{c}')", "a variable"),
        ("return g(key='A')", "a variable"),
        ("name = 'A'\nif c:\n    name = 'B'\nreturn os.getenv(name)", "a variable"),
        ("return c in os.environ", "a variable"),
        ("return list(map(os.getenv, c))", "a variable"),
        ("read = os.environ.get\nreturn [read(k) for k in c]", "a variable"),
        ("return find_spec(c)", "a module"),
        ("return x(os.environ)", "the environment"),
        ("return dict(os.environ)", "the environment"),
        ("return len(os.environ)", "the environment"),
        ("return os.environ.items()", "the environment"),
        ("return [k for k in os.environ]", "the environment"),
        ("for k in os.environ:\n    x = k\nreturn x", "the environment"),
        ("self.env = os.environ\nreturn x", "the environment"),
        ("return {**os.environ}", "the environment"),
        ("return os.environ", "the environment"),
        ("return os.environ if c else x", "the environment"),
        ("e = os.environ\nreturn lambda: e['A']", "the environment"),
    ],
)
def test_what_cannot_be_followed_is_never_silent(body: str, what: str) -> None:
    found = found_in(body)
    assert found.variables == {}
    assert {item.what for item in found.computed} == {what}
    assert found.computed[0].where.startswith("m.py:")


def test_a_name_that_depends_on_a_branch_is_either_both_names_or_none() -> None:
    found = found_in("return os.environ.get('A' if c else 'B')")
    followed = set(found.variables) == {"A", "B"} and not found.computed  # the byte code of 3.12 and later
    assert followed or ({item.what for item in found.computed} == {"a variable"} and not found.variables)


def test_an_object_that_depends_on_a_branch_is_not_lost() -> None:
    found = found_in("return (os.environ if c else {})['A']")
    assert set(found.variables) == {"A"} or {item.what for item in found.computed} == {"the environment"}


def test_a_line_is_that_of_the_read() -> None:
    found = found_in("y = x\nz = os.getenv('A')\nreturn os.getenv(y)")
    assert found.variables == {"A": "m.py:9"}
    assert [item.where for item in found.computed] == ["m.py:10"]


def test_probes_grad_mode_and_flags_of_weights() -> None:
    found = found_in("return find_spec('fast') or importlib.util.find_spec('faster')")
    assert set(found.modules) == {"fast", "faster"}
    assert found_in("return torch.is_grad_enabled()").grad_mode == "m.py:8"
    assert found_in("return torch.nn.functional.relu(x)").grad_mode == ""
    assert found_in("return self.w.requires_grad").requires_grad == "m.py:8"


def test_a_look_into_an_objects_dictionary_names_the_keys() -> None:
    for body in (
        "return 'flag' in self.__dict__",
        "return 'flag' in vars(self)",
        "return self.__dict__.get('flag')",
    ):
        assert "flag" in found_in(body).own_keys["f"]
    assert found_in("return hasattr(self, 'flag')").own_keys == {}


def test_code_that_reads_nothing_is_clean() -> None:
    for function in (
        torch.nn.Linear.forward,
        torch.nn.functional.gelu,
        os.path.join,
        importlib.util.module_from_spec,
    ):
        code = getattr(function, "__code__", None)
        if code is not None:
            found = scan([(code, getattr(function, "__globals__", {}))])
            assert (found.variables, found.modules, found.computed) == ({}, {}, [])


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("return x if torch.distributed.is_initialized() else c", "torch.distributed.is_initialized"),
        ("import torch.distributed as dist\nreturn dist.get_rank()", "torch.distributed.get_rank"),
        ("from torch.distributed import get_world_size as n\nreturn n()", "torch.distributed.get_world_size"),
        ("return torch.get_autocast_dtype('cpu')", "torch.get_autocast_dtype"),
        ("with torch.autocast('cpu'):\n    return x", "torch.get_autocast_dtype"),
        ("with torch.amp.autocast('cpu'):\n    return x", "torch.get_autocast_dtype"),
        ("return torch.is_autocast_cache_enabled()", "torch.is_autocast_cache_enabled"),
        ("import sys\nreturn sys.getrecursionlimit()", "sys.getrecursionlimit"),
        ("import platform\nreturn platform.node()", "platform.node"),
    ],
)
def test_what_the_process_is_asked_for_is_found(body: str, name: str) -> None:
    found = found_in(body)
    assert list(found.states) == [name]
    assert found.states[name].startswith("m.py:")
