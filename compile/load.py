"""Artifact: find, check and load an entry for a live model; compiles, writes and starts nothing."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from pwcc.cache import sources
from pwcc.cache.errors import CacheMiss, CorruptEntry, HostMismatch, PwccError, StoreError
from pwcc.cache.factors import FactorTree, lookup_key
from pwcc.cache.ids import BlobDigest, FactorDigest, LookupKey
from pwcc.cache.manifest import Manifest
from pwcc.cache.requirements import unmet
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import EntryRef, Store, default_root
from pwcc.compile.compiled_model import Bind, CompiledModel, LoadedProgram, LoadedVariant
from pwcc.compile.model_tree import identity, model_tree
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.receipt import LoadObserver
from pwcc.compile.runtime import program_code
from pwcc.compile.runtime.calling import Binder, CallingConvention, build_output
from pwcc.compile.runtime.hooks import global_hooks
from pwcc.compile.runtime.piece import PieceLoader
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.signature import signature_facts
from pwcc.compile.target import Target, device_of, host_facts, lookup_factors, target_of

MAX_LISTED = 5  # entries named when none is of this model
MAX_NEAREST = 1000  # entries looked at to explain a miss


@dataclass(frozen=True)
class Rejection:
    """Why one candidate was not taken; ``host`` tells that only the host stands in the way."""

    entry: str
    reason: str
    host: bool = False

    def __str__(self) -> str:
        return f"{self.entry[:12]}: {self.reason}"


def load(
    model: nn.Module,
    *,
    cache_dir: str | Path | None = None,
    profile: str | None = None,
    entry: str | None = None,
) -> CompiledModel:
    """Load the entry of a cache directory that fits a live model on this host.

    Args:
        model: the module, in eval mode, with its weights on one device. Its weights are bound, not copied.
        cache_dir: the cache directory; default is the user's cache directory for pwcc.
        profile: take only entries compiled with ``--profile`` of this name.
        entry: take only entries whose key starts with this.

    Returns:
        The compiled model, whose ``receipt`` holds what loading did and took.

    Raises:
        CacheMiss: no entry fits; says why each candidate was not taken.
        HostMismatch: an entry fits the model, but this host lacks something that it requires.
        NotAStore: ``cache_dir`` is not a pwcc cache directory.
        CorruptEntry: the entry's files are not what its manifest says.
    """
    root = default_root() if cache_dir is None else Path(cache_dir)
    with _collector_paused(), LoadObserver() as observer:
        with observer.step("lookup"):
            store = Store.open(root)
            target = target_of(device_of(model))
            key, tree_digest = lookup(model, target)
        with observer.step("candidates"):
            candidates = _candidates(store, key, profile, entry)
        with observer.step("eligibility"):
            ref, manifest = _choose(store, model, target, candidates, key, tree_digest, root)
        reader = _Reader(store, ref)
        with observer.step("blobs"):
            reader.fetch(manifest)
        with observer.step("pieces"), _fitting(ref):
            programs = _load_programs(manifest, reader, target.device)
        with observer.step("bind"), _fitting(ref):
            compiled = CompiledModel(model, target.device, manifest, programs, store.read_blob)
        receipt = observer.receipt(
            entry_key=manifest.entry_key,
            blobs=reader.count,
            bytes=reader.size,
            pieces=sum(len(program.unique) for program in manifest.programs),
            variants=sum(len(program.variants) for program in manifest.programs),
        )
    compiled._receipt = receipt
    return compiled


def lookup(model: nn.Module, target: Target) -> tuple[LookupKey, FactorDigest]:
    """Return the lookup key of a live model on a target, and its model tree's digest."""
    tree_digest = model_tree(model).digest()
    factors = lookup_factors(tree_digest, target, numeric_state(), signature_facts(model))
    return lookup_key(FactorTree.of(configuration=factors)), tree_digest


Candidate = tuple[EntryRef, Manifest | PwccError]


def _candidates(store: Store, key: LookupKey, profile: str | None, entry: str | None) -> list[Candidate]:
    """Return the entries under a lookup key: the manifest, or why it is not taken whatever it holds."""
    found: list[Candidate] = []
    for ref in store.candidates(key):
        if entry is not None and not ref.entry_key.startswith(entry):
            found.append((ref, CacheMiss(f"entry: expected a key that starts with {entry!r}")))
            continue
        try:
            manifest = store.read_manifest(ref)
        except StoreError as error:
            found.append((ref, error))
            continue
        if profile is None or manifest.profile == profile:
            found.append((ref, manifest))
        else:
            found.append((ref, CacheMiss(f"profile: expected {profile!r}, got {manifest.profile!r}")))
    return found


def _choose(
    store: Store,
    model: nn.Module,
    target: Target,
    candidates: Sequence[Candidate],
    key: LookupKey,
    tree_digest: FactorDigest,
    root: Path,
) -> tuple[EntryRef, Manifest]:
    """Return the best eligible candidate, or raise with every candidate's reason.

    Policy: most static sizes, then tuned over untuned, then the newest published.
    """
    rejections: list[Rejection] = []
    eligible: list[tuple[EntryRef, Manifest]] = []
    facts = host_facts(target)
    for ref, manifest in candidates:
        rejection = (
            Rejection(ref.entry_key, manifest.message)
            if isinstance(manifest, PwccError)
            else reject(store, model, manifest, facts)
        )
        if rejection is not None:
            rejections.append(rejection)
        elif isinstance(manifest, Manifest):
            eligible.append((ref, manifest))
    if eligible:
        return max(
            eligible, key=lambda item: (len(item[1].sizes), item[1].tuned, item[0].manifest.stat().st_mtime)
        )
    if not rejections:
        rejections = nearest(store, tree_digest, facts)
    reasons = [str(rejection) for rejection in rejections]
    if any(rejection.host for rejection in rejections):
        raise HostMismatch(
            "an entry matches this model, but this host does not meet its requirements",
            reasons=reasons,
            where=str(root),
            hint="compile on a host like this one, or serve on a host like the builder",
        )
    raise CacheMiss(
        f"no entry for this model (lookup key {key[:12]})",
        reasons=reasons or contents(store, model, target),
        where=str(root),
        hint="run: pwcc compile --model ... --cache-dir " + str(root),
    )


def reject(store: Store, model: nn.Module, manifest: Manifest, facts: Mapping[str, object]) -> Rejection | None:
    """Return why an entry may not serve a live model on a host with ``facts``, or None when it may."""
    key = manifest.entry_key
    if type(model).__call__ is not nn.Module.__call__ or global_hooks():
        return Rejection(key, "the model overrides __call__, or modules have global hooks: neither would run")
    changes = sources.check(manifest.sources, sys.modules, sys.path, live_code=live_code(model))
    if changes:
        change = changes[0]
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        return Rejection(key, f"source {change.reason}{more}")
    try:
        predicates = PredicateSet.from_json(store.read_blob(manifest.predicates))
    except StoreError as error:
        return Rejection(key, error.message)
    violations = predicates.check(model, limit=3)
    if violations:
        return Rejection(key, "; ".join(str(violation) for violation in violations))
    lines = unmet(manifest.requirements, facts)
    return Rejection(key, "; ".join(lines), host=True) if lines else None


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


def contents(store: Store, model: nn.Module, target: Target) -> list[str]:
    """Say what a cache holds when nothing in it is of this model tree."""
    wanted = identity(model)
    reasons = [f"the cache holds no entry for this model tree: {wanted}, {_dtype(model)}, {target.device.type}"]
    for count, ref in enumerate(store.entries()):
        if count == MAX_LISTED:
            reasons.append("... and more: pwcc inspect lists them")
            break
        with contextlib.suppress(StoreError):
            found = store.read_manifest(ref)
            args = ", ".join(f"{name}={value}" for name, value in found.model.args.items()) or "no arguments"
            reasons.append(
                f"it holds {ref.entry_key[:12]}: {found.model.identity}, {found.model.dtype}, "
                f"{found.device.name or found.device.type}, {args}"
            )
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        reasons.append(
            "a Hugging Face model is compiled on flat tokens: build it with "
            "pwcc.compile.model_ref.build(ModelRef.parse(DIR), weights='real').module"
        )
    return reasons


def _dtype(model: nn.Module) -> str:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    return "+".join(dtypes) or "no parameters"


def nearest(store: Store, tree_digest: FactorDigest, facts: Mapping[str, object]) -> list[Rejection]:
    """Explain a miss by the entries of the same model tree under other lookup keys."""
    found: list[Rejection] = []
    for count, ref in enumerate(store.entries()):
        if count >= MAX_NEAREST:
            break
        try:
            manifest = store.read_manifest(ref)
        except StoreError:
            continue
        if manifest.model.tree_digest != tree_digest:
            continue
        lines = unmet(manifest.requirements, facts)
        if manifest.device.type == "cuda" and facts.get("cuda_device_name") != manifest.device.name:
            lines.append(
                f"device: built for {manifest.device.name}, got {facts.get('cuda_device_name') or 'cpu'}"
            )
        elif manifest.device.type == "cpu" and facts.get("cuda_device_name"):
            lines.append(f"device: built for cpu, got {facts['cuda_device_name']}")
        if lines:
            found.append(Rejection(ref.entry_key, "; ".join(lines), host=True))
        else:
            found.append(Rejection(ref.entry_key, _lookup_difference(store, manifest)))
    return found


def _lookup_difference(store: Store, manifest: Manifest) -> str:
    """Say which global mode differs between the builder and this process."""
    from pwcc.cache import strict

    try:
        recorded = strict.loads(store.read_blob(manifest.factors), where="factors")
        then = recorded["compiler"]["numeric state"]  # type: ignore[index]
    except (StoreError, KeyError, TypeError):
        return "the same model under other global modes"
    now = numeric_state()
    changed = [
        f"{name}: compiled with {then.get(name)!r}, now {now.get(name)!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    return (
        "global modes differ: " + "; ".join(changed[:5]) if changed else "the same model with other arguments"
    )


class _Reader:
    """Reads an entry's blobs once, verified; a failure names the entry and how to remove it."""

    def __init__(self, store: Store, ref: EntryRef) -> None:
        self._store = store
        self._ref = ref
        self._held: dict[BlobDigest, bytes] = {}
        self.records: dict[BlobDigest, SealedPiece] = {}

    @property
    def count(self) -> int:
        """Blobs read."""
        return len(self._held)

    @property
    def size(self) -> int:
        """Bytes read."""
        return sum(len(data) for data in self._held.values())

    def fetch(self, manifest: Manifest) -> None:
        """Read what loading needs: programs, records, kernels, constants; not factors or piece graphs.

        One after the other: the blobs are small, and handing the interpreter lock between threads cost
        more than hashing them (9 ms serial, 20 ms with four threads, for 90 blobs on 16 cores).
        """
        for program in manifest.programs:
            self.read(program.stitch)
            self.read(program.calling)
        for digest in dict.fromkeys(d for p in manifest.programs for v in p.variants for d in v.pieces):
            record = SealedPiece.from_bytes(self.read(digest), where=f"piece {digest[:12]}")
            self.records[digest] = record
            _, is_code = record.program(program_code.MAGIC)
            code = None if record.code is None else record.code.blob
            for blob in record.blobs:
                if blob != (record.source if is_code else code):
                    self.read(blob)

    def _read(self, digest: BlobDigest) -> bytes:
        try:
            return self._store.read_blob(digest)
        except StoreError as error:
            error.hint = f"entry {self._ref.entry_key} is damaged: remove {self._ref.path} and compile again"
            raise

    def read(self, digest: BlobDigest) -> bytes:
        """Return a blob's verified bytes."""
        if digest not in self._held:
            self._held[digest] = self._read(digest)
        return self._held[digest]


def _load_programs(manifest: Manifest, reader: _Reader, device: torch.device) -> list[LoadedProgram]:
    loader = PieceLoader(reader.read, device)
    loaded = {digest: loader.load(record) for digest, record in reader.records.items()}
    programs: list[LoadedProgram] = []
    for program in manifest.programs:
        calling = CallingConvention.from_bytes(reader.read(program.calling), where="calling convention")
        variants = tuple(
            LoadedVariant(v.low, v.high, v.kind == "static", tuple(loaded[d] for d in v.pieces))
            for v in program.variants
        )
        programs.append(
            LoadedProgram(
                low=program.min_tokens,
                high=program.max_tokens,
                calling=calling,
                bind=compile_stitch(reader.read(program.stitch)),
                variants=variants,
                binder=Binder(calling, device),
                output=build_output(calling.output),
            )
        )
    return programs


@contextlib.contextmanager
def _fitting(ref: EntryRef) -> Iterator[None]:
    """Turn what only parts that do not fit together can raise into a named failure of the entry."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, NameError) as error:
        raise CorruptEntry(
            f"the parts of the entry do not fit together: {type(error).__name__}: {error}",
            where=str(ref.path),
            hint=f"entry {ref.entry_key} is damaged: remove {ref.path} and compile again",
        ) from error


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's cyclic collector: a full collection over torch's objects costs more than the load.

    What was allocated meanwhile joins the oldest generation at once (freeze, then unfreeze, resets the
    counts), else the collector would make up for it right after the return, for 90 ms and more. A process
    that has frozen objects itself keeps them frozen and pays that collection.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if gc.get_freeze_count() == 0:
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def compile_stitch(source: bytes) -> Bind:
    """Compile a stitch program's text and return its ``bind``.

    Raises:
        CorruptEntry: it is no Python or defines no ``bind``.
    """
    namespace: dict[str, object] = {"__name__": "pwcc_stitch"}
    try:
        exec(compile(source, "<stitch>", "exec"), namespace)  # noqa: S102 (verified bytes of the entry)
    except SyntaxError as error:
        raise CorruptEntry(f"expected a stitch program, got {error}") from error
    bind = namespace.get("bind")
    if not callable(bind):
        raise CorruptEntry("expected a stitch program that defines bind")
    return cast("Bind", bind)
