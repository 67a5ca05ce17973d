"""Key: everything that was seen to go into one traced model, as records that a host can check again.

Four witnesses: the recording of the model's construction, one eager run of ``forward``, the guards that
Dynamo placed on the environment, and a scan of the traced code. What one of them saw counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch

from pwcc.cache import observed
from pwcc.cache.anchors import anchored
from pwcc.cache.code_digest import digest_code
from pwcc.cache.environment import Pattern, matches
from pwcc.cache.errors import TraceError
from pwcc.cache.observed import ObservedInput
from pwcc.cache.policy import Policy
from pwcc.cache.probes import module_present
from pwcc.cache.process_state import state_value
from pwcc.compile.code_scan import Computed, Found
from pwcc.compile.observation import Observation

GRAD_MODE = "grad"
READ_BY_NAME = "read the variables by name, or name what it may depend on with --env-include"


@dataclass(frozen=True)
class Observed:
    """The records, and what a user should hear about them."""

    records: tuple[ObservedInput, ...]
    warnings: tuple[str, ...] = ()


def require_followed(seen: Observation, found: Found, policy: Policy) -> None:
    """Refuse reads that no record can stand for.

    Raises:
        TraceError: the code asks for what is another in every process; own code
            looks through the whole environment and the site's policy includes no variable;
            or traced code reads a variable or module whose name it computes, at a line that the eager run
            did not come by.
    """
    for where in sorted(seen.iterated) if not policy.include else ():
        raise TraceError(
            "the model's code looks through the whole environment, which differs on every host",
            where=where,
            hint=READ_BY_NAME,
        )
    for name, where in sorted(found.volatile.items()):
        raise TraceError(
            f"the traced code asks for {name.removeprefix('builtins.')}(), which is another in every process",
            where=where,
            hint="compute it when the model is built, from what does not change, and keep it in an attribute",
        )
    for item in found.computed:
        if (item.code, item.line) in seen.sites or (_is_whole(item) and policy.include):
            continue
        what = "looks at the whole environment" if _is_whole(item) else f"computes the name of {item.what}"
        why = f"could not be made: {seen.problem}" if seen.problem else "did not come by that line"
        raise TraceError(
            f"the traced code {what}, and the eager run that would tell it {why}",
            where=item.where,
            hint=READ_BY_NAME,
        )


def _is_whole(item: Computed) -> bool:
    return item.what == "the environment"


def make_records(
    seen: Observation,
    found: Found,
    guarded: Mapping[str, str],
    *,
    salt: str,
    policy: Policy,
    own_modules: Iterable[str] = (),
) -> Observed:
    """Turn what was seen into records, each with the value it has now.

    Args:
        seen: the construction and the eager run.
        found: the scan of the traced code.
        guarded: variables that Dynamo guarded, with the line.
        salt: the entry's lookup key.
        policy: the site's; variables that it excludes get no record.
        own_modules: modules that are sources of their own.
    """
    variables = {name: reader.where for name, reader in seen.environment.items()}
    variables = {**dict(guarded), **found.variables, **variables}
    records = [
        ObservedInput(
            "environment", name, observed.environment_value(name, os.environ.get(name), salt), where=where
        )
        for name, where in variables.items()
        if not _excluded(policy, name)
    ]
    modules = {name: reader.where for name, reader in seen.modules.items()} | found.modules
    records += [
        ObservedInput("module", name, "present" if module_present(name, sys.modules) else None, where=where)
        for name, where in modules.items()
        if name not in set(own_modules)
    ]
    places, warnings = _places(seen)
    records += places
    records += [
        ObservedInput("state", name, state_value(name, salt, sys.modules), where=where)
        for name, where in found.states.items()
    ]
    if found.grad_mode:
        records.append(ObservedInput("mode", GRAD_MODE, "off", where=found.grad_mode))
    if seen.problem:
        records.append(ObservedInput("note", "eager run", f"not made: {seen.problem}"[:300]))
    return Observed(tuple(sorted(records, key=observed.sort_key)), (*_warnings(seen), *warnings))


def _excluded(policy: Policy, name: str) -> bool:
    """Tell whether the site itself excludes a variable; the tables' exclusions are not asked here."""
    return bool(policy.exclude) and matches(tuple(Pattern(glob, "") for glob in policy.exclude), name)


def _places(seen: Observation) -> tuple[list[ObservedInput], list[str]]:
    opened = {given for kind, given in seen.places if kind != "path"}
    records: dict[tuple[str, str, str], ObservedInput] = {}
    warnings: list[str] = []
    for (kind, given), (reader, cwd) in seen.places.items():
        if kind == "path" and given in opened:
            continue  # its content says more
        whole = os.path.normpath(os.path.join(cwd, given))  # noqa: PTH118
        place = anchored(
            given,
            cwd=cwd,
            home=str(Path.home()),
            module=reader.module,
            module_file=reader.module_file,
        )
        value = observed.place_value(kind, whole)
        record = ObservedInput(kind, place.path, value, place.anchor, reader.where)
        if place.host_bound and (kind, place.anchor, place.path) not in records:
            warnings.append(
                f"{reader.where} reads {place.path}, which only this host's layout explains: the entry misses "
                "where it is not at that path; put it beside the model's code"
            )
        records[kind, place.anchor, place.path] = record
    return list(records.values()), warnings


def _warnings(seen: Observation) -> list[str]:
    found = [
        f"{name} is read, and given another value at {where}: the entry holds for the value it has in the end"
        for name, where in sorted(seen.rewritten.items())
    ]
    found += [
        f"{package} looks through the whole environment: what the model takes from it there is not known; name "
        "it with --env-include"
        for package in sorted(seen.surveyed_by)
    ]
    found += [
        f"{path} was read: what the kernel says is different each time, and no part of the key"
        for path in sorted(seen.unkeyed)
    ]
    return found


def libraries() -> list[ObservedInput]:
    """Return a record for each library of custom operators that this process has loaded."""
    paths = sorted(str(path) for path in torch.ops.loaded_libraries)
    return [ObservedInput("library", Path(path).name, observed.library_value(path)) for path in paths if path]


def functions(codes: Iterable[tuple[CodeType, str]]) -> list[ObservedInput]:
    """Return a record for each traced function that its module and qualified name lead back to."""
    tag = observed.code_tag()
    made: dict[tuple[str, str], ObservedInput] = {}
    for code, module in codes:
        record = ObservedInput("function", code.co_qualname, f"{tag}:{digest_code(code)}", module)
        if not observed.function_changed(record, tag, sys.modules) and module in sys.modules:
            made[module, code.co_qualname] = record
    return list(made.values())
