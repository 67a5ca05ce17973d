from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pwcc.cache.entries import EntryRef
from pwcc.cache.ids import BlobDigest, EntryKey, LookupKey
from pwcc.cache.retention import Held, Limits, Verdict, decide, total_bytes

NOW = 1_000_000.0
DAY = 86400.0


def held(
    name: str,
    *,
    days: float = 0.0,
    lookup: str = "a",
    blobs: dict[str, int] | None = None,
    protected: str | None = None,
) -> Held:
    keys = LookupKey(lookup * 32), EntryKey(name.ljust(32, "0"))
    return Held(
        ref=EntryRef(*keys, Path("entries", *keys)),
        used_s=NOW - days * DAY,
        own_bytes=10,
        blobs={BlobDigest(digest): size for digest, size in (blobs or {}).items()},
        protected=protected,
    )


def gone(verdicts: list[Verdict]) -> set[str]:
    return {verdict.held.ref.entry_key.rstrip("0") for verdict in verdicts if verdict.remove}


def test_without_limits_everything_stays() -> None:
    assert gone(decide([held("1", days=1000)], Limits(), now=NOW)) == set()


def test_age_counts_from_the_last_use() -> None:
    entries = [held("1", days=29.9), held("2", days=30.1)]
    (old, young) = decide(entries, Limits(max_age_s=30 * DAY), now=NOW)
    assert (old.remove, young.remove) == (True, False)
    assert old.reason == "last used 30 d ago"


def test_keep_last_alone_removes_the_older_ones_of_each_lookup_key() -> None:
    entries = [held(name, days=day) for name, day in (("1", 1), ("2", 2), ("3", 3))]
    entries.append(held("4", days=99, lookup="b"))
    assert gone(decide(entries, Limits(keep_last=2), now=NOW)) == {"3"}


def test_keep_last_keeps_what_is_too_old() -> None:
    entries = [held("1", days=100), held("2", days=200), held("3", days=300)]
    verdicts = decide(entries, Limits(max_age_s=30 * DAY, keep_last=1), now=NOW)
    assert gone(verdicts) == {"2", "3"}
    assert verdicts[0].reason == "last used 300 d ago; not among the last 1 of its lookup key"


def test_what_is_young_stays_although_later_ones_are_kept() -> None:
    entries = [held("1", days=1), held("2", days=2), held("3", days=300)]
    assert gone(decide(entries, Limits(max_age_s=30 * DAY, keep_last=1), now=NOW)) == {"3"}


def test_size_takes_what_was_used_longest_ago_and_no_more_than_needed() -> None:
    entries = [held(str(day), days=day, blobs={f"{day}": 90}) for day in (1, 2, 3, 4)]
    verdicts = decide(entries, Limits(max_bytes=250), now=NOW)
    assert gone(verdicts) == {"3", "4"}
    assert [verdict.freed for verdict in verdicts] == [100, 100, 0, 0]


def test_a_shared_blob_counts_once_and_is_freed_by_its_last_user() -> None:
    entries = [held("1", days=2, blobs={"s": 1000}), held("2", days=1, blobs={"s": 1000, "t": 5})]
    assert total_bytes(entries) == 1025
    first, second = decide(entries, Limits(max_bytes=0), now=NOW)
    assert (first.freed, second.freed) == (10, 1015)


def test_size_is_a_hard_limit_that_keep_last_does_not_lift() -> None:
    entries = [held("1", days=1, blobs={"a": 500})]
    assert gone(decide(entries, Limits(max_bytes=100, keep_last=5), now=NOW)) == {"1"}


def test_what_is_protected_stays_and_its_reason_is_told() -> None:
    entries = [held("1", days=500, protected="pinned")]
    (verdict,) = decide(entries, Limits(max_bytes=0, max_age_s=1, keep_last=0), now=NOW)
    assert (verdict.remove, verdict.reason) == (False, "pinned")


def test_a_protected_entry_counts_among_the_last() -> None:
    entries = [held("1", days=1, protected="pinned"), held("2", days=2)]
    assert gone(decide(entries, Limits(keep_last=1), now=NOW)) == {"2"}


def test_use_in_the_future_counts_as_now() -> None:
    entries = [held("1", days=-5000), held("2", days=0), held("3", days=1)]
    assert gone(decide(entries, Limits(max_age_s=DAY / 2), now=NOW)) == {"3"}
    # A clock that was wrong once must not make an entry outlive all others for ever: key order decides.
    assert gone(decide(entries[:2], Limits(max_bytes=10), now=NOW)) == {"1"}


def test_what_was_asked_for_goes() -> None:
    entries = [held("1"), held("2")]
    assert gone(decide(entries, Limits(), now=NOW, asked=[entries[0].ref])) == {"1"}


BLOBS = st.dictionaries(st.sampled_from("abcdef"), st.just(7), max_size=4)
ENTRIES = st.lists(
    st.tuples(st.integers(-3, 40), st.sampled_from("xyz"), BLOBS, st.sampled_from([None, None, "pinned"])),
    max_size=12,
).map(
    lambda rows: [
        held(
            f"{index:x}f", days=days, lookup={"x": "a", "y": "b", "z": "c"}[lookup], blobs=blobs, protected=why
        )
        for index, (days, lookup, blobs, why) in enumerate(rows)
    ]
)
LIMITS = st.builds(
    Limits,
    max_bytes=st.none() | st.integers(0, 200),
    max_age_s=st.none() | st.integers(0, 40).map(lambda days: days * DAY),
    keep_last=st.none() | st.integers(0, 4),
)


@given(ENTRIES, LIMITS, st.randoms())
def test_what_holds_for_all_entries_and_limits(entries: list[Held], limits: Limits, order: object) -> None:
    verdicts = decide(entries, limits, now=NOW)
    kept = [verdict.held for verdict in verdicts if not verdict.remove]
    removed = [verdict for verdict in verdicts if verdict.remove]
    # Each entry has one verdict, with a reason; nothing protected goes; the listing's order does not matter.
    assert Counter(verdict.held.ref for verdict in verdicts) == Counter(entry.ref for entry in entries)
    assert all(verdict.reason for verdict in verdicts)
    assert all(verdict.held.protected is None for verdict in removed)
    shuffled = list(entries)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(shuffled, limits, now=NOW) == verdicts
    # What is said to be freed is what is missing afterwards.
    assert total_bytes(entries) - sum(verdict.freed for verdict in removed) == total_bytes(kept)
    # The size limit holds, except for what may not go.
    if limits.max_bytes is not None and total_bytes(kept) > limits.max_bytes:
        assert all(entry.protected for entry in kept)
    # Nothing goes that no rule lets go; a second collection finds nothing to do.
    if limits == Limits():
        assert not removed
    assert not any(verdict.remove for verdict in decide(kept, limits, now=NOW))
    # The last N of a lookup key stay, but for the size limit.
    if limits.keep_last is not None and limits.max_bytes is None:
        for lookup in {entry.ref.lookup_key for entry in entries}:
            mine = [verdict for verdict in verdicts if verdict.held.ref.lookup_key == lookup]
            assert not any(
                verdict.remove for verdict in mine[len(mine) - limits.keep_last :] if limits.keep_last
            )
    # Size takes in order of use: what goes for size was not used later than what stays unprotected.
    for verdict in removed:
        if verdict.reason.startswith("over the size limit"):
            later = [entry for entry in kept if entry.protected is None]
            assert all(min(verdict.held.used_s, NOW) <= min(entry.used_s, NOW) for entry in later)
