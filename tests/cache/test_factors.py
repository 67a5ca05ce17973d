from __future__ import annotations

import enum
import json
import os
import subprocess
import sys

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


GOLDEN_GROUPS = {
    "environment": "def8a04cdfb6badfb6df36c1c1dec3f9",
    "configuration": "f3c2c45fdc6963e9a370aef4a11e4097",
    "sources": "0ab89e069389a901b1d8e145f445045b",
    "compiler": "af35f1ab107aa3f19f72a8c2e2250a71",
}
GOLDEN_KEYS = (
    "3df84e475f17d242768c58f74e10e202",
    "41ae6da25bc594123aaefd843eb0ddf8",
    "da5edc934d8bb77d79be8ee210b40cf2",
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


def test_golden_bytes_of_a_tree() -> None:
    """What is hashed and stored, byte by byte: changing any of it orphans every cache in the field."""
    tree = FactorTree.of(
        environment={"TORCHINDUCTOR_FREEZING": "1", "MKL_CBWR": "AVX2"},
        configuration={"model": "builtin:x", "options": {"sizes": (1, 2), "profile": None, "eps": 1e-5}},
        sources={"m:m.py": "0" * 32},
        compiler={"torch": "2.13.0", "é": [True, -0.0]},
    )
    assert strict.canonical(tree.to_json()).decode() == (
        '{"compiler":{"torch":"2.13.0","é":[true,-0.0]},'
        '"configuration":{"model":"builtin:x","options":{"eps":1e-05,"profile":null,"sizes":[1,2]}},'
        '"environment":{"MKL_CBWR":"AVX2","TORCHINDUCTOR_FREEZING":"1"},"schema":1,'
        '"sources":{"m:m.py":"00000000000000000000000000000000"}}'
    )
    assert tree.group_digests() == GOLDEN_GROUPS
    assert (tree.digest(), entry_key(tree), lookup_key(tree)) == GOLDEN_KEYS


@given(st.data(), trees)
def test_any_one_change_changes_the_key_and_is_named(data: st.DataObject, tree: FactorTree) -> None:
    group = data.draw(st.sampled_from(GROUPS))
    name = data.draw(text.filter(bool))
    value = data.draw(values)
    recorded: dict[str, object] = {g: {f.name: f.value for f in factors} for g, factors in tree.groups()}
    changed = FactorTree.of(**{**recorded, group: {**recorded[group], name: value}})  # type: ignore[arg-type,dict-item]
    found = diff(tree, changed)
    assert (entry_key(tree) == entry_key(changed)) is (not found)
    assert (lookup_key(tree) == lookup_key(changed)) is (not found)
    assert all(change.path.startswith(f"{group}/{name}") for change in found)
    same = [g for g, digest in tree.group_digests().items() if digest == changed.group_digests()[g]]
    assert same == [g for g in GROUPS if g != group or not found]


PROCESS = """
import json, random, sys
names = ["b", "a", "é", "aa", ""]
random.seed(int(sys.argv[1])); random.shuffle(names)
if int(sys.argv[1]) % 2:
    import pwcc.cache.store, pwcc.cache.environment  # another import order
from pwcc.cache.factors import FactorTree, entry_key
from pwcc.cache.policy import Policy
options = {name: {"set": set("xyz"), name + "k": name} for name in names}
environ = {"OMP_NUM_THREADS": "1", "MYAPP_B": "/home/me/x", "MYAPP_A": "2"}
environ = dict(random.sample(list(environ.items()), len(environ)))
policy = Policy.of(include=set(["MYAPP_*", "OTHER"]), exclude=set(["TORCH_X", "TORCH_Y"]))
tree = FactorTree.of(
    environment=policy.factors(environ), configuration={"options": options, "policy": policy.to_json()}
)
print(entry_key(tree), json.dumps(tree.group_digests()))
"""


def test_hash_seed_dict_order_and_import_order_do_not_matter() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", PROCESS, str(number)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(number * 7919)},
        ).stdout
        for number in range(5)
    }
    assert len(found) == 1


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
