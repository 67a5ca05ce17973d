from __future__ import annotations

from pwcc.cli.table import Column, facts, table


def test_columns_are_aligned_and_the_widest_elastic_one_gives_way() -> None:
    columns = (Column("NAME", elastic=True), Column("N", right=True), Column("KIND", elastic=True))
    rows = [("a_name_of_twenty_one", "7", "dynamic"), ("b", "12", "static")]
    assert table(columns, rows, width=80) == [
        "NAME                   N  KIND",
        "a_name_of_twenty_one   7  dynamic",
        "b                     12  static",
    ]
    assert table(columns, rows, width=24, indent=" ") == [
        " NAME         N  KIND",
        " a_name…one   7  dynamic",
        " b           12  static",
    ]


def test_what_cannot_shrink_is_left_whole() -> None:
    assert table((Column("A"),), [("x" * 30,)], width=10) == ["A", "x" * 30]


def test_facts_align_their_values() -> None:
    assert facts([("a", "1"), ("long", ""), ("b", "2")]) == ["  a     1", "  long", "  b     2"]
