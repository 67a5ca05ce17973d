from __future__ import annotations

from pwcc.cache.difference import MAX_SHOWN, Difference, advice, all_advice, of_change, only_the_host, said
from pwcc.cache.factors import ABSENT, FactorChange


def test_a_mode_is_named_with_both_values() -> None:
    found = of_change(FactorChange("compiler/numeric state.default_dtype", "torch.float32", "torch.float64"))
    assert found.reason == (
        "global modes differ: default_dtype: compiled with 'torch.float32', now 'torch.float64'"
    )
    assert found.path == "compiler/numeric state.default_dtype"


def test_a_digest_is_not_shown_as_a_value() -> None:
    found = of_change(FactorChange("environment/A", "digest:" + "0" * 32, "digest:" + "1" * 32))
    assert "digest differs" in found.reason
    assert "000" not in found.reason
    assert "built with nothing, now 'x'" in of_change(FactorChange("environment/A", ABSENT, "x")).reason
    assert (
        "built with nothing, now 'x'" in of_change(FactorChange("configuration/options.tag", None, "x")).reason
    )


def test_a_message_is_bounded() -> None:
    many = [Difference(f"predicate/p{i}", f"p{i}: compiled with 1, found 2") for i in range(50)]
    text = said(many)
    assert text.count("compiled with") == MAX_SHOWN
    assert text.endswith(f"(and {50 - MAX_SHOWN} more: pwcc explain)")
    assert len(said([Difference("predicate/x", "y" * 10_000)])) < 500
    assert said(many[:2]) == "p0: compiled with 1, found 2; p1: compiled with 1, found 2"


def test_shared_words_are_said_once() -> None:
    modes = [of_change(FactorChange(f"compiler/numeric state.m{i}", 1, 2)) for i in range(2)]
    assert said(modes) == "global modes differ: m0: compiled with 1, now 2; m1: compiled with 1, now 2"


def test_every_group_has_advice() -> None:
    groups = (
        "environment",
        "configuration",
        "sources",
        "predicate",
        "model",
        "requirement",
        "compiler",
        "entry",
    )
    assert all(advice(f"{group}/x") for group in groups)
    assert advice("choice/load") == ""
    assert advice("choice/environment policy") == advice("configuration/environment policy") != ""
    twice = [Difference("sources/a", ""), Difference("sources/b", ""), Difference("model/c", "")]
    assert all_advice(twice) == (advice("sources/a"), advice("model/c"))


def test_only_the_host() -> None:
    host = Difference("requirement/glibc", "", host=True)
    mode = Difference("compiler/numeric state.x", "")
    source = Difference("sources/a:a.py", "")
    assert only_the_host([host])
    assert only_the_host([host, mode])
    assert not only_the_host([mode])
    assert not only_the_host([host, source])
    assert not only_the_host([])


def test_a_line_names_the_path_once() -> None:
    assert (
        Difference("predicate/model.eps", "model.eps: compiled with 1").line() == "model.eps: compiled with 1"
    )
    named = Difference("compiler/device", "built for x").line()
    assert named == "compiler/device: built for x"


def test_a_terminal_obeys_nothing_of_a_cache() -> None:
    evil = Difference("sources/a\x1b[2J", "changed \x1b[31m\n")
    for text in (evil.line(), said([evil])):
        assert text.isprintable()
        assert "\\x1b" in text
