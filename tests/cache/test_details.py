from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache import strict
from pwcc.cache.details import Details, diff_size, line_digests, moved_rows, row_text, rows_of, tree_changes
from pwcc.cache.errors import CorruptEntry

lines = st.lists(st.sampled_from([b"a", b"b", b"c", b"", b"dd"]), max_size=12)


def unified(before: list[bytes], after: list[bytes]) -> tuple[int, int]:
    """What a real unified diff has, by difflib on the text."""
    text = difflib.unified_diff([str(x) for x in before], [str(x) for x in after], n=0, lineterm="")
    found = [line for line in text if not line.startswith(("---", "+++", "@@"))]
    return sum(line[0] == "+" for line in found), sum(line[0] == "-" for line in found)


@given(lines, lines)
def test_the_size_accounts_for_every_line(before: list[bytes], after: list[bytes]) -> None:
    added, removed = diff_size(line_digests(b"\n".join(before)), line_digests(b"\n".join(after)))
    old, new = b"\n".join(before).splitlines(), b"\n".join(after).splitlines()
    assert len(old) - removed + added == len(new)
    assert (added, removed) == (0, 0) if old == new else added + removed > 0


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        ("a\nb\nc\n", "a\nb\nc\n", (0, 0)),
        ("a\nb\nc\n", "a\nX\nc\n", (1, 1)),
        ("a\nb\nc\n", "a\nb\nc\nd\n", (1, 0)),
        ("a\nb\nc\n", "a\nc\n", (0, 1)),
        ("a\nb\nc\n", "z\na\nb\nq\nc\n", (2, 0)),
        ("", "a\n", (1, 0)),
    ],
)
def test_like_a_unified_diff(before: str, after: str, size: tuple[int, int]) -> None:
    assert diff_size(line_digests(before.encode()), line_digests(after.encode())) == size
    assert unified([*map(str.encode, before.splitlines())], [*map(str.encode, after.splitlines())]) == size


def test_a_large_rewrite_is_counted_and_costs_little() -> None:
    before = line_digests(b"\n".join(b"%d" % i for i in range(20_000)))
    after = line_digests(b"\n".join(b"x%d" % i for i in range(15_000)))
    assert diff_size(before, after) == (15_000, 20_000)


def test_only_four_bytes_of_a_line_are_kept() -> None:
    found = line_digests(b"password = 'secret'\nsecond\n")
    assert [len(line) for line in found] == [4, 4]


def record() -> Details:
    tree = {"modules": [["", "m:A", ""]], "tensors": [["w", "parameter", "torch.float32", [2, 3], "", ""]]}
    return Details.of(tree, [["x", ""]], {"m:a.py": line_digests(b"a\nb\n")})


def test_round_trip() -> None:
    assert Details.from_bytes(record().to_bytes()) == record()
    assert record().to_bytes() == record().to_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"lines": {"m:a.py": "AAA"}},
        {"lines": {"m:a.py": "AAAA"}},
        {"lines": {"m:a.py": 1}},
        {"lines": []},
        {"tree": []},
        {"more": 1},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, object]) -> None:
    value = {**strict.loads(record().to_bytes(), where="test"), **change}  # type: ignore[dict-item]
    with pytest.raises(CorruptEntry):
        Details.from_bytes(strict.canonical(value))


def test_rows_are_named_where_they_differ() -> None:
    def tree(**tensors: list[object]) -> dict[str, object]:
        return {"modules": [["", "m:A", ""]], "tensors": [[name, *row] for name, row in tensors.items()]}

    before = rows_of(
        tree(a=["parameter", "torch.float32", [2], "", ""], b=["buffer", "torch.int64", [1], "", ""])
    )
    after = rows_of(
        tree(a=["parameter", "torch.float32", [4], "", ""], c=["buffer", "torch.int64", [1], "", ""])
    )
    found = tree_changes(before, after)
    assert [path for path, _, _ in found] == ["tensor a", "tensor b", "tensor c"]
    assert row_text(found[0][1]) == "parameter torch.float32 [2]"
    assert (row_text(found[1][2]), row_text(found[2][1])) == ("nothing", "nothing")
    assert tree_changes(before, before) == []


def test_another_order_is_a_difference() -> None:
    before, after = rows_of({"tensors": [["a", 1], ["b", 2]]}), rows_of({"tensors": [["b", 2], ["a", 1]]})
    assert tree_changes(before, after) == [("order of tensors", ["a", "b"], ["b", "a"])]


def test_a_tensor_that_a_wrapper_moved_is_found() -> None:
    def tree(**tensors: int) -> dict[str, object]:
        return {
            "tensors": [
                [name.replace("__", "."), "parameter", "float32", [n], "", ""] for name, n in tensors.items()
            ]
        }

    before = rows_of(tree(a__weight=4, b__weight=4, c__weight=4, d__bias=4))
    after = rows_of(
        tree(a__base_layer__weight=4, a__lora__weight=2, b__inner__weight=2, e__weight=4, d__bias=4)
    )
    assert moved_rows(tree_changes(before, after)) == {"tensor a.weight": "a.base_layer.weight"}
    alone = tree_changes(rows_of(tree(weight=4)), rows_of(tree(base_layer__weight=4)))
    assert moved_rows(alone) == {"tensor weight": "base_layer.weight"}
