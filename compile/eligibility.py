"""Artifact: what keeps an entry from serving a live model on this host, check by check, each thing by name.

The checks stand in one list, from cheap to dear. A load stops at the first that finds something
(:func:`reject`); an explanation asks all of them (:func:`all_differences`), so both say the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pwcc.cache import observed, sources
from pwcc.cache.difference import MAX_SHOWN, Difference, said
from pwcc.cache.errors import StoreError
from pwcc.cache.ids import FactorDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.observed import ObservedInput
from pwcc.cache.requirements import unmet
from pwcc.cache.store import Store
from pwcc.compile.call import own_call
from pwcc.compile.runtime.hooks import global_hooks, replaced_calls
from pwcc.compile.runtime.predicates import PredicateSet


@dataclass(frozen=True)
class Rejection:
    """Why one candidate was not taken; ``host`` tells that only the host stands in the way.

    ``path`` is that of the difference, where the load asked for another entry by a choice of its own.
    """

    entry: str
    reason: str
    host: bool = False
    path: str = "choice/load"

    def __str__(self) -> str:
        return f"{self.entry[:12]}: {self.reason}"


def reject(store: Store, model: nn.Module, manifest: Manifest, facts: Mapping[str, object]) -> Rejection | None:
    """Return why an entry may not serve a live model on a host with ``facts``, or None when it may."""
    for found in _stages(store, model, manifest, facts, limit=MAX_SHOWN + 1):
        if found:
            return Rejection(manifest.entry_key, said(found), host=all(difference.host for difference in found))
    return None


def all_differences(
    store: Store, model: nn.Module, manifest: Manifest, facts: Mapping[str, object], *, limit: int = 50
) -> list[Difference]:
    """Return everything that keeps an entry from serving; at most ``limit`` predicates are among it.

    Where a source changed, it is said by how many lines: this reads the file and the entry's details.
    """
    found = [item for items in _stages(store, model, manifest, facts, limit=limit) for item in items]
    if not any(difference.group == "sources" for difference in found):
        return found
    sizes = source_diffs(store, manifest)
    return [
        replace(difference, reason=f"{difference.reason.removesuffix(')')}; {sizes[difference.path]})")
        if difference.path in sizes
        else difference
        for difference in found
    ]


def _stages(
    store: Store, model: nn.Module, manifest: Manifest, facts: Mapping[str, object], *, limit: int
) -> Iterator[list[Difference]]:
    """Yield the differences of each check; none of them traces, compiles, imports or executes anything."""
    yield _replaced_call(model)
    yield _site_environment(manifest)
    yield _observed([item for item in manifest.observed if item.kind != "function"], manifest.lookup_key)
    yield _sources(model, manifest)
    yield _observed([item for item in manifest.observed if item.kind == "function"], manifest.lookup_key)
    yield _predicates(store, model, manifest, limit)
    yield [
        Difference(f"requirement/{line.partition(':')[0]}", line, host=True)
        for line in unmet(manifest.requirements, facts)
    ]


def changed_code(model: nn.Module, manifest: Manifest) -> list[str]:
    """Return which calls and functions were replaced in this process since they were compiled."""
    functions = [item for item in manifest.observed if item.kind == "function"]
    found = [*_replaced_call(model), *_observed(functions, manifest.lookup_key)]
    return [difference.reason for difference in found]


def _replaced_call(model: nn.Module) -> list[Difference]:
    if replaced := replaced_calls():
        reason = f"torch's own {', '.join(replaced)} was replaced in this process, and would not run"
        return [Difference("model/__call__", reason)]
    if own_call(type(model)) is nn.Module.__call__ and not global_hooks():
        return []
    reason = "the model overrides __call__, or modules have global hooks: neither would run"
    return [Difference("model/__call__", reason)]


def _site_environment(manifest: Manifest) -> list[Difference]:
    return [
        Difference(
            f"environment/{name} (site policy)",
            f"environment {name}: built with {_value(then)}, now {_value(now)}",
        )
        for name, then, now in manifest.site_environment.changes(os.environ)
    ]


def _observed(records: Sequence[ObservedInput], salt: str) -> list[Difference]:
    changes = observed.changes(
        records,
        salt=salt,
        environ=os.environ,
        modules=sys.modules,
        libraries=torch.ops.loaded_libraries,
    )
    return [Difference("/".join(record.factor), reason) for record, reason in changes]


def _value(value: str | None) -> str:
    return "nothing" if value is None else repr(value)


def _sources(model: nn.Module, manifest: Manifest) -> list[Difference]:
    changes = sources.check(manifest.sources, sys.modules, sys.path, live_code=live_code(model))
    return [
        Difference(f"sources/{change.record.module}:{change.record.path}", f"source {change.reason}")
        for change in changes
    ]


def source_diffs(store: Store, manifest: Manifest) -> dict[str, str]:
    """Return ``+a -b lines`` by difference path, of every source whose lines are recorded and differ here."""
    from pwcc.cache.details import Details, diff_size, line_digests

    try:
        recorded = Details.from_bytes(store.read_blob(manifest.details)) if manifest.details else None
    except StoreError:
        return {}
    found: dict[str, str] = {}
    for record in manifest.sources if recorded else ():
        name = f"{record.module}:{record.path}"
        path = sources.resolve(record, sys.modules, sys.path)
        if recorded is None or path is None or name not in recorded.lines:
            continue
        try:
            now = line_digests(path.read_bytes())
        except OSError:
            continue
        if now != recorded.lines[name]:
            found[f"sources/{name}"] = "+{} -{} lines".format(*diff_size(recorded.lines[name], now))
    return found


def _predicates(store: Store, model: nn.Module, manifest: Manifest, limit: int) -> list[Difference]:
    try:
        predicates = PredicateSet.from_json(store.read_blob(manifest.predicates))
    except StoreError as error:
        return [Difference("entry/predicates", error.message)]
    found = predicates.check(model, limit=limit)
    return [Difference(f"predicate/{violation.path}", str(violation)) for violation in found]


def live_code(model: nn.Module) -> frozenset[FactorDigest]:
    """Return digests of the methods of a live model's classes, for sources that have no file."""
    from pwcc.cache.code_digest import digest_code

    found: set[FactorDigest] = set()
    for cls in {type(module) for module in model.modules()}:
        if getattr(sys.modules.get(cls.__module__), "__file__", None):
            continue
        for base in cls.__mro__:
            for value in vars(base).values():
                code = getattr(value, "__code__", None)
                if code is not None and base.__module__ == cls.__module__:
                    found.add(digest_code(code))
    return frozenset(found)
