from __future__ import annotations

import pytest

from pwcc.cache.difference import Difference
from pwcc.cache.explain import MAX_DIFFERENCES, MAX_REASONS, Outcome, Verdict, answer
from pwcc.cache.ids import EntryKey, LookupKey, factor_digest

LOOKUP = LookupKey("f" * 32)
SOURCE = Difference("sources/m:m.py", "source m: m.py changed (was 1, is 2; +1 -1 lines)")
HOST = Difference("requirement/glibc", "glibc: expected 99, got 2", host=True)


def verdict(name: str, *differences: Difference, taken: bool = False, same_key: bool = True) -> Verdict:
    return Verdict(
        entry_key=EntryKey(factor_digest(name.encode())),
        lookup_key=LOOKUP,
        what=name,
        differences=differences,
        same_key=same_key,
        taken=taken,
    )


@pytest.mark.parametrize(
    ("verdicts", "outcome", "code"),
    [
        ([], Outcome.MISS, 3),
        ([verdict("a", SOURCE)], Outcome.MISS, 3),
        ([verdict("a", HOST)], Outcome.HOST, 4),
        ([verdict("a", SOURCE), verdict("b", HOST)], Outcome.HOST, 4),
        ([verdict("a", SOURCE, HOST)], Outcome.MISS, 3),
        ([verdict("a", HOST), verdict("b", taken=True)], Outcome.HIT, 0),
    ],
)
def test_outcomes(verdicts: list[Verdict], outcome: Outcome, code: int) -> None:
    found = answer("pwcc.load", verdicts)
    assert (found.outcome, found.outcome.exit_code) == (outcome, code)
    assert found.to_json()["exit_code"] == code


def test_the_taken_one_comes_first_then_the_nearest() -> None:
    far, near, taken = verdict("far", SOURCE, HOST), verdict("near", SOURCE), verdict("taken", taken=True)
    fits = verdict("fits")
    found = answer("pwcc.load", [far, near, fits, taken])
    assert [v.what for v in found.verdicts] == ["taken", "fits", "near", "far"]
    text = "\n".join(found.lines())
    assert text.splitlines()[0] == f"pwcc.load: hit, entry {taken.entry_key[:12]}"
    assert "also fits" in text
    assert "next: deploy the sources" in text


def test_reasons_are_the_lines_of_a_miss_and_bounded() -> None:
    found = answer("pwcc.load", [verdict(f"v{i}", SOURCE) for i in range(MAX_REASONS + 5)], ["a note"])
    reasons = found.reasons()
    assert len(reasons) == MAX_REASONS + 2
    assert reasons[-2:] == ("and 5 more entries: pwcc explain", "a note")
    assert all(SOURCE.reason in reason for reason in reasons[:MAX_REASONS])
    assert found.advice() == ("deploy the sources that were compiled, or compile again",)


def test_a_whole_answer_is_bounded_as_text_and_complete_as_json() -> None:
    many = [Difference(f"model/tensor t{i}", f"tensor t{i}: compiled with a, now b") for i in range(200)]
    found = answer("pwcc.load", [verdict("v", *many, same_key=False)])
    text = found.lines()
    assert len(text) < MAX_DIFFERENCES + 10
    assert any("160 more: --json shows all" in line for line in text)
    assert "under another lookup key" in text[1]
    shown = found.verdicts[0].to_json()["differences"]
    assert isinstance(shown, list)
    assert len(shown) == 200
