"""Artifact: which entries of a cache may serve a live model, best first, and why the others may not.

An entry that cannot be used because of its files is a *failure*: the next one is tried, and one whose
files are not what the manifest says is set aside, where this process may do that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from pwcc.cache import ownership
from pwcc.cache.difference import Difference
from pwcc.cache.errors import CorruptEntry, NewerFormat, StoreError, UntrustedEntry
from pwcc.cache.ids import LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.policy import Policy
from pwcc.cache.store import EntryRef, Store
from pwcc.compile.eligibility import Rejection, reject

_LOG = logging.getLogger("pwcc")


@dataclass(frozen=True)
class Failure:
    """An entry that could not be used because of its files, and what was found."""

    ref: EntryRef
    error: StoreError

    @property
    def reason(self) -> str:
        """File, expected and got, in one line."""
        return f"{self.error.message} (at {self.error.where})" if self.error.where else self.error.message

    def rejection(self) -> Rejection:
        """Return the failure as a reason of a miss."""
        return Rejection(self.ref.entry_key, self.reason)


@dataclass
class Candidates:
    """The entries under one lookup key: those that may serve, best first; what keeps the others from it."""

    eligible: list[tuple[EntryRef, Manifest]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What a load asks for: the lookup key, and the profile or entry where one is named.

    ``trusted`` tells that owners do not matter; in the directories of ``by_name`` they do not either.
    """

    key: LookupKey
    profile: str | None
    entry: str | None
    trusted: bool
    by_name: tuple[Path, ...] = ()
    policy: Policy | None = None

    def refusal(self, ref: EntryRef) -> str | None:
        """Return why an entry is not taken whatever its manifest says, or None."""
        if self.entry is not None and not ref.entry_key.startswith(self.entry):
            return f"entry: expected a key that starts with {self.entry!r}"
        trusted = self.trusted or any(ref.path.is_relative_to(root) for root in self.by_name)
        if not trusted and (found := ownership.entry_concern(ref.path, ref.manifest)):
            return f"expected an entry that only you or root can write, got {found}: --trust-dir takes it"
        return None

    def otherwise(self, manifest: Manifest) -> Difference | None:
        """Return how an entry was compiled otherwise than was asked for by name, or None."""
        if self.profile is not None and manifest.profile != self.profile:
            reason = f"profile: expected {self.profile!r}, got {manifest.profile!r}"
            return Difference("choice/profile", reason)
        policy = manifest.site_environment.policy
        if self.policy is not None and policy != self.policy:
            reason = f"environment policy: expected {self.policy}, got {policy}"
            return Difference("choice/environment policy", reason)
        return None


def read_manifests(store: Store, wanted: Wanted) -> tuple[Candidates, list[tuple[EntryRef, Manifest]]]:
    """Return the manifests to choose from; the others are in the first answer, with their reasons."""
    found, manifests = Candidates(), []
    for ref in store.candidates(wanted.key):
        refusal = wanted.refusal(ref)
        if refusal is not None:
            found.rejections.append(Rejection(ref.entry_key, refusal))
            continue
        try:
            manifest = store.read_manifest(ref)
        except (NewerFormat, UntrustedEntry) as error:
            found.rejections.append(Rejection(ref.entry_key, error.message))
        except StoreError as error:
            found.failures.append(Failure(ref, error))
        else:
            other = wanted.otherwise(manifest)
            if other is None:
                manifests.append((ref, manifest))
            else:
                found.rejections.append(Rejection(ref.entry_key, other.reason, path=other.path))
    return found, manifests


def judge(
    store: Store,
    model: nn.Module,
    manifests: Sequence[tuple[EntryRef, Manifest]],
    found: Candidates,
    facts: Mapping[str, object],
) -> None:
    """Sort manifests into ``found``: eligible ones best first, others with what keeps them from serving.

    Policy: most static sizes, then tuned over untuned, then the newest published.
    """
    for ref, manifest in manifests:
        rejection = reject(store, model, manifest, facts)
        if rejection is None:
            found.eligible.append((ref, manifest))
        elif (error := _unreadable(store, manifest)) is not None:
            found.failures.append(Failure(ref, error))
        else:
            found.rejections.append(rejection)
    found.eligible.sort(key=lambda item: (len(item[1].sizes), item[1].tuned, _published(item[0])), reverse=True)


def _unreadable(store: Store, manifest: Manifest) -> StoreError | None:
    """Tell whether an entry was rejected only because its predicates cannot be read."""
    try:
        store.read_blob(manifest.predicates)
    except StoreError as error:
        return error
    return None


def _published(ref: EntryRef) -> float:
    try:
        return ref.manifest.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def vanished(failures: Sequence[Failure]) -> bool:
    """Tell whether an entry failed because it was removed or replaced while it was loaded."""
    return any(not failure.ref.manifest.exists() for failure in failures)


def set_aside(store: Store, failures: Sequence[Failure]) -> tuple[str, ...]:
    """Quarantine the entries that are damaged, log every failure once, and return one line for each.

    Only entries whose damage is found again now, in a cache of this user's that can be written; an entry
    that failed for another reason stays where it is.
    """
    lines = []
    for failure in failures:
        line = str(failure.rejection())
        if isinstance(failure.error, CorruptEntry) and _move(store, failure):
            line += "; set aside in quarantine"
        _LOG.warning("an entry could not be used: %s", line)
        lines.append(line)
    return tuple(lines)


def _move(store: Store, failure: Failure) -> bool:
    from pwcc.cache.verify import is_damaged

    try:
        ours = store.root.stat().st_uid == os.geteuid()
    except OSError:
        return False
    if not (ours and failure.ref.path.exists() and is_damaged(store, failure.ref)):
        return False
    place = store.quarantine(failure.ref, failure.reason, is_damaged=lambda ref: is_damaged(store, ref))
    return place is not None


def quarantined(store: Store, key: LookupKey) -> list[Rejection]:
    """Return what was set aside under a lookup key and has not been made again."""
    there = {ref.entry_key for ref in store.candidates(key)}
    return [
        Rejection(record.entry_key, f"was damaged and is in quarantine: {record.reason}")
        for record in store.quarantined(key)
        if record.entry_key not in there
    ]
