"""The fused FP8 operators and their passes, against Inductor's own code for the same torch operations.

python benchmarks/bench_fusions.py --device cuda [--quick] [--only KIND,...] [--deadline SECONDS]

Every form is compiled three times under the profile that pieces are compiled with: as it is, tuned (static
sizes with --autotune), and with the pass that puts the operator there. Results are compared before anything
is timed. A time is that of one call in a CUDA graph of many, over inputs that take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lab

TOKENS = (1, 8, 64, 512, 4096)
HIDDEN, WIDTH = 4096, 14336
GAIN = 0.97  # a fusion is kept where it takes at most this part of the best unfused time
WAYS = ("plain", "tuned", "fused")
CALLS, REPLAYS, ROUNDS = 24, 10, 5
NOTE = (
    "Microseconds of one call in a CUDA graph, medians; hidden 4096, intermediate 14336, bfloat16. Inductor "
    "and tuned: Inductor's code for the torch operations under pwcc's profile, without and with autotuning. "
    f"Fused: the pass is on. Kept: at most {GAIN} of the better of the two, over a pass's forms together."
)


@dataclass(frozen=True)
class Kind:
    """A form in which models write it: ``make(tokens, generator)`` gives its inputs, ``run`` computes it."""

    name: str
    fusion: str
    run: Callable[..., Any]
    make: Callable[[int, Any], tuple[Any, ...]]


def main() -> None:
    """Measure, and write the results."""
    parser = lab.options(__doc__ or "", repeat=1)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    given = parser.parse_args()
    began = time.monotonic()
    tokens = [int(part) for part in given.tokens.split(",")]
    found: dict[str, dict[int, dict[str, float]]] = {}
    problems: list[str] = []
    for kind, count in itertools.product(kinds(), tokens):
        if not lab.wanted(given, kind.name) or time.monotonic() - began > given.deadline:
            continue
        try:
            found.setdefault(kind.name, {})[count] = measure(kind, count, quick=given.quick)
        except Exception as error:  # noqa: BLE001 (one form must not hide the others)
            problems.append(f"{kind.name}, {count} tokens: {type(error).__name__}: {str(error)[:300]}")
            print(f"# {problems[-1]}", flush=True)
            continue
        times = found[kind.name][count]
        print(f"# {kind.name} {count}: " + ", ".join(f"{k} {v:.3g}" for k, v in times.items()), flush=True)
    kept = keep({kind.name: kind.fusion for kind in kinds()}, found)
    publish(given, found, kept, problems)


def publish(
    given: argparse.Namespace,
    found: Mapping[str, Mapping[int, Mapping[str, float]]],
    kept: Mapping[str, tuple[int, int] | None],
    problems: Sequence[str],
) -> None:
    """Print and write the table: one row a form and size."""
    fusions = {kind.name: kind.fusion for kind in kinds()}
    columns = ("form", "tokens", "Inductor", "tuned", "fused", "fused to better", "8-bit steps", "kept")
    rows = [
        (
            name,
            str(count),
            *(lab.show(times.get(way)) for way in WAYS),
            lab.show(times["fused"] / best(times), 2),
            f"{times['steps']:.0f} ({lab.show(100 * times['share'], 2)} %)",
            "yes" if (limits := kept.get(fusions[name])) and limits[0] <= count <= limits[1] else "no",
        )
        for name, sizes in found.items()
        for count, times in sizes.items()
    ]
    data: dict[str, object] = {"times": found, "keep": kept, "problems": list(problems)}
    lab.publish(given, "fusions", columns, rows, note=NOTE, data=data)
    print("\n".join(f"keep {name}: {limits}" for name, limits in kept.items()))


def best(times: Mapping[str, float]) -> float:
    """Return the better time without the fusion."""
    return min(times[way] for way in ("plain", "tuned") if way in times)


def keep(
    fusions: Mapping[str, str], found: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> dict[str, tuple[int, int] | None]:
    """Return, for each pass, the longest run of measured sizes at which it wins, as its limits; None: nowhere.

    ``fusions`` maps forms to passes. A pass wins at a size where all its forms together take at most
    ``GAIN`` of the better unfused time. Of runs of one length the one with larger sizes is taken.
    """
    limits: dict[str, tuple[int, int] | None] = {}
    for fusion in dict.fromkeys(fusions.values()):
        forms = [found[name] for name, owner in fusions.items() if owner == fusion and name in found]
        shared = sorted(set.intersection(*(set(form) for form in forms))) if forms else []
        runs: list[list[int]] = [[]]
        for count in shared:
            won = sum(form[count]["fused"] for form in forms) <= GAIN * sum(best(form[count]) for form in forms)
            if won:
                runs[-1].append(count)
            else:
                runs.append([])
        longest = max(runs, key=lambda run: (len(run), run))
        limits[fusion] = (longest[0], longest[-1]) if longest else None
    return limits


# --- measuring -------------------------------------------------------------------------------------


def measure(kind: Kind, tokens: int, *, quick: bool) -> dict[str, float]:
    """Compile the three ways, compare, and time each; microseconds, and the distance of the 8-bit values."""
    import torch

    generator = torch.Generator("cuda").manual_seed(tokens)
    size = sum(item.numel() * item.element_size() for item in kind.make(tokens, generator))
    sets = [kind.make(tokens, generator) for _ in range(max(2, min(CALLS, (96 << 20) // max(size, 1))))]
    times: dict[str, float] = {}
    results: dict[str, Any] = {}
    for way in WAYS:
        with compiled(kind, way) as function:
            results[way] = flat(function(*sets[0]))
            times[way] = timed(function, sets, rounds=1 if quick else ROUNDS)
    return times | compare(results["fused"], results["plain"])


@contextmanager
def compiled(kind: Kind, way: str) -> Iterator[Callable[..., Any]]:
    """Yield the form's function compiled one way; raise if the pass does not match exactly once."""
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config

    from pwcc.compile.passes.base import PassContext
    from pwcc.compile.passes.manager import PassRun
    from pwcc.compile.passes.registry import make, resolve
    from pwcc.compile.sealing.profile import cuda_profile
    from pwcc.compile.torch_private.inductor import pass_options

    specs = resolve(f"noop,{kind.fusion}(min_tokens=1,max_tokens=null)") if way == "fused" else ()
    run = PassRun([(spec.name, make(spec)) for spec in specs], PassContext(torch.device("cuda", 0), 1, 1, True))
    torch._dynamo.reset()
    options = {**cuda_profile(autotune=way == "tuned"), **pass_options(run if specs else None)}
    with torch.no_grad(), config.patch(options), functorch.patch(enable_autograd_cache=False):
        yield torch.compile(kind.run, dynamic=False, fullgraph=True)
        matches = {count.name: count.matches for count in run.counts}
    if specs and matches.get(kind.fusion) != 1:
        raise RuntimeError(f"expected one match of {kind.fusion}, got {matches}")


def timed(function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], *, rounds: int) -> float:
    """Return the microseconds of one call in a CUDA graph of ``CALLS`` of them: the median of ``rounds``."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for given in sets[:2]:
            function(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for given in itertools.islice(itertools.cycle(sets), CALLS):
            function(*given)
    for _ in range(3):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken: list[float] = []
    for _ in range(rounds):
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1000 / REPLAYS / CALLS)
    graph.reset()
    return statistics.median(taken)


def flat(value: Any) -> list[Any]:
    """Return the tensors of a result, copied."""
    return [item.clone() for item in (value if isinstance(value, tuple) else (value,))]


def compare(ours: Sequence[Any], theirs: Sequence[Any]) -> dict[str, float]:
    """Return the largest distance of 8-bit values in representable steps, and the share that differs.

    Raises if that is more than one step, or another output differs beyond the rounding of its dtype.
    """
    import torch

    steps, share = 0, 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.dtype is torch.float8_e4m3fn:
            a, b = (t.contiguous().view(torch.uint8).int() for t in (one, other))
            a, b = (torch.where(t < 128, t, 128 - t) for t in (a, b))
            steps = max(steps, int((a - b).abs().max()))
            share = max(share, float((a != b).float().mean()))
        else:
            torch.testing.assert_close(one, other, rtol=1.6e-2, atol=1e-5)
    if steps > 1:
        raise RuntimeError(f"expected 8-bit values at most one step apart, got {steps} ({share:.2%} differ)")
    return {"steps": float(steps), "share": share}


# --- the forms -------------------------------------------------------------------------------------


def kinds() -> list[Kind]:
    """Return the forms, each as a model writes it."""
    import torch
    from torch.nn import functional

    fp8 = torch.float8_e4m3fn

    def norm(x: Any, weight: Any) -> Any:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * weight

    def static(value: Any, scale: Any) -> Any:
        return (value.float() / scale).clamp(-448, 448).to(fp8)

    def dynamic(value: Any) -> tuple[Any, Any]:
        scale = (value.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
        return (value.float() / scale).clamp(-448, 448).to(fp8), scale

    def add_static(x: Any, residual: Any, weight: Any, scale: Any) -> tuple[Any, Any]:
        total = x + residual
        return static(norm(total, weight), scale), total

    def add_dynamic(x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
        total = x + residual
        return (*dynamic(norm(total, weight)), total)

    def gate(x: Any) -> Any:
        one, other = x.chunk(2, -1)
        return functional.silu(one) * other

    def tensor(generator: Any, *shape: int) -> Any:
        made = torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float32)
        return made.to(torch.bfloat16)

    def weight(generator: Any) -> Any:
        return 1 + tensor(generator, HIDDEN) / 8

    def scale() -> Any:
        return torch.tensor([0.02], device="cuda")

    return [
        Kind(
            "norm, static",
            "rms_norm_static_fp8",
            lambda x, w, s: static(norm(x, w), s),
            lambda n, g: (tensor(g, n, HIDDEN), weight(g), scale()),
        ),
        Kind(
            "add, norm, static",
            "rms_norm_static_fp8",
            add_static,
            lambda n, g: (tensor(g, n, HIDDEN), tensor(g, n, HIDDEN), weight(g), scale()),
        ),
        Kind(
            "norm, per token",
            "rms_norm_dynamic_fp8",
            lambda x, w: dynamic(norm(x, w)),
            lambda n, g: (tensor(g, n, HIDDEN), weight(g)),
        ),
        Kind(
            "add, norm, per token",
            "rms_norm_dynamic_fp8",
            add_dynamic,
            lambda n, g: (tensor(g, n, HIDDEN), tensor(g, n, HIDDEN), weight(g)),
        ),
        Kind(
            "silu and mul, static",
            "silu_and_mul_static_fp8",
            lambda x, s: static(gate(x), s),
            lambda n, g: (tensor(g, n, 2 * WIDTH), scale()),
        ),
        Kind(
            "silu and mul, per token",
            "silu_and_mul_dynamic_fp8",
            lambda x: dynamic(gate(x)),
            lambda n, g: (tensor(g, n, 2 * WIDTH),),
        ),
    ]


if __name__ == "__main__":
    main()
