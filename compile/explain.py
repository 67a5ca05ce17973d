"""Key: why a cache serves a live model or not: every candidate and the nearest entries, factor by factor.

Nothing is traced, compiled, executed or written. :func:`explain_load` and :func:`explain_compile` answer the
two questions; :func:`miss` and :func:`frozen_miss` turn the same answers into errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pwcc.cache import nearest
from pwcc.cache.difference import UNSIGNED, Difference, advice
from pwcc.cache.entries import EntryRef
from pwcc.cache.errors import CacheMiss, HostMismatch, StoreError, UntrustedEntry
from pwcc.cache.explain import Answer, Outcome, Verdict, answer, describe
from pwcc.cache.ids import EntryKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.policy import Policy
from pwcc.cache.store import Store
from pwcc.cache.strict import Json
from pwcc.compile.build_factors import BuildFactors, portable_args
from pwcc.compile.candidates import Wanted, judge, read_manifests
from pwcc.compile.differences import build_differences, entry_differences
from pwcc.compile.eligibility import Rejection
from pwcc.compile.here import Here
from pwcc.compile.hit import is_whole
from pwcc.compile.request import Request

LOAD: Final = "pwcc.load"
COMPILE: Final = "pwcc compile"
MAX_LISTED: Final = 5  # entries named when none is of this model
MAX_NEAR: Final = 3  # entries under other lookup keys that are shown

Compare = Callable[[Manifest], list[Difference]]


def explain_load(
    store: Store,
    here: Here,
    *,
    profile: str | None = None,
    entry: str | None = None,
    policy: Policy | None = None,
    rejections: Sequence[Rejection] | None = None,
) -> Answer:
    """Say what ``pwcc.load`` would take from a store for a live model, and why not each other entry.

    ``rejections`` are those of a load that found nothing; without them the candidates are judged as a load
    does it. For another host's record, what only that host knows (its sources, its environment beside the
    recorded variables) is taken to be as it is here.
    """

    def compare(manifest: Manifest) -> list[Difference]:
        return entry_differences(store, manifest, here)

    if rejections is not None:
        refs = {ref.entry_key: ref for ref in store.candidates(here.lookup_key)}
        verdicts = [_rejected(store, here, rejection, refs, compare) for rejection in rejections]
    else:
        wanted = Wanted(here.lookup_key, profile, entry, trusted=True, policy=policy)
        verdicts = _judged(store, here, wanted, compare)
    if any(not verdict.differences for verdict in verdicts):
        return answer(LOAD, verdicts)
    return _with_near(LOAD, store, here, verdicts, compare, None, None)


def explain_compile(store: Store, here: Here, request: Request, build: BuildFactors) -> Answer:
    """Say whether ``pwcc compile`` with these options would be a hit, and why not for each entry.

    A compile makes what it lacks, so this is a hit or a miss, never the host's fault.
    """

    def compare(manifest: Manifest) -> list[Difference]:
        return build_differences(store, manifest, here, build)

    verdicts: list[Verdict] = []
    for ref in store.candidates(here.lookup_key):
        found = _compared(store, here, ref, compare)
        if not found.differences and not any(verdict.taken for verdict in verdicts):
            found = _taken_if_whole(store, here, ref)
        verdicts.append(found)
    if not any(verdict.taken for verdict in verdicts):
        args = portable_args(request.args)
        return _with_near(COMPILE, store, here, verdicts, compare, request.identity, args)
    return answer(COMPILE, verdicts)


def miss(here: Here, store: Store, rejections: Sequence[Rejection]) -> CacheMiss:
    """Return the error of a load that found no entry."""
    found = explain_load(store, here, rejections=rejections)
    where = str(store.root)
    if found.outcome is Outcome.HOST:
        return HostMismatch(
            "an entry matches this model, but this host does not meet its requirements",
            reasons=found.reasons(),
            where=where,
            hint="compile on a host like this one, or serve on a host like the builder",
        )
    command = f"pwcc compile --model ... --cache-dir {where}"
    todo = "; ".join(found.advice()[:2])
    if todo == advice(UNSIGNED):  # a compile makes no signature
        hint = todo
    elif todo:
        hint = f"{todo} ({command}); pwcc explain shows all"
    else:
        hint = f"run: {command}"
    return CacheMiss(
        f"no entry for this model (lookup key {here.lookup_key[:12]})",
        reasons=found.reasons(),
        where=where,
        hint=hint,
    )


def frozen_miss(here: Here, store: Store, request: Request, build: BuildFactors) -> CacheMiss:
    """Return the error of a compile that may not compile and found no entry."""
    found = explain_compile(store, here, request, build)
    todo = "; ".join(found.advice()[:2])
    return CacheMiss(
        f"no entry of these options for {request.identity} (lookup key {here.lookup_key[:12]})",
        reasons=found.reasons(),
        where=str(store.root),
        hint=f"{todo}; or run without --frozen" if todo else "run without --frozen to compile it",
    )


def _judged(store: Store, here: Here, wanted: Wanted, compare: Compare) -> list[Verdict]:
    """Judge the candidates as a load does: the first eligible one whose blobs are whole is taken."""
    found, manifests = read_manifests(store, wanted)
    verdicts: list[Verdict] = []
    if here.record is None:
        judge(store, here.model, manifests, found, here.facts)
    else:  # of another host only the record is asked
        verdicts = [_compared(store, here, ref, compare) for ref, _ in manifests]
        fitting = {verdict.entry_key for verdict in verdicts if not verdict.differences}
        verdicts = [verdict for verdict in verdicts if verdict.differences]
        found.eligible = [item for item in manifests if item[0].entry_key in fitting]
        found.eligible.sort(key=lambda item: (len(item[1].sizes), item[1].tuned), reverse=True)
    refs = {ref.entry_key: ref for ref in store.candidates(wanted.key)}
    others = [*found.rejections, *(failure.rejection() for failure in found.failures)]
    verdicts += [_rejected(store, here, rejection, refs, compare) for rejection in others]
    taken = False
    for ref, _ in found.eligible:
        verdicts.append(_verdict(store, ref, here, ()) if taken else _taken_if_whole(store, here, ref))
        taken = taken or verdicts[-1].taken
    return verdicts


def _taken_if_whole(store: Store, here: Here, ref: EntryRef) -> Verdict:
    """Take an entry that fits, unless a blob of it is lost or damaged."""
    if is_whole(store, store.read_manifest(ref)):
        return _verdict(store, ref, here, (), taken=True)
    return _verdict(store, ref, here, (Difference("entry/blobs", "a blob is missing or damaged"),))


def _rejected(
    store: Store, here: Here, rejection: Rejection, refs: Mapping[EntryKey, EntryRef], compare: Compare
) -> Verdict:
    """Say all that keeps a rejected entry from serving; else what the load said, as of damaged files."""
    key = EntryKey(rejection.entry)
    ref = refs.get(key)
    said = (Difference(rejection.path, rejection.reason, rejection.host),)
    if ref is None:
        gone = store.entry_ref(here.lookup_key, key)
        return _verdict(store, gone, here, said)
    found = _compared(store, here, ref, compare)
    known = found.differences and not found.differences[0].path.startswith("entry/")
    return found if known else _verdict(store, ref, here, said)


def _compared(store: Store, here: Here, ref: EntryRef, compare: Compare) -> Verdict:
    try:
        manifest = store.read_manifest(ref)
        differences = compare(manifest)
    except UntrustedEntry as error:
        differences = [Difference(UNSIGNED, error.message)]
    except StoreError as error:
        differences = [Difference("entry/files", error.message)]
    return _verdict(store, ref, here, differences)


def _is_unsigned(verdict: Verdict) -> bool:
    return any(difference.path == UNSIGNED for difference in verdict.differences)


def _verdict(
    store: Store, ref: EntryRef, here: Here, differences: Sequence[Difference], *, taken: bool = False
) -> Verdict:
    what = "unreadable"
    with contextlib.suppress(StoreError):
        what = describe(store.read_manifest(ref))
    return Verdict(
        entry_key=ref.entry_key,
        lookup_key=ref.lookup_key,
        what=what,
        differences=tuple(differences),
        same_key=ref.lookup_key == here.lookup_key,
        taken=taken,
    )


def _with_near(
    question: str,
    store: Store,
    here: Here,
    verdicts: Sequence[Verdict],
    compare: Compare,
    identity: str | None,
    args: Mapping[str, Json] | None,
) -> Answer:
    """Answer a miss: the candidates, and entries under other lookup keys that differ in less."""
    wanted = nearest.Wanted(
        tree_digest=here.tree_digest,
        root=here.root,
        device=here.device_label,
        torch=here.torch.partition(" ")[0],
        identity=identity,
        args=args,
    )
    found = nearest.scan(store, wanted)
    near = [_compared(store, here, ref, compare) for ref in found.near if ref.lookup_key != here.lookup_key]
    near = [verdict for verdict in near if not _is_unsigned(verdict)]  # a signature would not make it fit
    near.sort(key=lambda verdict: (not verdict.only_the_host, len(verdict.differences), verdict.entry_key))
    fewest = min((len(verdict.differences) for verdict in verdicts), default=None)
    if fewest is not None:
        near = [verdict for verdict in near if len(verdict.differences) < fewest]
    shown = [*verdicts, *near[:MAX_NEAR]]
    notes = [] if shown else contents(store, here)
    if not found.complete:
        notes.append(f"only {found.scanned:,} entries were looked at")
    result = answer(question, shown, notes)
    if question == COMPILE and result.outcome is Outcome.HOST:
        return Answer(question=question, outcome=Outcome.MISS, verdicts=result.verdicts, notes=result.notes)
    return result


def contents(store: Store, here: Here) -> list[str]:
    """Say what a cache holds when nothing in it is near this model."""
    device = here.device["name"] or here.device["type"]
    reasons = [f"the cache holds no entry for this model tree: {here.root}, {_dtype(here)}, {device}"]
    for count, ref in enumerate(store.entries()):
        if count == MAX_LISTED:
            reasons.append("... and more: pwcc inspect lists them")
            break
        with contextlib.suppress(StoreError):
            reasons.append(f"it holds {ref.entry_key[:12]}: {describe(store.read_manifest(ref))}")
    if any(base.__module__.startswith("transformers.") for base in type(here.model).__mro__):
        reasons.append(
            "a Hugging Face model is compiled on flat tokens: build it with "
            "pwcc.compile.model_ref.build(ModelRef.parse(DIR), weights='real').module"
        )
    return reasons


def _dtype(here: Here) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in here.model.parameters()})
    return "+".join(dtypes) or "no parameters"
