"""Artifact: one compile, stage by stage: trace, split, compile, publish. Counts, times and reports them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from pwcc.cache import costs, renewal, tuning
from pwcc.cache.errors import StoreError
from pwcc.cache.failpoints import failpoint
from pwcc.cache.ids import EntryKey, FactorDigest, LookupKey
from pwcc.cache.store import Store
from pwcc.cache.telemetry import finished, span
from pwcc.cache.tuning import PieceTuning
from pwcc.compile import build_factors
from pwcc.compile.autotune import Pins, entry_tuning, untuned_warnings
from pwcc.compile.build_factors import BuildFactors
from pwcc.compile.dump import dump_pieces, dump_programs, piece_folder, rename_pieces, trace_programs
from pwcc.compile.entry import CountingBlobs, EntryWriter, Results
from pwcc.compile.frozen import Frozen
from pwcc.compile.lowering_guards import excluded_sizes, require_covered
from pwcc.compile.observation import Observation
from pwcc.compile.piece_cache import PieceCache
from pwcc.compile.piece_compiler import PieceResult, PieceTask
from pwcc.compile.predicates import collect
from pwcc.compile.ranges import inductor_options
from pwcc.compile.rebuild import Variant
from pwcc.compile.report import CompileCounters, CompilePlan, CompileReport, OnProgress, Progress
from pwcc.compile.request import Request
from pwcc.compile.runtime.predicates import Predicate, PredicateSet
from pwcc.compile.steps import PieceStep
from pwcc.compile.tracing import Traced, make_plan, piece_names, trace_all, trace_one
from pwcc.compile.witness import Witness
from pwcc.compile.workers import Workers, default_jobs, default_threads, run_tasks

UNIQUE_PIECES = 3
"""How many different pieces a decoder of equal layers has: first, middle, last. Only a guess of the work."""


class Job:
    """One compile under the lock of its lookup key: counts, times and reports its stages."""

    def __init__(
        self,
        *,
        store: Store,
        model: nn.Module,
        request: Request,
        build: BuildFactors,
        frozen: Frozen,
        on_progress: OnProgress,
        jobs: int | None,
        dump: Path | None,
        observation: Observation | None = None,
        recache: bool = False,
        pins: Pins | None = None,
    ) -> None:
        self._store = store
        self._model = model
        self._request = request
        self._build = build
        self._frozen = frozen
        self._tell = on_progress
        self._jobs = jobs
        self._dump = dump
        self._recache = recache
        self._pins = pins
        self._made: list[tuple[str, PieceTuning | None]] = []
        self._witness = Witness(model, request, observation)
        self._counters = CompileCounters()
        self._seconds: dict[str, float] = {}
        self._predicates: list[Predicate] = []
        self._programs = 0

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._tell(Progress(name))
        before = time.perf_counter()
        try:
            with span(f"compile.{name}"):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - before

    def run(self, key: LookupKey, tree_digest: FactorDigest, started: float) -> CompileReport:
        """Do every stage and publish."""
        with tempfile.TemporaryDirectory(prefix="pwcc-") as scratch, self._workers(Path(scratch)) as workers:
            with self._stage("trace"):
                traced = trace_all(self._model, self._request)
                self._collect(traced)
                if self._dump is not None:
                    dump_programs(self._dump, traced)
                self._witness.watch(traced)
            failpoint("compile.traced")
            with self._stage("split"):
                plan = make_plan(self._model, self._request, traced)
            with self._stage("compile"):
                traced, results = self._compile(traced, Path(scratch), workers)
        failpoint("compile.compiled")
        plan = make_plan(self._model, self._request, traced)
        self._count_plan(traced, plan)
        self._seconds["tune"] = sum(result.tune_seconds for result in results.values())
        with self._stage("publish"):
            self._frozen.verify()
            seen = self._witness.testify(traced, self._predicates, key)
            writer = EntryWriter(
                store=self._store,
                model=self._model,
                request=self._request,
                build=self._build,
                traced=traced,
                results=results,
                predicates=PredicateSet.of(seen.predicates),
                sources=seen.sources,
                inputs=seen.inputs,
            )
            manifest = writer.manifest(key, tree_digest)
            if self._recache:
                renewal.set_aside_other(self._store, manifest)
            publication = self._store.publish(manifest)
            self._keep_tuning(manifest.entry_key, traced, results)
            failpoint("compile.published")
        self._seconds["total"] = time.perf_counter() - started
        self._keep_costs(manifest.entry_key, traced, results, workers.jobs)
        return CompileReport(
            hit=False,
            entry_key=manifest.entry_key,
            lookup_key=manifest.lookup_key,
            path=publication.path,
            plan=plan,
            counters=self._counters,
            seconds=self._seconds,
            bytes=sum(manifest.blobs.values()),
            kernels=manifest.counts["kernels"],
            warnings=(*plan.warnings(), *seen.warnings, *untuned_warnings(self._pins, self._made)),
            build_observed=manifest.build_observed,
        )

    def _keep_tuning(self, key: EntryKey, traced: Sequence[Traced], results: Results) -> None:
        """Write what tuning measured beside the entry; over what is there of an earlier one."""
        found = entry_tuning(key, {name: result.tuning for name, result in _named(traced, results).items()})
        if found is not None:
            tuning.write(self._store, found)

    def _keep_costs(self, key: EntryKey, traced: Sequence[Traced], results: Results, jobs: int) -> None:
        """Write what the compile took beside the entry; it is there and whole without."""
        pieces = {
            name: costs.PieceCost(result.seconds, result.tune_seconds)
            for name, result in _named(traced, results).items()
        }
        with contextlib.suppress(StoreError):
            costs.write(self._store, key, costs.Costs(dict(self._seconds), pieces, jobs))

    def _workers(self, scratch: Path) -> Workers:
        """Return the compile's workers, started already: how many tasks there will be is a guess."""
        variants = 1 + len(self._request.sizes) + len(self._request.options.ranges)
        device, tuned = self._request.target.device, self._request.options.autotune
        jobs = self._jobs or default_jobs(UNIQUE_PIECES * variants, device.type)
        threads = default_threads(jobs, device.type, tuned=tuned)
        workers = Workers(jobs, scratch, device=str(device), threads=threads)
        workers.start()
        return workers

    def _collect(self, traced: Sequence[Traced]) -> None:
        """Keep the predicates of new traces, and tell torch's structured trace of them."""
        for item in traced:
            found = collect(
                item.trace.guards,
                model=self._model,
                local_scope=item.trace.local_scope,
                global_scope=item.trace.global_scope,
            )
            self._predicates.extend(found.predicates)
        trace_programs(self._programs, traced)
        self._programs += len(traced)

    def _count_plan(self, traced: Sequence[Traced], plan: CompilePlan) -> None:
        counters = self._counters
        counters.graphs_seen = len(traced)
        counters.pieces = sum(item.program.segments for item in traced)
        counters.compiled_pieces = len(plan.pieces)
        counters.unique_pieces = len(plan.unique)
        counters.splits = plan.splits
        counters.variants = len(plan.variants)

    def _compile(
        self, traced: Sequence[Traced], scratch: Path, workers: Workers
    ) -> tuple[list[Traced], Results]:
        """Compile every unique piece for every variant.

        Where lowering holds for all sizes but 1, that size is traced again on its own: a graph whose
        range excludes a size must not serve it, compiled for that size or not.
        """
        cache = PieceCache(self._store, self._request.target, renew=self._recache or self._pins is not None)
        results = self._run(traced, {}, cache, scratch, workers)
        completed: list[Traced] = []
        for item in traced:
            if self._excludes_one(item, results):
                one = trace_one(self._model, self._request)
                self._collect([one])
                larger = tuple(variant for variant in item.variants if variant.high > 1)
                completed += [one, replace(item, low=2, variants=larger)]
            else:
                completed.append(item)
        if len(completed) > len(traced):
            if self._dump is not None:
                rename_pieces(self._dump, piece_names(traced), piece_names(completed))
                dump_programs(self._dump, completed)
            results = self._run(completed, results, cache, scratch, workers)
        if self._dump is not None:
            dump_pieces(self._dump, completed, results, self._store)
        return completed, results

    def _excludes_one(self, item: Traced, results: Results) -> bool:
        static = [variant.low for variant in item.variants if variant.static and variant.low > 1]
        excluded: dict[int, str] = {}
        for variant in item.variants:
            if not variant.static:
                for graph in item.program.unique:
                    found = excluded_sizes(results[graph.digest, variant], graph, variant)
                    excluded |= {size: text for size, text in found.items() if item.holds_at(size)}
                require_covered(excluded, static, variant)
        return 1 in excluded

    def _run(
        self, traced: Sequence[Traced], known: Results, cache: PieceCache, scratch: Path, workers: Workers
    ) -> Results:
        names = piece_names(traced)
        tasks: dict[tuple[FactorDigest, Variant], PieceTask] = {}
        for item in traced:
            first: dict[FactorDigest, PieceStep] = {}
            for piece in item.program.pieces:
                first[piece.graph.digest] = _of_both(first.get(piece.graph.digest, piece), piece)
            for variant in item.variants:
                for digest, piece in first.items():
                    if (digest, variant) not in known:
                        tasks.setdefault((digest, variant), self._task(names[digest], piece, variant))
        found = {key: hit for key, task in tasks.items() if (hit := cache.get(task)) is not None}
        missing = [key for key in tasks if key not in found]
        total, done = len(tasks), len(found)
        self._tell(Progress("compile", done, total))

        def on_done(index: int, result: PieceResult) -> None:
            nonlocal done
            done += 1
            task = tasks[missing[index]]
            self._frozen.verify()
            finished("compile.piece", result.seconds, piece=task.name, variant=str(task.variant))
            cache.put(task, result)  # at once, so that a compile that fails later need not repeat it
            self._tell(Progress("compile", done, total, f"{task.name} {task.variant}"))

        blobs = CountingBlobs(self._store)
        made = run_tasks(
            [tasks[key] for key in missing], blobs, workers=workers, scratch=scratch, on_done=on_done
        )
        labels = [f"{tasks[key].name} {tasks[key].variant}" for key in missing]
        self._made += zip(labels, (result.tuning for result in made), strict=True)
        self._count(made, hits=len(found), tuned=sum(tasks[key].tuned for key in missing))
        return {**known, **found, **dict(zip(missing, made, strict=True))}

    def _count(self, made: Sequence[PieceResult], *, hits: int, tuned: int) -> None:
        counters = self._counters
        counters.piece_cache_hits += hits
        counters.compiles += len(made)
        counters.autotunes += tuned
        counters.tuning_runs += sum(result.tuning.runs for result in made if result.tuning is not None)
        counters.kernels_sealed += sum(result.kernels for result in made)
        counters.blobs_written += len({digest for result in made for digest in result.blobs})

    def _task(self, name: str, piece: PieceStep, variant: Variant) -> PieceTask:
        tuned = self._request.options.autotune and variant.static
        options, march, flags = build_factors.sealing_options(
            self._request.options, self._request.target, tuned
        )
        return PieceTask(
            name=name,
            graph=piece.graph,
            variant=variant,
            device=str(self._request.target.device),
            options={**options, **inductor_options(self._request.options.ranges, variant)},
            march=march,
            cpu_flags=flags,
            tuned=tuned,
            lines=piece.lines,
            alias_groups=piece.alias_groups,
            shared=piece.shared,
            passes=self._request.options.passes,
            custom_ops=self._request.options.custom_ops,
            dump=None if self._dump is None else str(piece_folder(self._dump.resolve(), name, variant)),
            pins={} if self._pins is None else self._pins.files,
        )


def _of_both(first: PieceStep, other: PieceStep) -> PieceStep:
    """Return the first of two calls of one piece with the memory that either's tensors share."""
    return replace(
        first,
        alias_groups=tuple(dict.fromkeys((*first.alias_groups, *other.alias_groups))),
        shared=tuple(dict.fromkeys((*first.shared, *other.shared))),
    )


def _named(traced: Sequence[Traced], results: Results) -> dict[str, PieceResult]:
    """Return the results of an entry's pieces by piece and variant, such as ``p0 n=1``."""
    names = piece_names(traced)
    return {f"{names[d]} {v}": result for (d, v), result in results.items() if d in names}
