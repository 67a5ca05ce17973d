from __future__ import annotations

import types

import pytest

from pwcc.cache.code_digest import digest_code, find_code
from pwcc.cache.errors import FactorError


def code(text: str, filename: str = "<string>") -> types.CodeType:
    return compile(text, filename, "exec")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x = 1", "x = 2"),
        ("x = 1", "x = True"),
        ("x = 1", "x = 1.0"),
        ("x = 0.0", "x = -0.0"),
        ("x = 'a'", "x = b'a'"),
        ("x = ('ab', 'c')", "x = ('a', 'bc')"),
        ("x = 1", "y = 1"),
        ("f(a)", "f(b)"),
        ("def f(a): return a", "def f(a, /): return a"),
        ("def f(): return 1", "def f(): return 2"),
        ("x in {1, 2}", "x in {1, 3}"),
        ("try:\n f()\nexcept A:\n pass", "try:\n f()\nexcept B:\n pass"),
    ],
)
def test_different(a: str, b: str) -> None:
    assert digest_code(code(a)) != digest_code(code(b))


def test_place_does_not_matter() -> None:
    text = "def f(x):\n    return [y * 2 for y in x if y in {'a', 'b', 'c'}]\n"
    assert digest_code(code(text)) == digest_code(code("\n\n# a comment\n" + text, "/home/someone/x.py"))


def test_running_does_not_change_it() -> None:
    found: dict[str, object] = {}
    exec("def f(x):\n    return x.real + 1\n", found)
    function = found["f"]
    assert isinstance(function, types.FunctionType)
    before = digest_code(function.__code__)
    for _ in range(1000):  # the interpreter specialises the bytecode in place
        function(1)
    assert digest_code(function.__code__) == before


def test_unknown_constants_are_refused() -> None:
    odd = code("x = 1").replace(co_consts=(object(),))
    with pytest.raises(FactorError):
        digest_code(odd)


def test_find_runs_no_descriptor() -> None:
    class Loud:
        def __get__(self, *_: object) -> object:
            raise AssertionError

    class Holder:
        forward = Loud()

    assert find_code({"Holder": Holder}, "Holder.forward") == []
    assert find_code({}, "Holder.forward") == []
    assert find_code({"x": 3}, "x.<locals>.y") == []


def test_a_decorated_function_is_found_behind_what_hides_it() -> None:
    def hide(function: object) -> object:
        def inner() -> object:
            return function

        return inner

    namespace: dict[str, object] = {}
    exec("def helper(): return 1", namespace)
    plain = find_code(namespace, "helper")
    namespace["helper"] = hide(namespace["helper"])
    assert plain[0] in find_code(namespace, "helper")
