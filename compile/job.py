"""Artifact: one compile, stage by stage: trace, split, compile, publish. Counts, times and reports them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from pwcc.cache.errors import SpecializationError
from pwcc.cache.ids import FactorDigest, LookupKey
from pwcc.cache.store import Store
from pwcc.compile import build_factors
from pwcc.compile.build_factors import BuildFactors
from pwcc.compile.dump import dump_pieces, dump_program
from pwcc.compile.entry import CountingBlobs, EntryWriter
from pwcc.compile.piece_cache import PieceCache
from pwcc.compile.piece_compiler import PieceResult, PieceTask
from pwcc.compile.predicates import collect
from pwcc.compile.rebuild import Variant
from pwcc.compile.report import CompileCounters, CompilePlan, CompileReport, OnProgress, Progress
from pwcc.compile.request import Request
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.split import PieceStep
from pwcc.compile.tracing import Traced, make_plan, piece_names, stitch_of, trace_all
from pwcc.compile.workers import default_jobs, run_tasks


class Job:
    """One compile under the lock of its lookup key: counts, times and reports its stages."""

    def __init__(
        self,
        *,
        store: Store,
        model: nn.Module,
        request: Request,
        build: BuildFactors,
        on_progress: OnProgress,
        jobs: int | None,
        dump: Path | None,
    ) -> None:
        self._store = store
        self._model = model
        self._request = request
        self._build = build
        self._tell = on_progress
        self._jobs = jobs
        self._dump = dump
        self._counters = CompileCounters()
        self._seconds: dict[str, float] = {}
        self._warnings: list[str] = []

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._tell(Progress(name))
        before = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - before

    def run(self, key: LookupKey, tree_digest: FactorDigest, started: float) -> CompileReport:
        """Do every stage and publish."""
        with self._stage("trace"):
            traced = trace_all(self._model, self._request)
            collected = [
                collect(
                    item.trace.guards,
                    model=self._model,
                    local_scope=item.trace.local_scope,
                    global_scope=item.trace.global_scope,
                )
                for item in traced
            ]
            predicates = PredicateSet.of(predicate for found in collected for predicate in found.predicates)
            records = build_factors.source_records([code for item in traced for code in item.trace.traced_code])
        with self._stage("split"):
            plan = make_plan(self._model, self._request, traced)
            self._count_plan(traced, plan)
        with tempfile.TemporaryDirectory(prefix="pwcc-") as scratch, self._stage("compile"):
            results = self._compile(traced, Path(scratch))
        self._seconds["tune"] = sum(result.tune_seconds for result in results.values())
        with self._stage("publish"):
            writer = EntryWriter(
                self._store, self._model, self._request, self._build, traced, results, predicates, records
            )
            manifest = writer.manifest(key, tree_digest)
            publication = self._store.publish(manifest)
        self._seconds["total"] = time.perf_counter() - started
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
            warnings=tuple(self._warnings),
        )

    def _count_plan(self, traced: Sequence[Traced], plan: CompilePlan) -> None:
        counters = self._counters
        counters.graphs_seen = len(traced)
        counters.pieces = sum(item.program.segments for item in traced)
        counters.compiled_pieces = len(plan.pieces)
        counters.unique_pieces = len(plan.unique)
        counters.splits = plan.splits
        counters.variants = len(plan.variants)
        if self._request.options.splitting_ops and not plan.splits:
            wanted = ", ".join(self._request.options.splitting_ops)
            self._warnings.append(
                f"no split point: the graph holds none of {wanted}; the model was compiled as one piece. "
                "If it has attention, route it through torch.ops.pwcc.attention or name your own op with "
                "--splitting-ops"
            )
        if self._dump is not None:
            for number, item in enumerate(traced):
                dump_program(self._dump, number, item.trace, item.program, stitch_of(item))

    def _compile(
        self, traced: Sequence[Traced], scratch: Path
    ) -> dict[tuple[FactorDigest, Variant], PieceResult]:
        names = piece_names(traced)
        tasks: dict[tuple[FactorDigest, Variant], PieceTask] = {}
        for item in traced:
            first: dict[FactorDigest, PieceStep] = {}
            for piece in item.program.pieces:
                first.setdefault(piece.graph.digest, piece)
            for variant in item.variants:
                for digest, piece in first.items():
                    tasks.setdefault((digest, variant), self._task(names[digest], piece, variant, item))
        cache = PieceCache(self._store, self._request.target)
        results = {key: found for key, task in tasks.items() if (found := cache.get(task)) is not None}
        self._counters.piece_cache_hits = len(results)
        missing = [key for key in tasks if key not in results]
        total, done = len(tasks), len(results)
        self._tell(Progress("compile", done, total))

        def on_done(index: int, result: PieceResult) -> None:
            nonlocal done
            done += 1
            task = tasks[missing[index]]
            cache.put(task, result)  # at once, so that a compile that fails later need not repeat it
            self._tell(Progress("compile", done, total, f"{task.name} {task.variant}"))

        jobs = self._jobs or default_jobs(len(missing), self._request.target.device.type)
        blobs = CountingBlobs(self._store)
        made = run_tasks([tasks[key] for key in missing], blobs, jobs=jobs, scratch=scratch, on_done=on_done)
        for key, result in zip(missing, made, strict=True):
            results[key] = result
        self._counters.compiles = len(made)
        self._counters.autotunes = sum(tasks[key].tuned for key in missing)
        self._counters.kernels_sealed = sum(result.kernels for result in made)
        self._counters.blobs_written = len({digest for result in made for digest in result.blobs})
        for result in results.values():
            self._refuse_lowering_guards(result)
        if self._dump is not None:
            dump_pieces(
                self._dump, {f"{tasks[k].name}.{tasks[k].variant}": r for k, r in results.items()}, self._store
            )
        return results

    def _task(self, name: str, piece: PieceStep, variant: Variant, item: Traced) -> PieceTask:
        tuned = self._request.options.autotune and variant.static
        options, march, flags = build_factors.sealing_options(
            self._request.options, self._request.target, tuned
        )
        return PieceTask(
            name=name,
            graph=piece.graph,
            variant=variant,
            device=str(self._request.target.device),
            options=options,
            march=march,
            cpu_flags=flags,
            tuned=tuned,
            lines=piece.lines,
            alias_groups=piece.alias_groups,
        )

    def _refuse_lowering_guards(self, result: PieceResult) -> None:
        """Lowering may not narrow what was asked; with unbacked sizes it has nothing to guard on."""
        if result.guards:
            text, where = result.guards[0]
            raise SpecializationError(
                f"lowering holds only where {text}", where=where, hint="report the piece with --dump"
            )
