from __future__ import annotations

import enum
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, FactorError, NewerFormat
from pwcc.cache.factors import ABSENT, GROUPS, FactorChange, FactorTree, diff, entry_key, lookup_key

text = st.text(st.characters(codec="utf-8"), max_size=6)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
groups = st.dictionaries(text.filter(bool), values, max_size=4)
trees = st.builds(
    lambda a, b, c, d: FactorTree.of(environment=a, configuration=b, sources=c, compiler=d),
    groups,
    groups,
    groups,
    groups,
)


@given(trees, trees)
def test_same_digest_exactly_when_same_tree(a: FactorTree, b: FactorTree) -> None:
    same = strict.canonical(a.to_json()) == strict.canonical(b.to_json())
    assert (a.digest() == b.digest()) is same
    assert (entry_key(a) == entry_key(b)) is same
    assert (diff(a, b) == []) is same


@given(trees)
def test_json_round_trip(tree: FactorTree) -> None:
    data = strict.canonical(tree.to_json())
    again = FactorTree.from_json(strict.loads(data, where="test"))
    assert again == tree
    assert again.digest() == tree.digest()


@given(groups)
def test_order_of_discovery_does_not_matter(group: dict[str, object]) -> None:
    backwards = dict(reversed(group.items()))
    assert FactorTree.of(configuration=group).digest() == FactorTree.of(configuration=backwards).digest()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"ab": "c"}, {"a": "bc"}),
        ({"a": "b", "c": "d"}, {"a": 'b","c":"d'}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": None}, {}),
        ({"a": None}, {"a": "null"}),
        ({"a": []}, {"a": {}}),
        ({"a": [1, [2]]}, {"a": [[1], 2]}),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}),
        ({"a": ""}, {"a": None}),
        ({"a": "é"}, {"a": "e\u0301"}),
    ],
)
def test_different_pairs(a: dict[str, object], b: dict[str, object]) -> None:
    one, two = FactorTree.of(configuration=a), FactorTree.of(configuration=b)
    assert one.digest() != two.digest()
    assert diff(one, two) != []


class Mode(enum.StrEnum):
    FAST = "fast"


class Version(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1, 2), [1, 2]),
        ({"x", "y", "z"}, ["x", "y", "z"]),
        (Mode.FAST, "fast"),
        (Version("2.13"), "2.13"),
        ({"k": (1,)}, {"k": [1]}),
    ],
)
def test_same_pairs(a: object, b: object) -> None:
    assert FactorTree.of(compiler={"x": a}) == FactorTree.of(compiler={"x": b})


def test_the_same_factor_in_another_group_is_another_key() -> None:
    found = {FactorTree.of(**{group: {"a": 1}}).digest() for group in GROUPS}
    assert len(found) == len(GROUPS)


def test_entry_and_lookup_keys_of_one_tree_differ() -> None:
    tree = FactorTree.of(compiler={"torch": "2.13.0"})
    assert len({tree.digest(), entry_key(tree), lookup_key(tree)}) == 3


def test_golden_keys() -> None:
    tree = FactorTree.of(environment={"OMP_NUM_THREADS": "2"}, configuration={"sizes": [1, 2]})
    assert (
        entry_key(tree) == "bb71b556b7b99dafe446a3b5f5141c26"
    )  # changing this orphans every cache in the field
    assert lookup_key(tree) == "73754fc432c6d30d6bdef24c6048c9c3"


@pytest.mark.parametrize(
    "value",
    [
        print,
        object(),
        lambda: 0,
        int,
        b"bytes",
        float("nan"),
        float("inf"),
        2**64,
        {1: 2},
        {1, 2},
        "\ud800",
        ...,
    ],
)
def test_values_without_a_stable_form_are_refused_by_name(value: object) -> None:
    with pytest.raises(FactorError, match=r"configuration/passes\.mine\[0\]"):
        FactorTree.of(configuration={"passes": {"mine": [value]}})


def test_recursion_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(FactorError, match="nested levels"):
        FactorTree.of(configuration={"x": endless})


def test_diff_names_the_place_inside() -> None:
    before = FactorTree.of(
        environment={"A": "1", "GONE": "x"},
        configuration={"model": {"args": {"hidden": [64, 128]}, "name": "m"}},
    )
    after = FactorTree.of(
        environment={"A": "1"}, configuration={"model": {"args": {"hidden": [64, 256]}, "name": "m"}}
    )
    assert diff(before, after) == [
        FactorChange("environment/GONE", "x", ABSENT),
        FactorChange("configuration/model.args.hidden[1]", 128, 256),
    ]


def test_diff_tells_types_apart() -> None:
    assert [c.path for c in diff(FactorTree.of(compiler={"a": 1}), FactorTree.of(compiler={"a": True}))] == [
        "compiler/a"
    ]


def test_group_digests_show_where() -> None:
    a = FactorTree.of(environment={"A": "1"}, compiler={"t": 1}).group_digests()
    b = FactorTree.of(environment={"A": "2"}, compiler={"t": 1}).group_digests()
    assert [name for name in GROUPS if a[name] != b[name]] == ["environment"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"schema": 1},
        {"schema": "1", **{group: {} for group in GROUPS}},
        {"schema": 1, **{group: [] for group in GROUPS}},
        {"schema": 1, "more": {}, **{group: {} for group in GROUPS}},
        {"schema": 1, **{group: {"": 1} for group in GROUPS}},
    ],
)
def test_hostile_json(value: object) -> None:
    with pytest.raises(CorruptEntry):
        FactorTree.from_json(json.loads(json.dumps(value)))


def test_future_schema() -> None:
    with pytest.raises(NewerFormat, match="newer pwcc"):
        FactorTree.from_json({"schema": 2})
