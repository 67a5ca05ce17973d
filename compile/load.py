"""Artifact: find, check and load an entry for a live model; compiles, writes and starts nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from pwcc.cache import last_use
from pwcc.cache.errors import CorruptEntry, PwccError, StoreError
from pwcc.cache.factors import FactorTree, lookup_key
from pwcc.cache.ids import FactorDigest, LookupKey
from pwcc.cache.layers import find_layered, require_trust
from pwcc.cache.layers import named as named_layers
from pwcc.cache.manifest import Manifest
from pwcc.cache.policy import Policy
from pwcc.cache.store import EntryRef, Store, default_root
from pwcc.cache.switches import Switches
from pwcc.cache.telemetry import span
from pwcc.cache.trust import restrict
from pwcc.compile.candidates import (
    Candidates,
    Failure,
    Wanted,
    judge,
    quarantined,
    read_manifests,
    set_aside,
    vanished,
)
from pwcc.compile.compiled_model import Bind, CompiledModel, LoadedProgram, LoadedVariant
from pwcc.compile.here import Here
from pwcc.compile.model_tree import model_tree
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.reader import EntryReader
from pwcc.compile.receipt import LoadObserver
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import CallingConvention
from pwcc.compile.runtime.decode import DecodeKernels
from pwcc.compile.runtime.output import build_output
from pwcc.compile.runtime.piece import PieceLoader
from pwcc.compile.signature import signature_facts
from pwcc.compile.target import Target, check_tag, device_of, host_facts, lookup_factors, target_of


def load(
    model: nn.Module,
    *,
    cache_dir: str | Path | None = None,
    profile: str | None = None,
    entry: str | None = None,
    tag: str | None = None,
    policy: Policy | None = None,
    require_signature: bool = False,
    trust_dir: bool = False,
    layers: Sequence[str | Path] | None = None,
    track_use: bool = False,
) -> CompiledModel:
    """Load the entry of a cache directory that fits a live model on this host.

    Args:
        model: the module, in eval mode, with its weights on one device. Its weights are bound, not copied.
        cache_dir: the cache directory; default: ``PWCC_CACHE_DIR``, else the user's for pwcc.
        profile: take only entries compiled with ``--profile`` of this name.
        entry: take only entries whose key starts with this.
        tag: the name of this part of a model, as it was compiled; without one, only entries without one.
        policy: take only entries compiled under this environment policy; by default each entry's own applies,
            which it records.
        require_signature: take only entries that a trusted key signed (see :mod:`pwcc.cache.trust`), which
            is found out before a blob is opened. ``PWCC_REQUIRE_SIGNATURE=1`` asks for it, too.
        trust_dir: load although others than this user and root could have written the directory; so does
            ``PWCC_TRUST_DIR`` (``1``, or directories separated by ``:``).
        layers: cache directories to read below ``cache_dir``, upper first, such as an image's; nothing is
            written to them, and ``cache_dir`` may then be empty or absent. Default: ``PWCC_LAYERS``.
        track_use: record for ``pwcc gc``, after the measured load, that the entry is used now; so does
            ``PWCC_TRACK_USE=1``. Best effort.

    Returns:
        The compiled model, whose ``receipt`` holds what loading did and took. An entry whose files are
        damaged is passed over for the next one: ``receipt.damaged`` and a logged warning say so, and it is
        set aside where this user owns the directory.

    Raises:
        CacheDisabled: ``PWCC_DISABLE`` is on.
        CacheMiss: no entry fits, or the directory is empty or absent; says why each candidate was not taken,
            damaged ones included.
        HostMismatch: an entry fits the model, but this host lacks something that it requires.
        NotAStore: ``cache_dir`` holds something else than a pwcc cache.
        UntrustedStore: others could have written the directory; see ``trust_dir``.
        StoreError: files cannot be read now (an I/O error, too many open files).
        SigningUnavailable: a signature is required, and ``cryptography`` is not installed.
    """
    Switches.read().require_cache("a load")
    root = default_root() if cache_dir is None else Path(cache_dir)
    with _collector_paused(), span("load"), LoadObserver() as observer:
        with observer.step("lookup"):
            hint = f"run: pwcc compile --model ... --cache-dir {root}"
            store = find_layered(root, named_layers(layers), hint=hint)
            by_name = require_trust(store, trust=trust_dir)
            restrict(store, require_signature)
            target = target_of(device_of(model))
            key, _ = lookup(model, target, tag)
        wanted = Wanted(key, profile, entry, trusted=False, by_name=by_name, policy=policy)
        loaded, found = _load_best(store, model, wanted, target, observer)
        if loaded is None and vanished(found.failures):  # replaced or collected meanwhile: look again, once
            loaded, found = _load_best(store, model, wanted, target, observer)
    damaged = set_aside(store, found.failures)  # after the measured block, and only where there is damage
    if loaded is None:
        raise _no_entry(store, Here.now(model, target, tag=tag), found)
    receipt = observer.receipt(
        entry_key=loaded.manifest.entry_key,
        blobs=loaded.blobs,
        bytes=loaded.bytes,
        pieces=sum(len(program.unique) for program in loaded.manifest.programs),
        variants=sum(len(program.variants) for program in loaded.manifest.programs),
    )
    loaded.compiled._receipt = replace(receipt, damaged=damaged)
    last_use.record(store, loaded.manifest.entry_key, asked=track_use)
    return loaded.compiled


def lookup(model: nn.Module, target: Target, tag: str | None = None) -> tuple[LookupKey, FactorDigest]:
    """Return the lookup key of a live model on a target under a tag, and its model tree's digest.

    Raises:
        UsageError: a tag that is no plain name.
    """
    tree_digest = model_tree(model).digest()
    factors = lookup_factors(tree_digest, target, numeric_state(), signature_facts(model), check_tag(tag))
    return lookup_key(FactorTree.of(configuration=factors)), tree_digest


@dataclass(frozen=True)
class _Loaded:
    """A loaded entry, bound to the live model, and what reading it took."""

    compiled: CompiledModel
    manifest: Manifest
    blobs: int
    bytes: int


def _load_best(
    store: Store, model: nn.Module, wanted: Wanted, target: Target, observer: LoadObserver
) -> tuple[_Loaded | None, Candidates]:
    """Load the best eligible entry whose files are whole; None, and why, where there is none."""
    with observer.step("candidates"):
        found, manifests = read_manifests(store, wanted)
    with observer.step("eligibility"):
        judge(store, model, manifests, found, host_facts(target))
    for ref, manifest in found.eligible:
        try:
            return _load_entry(store, model, ref, manifest, target, observer), found
        except StoreError as error:
            found.failures.append(Failure(ref, error))
    return None, found


def _no_entry(store: Store, here: Here, found: Candidates) -> PwccError:
    """Return the error of a load that found nothing: a miss, or what kept the files from being read."""
    from pwcc.compile.explain import miss  # costs nothing where an entry was found

    for failure in found.failures:
        if not isinstance(failure.error, CorruptEntry):  # no miss: compiling again would not help
            return failure.error
    reasons = [*found.rejections, *(failure.rejection() for failure in found.failures)]
    return miss(here, store, reasons or quarantined(store, here.lookup_key))


def _load_entry(
    store: Store, model: nn.Module, ref: EntryRef, manifest: Manifest, target: Target, observer: LoadObserver
) -> _Loaded:
    """Load one entry.

    Raises:
        StoreError: its files cannot be read, are damaged, or do not fit together.
        CacheMiss: its weights are not those of the live model.
    """
    hold = store.hold(ref)
    reader = EntryReader(store, ref, manifest)
    with observer.step("blobs"):
        reader.fetch(manifest)
    with observer.step("pieces"), _fitting(ref):
        programs, decode = _load_programs(manifest, reader, target.device)
    with observer.step("bind"), _fitting(ref):
        compiled = CompiledModel(
            model,
            target.device,
            manifest,
            programs,
            reader.outliving(manifest.predicates),
            attention_kernel=decode,
            hold=hold,
        )
    return _Loaded(compiled, manifest, reader.count, reader.size)


def _load_programs(
    manifest: Manifest, reader: EntryReader, device: torch.device
) -> tuple[list[LoadedProgram], DecodeKernels | None]:
    """Return the loaded programs, and the sealed decode kernels where the entry has some."""
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
                output=build_output(calling.output, [symbol.name for symbol in calling.symbols]),
            )
        )
    decode = DecodeKernels.of(manifest.decode_attention, {d: piece.call for d, piece in loaded.items()})
    return programs, decode


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
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CorruptEntry(f"expected a stitch program, got {error}") from error
    bind = namespace.get("bind")
    if not callable(bind):
        raise CorruptEntry("expected a stitch program that defines bind")
    return cast("Bind", bind)
