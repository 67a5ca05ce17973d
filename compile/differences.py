"""Key: how one entry differs from a live model here, as named differences; not only the first one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pwcc.cache import strict
from pwcc.cache.details import Details, moved_rows, row_text, rows_of, tree_changes
from pwcc.cache.difference import Difference, of_change
from pwcc.cache.errors import StoreError
from pwcc.cache.factors import FactorChange, FactorTree, diff
from pwcc.cache.manifest import Manifest
from pwcc.cache.policy import SiteEnvironment
from pwcc.cache.store import Store
from pwcc.cache.strict import Json
from pwcc.compile.build_factors import BuildFactors
from pwcc.compile.eligibility import all_differences
from pwcc.compile.here import Here

_WRAPPED: Final = ", inside a module that was wrapped around it"
MAX_ROWS: Final = 200  # rows of two model trees that are named one by one


def entry_differences(store: Store, manifest: Manifest, here: Here) -> list[Difference]:
    """Return all that keeps an entry from serving by ``pwcc.load``; empty means that it would serve.

    Raises:
        StoreError: the entry's factors cannot be read.
    """
    recorded = read_factors(store, manifest)
    found = list(_live(store, manifest, here))
    needed = {difference.path.removeprefix("requirement/") for difference in found}
    if "torch" not in needed:
        found += _torch(recorded, here)
    found += _device(manifest, recorded, here)
    found += _modes(recorded, here)
    return _named(store, manifest, here, found)


def build_differences(store: Store, manifest: Manifest, here: Here, build: BuildFactors) -> list[Difference]:
    """Return all that keeps an entry from being the answer to a compile; empty means that it would be.

    Raises:
        StoreError: the entry's factors cannot be read.
    """
    changes = build.changes(read_factors(store, manifest))
    found = [of_change(change) for change in changes]
    found += [
        difference
        for difference in _live(store, manifest, here)
        if difference.path not in {f.path for f in found}
    ]
    return _named(store, manifest, here, found)


def read_factors(store: Store, manifest: Manifest) -> FactorTree:
    """Return an entry's recorded factors. Raises StoreError where they cannot be read."""
    return FactorTree.from_json(strict.loads(store.read_blob(manifest.factors), where="factors"))


def _live(store: Store, manifest: Manifest, here: Here) -> Iterator[Difference]:
    """Yield what a load checks of a candidate; of another host, what its record tells."""
    for difference in all_differences(store, here.model, manifest, here.facts):
        if here.record is None or not difference.path.endswith("(site policy)"):
            yield difference
    if here.record is not None:
        yield from _recorded_environment(manifest.site_environment, here)


def _recorded_environment(site: SiteEnvironment, here: Here) -> Iterator[Difference]:
    record = here.record
    if record is None or not site.policy.include:
        return
    now = {name: value for name, value in record.environment.items() if site.policy.includes(name)}
    for name in sorted({*site.values, *now}):
        if site.values.get(name) != now.get(name):
            then, value = (_shown(values.get(name)) for values in (site.values, now))
            unknown = "" if record.site.policy.is_factor(name) else f" (or not recorded: --env-include {name})"
            reason = f"environment {name}: built with {then}, on that host {value}{unknown}"
            yield Difference(f"environment/{name} (site policy)", reason)


def _shown(value: str | None) -> str:
    return "nothing" if value is None else repr(value)


def _torch(recorded: FactorTree, here: Here) -> Iterator[Difference]:
    then = _compiler(recorded, "torch")
    if then != here.torch:
        yield Difference("compiler/torch", f"torch: built with {then}, now {here.torch}", host=True)


def _device(manifest: Manifest, recorded: FactorTree, here: Here) -> Iterator[Difference]:
    then, now = manifest.device, here.device
    before, after = then.name or then.type, now["name"] or now["type"]
    if (then.type, then.name) != (now["type"], now["name"]):
        yield Difference("compiler/device", f"device: built for {before}, got {after}", host=True)
        return
    facts = _compiler(recorded, "device")
    changes = _changes("compiler/device", facts if isinstance(facts, dict) else {}, now)
    yield from (Difference(change.path, str(change), host=True) for change in changes)


def _modes(recorded: FactorTree, here: Here) -> Iterator[Difference]:
    then = _compiler(recorded, "numeric state")
    changes = _changes("compiler/numeric state", then if isinstance(then, dict) else {}, here.numeric)
    yield from map(of_change, changes)


def _changes(path: str, before: Mapping[str, Json], after: Mapping[str, Json]) -> list[FactorChange]:
    group, _, name = path.partition("/")
    trees = [FactorTree.of(**{group: {name: dict(values)}}) for values in (before, after)]
    return diff(*trees)


def _compiler(recorded: FactorTree, name: str) -> Json:
    return next((factor.value for factor in recorded.compiler if factor.name == name), None)


def _named(store: Store, manifest: Manifest, here: Here, found: list[Difference]) -> list[Difference]:
    """Add what of the lookup key is the model's: its tag, rows and signature; each path once."""
    if manifest.lookup_key != here.lookup_key:
        found += _model(store, manifest, here)
        if manifest.tag != here.tag and not any(f.path.endswith("options.tag") for f in found):
            found.append(of_change(FactorChange("configuration/options.tag", manifest.tag, here.tag)))
        found.sort(key=lambda difference: not difference.reason.endswith(_WRAPPED))  # it explains the others
        if not found:
            found.append(Difference("entry/lookup", "nothing recorded differs, but its lookup key does"))
    return list({difference.path: difference for difference in reversed(found)}.values())[::-1]


def _model(store: Store, manifest: Manifest, here: Here) -> Iterator[Difference]:
    same_tree = manifest.model.tree_digest == here.tree_digest
    try:
        details = Details.from_bytes(store.read_blob(manifest.details)) if manifest.details else None
    except StoreError:
        details = None
    if details is None:
        if not same_tree:
            yield Difference("model/tree", "the model's modules or tensors differ (its rows are not recorded)")
        return
    if not same_tree:
        rows = tree_changes(details.tree, rows_of(here.tree.to_json()))
        moved = moved_rows(rows)
        for path, before, after in rows[:MAX_ROWS]:
            now = f"at {moved[path]!r}{_WRAPPED}" if path in moved else row_text(after)
            yield Difference(f"model/{path}", f"{path}: compiled with {row_text(before)}, now {now}")
        if len(rows) > MAX_ROWS:
            yield Difference("model/...", f"{len(rows) - MAX_ROWS} more rows of the model differ")
    if details.signature != here.signature:
        then, now_ = _parameters(details.signature), _parameters(here.signature)
        yield Difference("model/forward", f"forward's parameters: compiled with {then}, now {now_}")


def _parameters(signature: object) -> str:
    items = signature if isinstance(signature, list) else []
    names = (item if isinstance(item, list) and len(item) == 2 else ["?", ""] for item in items)
    return "(" + ", ".join(f"{name}={default}" if default else str(name) for name, default in names) + ")"
