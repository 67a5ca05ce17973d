"""Graph: the runner, which a serving loop calls: copies in, pads, dispatches, replays, cuts out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from pwcc.cache.errors import ArgumentError, CaptureError, UsageError
from pwcc.capture.agreement import check
from pwcc.capture.backend import GraphBackend, backend_for
from pwcc.capture.batch import StaticBatch, is_decode, without_metadata
from pwcc.capture.buffers import Input, StaticArguments, grouped_copies
from pwcc.capture.checks import fitting_cache, memory_for, require_block_size
from pwcc.capture.dispatch import Dispatch
from pwcc.capture.graphs import GraphTable
from pwcc.capture.outputs import Outputs, OutputSlices
from pwcc.capture.plan import CapturePlan, GraphKey
from pwcc.capture.plan_capture import PlanCapture
from pwcc.capture.recorder import Recorder, Subject
from pwcc.capture.report import CaptureReport, CaptureRow, MemoryEstimate
from pwcc.capture.stats import GraphStats
from pwcc.compile.ops.forward_context import (
    AttentionKernel,
    BatchDescriptor,
    ForwardContext,
    RunMode,
    use_forward_context,
)
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache

if TYPE_CHECKING:
    from pwcc.compile.compiled_model import CompiledModel


class GraphRunner:
    """Runs a loaded entry's batches as captured graphs. Call it as ``runner(input_ids, positions, metadata)``.

    Workflow: make it, :meth:`capture` (or let the first call do it), then call it per batch with arguments and
    metadata of the true token count. It copies them into static buffers at the padded size, replays what the
    dispatcher chose, and returns what ``forward`` returns for the true tokens. Batches without a graph run the
    compiled variants, never eager Python. It sets the forward context itself.

    Outputs are the caller's: a later call does not change them. With ``outputs="static"`` they are views of the
    pool, valid until the next call. Addresses are checked at the first replay of each recording, with ``debug``
    at each; persistent inputs at each call; weights whenever the model was bound again.

    Capture and estimate run on padding alone: padded tokens write the cache's null block and no sequence's.
    Calls are serialised by a lock and ordered on the device, so that threads may share a runner whose outputs
    are owned. It is for inference and holds for one entry, one KV cache and one attention kernel.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        plan: CapturePlan,
        *,
        cache: PagedKVCache | None = None,
        kernel: AttentionKernel | None = None,
        block_size: int | None = None,
        inputs: Mapping[str, Input] | None = None,
        fill: Mapping[str, float] | None = None,
        outputs: Outputs = "owned",
        debug: bool = False,
        backend: GraphBackend | None = None,
        on_progress: Callable[[CaptureRow], None] | None = None,
    ) -> None:
        """Allocate the static buffers; capture nothing.

        Args:
            compiled: the loaded entry.
            plan: a plan of that entry.
            cache: the paged KV cache; None for a model that needs no metadata.
            kernel: the attention kernel; default: the entry's own, or plain causal attention without a cache.
            block_size: of a kernel that keeps its cache itself; default: the cache's, else 16.
            inputs: per argument ``"copy"`` (the default) or a persistent buffer of at least the largest size.
            fill: per argument the value of padding rows, default 0.
            outputs: ``"owned"`` or ``"static"``.
            debug: check addresses at every replay.
            backend: default by device: CUDA or HIP on a GPU, the fake backend elsewhere.
            on_progress: called after every recording.

        Raises:
            UsageError: the plan is of another entry, an argument cannot be padded, or an option does not fit.
            CaptureMemoryError: there is no room for the buffers.
        """
        if plan.entry_key != compiled.manifest.entry_key:
            raise UsageError(
                f"the plan is of entry {plan.entry_key}, the model of {compiled.manifest.entry_key}",
                hint="make one with plan_for(compiled, ...)",
            )
        if outputs not in get_args(Outputs):
            raise UsageError(f"expected outputs to be one of {', '.join(get_args(Outputs))}, got {outputs!r}")
        require_block_size(block_size, cache)
        self._compiled = compiled
        self._arity = len(compiled.programs[0].calling.parameters)
        self._cache = cache
        self._needs_metadata = cache is not None or kernel is not None
        default = compiled.attention_kernel if cache is not None else without_metadata
        self._kernel = kernel or default
        self._observing = fitting_cache(default) if kernel is None else kernel
        self._outputs: Outputs = outputs
        self._debug = debug
        self._backend = backend or backend_for(compiled.device)
        self._lock = threading.RLock()
        self._slices: dict[int, OutputSlices] = {}
        self._bound = compiled.bindings
        self.stats = GraphStats()
        self.last: Dispatch | None = None
        largest = plan.sizes[-1] if plan.sizes else 0
        with torch.inference_mode(False), torch.no_grad():
            self._arguments = (
                None
                if not largest
                else StaticArguments(
                    compiled.programs, largest=largest, device=compiled.device, inputs=inputs, fill=fill
                )
            )
            with memory_for(
                f"the block tables of {largest} sequences of {plan.max_seq_len} tokens",
                hint="lower max_seq_len or the largest size, or use larger blocks",
            ):
                self._batch = StaticBatch(
                    largest=largest,
                    max_num_seqs=plan.max_num_seqs,
                    max_seq_len=plan.max_seq_len,
                    block_size=cache.block_size if cache is not None else block_size,
                    device=compiled.device,
                )
        self._capture = PlanCapture(
            plan,
            self._backend,
            lock=self._lock,
            make_table=self._make_table,
            observe=self._observe,
            stats=self.stats,
            on_progress=on_progress,
        )

    def _make_table(self, plan: CapturePlan) -> GraphTable:
        return GraphTable(
            plan,
            self._backend,
            prepare=self._prepare,
            addresses=self._addresses,
            observed=self._observed,
            debug=self._debug,
        )

    # Capture

    @property
    def plan(self) -> CapturePlan:
        """The plan, after a capture without the sizes that did not fit and with what the others took."""
        return self._capture.plan

    @property
    def report(self) -> CaptureReport | None:
        """What the capture did; None before it."""
        return self._capture.report

    def estimate(self) -> MemoryEstimate:
        """Return what the plan will take, from its two largest sizes per mode in a throwaway pool.

        Raises:
            CaptureMemoryError: not even these fit.
        """
        with self._lock:
            return self._capture.estimate()

    def capture(
        self, *, max_bytes: int | None = None, estimated: MemoryEstimate | None = None
    ) -> CaptureReport:
        """Capture the plan, largest sizes first, and lock; with ``background`` return at once.

        Args:
            max_bytes: leave out sizes that would not fit, by ``estimated`` or a new estimate.
            estimated: what :meth:`estimate` returned, to be kept in the report.

        Raises:
            CaptureLockedError: it was captured before; see :meth:`recapture`.
            CaptureError, CaptureMemoryError: a recording failed and the plan says ``raise``; all is released.
        """
        with self._lock:
            self._bound = self._compiled.bindings
            preferred = self._compiled.manifest.sizes
            return self._capture.capture(max_bytes=max_bytes, estimated=estimated, preferred=preferred)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for a capture in the background.

        Raises:
            CaptureError: it ended by a failure, and the plan says ``raise``.
        """
        self._capture.join(timeout_s)

    def recapture(self) -> CaptureReport:
        """Release everything and capture the plan anew, for weights that the module holds now."""
        with self._lock:
            self._compiled.rebind()
            self._capture.reset()
            return self.capture()

    def close(self) -> None:
        """Release the graphs and their memory. Later calls run without graphs."""
        with self._lock:
            self._capture.close()

    # What the table asks for

    def _static(self) -> StaticArguments:
        if self._arguments is None:
            raise CaptureError("nothing is captured in mode NONE")
        return self._arguments

    def _subject(self, size: int) -> Subject:
        program = self._compiled.program_at(size)
        arguments = self._static().named(size)
        _, sizes = program.binder.bind((), arguments)  # the padded size must satisfy every shape predicate, too
        return Subject(program=program, variant=program.variant(size), arguments=arguments, sizes=sizes)

    def _prepare(self, key: GraphKey) -> tuple[Subject, ForwardContext]:
        self._static().clear()
        self._batch.clear()
        metadata = self._batch.captured(key) if key.mode is RunMode.FULL else self._batch.idle(key)
        return self._subject(key.batch.num_tokens), self._context(key.mode, key.batch, metadata)

    def _context(
        self, mode: RunMode, batch: BatchDescriptor, metadata: AttentionMetadata | None
    ) -> ForwardContext:
        seen = metadata if self._needs_metadata else None
        return ForwardContext(metadata=seen, cache=self._cache, kernel=self._kernel, mode=mode, batch=batch)

    def _addresses(self, key: GraphKey) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._static().named(key.batch.num_tokens), self._compiled.live_weights()

    def _observe(self, plan: CapturePlan) -> None:
        """Run two sizes per program without graphs: lazy initialisation, and the outputs' shapes.

        A size that fails is passed over: its capture fails in the same way, and the plan's policy decides.

        Raises:
            ArgumentError: the KV cache is of another shape than the model's, which no policy can help.
        """
        for program in self._compiled.programs:
            sizes = [size for size in reversed(plan.sizes) if program.low <= size <= program.high]
            if sizes and sizes[-1] > program.low:
                sizes.append(sizes[-1] - 1)
            for size in sizes[:2]:
                try:
                    self._observe_at(size)
                except ArgumentError:
                    raise
                except Exception:  # noqa: BLE001, S112
                    continue

    def _observe_at(self, size: int) -> None:
        key = GraphKey(RunMode.PIECEWISE, BatchDescriptor(size))
        with torch.inference_mode(False), torch.no_grad(), self._backend.session():
            subject, context = self._prepare(key)
            with use_forward_context(replace(context, kernel=self._observing)):
                recorder = Recorder(subject, self._backend, pool=None, instantiate="lazy")
                self._observed(key, recorder.warm_up())

    def _observed(self, key: GraphKey, outputs: tuple[object, ...]) -> None:
        size = key.batch.num_tokens
        slices = self._slices.setdefault(id(self._compiled.program_at(size)), OutputSlices())
        slices.observe(size, outputs)

    # Calls

    def __call__(
        self, *inputs: Tensor | AttentionMetadata | None, metadata: AttentionMetadata | None = None
    ) -> Any:
        """Run one batch; the last positional argument may be its metadata.

        Raises:
            CallError: arguments or metadata that do not fit. CaptureError: graphs that must not be replayed.
            What torch raises comes as it is, with a note that names the entry.
        """
        arguments, metadata = _split(inputs, metadata, self._arity)
        with self._lock, torch.no_grad():
            if self.report is None:
                self.capture()
            try:
                return self._run(arguments, metadata)
            except Exception as error:
                self._compiled.name_in(error)
                raise

    def _run(self, inputs: Sequence[object], metadata: AttentionMetadata | None) -> Any:
        program, tensors, sizes = self._compiled.bind(inputs, {})
        if self._compiled.bindings != self._bound:
            self._follow_binding()
        count = program.tokens(sizes)
        decode, full = False, True
        if metadata is not None:
            self._batch.require(metadata, count)
            decode, full = is_decode(metadata), self._batch.holds(metadata)
        elif self._needs_metadata:
            raise ArgumentError(
                "expected metadata beside the arguments, got none", hint="AttentionMetadata.build(...)"
            )
        chosen = self._capture.dispatch(count, decode, full=full)
        self.last = chosen
        self.stats.count(chosen, count)
        if chosen.mode is RunMode.NONE:
            return self._dynamic(inputs, metadata, chosen.batch)
        self._backend.follow()
        copies = self._static().load(tensors, count)
        seen = metadata
        if metadata is not None:
            seen, more = self._batch.load(GraphKey(chosen.mode, chosen.batch), metadata)
            copies += more
        grouped_copies(copies)
        with use_forward_context(self._context(chosen.mode, chosen.batch, seen)):
            outputs = self._capture.table()
        padded = self._compiled.program_at(chosen.batch.num_tokens)
        kept = self._slices[id(padded)].cut(outputs, count=count, keep=self._outputs)
        return padded.output(kept, tensors, padded.weights, sizes)

    def _dynamic(
        self, inputs: Sequence[object], metadata: AttentionMetadata | None, batch: BatchDescriptor
    ) -> Any:
        with use_forward_context(self._context(RunMode.NONE, batch, metadata)):
            return self._compiled(*inputs)

    def _follow_binding(self) -> None:
        """The model was bound again: go on if every weight lies where it was captured.

        Raises:
            MovedInputError: one does not; names it.
        """
        live = self._compiled.live_weights()
        for key, recording in self._capture.table.recordings.items():
            recording.check(self._static().named(key.batch.num_tokens), live)
        self._bound = self._compiled.bindings

    def without_graphs(self, *inputs: Tensor | AttentionMetadata | None) -> Any:
        """Run one batch by the compiled variants, as mode NONE does; counted nowhere."""
        arguments, metadata = _split(inputs, None, self._arity)
        with self._lock, torch.no_grad():
            return self._dynamic(arguments, metadata, BatchDescriptor(0))

    def check(self, batches: Iterable[Sequence[Any]], *, tolerance: float | None = None) -> float:
        """Compare batches with and without graphs; see ``agreement.check``.

        It alone finds outputs that sum over tokens, padding among them: pass batches that are padded.
        """
        return check(self, batches, tolerance=tolerance)


def _split(
    inputs: Sequence[Tensor | AttentionMetadata | None], metadata: AttentionMetadata | None, arity: int
) -> tuple[list[object], AttentionMetadata | None]:
    if inputs:
        last = inputs[-1]
        if isinstance(last, AttentionMetadata):
            return list(inputs[:-1]), last
        if last is None and len(inputs) > arity:  # metadata that is None
            return list(inputs[:-1]), metadata
    return list(inputs), metadata
