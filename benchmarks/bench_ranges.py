"""A step by the dynamic variant for all sizes, by one for a range of them, and by a static one.

python benchmarks/bench_ranges.py --device cpu|cuda [--quick]

One entry holds all three kinds for every size; they run in turns, over the same weights, in one process.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import lab
import torch
from ways import build

import pwcc
from pwcc.compile.compiled_model import CompiledModel, LoadedVariant
from pwcc.compile.input_values import make_inputs
from pwcc.compile.inputs import input_specs

TOKENS = (1, 8, 64)
MAX_TOKENS = 2048
RANGES = ((1, 16), (17, 128), (1, MAX_TOKENS))
SHALLOW = lab.Model("llama-8b, 2 layers, bf16", "llama-8b", {"layers": 2})
BLOCK_S, BLOCKS = 0.03, 15
NOTE = (
    f"Microseconds of a call, the device waited for after blocks of calls that take turns, medians. Dynamic: "
    f"one variant for 1 to {MAX_TOKENS} tokens. Range: the variant for {RANGES[0][0]} to {RANGES[0][1]} or "
    f"{RANGES[1][0]} to {RANGES[1][1]}. Static: code for that size alone, not tuned. No CUDA graphs; on a CPU "
    "one thread."
)


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=1).parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)  # on few shared cores a second thread measures whoever else is there
    rows: list[Sequence[str]] = []
    data: dict[str, object] = {}
    for model in models(given):
        times, seconds = measure(model, given.device)
        data[model.label] = {"times_us": times, "compile_s": seconds}
        for tokens, kinds in times.items():
            dynamic = kinds["dynamic"]
            figures = [lab.show(kinds[kind]) for kind in ("dynamic", "range", "static")]
            ratios = [lab.show(kinds[kind] / dynamic, 3) for kind in ("range", "static")]
            rows.append((model.label, str(tokens), *figures, *ratios))
    columns = ("model", "tokens", "dynamic", "range", "static", "range to dynamic", "static to dynamic")
    lab.publish(given, "ranges", columns, rows, note=NOTE, data=data)


def models(given: argparse.Namespace) -> tuple[lab.Model, ...]:
    """Return the models of a device."""
    if given.quick:
        return (lab.TINY,)
    return (lab.TINY, lab.MIDDLE) if given.device == "cpu" else (SHALLOW,)


def measure(wanted: lab.Model, device: str) -> tuple[dict[int, dict[str, float]], float]:
    """Return microseconds by token count and kind of variant, and the seconds that compiling took."""
    model = build(wanted.preset, wanted.args, torch.device(device))
    specs = input_specs(model)
    with tempfile.TemporaryDirectory(prefix="pwcc-bench-") as cache:
        report = pwcc.precompile(
            model, cache_dir=cache, sizes=TOKENS, ranges=RANGES, max_tokens=MAX_TOKENS, device=device
        )
        compiled = pwcc.load(model, cache_dir=cache)
        found: dict[int, dict[str, float]] = {}
        for tokens in TOKENS:
            inputs = make_inputs(specs, tokens, device=torch.device(device))
            calls = {kind: call(compiled, variant, inputs) for kind, variant in variants(compiled, tokens)}
            found[tokens] = turns(calls, device)
    return found, report.seconds["total"]


def variants(compiled: CompiledModel, tokens: int) -> Iterator[tuple[str, LoadedVariant]]:
    """Yield the kinds of variant that serve a size, each with its variant."""
    served = [v for v in compiled.program_at(tokens).variants if v.low <= tokens <= v.high]
    yield "static", next(v for v in served if v.static)
    ranges = sorted((v for v in served if not v.static), key=lambda v: v.high - v.low)
    yield "range", ranges[0]
    yield "dynamic", ranges[-1]


def call(
    compiled: CompiledModel, variant: LoadedVariant, inputs: Sequence[torch.Tensor]
) -> Callable[[], object]:
    """Return a call of the whole model that runs one variant, whatever dispatch would choose."""
    program, tokens = compiled.program_at(inputs[0].shape[0]), inputs[0].shape[0]
    run = variant.run
    if run is None:
        raise RuntimeError(f"variant {variant.low}..{variant.high} is not bound")

    def step() -> object:
        program.by_size[tokens] = run
        return compiled(*inputs)

    return step


@torch.no_grad()
def turns(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Return the median microseconds of each call; blocks of them take turns."""
    wait = functools.partial(torch.cuda.synchronize, device) if device == "cuda" else int
    counts: dict[str, int] = {}
    for kind, step in calls.items():
        step()
        wait()
        began = time.perf_counter()
        step()
        wait()
        counts[kind] = max(1, int(BLOCK_S / max(1e-6, time.perf_counter() - began)))
    taken: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(BLOCKS):
        for kind, step in calls.items():
            began = time.perf_counter()
            for _ in range(counts[kind]):
                step()
            wait()
            taken[kind].append((time.perf_counter() - began) / counts[kind])
    return {kind: 1e6 * statistics.median(blocks) for kind, blocks in taken.items()}


if __name__ == "__main__":
    main()
