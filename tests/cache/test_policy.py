"""A site's word on environment variables: what it changes, and that an entry carries it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache import strict
from pwcc.cache.environment import environment_factors, is_factor
from pwcc.cache.errors import CorruptEntry, UsageError
from pwcc.cache.policy import NO_SITE, TABLES_ONLY, Policy, SiteEnvironment

names = st.sampled_from(["MYAPP_A", "MYAPP_B", "HOME", "OMP_NUM_THREADS", "TORCH_LOGS", "HF_TOKEN", "OTHER"])
environs = st.dictionaries(names, st.text(st.characters(codec="ascii"), max_size=5))
policies = st.builds(
    lambda include, exclude: Policy.of(include=include - exclude, exclude=exclude),
    st.sets(st.sampled_from(["MYAPP_*", "HOME", "HF_TOKEN", "OMP_*", "OTHER"])),
    st.sets(st.sampled_from(["MYAPP_B", "OMP_*", "TORCH_*", "OTHER"])),
)


@given(environs)
def test_without_a_site_only_the_tables_decide(environ: dict[str, str]) -> None:
    assert TABLES_ONLY.factors(environ) == environment_factors(environ)
    assert TABLES_ONLY.included(environ) == {}
    assert NO_SITE.changes(environ) == []


@given(policies, environs, environs)
def test_a_change_is_told_exactly_where_an_included_value_differs(
    policy: Policy, then: dict[str, str], now: dict[str, str]
) -> None:
    site = SiteEnvironment.record(policy, then)
    told = {name for name, _, _ in site.changes(now)}
    assert told == {n for n in {*then, *now} if policy.includes(n) and then.get(n) != now.get(n)}
    assert site.changes(then) == []


@given(policies, environs)
def test_exclusion_wins_then_inclusion_then_the_tables(policy: Policy, environ: dict[str, str]) -> None:
    for name in environ:
        factor, _, reason = policy.decide(name)
        assert factor is policy.is_factor(name)
        assert reason
        if not policy.includes(name) and policy == Policy.of(include=policy.include):
            assert factor is is_factor(name)
    assert list(policy.factors(environ)) == sorted(name for name in environ if policy.is_factor(name))


def test_the_order_of_decisions() -> None:
    policy = Policy.of(include=["MYAPP_*", "TORCH_LOGS"], exclude=["MYAPP_NOISE", "OMP_*"])
    assert policy.decide("MYAPP_MODE") == (True, "MYAPP_*", "the site's policy")
    assert policy.decide("MYAPP_NOISE")[:2] == (False, "MYAPP_NOISE")
    assert policy.decide("OMP_NUM_THREADS")[:2] == (False, "OMP_*")
    assert policy.decide("TORCH_LOGS")[0]  # a site may include what the tables leave out
    assert policy.decide("UNHEARD_OF")[:2] == (False, "")
    assert "observed" not in policy.decide("OTHER")[2]
    assert "seen to read it" in policy.decide("OTHER")[2]


def test_a_credential_is_never_kept_in_the_clear() -> None:
    policy = Policy.of(include=["HF_TOKEN", "MYAPP_MODE"])
    values = SiteEnvironment.record(policy, {"HF_TOKEN": "abc", "MYAPP_MODE": "fast"}).values
    assert values["MYAPP_MODE"] == "fast"
    assert values["HF_TOKEN"].startswith("digest:")
    assert "abc" not in values["HF_TOKEN"]


@pytest.mark.parametrize("pattern", ["", "*", "**", "A B", "A=1", "A\n", "x" * 201, "$HOME"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError):
        Policy.of(include=[pattern])
    with pytest.raises(UsageError):
        Policy.of(exclude=[pattern])


def test_both_ways_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="A is both included and excluded"):
        _ = Policy.of(include=["A"]) + Policy.of(exclude=["A"])


@given(policies, environs)
def test_round_trip(policy: Policy, environ: dict[str, str]) -> None:
    site = SiteEnvironment.record(policy, environ)
    data = strict.canonical(site.to_json())
    assert SiteEnvironment.parse(strict.loads(data, where="test"), "test") == site


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"include": [], "exclude": []},
        {"include": ["*"], "exclude": [], "values": {}},
        {"include": ["A"], "exclude": ["A"], "values": {}},
        {"include": [1], "exclude": [], "values": {}},
        {"include": [], "exclude": [], "values": {"A": 1}},
        {"include": [], "exclude": [], "values": {}, "more": 1},
    ],
)
def test_what_is_no_record_is_refused(value: object) -> None:
    with pytest.raises(CorruptEntry):
        SiteEnvironment.parse(value, "test")
