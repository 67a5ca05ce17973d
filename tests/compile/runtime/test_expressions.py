from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache.errors import CorruptEntry
from pwcc.compile.runtime.expressions import (
    MAX_LENGTH,
    check_symbols,
    compile_expressions,
    parse_expression,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0", 7),
        ("2*s0 + 1", 15),
        ("(s0 + 7)//8", 1),
        ("-s0 % 4", 1),
        ("max(s0, s1) - min(1, s1, 5)", 6),
        ("s0 % 4 == 3", True),
        ("s0 <= 16 and not s1 > 4", True),
        ("s0 != 7 or 1 < s1 < 4", True),
        ("True", True),
    ],
)
def test_values(text: str, value: object) -> None:
    assert compile_expressions([text], ["s0", "s1"])(7, 3) == (value,)


def test_several_with_plain_integers() -> None:
    assert compile_expressions(["s0", 8, "s0*8"], ["s0"])(3) == (3, 8, 24)
    assert compile_expressions([], ["s0"])(3) == ()
    assert compile_expressions([5], [])() == (5,)


def test_other_meaning_of_calls() -> None:
    function = compile_expressions(["max(s0, 1)"], ["s0"], calls={"max": lambda *args: sum(args), "min": min})
    assert function(3) == (4,)


@pytest.mark.parametrize(
    "text",
    [
        "s1",
        "s0.real",
        "s0[0]",
        "s0 ** 9",
        "s0 << 3",
        "s0 / 2",
        "~s0",
        "1.5 * s0",
        "'text'",
        "None",
        "lambda: 0",
        "[s0]",
        "(s0, 1)",
        "{s0}",
        "s0 if s0 else 1",
        "(s0 := 1)",
        "f'{s0}'",
        "abs(s0)",
        "__import__('os')",
        "max",
        "max + 1",
        "max()",
        "max(s0)",
        "max(*s0)",
        "max(s0, key=s0)",
        "max(s0, 1)(2)",
        "s0()",
        "s0; s0",
        "s0\nimport os",
        "s0 in s0",
        "s0 is s0",
        "",
        "   ",
        "\x00",
        "(" * 500 + "s0" + ")" * 500,
        "s0" + " + s0" * MAX_LENGTH,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(CorruptEntry):
        parse_expression(text, ["s0"])
    with pytest.raises(CorruptEntry):
        compile_expressions([text], ["s0"])


@given(st.text(max_size=40))
def test_any_text_gives_a_function_or_corrupt_entry(text: str) -> None:
    try:
        compile_expressions([text], ["s0"])
    except CorruptEntry:
        return


@pytest.mark.parametrize("names", [["s0", "s0"], ["max"], ["None"], ["a b"], ["__debug__"], [""], ["lambda"]])
def test_symbols_that_are_no_names(names: list[str]) -> None:
    with pytest.raises(CorruptEntry):
        check_symbols(names)
    with pytest.raises(CorruptEntry):
        compile_expressions(["1"], names)
