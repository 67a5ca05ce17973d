"""Artifact: compile one piece for one variant, tune it, seal it, and check the sealed piece.

:func:`compile_piece` is a function of its :class:`PieceTask` alone; the parent process and worker
processes run the same one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from pwcc.cache import strict
from pwcc.cache.errors import NumericsError, PieceCompileError, PwccError, UnsealableError
from pwcc.cache.ids import BlobDigest, blob_digest
from pwcc.cache.sealed import InputFacts, SealedPiece, TritonKernel
from pwcc.cache.tuning import PieceTuning, parse_files
from pwcc.compile import numerics
from pwcc.compile.layouts import Ask, OtherLayout, Run, ask_for, check_layouts, check_sharing
from pwcc.compile.numerics import NumericsRecord
from pwcc.compile.ops.custom_ops import write_out
from pwcc.compile.passes.base import PassContext, PassSpec
from pwcc.compile.passes.manager import PassRun, dump_passes
from pwcc.compile.passes.registry import make as make_pass
from pwcc.compile.piece_graph import PieceGraph, SymbolInput, interpret
from pwcc.compile.rebuild import Variant, rebuild
from pwcc.compile.runtime.expressions import compile_expressions
from pwcc.compile.runtime.piece import PieceLoader
from pwcc.compile.runtime.samples import copies, sample_inputs
from pwcc.compile.torch_private import inductor, symbols
from pwcc.compile.torch_private.dynamo import is_data_dependent
from pwcc.compile.torch_private.tuning import Watch

INDUCTOR = "inductor.py"
"""The file of a dump that holds Inductor's own code of a piece."""
MAX_REASON = 300  # characters of a foreign error; the dispatcher's lists every backend


@dataclass(frozen=True)
class PieceTask:
    """What one compile needs: the graph, the variant, the device, Inductor's options and required CPU flags.

    ``lines`` are the user's source lines per node, for messages only. ``alias_groups`` are positions of
    inputs that share memory in the program; none of them may be written by the piece. ``shared`` are positions
    of outputs that must share memory where eager's do. ``passes`` run in their order; ``custom_ops`` are pwcc's
    own operators that keep their kernels, the others are written out; ``dump`` is a directory for Inductor's
    code and the text of what passes changed. ``pins`` are files of an earlier compile's tuning, whose choices
    are not timed again.
    """

    name: str
    graph: PieceGraph
    variant: Variant
    device: str
    options: Mapping[str, object]
    march: str = "native"
    cpu_flags: tuple[str, ...] = ()
    tuned: bool = False
    lines: tuple[str | None, ...] = ()
    alias_groups: tuple[tuple[int, ...], ...] = ()
    shared: tuple[tuple[int, ...], ...] = ()
    passes: tuple[PassSpec, ...] = ()
    custom_ops: tuple[str, ...] = ()
    dump: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Serialise for a worker process."""
        return strict.canonical(
            {
                "name": self.name,
                "graph": self.graph.to_bytes().decode(),
                "variant": self.variant.to_json(),
                "device": self.device,
                "options": dict(self.options),
                "march": self.march,
                "cpu_flags": list(self.cpu_flags),
                "tuned": self.tuned,
                "lines": list(self.lines),
                "alias_groups": [list(group) for group in self.alias_groups],
                "shared": [list(group) for group in self.shared],
                "passes": [spec.to_json() for spec in self.passes],
                "custom_ops": list(self.custom_ops),
                "dump": self.dump,
                "pins": dict(self.pins),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceTask:
        """Parse what :meth:`to_bytes` wrote."""
        fields = strict.Fields(strict.loads(data, where="task"), "task")
        task = cls(
            name=fields.str_("name"),
            graph=PieceGraph.from_bytes(
                fields.str_("graph", max_length=strict.MAX_BYTES).encode(), where="task"
            ),
            variant=Variant.from_json(fields.take("variant"), "task"),
            device=fields.str_("device"),
            options=fields.mapping("options", lambda value, _: value),
            march=fields.str_("march"),
            cpu_flags=fields.list_("cpu_flags", strict.as_str),
            tuned=fields.bool_("tuned"),
            lines=fields.list_(
                "lines", lambda value, where: None if value is None else strict.as_str(value, where)
            ),
            alias_groups=fields.list_("alias_groups", _as_group),
            shared=fields.list_("shared", _as_group),
            passes=fields.list_("passes", PassSpec.parse),
            custom_ops=fields.list_("custom_ops", strict.as_str),
            dump=fields.opt_str("dump"),
            pins=fields.item("pins", parse_files),
        )
        fields.done()
        return task


def _as_group(value: object, where: str) -> tuple[int, ...]:
    return tuple(strict.as_int(item, where) for item in value) if isinstance(value, list) else ()


@dataclass(frozen=True)
class PieceResult:
    """One sealed piece: its record's digest, what lowering assumed of sizes, numerics, and the cost.

    ``guards`` are (condition in the piece's symbols, user's line). ``blobs`` are all digests with sizes.
    ``tuning`` is what was timed, on a GPU only.
    """

    sealed: BlobDigest
    numerics: tuple[NumericsRecord, ...]
    guards: tuple[tuple[str, str | None], ...]
    blobs: Mapping[BlobDigest, int]
    kernels: int
    seconds: float
    tune_seconds: float
    tuning: PieceTuning | None = None

    def to_json(self) -> dict[str, strict.Json]:
        """Return the JSON form, as the piece cache stores it."""
        return {
            "sealed": self.sealed,
            "numerics": [record.to_json() for record in self.numerics],
            "guards": [[text, where] for text, where in self.guards],
            "blobs": dict(sorted(self.blobs.items())),
            "kernels": self.kernels,
            "seconds": self.seconds,
            "tune_seconds": self.tune_seconds,
            "tuning": None if self.tuning is None else self.tuning.to_json(),
        }

    @classmethod
    def parse(cls, data: bytes, where: str) -> PieceResult:
        """Parse what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = strict.Fields(strict.loads(data, where=where), where)
        result = cls(
            sealed=fields.digest("sealed"),
            numerics=fields.list_("numerics", NumericsRecord.parse, max_items=100),
            guards=fields.list_("guards", _as_guard),
            blobs={
                strict.as_digest(key, where): size
                for key, size in fields.mapping("blobs", strict.as_int).items()
            },
            kernels=fields.int_("kernels"),
            seconds=fields.float_("seconds"),
            tune_seconds=fields.float_("tune_seconds"),
            tuning=fields.opt_item("tuning", PieceTuning.parse),
        )
        fields.done()
        return result


def _as_guard(value: object, where: str) -> tuple[str, str | None]:
    text, line = value if isinstance(value, list) and len(value) == 2 else (value, None)
    return strict.as_str(text, where), None if line is None else strict.as_str(line, where)


class Blobs(Protocol):
    """Where sealed bytes go and are read back from: a store, or memory in a worker."""

    def put_blob(self, data: bytes) -> BlobDigest:
        """Keep a blob and return its digest."""
        ...

    def read_blob(self, digest: BlobDigest) -> bytes:
        """Return a blob's bytes."""
        ...


def compile_piece(
    task: PieceTask, blobs: Blobs, *, scratch: Path, tune_lock: Path | None = None
) -> PieceResult:
    """Compile, tune, seal and check one piece.

    ``scratch`` is an existing directory for the compilers' own files; nothing in it is needed later.
    ``tune_lock`` is a lock file that processes on one GPU share: tuning is alone on it.

    Raises:
        PieceCompileError: Inductor failed; names the piece, the operation and the user's source line.
        UnsealableError: the compiled piece holds a construct that cannot be sealed.
        NumericsError: the sealed piece disagrees with eager.
    """
    try:
        try:
            return _laid_out(task, blobs, scratch, tune_lock, backed=False)
        except Exception as error:
            asks = isinstance(error, NumericsError) or is_data_dependent(error)
            if task.variant.static or not asks:
                raise
        # The piece's code depends on the value of the size, which backed symbols make explicit as guards.
        return _laid_out(task, blobs, scratch, tune_lock, backed=True)
    except PwccError as error:
        error.message = f"piece {task.name} ({task.variant}): {error.message}"
        error.where = error.where or _line_of(task, _culprit(task, error))
        raise
    except Exception as error:
        operation = _culprit(task, error)
        raise PieceCompileError(
            f"piece {task.name} ({task.variant}): Inductor or what it compiled failed"
            + (f" on {operation}" if operation else "")
            + f": {type(error).__name__}: {_first_line(error)}",
            where=_line_of(task, operation),
            hint="--debug shows Inductor's own report; --dump DIR writes the piece",
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if len(lines[0]) <= MAX_REASON else lines[0][:MAX_REASON] + " ..."


def _culprit(task: PieceTask, error: BaseException) -> str | None:
    """Return the operation that a failure names: as Inductor does, or a custom one as the dispatcher does."""
    text = str(error)
    for target in task.graph.ops:
        root, _, path = target.partition(".ops.")
        namespace, _, name = path.partition(".")
        operation = f"{namespace}::{name.split('.')[0]}"
        if root == "torch" and namespace != "aten" and operation in text:
            return operation
    return inductor.failed_operation(error)


def _line_of(task: PieceTask, operation: str | None) -> str | None:
    """Return the source line of the first node whose operation has the failed one's name.

    Lowering's names are often not those of the source; then it is the line where the piece begins.
    """
    begin = next((f"{line} (where the piece begins)" for line in task.lines if line), None)
    if operation is None:
        return begin
    name = operation.replace("::", ".").split(".")
    base = name[1] if len(name) > 1 else name[0]
    for node, line in zip(task.graph.nodes, task.lines, strict=False):
        if line and base in node.target.split("."):
            return line
    return begin


def _laid_out(
    task: PieceTask, blobs: Blobs, scratch: Path, tune_lock: Path | None, *, backed: bool
) -> PieceResult:
    """Compile, and once more where outputs lie otherwise than those who read them were compiled for."""
    asks: dict[int, Ask] = {}
    while True:
        try:
            return _compile(task, blobs, scratch, tune_lock, backed=backed, asks=asks)
        except OtherLayout as found:
            more = {
                index: Ask(ask.order, ask.own or (index in asks and asks[index].own))
                for index, ask in found.asks.items()
            }
            if all(asks.get(index) == more[index] for index in found.wrong):
                raise UnsealableError(
                    f"outputs {sorted(found.wrong)} of the piece cannot be laid out as eager's are",
                    hint="call .contiguous() on that tensor before the splitting operation",
                ) from found
            asks |= more


def _compile(
    task: PieceTask,
    blobs: Blobs,
    scratch: Path,
    tune_lock: Path | None,
    *,
    backed: bool,
    asks: Mapping[int, Ask],
) -> PieceResult:
    from pwcc.compile.sealing.builder_paths import builder_paths
    from pwcc.compile.sealing.compiled import CompiledPiece
    from pwcc.compile.sealing.driver import write_driver
    from pwcc.compile.sealing.seal import seal

    started = time.perf_counter()
    device = torch.device(task.device)
    options, paths = dict(task.options), builder_paths([str(scratch)])
    if device.type == "cpu":
        driver = write_driver(scratch / "driver", march=task.march, path_prefixes=paths)
        options["cpp.cxx"] = (None, str(driver))
    watch = Watch(scratch, task.pins, active=device.type == "cuda")
    with inductor.private_caches(scratch), watch:
        result, guards, run_passes = _lower(task, device, options, backed=backed, asks=asks)
    _refuse_aliased_writes(task, result.mutated_inputs)
    compiled = time.perf_counter()
    size = task.variant.hint
    run: Any = result.run
    with _exclusive(tune_lock), torch.no_grad(), inductor.private_caches(scratch), watch:
        given = sample_inputs(task.graph, size, device, seed=numerics.SEED)
        taken = copies(given)
        got = run(list(taken))
        plain = interpret(task.graph, given, device=device)
        check_layouts(Run(taken, got), Run(given, plain))
        check_sharing(got, plain, task.shared)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    del given, taken, got, plain
    tuned = time.perf_counter()
    sizes: dict[BlobDigest, int] = {}

    def put(data: bytes) -> BlobDigest:
        digest = blobs.put_blob(data)
        sizes[digest] = len(data)
        return digest

    piece = CompiledPiece(
        source=result.source,
        module=result.module,
        constants=result.constants,
        inputs_to_check=result.inputs_to_check,
        mutated_inputs=result.mutated_inputs,
        device_type=device.type,
        device_index=device.index,
        inputs=input_facts(task.graph, task.variant),
        defers_input_alignment=result.defers_input_alignment,
        ops=task.graph.ops,
        tuned=task.tuned,
        cpu_flags=task.cpu_flags,
        builder_paths=paths,
        passes=tuple(run_passes.counts),
    )
    with inductor.private_caches(scratch):
        record, digest = seal(piece, put)
    sealed: Any = PieceLoader(blobs.read_blob, device).load(record).call
    with _exclusive(tune_lock):  # what runs on the GPU meanwhile would disturb another worker's tuning
        measured = tuple(
            numerics.measure(task.graph, size, device, compiled=run, sealed=sealed)
            for size in task.variant.check_sizes
            if _holds(guards, task.graph, size)
        )
        if tune_lock is not None and device.type == "cuda":
            torch.cuda.empty_cache()  # the next worker's samples may need the memory that these took
    return PieceResult(
        sealed=digest,
        numerics=measured,
        guards=guards,
        blobs=sizes,
        kernels=len(record.kernels),
        seconds=compiled - started,
        tune_seconds=tuned - compiled,
        tuning=watch.result(result.module, _winners(record)),
    )


def _winners(record: SealedPiece) -> list[tuple[str, str, str]]:
    """Return name, symbol and chosen configuration of a piece's Triton kernels."""
    kernels = (kernel for kernel in record.kernels if isinstance(kernel, TritonKernel))
    return [(kernel.name, kernel.symbol, kernel.config) for kernel in kernels]


def _lower(
    task: PieceTask,
    device: torch.device,
    options: Mapping[str, object],
    *,
    backed: bool,
    asks: Mapping[int, Ask],
) -> tuple[inductor.InductorResult, tuple[tuple[str, str | None], ...], PassRun]:
    """Compile the rebuilt piece; return it, the conditions on sizes that lowering relies on, and the passes."""
    rebuilt = rebuild(task.graph, task.variant, device, task.lines, backed=backed)
    ask_for(rebuilt.graph_module, asks)
    names = _symbol_names(rebuilt.inputs, task.graph.symbols)
    write_out(rebuilt.graph_module, keep=task.custom_ops, device_type=device.type)
    variant = task.variant
    passes = PassRun(
        [(spec.name, make_pass(spec)) for spec in task.passes],
        PassContext(device, variant.low, variant.high, variant.static),
        keep_text=task.dump is not None,
    )
    result = inductor.compile_graph(
        rebuilt.graph_module, rebuilt.inputs, rebuilt.fake_mode, options, passes=passes if task.passes else None
    )
    if task.dump is not None:
        folder = Path(task.dump)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDUCTOR).write_text(result.source)
        dump_passes(folder, passes.texts)
    return result, _guards(result.guards, names, rebuilt.fake_mode.shape_env), passes


def _holds(guards: Sequence[tuple[str, str | None]], graph: PieceGraph, size: int) -> bool:
    """Tell whether a size meets every guard; the others are served by variants of their own."""
    return all(compile_expressions([text for text, _ in guards], graph.symbols)(*graph.sizes_at(size)))


def _exclusive(lock: Path | None) -> AbstractContextManager[object]:
    if lock is None:
        return nullcontext()
    from pwcc.cache.locks import file_lock

    return file_lock(lock)


def input_facts(graph: PieceGraph, variant: Variant) -> tuple[InputFacts, ...]:
    """Describe the piece's inputs for its sealed record."""
    facts: list[InputFacts] = []
    for item in graph.inputs:
        if isinstance(item, SymbolInput):
            fixed = variant.fixes(item)
            value: int | str = variant.low if fixed else item.symbol
            facts.append(InputFacts("int" if fixed else "symint", value=value))
        else:
            facts.append(InputFacts("tensor", dtype=item.dtype, shape=item.shape, stride=item.stride))
    return tuple(facts)


def _symbol_names(inputs: Sequence[Any], names: Sequence[str]) -> dict[Any, str]:
    """Return the compiler's symbols with the names of the sizes that they are; fixed sizes have none."""
    given = zip(inputs, names, strict=False)
    return {item.node.expr: name for item, name in given if isinstance(item, torch.SymInt)}


def _guards(
    found: Sequence[tuple[Any, str | None]], names: Mapping[Any, str], env: Any
) -> tuple[tuple[str, str | None], ...]:
    texts: dict[str, str | None] = {}
    for expr, where in found:
        simplified = env.simplify(expr)
        if any(symbol not in names for symbol in symbols.free_symbols(simplified)):
            raise UnsealableError(
                f"lowering depends on a value computed at run time: {simplified}", where=where
            )
        text = symbols.condition_text(simplified, names)
        if text is not None:
            texts.setdefault(text, where)
    return tuple(sorted(texts.items()))


def _refuse_aliased_writes(task: PieceTask, mutated: Sequence[int]) -> None:
    for group in task.alias_groups:
        written = [index for index in group if index in mutated]
        if written:
            raise UnsealableError(
                f"inputs {list(group)} share memory and input {written[0]} is written by the piece",
                hint="update the buffer through one tensor only",
            )


class MemoryBlobs:
    """Blobs in memory: where a worker collects what it sealed, and where it reads them back."""

    def __init__(self) -> None:
        self.blobs: dict[BlobDigest, bytes] = {}

    def put_blob(self, data: bytes) -> BlobDigest:
        """Keep a blob and return its digest."""
        digest = blob_digest(data)
        self.blobs[digest] = data
        return digest

    def read_blob(self, digest: BlobDigest) -> bytes:
        """Return a blob that was put."""
        return self.blobs[digest]
