"""The one entry that a key prefix names."""

from __future__ import annotations

import string

from pwcc.cache.errors import UsageError
from pwcc.cache.inspection import MIN_PREFIX, SHORT, find
from pwcc.cache.store import EntryRef, Store


def choose_entry(store: Store, prefix: str) -> EntryRef:
    """Return the entry whose key begins with ``prefix``.

    Raises:
        UsageError: a prefix that is too short, or that no entry or several entries have.
    """
    if set(prefix.lower()) - set(string.hexdigits):
        raise UsageError(
            f"expected the first hex digits of an entry's key, got {prefix!r}",
            hint="pwcc inspect DIR lists entries; a cache directory is named by an option such as --cache-dir",
        )
    if len(prefix) < MIN_PREFIX:
        raise UsageError(f"expected at least {MIN_PREFIX} hex digits of an entry's key, got {prefix!r}")
    found = find(store, prefix)
    if not found:
        raise UsageError(
            f"no entry's key begins with {prefix!r}", where=str(store.root), hint="pwcc inspect DIR lists them"
        )
    if len(found) > 1:
        keys = ", ".join(ref.entry_key[: max(SHORT, len(prefix) + 2)] for ref in found[:8])
        raise UsageError(f"{len(found)} entries' keys begin with {prefix!r}: {keys}", hint="give more digits")
    return found[0]
