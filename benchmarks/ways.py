"""One measured way in a process of its own; ``lab.py`` starts it with a job as JSON and reads its answer.

The clock starts when the model is built and its weights lie on the device; what each way must still
import counts. The model holds ``pwcc::attention``, opaque to every compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FIRST = 16  # tokens of the first call: no size with a static variant, so every way runs dynamic code
STEPS = (1, 8, 64)
MAX_TOKENS = 8192
COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy")
Call = Callable[..., Any]


class Subject:
    """The model under measurement, on its device, and its inputs."""

    def __init__(self, job: dict[str, Any]) -> None:
        from pwcc.compile.inputs import input_specs

        self.device = torch.device(job["device"] if job["device"] == "cpu" else f"{job['device']}:0")
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # on few shared cores a second thread measures whoever else is there
        self.model = build(job["model"]["preset"], job["model"]["args"], self.device)
        self.specs = input_specs(self.model)
        self._made: dict[int, tuple[torch.Tensor, ...]] = {n: self.make(n) for n in (FIRST, *STEPS)}
        compilers = [name for name in COMPILERS if name in sys.modules]
        if compilers:
            raise RuntimeError(f"imported before the clock starts: {', '.join(compilers)}")
        self.synchronize()
        self.started = time.perf_counter()

    def make(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return new inputs for this many tokens."""
        from pwcc.compile.input_values import make_inputs

        return make_inputs(self.specs, tokens, device=self.device)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return inputs that were made before the clock started."""
        return self._made[tokens]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def elapsed(self) -> float:
        """Return the seconds since the clock started, all work on the device done."""
        self.synchronize()
        return time.perf_counter() - self.started

    def first(self, call: Call) -> dict[str, object]:
        """Run the first call; return when its output was there, and a figure to compare outputs by."""
        output = call(*self.inputs(FIRST))
        seconds = self.elapsed()
        return {"first_s": seconds, "norm": float(output.double().norm())}

    def steps(self, call: Call) -> dict[str, object]:
        """Return microseconds of a step by number of tokens: device and host, and host alone (issuing)."""
        found = {}
        for tokens in STEPS:
            bound = functools.partial(call, *self.inputs(tokens))
            found[str(tokens)] = {
                "step_us": 1e6 * statistics.median(self.blocks(bound)),
                "issue_us": 1e6 * statistics.median(self.issues(bound)),
            }
        return {"steps": found}

    def blocks(self, call: Callable[[], object], *, seconds: float = 0.05, blocks: int = 9) -> list[float]:
        """Return seconds a call over blocks of calls, each block waited for."""
        calls = self._calls(call, seconds)
        found = []
        for _ in range(blocks):
            self.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            self.synchronize()
            found.append((time.perf_counter() - started) / calls)
        return found

    def issues(self, call: Callable[[], object], *, calls: int = 30) -> list[float]:
        """Return the host's seconds of single calls, with the device idle before each."""
        found = []
        for _ in range(calls):
            self.synchronize()
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        self.synchronize()
        return found

    def _calls(self, call: Callable[[], object], seconds: float) -> int:
        for _ in range(3):
            call()
        self.synchronize()
        started = time.perf_counter()
        call()
        self.synchronize()
        return max(1, min(2000, int(seconds / (time.perf_counter() - started))))


def build(preset: str, args: Mapping[str, Any], device: torch.device) -> torch.nn.Module:
    """Build a reference decoder as a server does, straight on the device.

    Not by way of the meta device, where torch's initialisers run as Python and import Dynamo: whoever
    must import it himself would not be seen to.
    """
    from pwcc.compile.models.llama import PRESET_DTYPES, PRESETS, Llama

    before = torch.get_default_dtype()
    torch.set_default_dtype(PRESET_DTYPES[preset])
    with device:
        model = Llama(dataclasses.replace(PRESETS[preset], **args))
    torch.set_default_dtype(before)
    model.init_weights()
    return model.eval().requires_grad_(False)


def prime(job: dict[str, Any]) -> dict[str, object]:
    """Import what any way imports."""
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.standalone_compile
    import triton  # noqa: F401

    import pwcc.compile.api
    import pwcc.compile.load
    import pwcc.compile.sealing.seal  # noqa: F401

    started = time.perf_counter()
    torch.ones(8, 8, device=job["device"]).mm(torch.ones(8, 8, device=job["device"]))
    return {"first_operation_s": time.perf_counter() - started}


def eager(job: dict[str, Any]) -> dict[str, object]:
    """Run the model as it is."""
    subject = Subject(job)
    return subject.first(subject.model) | subject.steps(subject.model)


def torch_compile(job: dict[str, Any]) -> dict[str, object]:
    """Compile with ``torch.compile``, dimension 0 marked dynamic, then call once with one token."""
    subject = Subject(job)
    compiled = torch.compile(subject.model, fullgraph=True)
    for tensor in subject.inputs(FIRST):
        torch._dynamo.mark_dynamic(tensor, 0)
    found = subject.first(compiled)
    before = subject.elapsed()
    compiled(*subject.inputs(1))
    after = subject.elapsed()
    return found | {"size_one_s": after - before, "both_s": after} | subject.steps(compiled)


def pwcc_compile(job: dict[str, Any]) -> dict[str, object]:
    """Compile with pwcc, from trace to published entry."""
    subject = Subject(job)
    import pwcc

    report = pwcc.precompile(
        subject.model, cache_dir=job["store"], sizes=job["sizes"], max_tokens=MAX_TOKENS, jobs=job["jobs"]
    )
    seconds = subject.elapsed()
    return {
        "compile_s": seconds,
        "stages_s": report.seconds,
        "counters": dict(vars(report.counters)),
        "entry_bytes": report.bytes,
        "hit": report.hit,
    }


def pwcc_load(job: dict[str, Any]) -> dict[str, object]:
    """Load the entry with pwcc and call it."""
    subject = Subject(job)
    import pwcc

    load = pwcc.load
    collections = Collections()
    imported = subject.elapsed()
    with collections:
        compiled = load(subject.model, cache_dir=job["store"])
        loaded = subject.elapsed()
    found = subject.first(compiled)
    receipt = compiled.receipt
    return {
        "import_s": imported,
        "call_s": loaded - imported,
        "loaded_s": loaded,
        **found,
        "load_ms": receipt.total_ms,
        "collector_ms": 1e3 * collections.seconds,
        "steps_ms": receipt.steps_ms,
        "clean": receipt.is_clean,
        "blobs": receipt.blobs,
        "bytes": receipt.bytes,
        "sizes": list(compiled.sizes),
        **subject.steps(compiled),
        "overhead": {str(tokens): overhead(subject, compiled, tokens) for tokens in STEPS},
    }


class Collections:
    """Times what Python's cyclic collector does in a block: a load's objects can set it off as it returns."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        gc.callbacks.append(self._note)

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        self.seconds += time.perf_counter() * (1 if phase == "stop" else -1)


def overhead(subject: Subject, compiled: Any, tokens: int) -> dict[str, float]:
    """Return what a call costs the host beyond its pieces and splitting operations, in microseconds."""
    program = compiled.programs[0]
    arguments = subject.inputs(tokens)
    tensors, sizes = program.binder.bind(arguments, {})
    run = program.select(tokens)
    variant = next(variant for variant in program.variants if variant.run is run)
    bare, idle, pieces = _apart(compiled, program, variant, tensors, sizes)
    stitched = functools.partial(run, tensors, sizes)
    rounds = [
        [_host(subject, call) for call in (stitched, bare, functools.partial(compiled, *arguments))]
        for _ in range(40)
    ]
    whole = [1e6 * (call - bare_) for _, bare_, call in rounds]
    difference = [1e6 * (with_stitch - bare_) / pieces for with_stitch, bare_, _ in rounds]
    nothing = statistics.median(subject.blocks(functools.partial(idle, tensors, sizes), seconds=0.01))
    bind = statistics.median(subject.blocks(lambda: program.binder.bind(arguments, {}), seconds=0.01))
    return {
        "pieces": pieces,
        "bare_us": 1e6 * statistics.median(bare_ for _, bare_, _ in rounds),
        "stitched_us": 1e6 * statistics.median(stitch for stitch, _, _ in rounds),
        "over_bare_per_piece_us": statistics.median(difference),
        "empty_stitch_per_piece_us": 1e6 * nothing / pieces,
        "binder_us": 1e6 * bind,
        "call_over_bare_us": statistics.median(whole),
    }


def _host(subject: Subject, call: Callable[[], object]) -> float:
    subject.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _apart(
    compiled: Any, program: Any, variant: Any, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]
) -> tuple[Callable[[], None], Call, int]:
    """Return the same calls in a flat loop, the program over pieces that do nothing, and how many pieces."""
    from pwcc.compile.compiled_model import constant, resolve_target

    calls: list[Callable[[], object]] = []
    outputs: dict[object, object] = {}
    count = 0

    def piece(call: Call) -> Call:
        def recorded(args: list[Any]) -> Any:
            nonlocal count
            count += 1
            kept = tuple(args)
            calls.append(lambda: call(list(kept)))
            outputs[call] = result = call(args)
            return result

        return recorded

    def operation(name: str) -> Call:
        function = resolve_target(name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append(functools.partial(function, *args, **kwargs))
            outputs[name] = result = function(*args, **kwargs)
            return result

        return recorded

    def bind(pieces: Sequence[Call], resolve: Call) -> Call:
        bound: Call = program.bind(pieces, resolve, constant(compiled.device), program.weights)
        return bound

    bind([piece(item.call) for item in variant.pieces], operation)(tensors, sizes)

    def bare() -> None:
        for call in calls:
            call()

    def nothing(result: object) -> Call:
        return lambda *args, **kwargs: result

    stubs = [nothing(outputs.get(item.call)) for item in variant.pieces]
    return bare, bind(stubs, lambda name: nothing(outputs.get(name))), count


def aot_build(job: dict[str, Any]) -> dict[str, object]:
    """Save pwcc's unique pieces, dynamic variant, as PyTorch's AOTCompiledArtifacts."""
    subject = Subject(job)
    from torch._inductor.standalone_compile import standalone_compile

    from pwcc.compile.model_tree import identity
    from pwcc.compile.rebuild import rebuild
    from pwcc.compile.request import make_request
    from pwcc.compile.torch_private import symbols
    from pwcc.compile.tracing import stitch_of, trace_all

    request = make_request(
        subject.model,
        specs=subject.specs,
        sizes=(),
        max_tokens=MAX_TOKENS,
        device=subject.device,
        identity=identity(subject.model),
        args=None,
        splitting_ops=("pwcc::attention",),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=False,
    )
    (traced,) = trace_all(subject.model, request)
    folder = Path(job["artifacts"])
    folder.mkdir()
    (folder / "stitch.py").write_text(stitch_of(traced))
    (folder / "calling.json").write_bytes(traced.trace.calling.to_bytes())
    traced_s = subject.elapsed()
    for number, graph in enumerate(traced.program.unique):
        rebuilt = rebuild(graph, traced.variants[0], subject.device)
        _note_values(rebuilt)
        with symbols.tracing(rebuilt.fake_mode):
            artifact = standalone_compile(
                rebuilt.graph_module,
                rebuilt.inputs,
                dynamic_shapes="from_tracing_context",
                options={},
                aot=True,
            )
        artifact.save(path=str(folder / f"{number}.artifact"), format="binary")
    return {"trace_s": traced_s, "build_s": subject.elapsed(), "pieces": len(traced.program.unique)}


def _note_values(rebuilt: Any) -> None:
    """Write each node's fake value beside it, as Dynamo does: PyTorch's serialisation refuses nodes without."""

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            n.meta["example_value"] = value = super().run_node(n)
            return value

    with rebuilt.fake_mode:
        Noting(rebuilt.graph_module).run(*rebuilt.inputs)


def aot_load(job: dict[str, Any]) -> dict[str, object]:
    """Load those artifacts, bind them into the same stitched program, and call it."""
    subject = Subject(job)
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    from pwcc.compile.compiled_model import constant, resolve_target
    from pwcc.compile.load import compile_stitch
    from pwcc.compile.runtime.binding import Binder
    from pwcc.compile.runtime.calling import CallingConvention
    from pwcc.compile.runtime.held import bind_weights, named_tensors

    imported = subject.elapsed()
    folder = Path(job["artifacts"])
    paths = sorted(folder.glob("*.artifact"), key=lambda path: int(path.stem))
    artifacts: list[Any] = [AOTCompiledArtifact.load(path=str(path), format="binary") for path in paths]
    calling = CallingConvention.from_bytes((folder / "calling.json").read_bytes(), where="calling")
    binder = Binder(calling, subject.device)
    run = compile_stitch((folder / "stitch.py").read_bytes())(
        [_unpacking(artifact) for artifact in artifacts],
        resolve_target,
        constant(subject.device),
        bind_weights(dict(named_tensors(subject.model)), calling.weights, subject.device),
    )
    loaded = subject.elapsed()

    def call(*args: object) -> Any:
        return run(*binder.bind(args, {}))[0]

    return {
        "import_s": imported,
        "call_s": loaded - imported,
        "loaded_s": loaded,
        **subject.first(call),
        **subject.steps(call),
    }


def _unpacking(artifact: Call) -> Call:
    return lambda args: artifact(*args)


FOUND: dict[str, Callable[[dict[str, Any]], dict[str, object]]] = {
    "prime": prime,
    "eager": eager,
    "torch.compile": torch_compile,
    "pwcc compile": pwcc_compile,
    "pwcc load": pwcc_load,
    "aot build": aot_build,
    "aot load": aot_load,
}


def answer(found: Mapping[str, Callable[[dict[str, Any]], dict[str, object]]]) -> None:
    """Run the job of the first argument and answer with one line of JSON; compilers print elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    with torch.no_grad(), answers:
        answers.write(json.dumps(found[job["way"]](job)))


if __name__ == "__main__":
    answer(FOUND)
