"""What the checks of a call cost in steady state, beside torch.compile's guards on the same module.

python benchmarks/bench_guards.py --device cpu|cuda [--quick] [--repeat 7]

The module is traced here and nothing is compiled: checks need no kernel. torch.compile gets a backend that
computes nothing, so that its call is its guards and the way to them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import lab
import torch
from torch import Tensor, nn

from pwcc.compile.compiled_model import CompiledModel, LoadedProgram, LoadedVariant
from pwcc.compile.input_declarations import parse_declaration
from pwcc.compile.request import make_request
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.output import build_output
from pwcc.compile.tracing import Traced, trace_all

BUDGET_NS = 1000
ARGUMENTS = (1, 2, 4, 8)
LAYERS = 8  # submodules with weights: torch.compile guards them at every call, pwcc once at load
CALLS = 2000  # a block: long beside the clock, short beside a busy spell of the machine
NOTE = (
    f"A call's checks alone, the best of {{repeat}} blocks of {CALLS} calls in turns, less an empty call, "
    "under no_grad. pwcc: arity, kind, dtype, device, layout, sizes and shape predicates of every argument, "
    "by position; by name; with four sizes in turn; the first call of a size; and all that a compiled model "
    "checks, its weights' presence, autocast and grad mode included. torch.compile, dynamic: its guards "
    "evaluated on the call's frame, and a call with a backend that computes nothing; its guards cover the "
    f"{LAYERS} layers, too, which pwcc checks at load."
)


class Sum(nn.Module):
    """A stack of layers over the sum of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def apply_layers(self, xs: Sequence[Tensor]) -> Tensor:
        """Return what the layers make of the sum."""
        y = torch.stack(tuple(xs)).sum(0)
        for layer in self.layers:
            y = layer(y)
        return y


def module(count: int) -> nn.Module:
    """Return a module whose forward takes ``count`` tensors by name."""
    names = ", ".join(f"x{index}" for index in range(count))
    space: dict[str, Any] = {}
    exec(f"def forward(self, {names}):\n    return self.apply_layers(({names},))\n", space)
    made: nn.Module = type("Sum", (Sum,), {"forward": space["forward"]})().eval()
    return made


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=7).parse_args()
    repeat = 3 if given.quick else given.repeat
    rows: list[Sequence[str]] = []
    data: dict[str, object] = {}
    for count in ARGUMENTS[:2] if given.quick else ARGUMENTS:
        with torch.no_grad():
            measured = measure(count, given, repeat)
        empty = min(measured["nothing"])
        best = {name: min(values) - empty for name, values in measured.items()}
        ours, theirs = best["positional"], best["torch guards"]
        rows.append(
            (
                str(count),
                f"{ours:.0f}",
                f"{best['by name']:.0f}",
                f"{best['another size each call']:.0f}",
                f"{best['first of a size']:.0f}",
                f"{best['compiled model']:.0f}",
                f"{theirs:.0f}",
                f"{best['torch call']:.0f}",
                lab.times(lab.ratio(ours, theirs)),
                str(BUDGET_NS),
            )
        )
        data[str(count)] = measured
    lab.publish(
        given,
        "guards",
        (
            "tensor arguments",
            "pwcc ns",
            "by name ns",
            "sizes in turn ns",
            "first call of a size ns",
            "compiled model ns",
            "torch.compile guards ns",
            "torch.compile call ns",
            "pwcc to guards",
            "budget ns",
        ),
        rows,
        note=NOTE.format(repeat=repeat),
        data=data,
    )


def measure(count: int, given: argparse.Namespace, repeat: int) -> dict[str, list[float]]:
    """Return nanoseconds a call of each way, one figure a block."""
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    model = module(count).to(device)
    calls = [tuple(torch.ones(size, 8, device=device) for _ in range(count)) for size in (5, 7, 11, 13)]
    (item,) = trace_all(model, asked(model, count, device))
    binder = Binder(item.trace.calling, device)
    named = {f"x{index}": tensor for index, tensor in enumerate(calls[0])}
    loaded = compiled_of(model, binder, item, device)
    guards, whole = torch_ways(model, calls)
    turns = iter(())

    def in_turn() -> None:
        nonlocal turns
        args = next(turns, None)
        if args is None:
            turns = iter(calls)
            args = next(turns)
        binder.bind(args, {})

    ways: dict[str, Callable[[], object]] = {
        "positional": lambda: binder.bind(calls[0], {}),
        "by name": lambda: binder.bind((), named),
        "another size each call": in_turn,
        "first of a size": lambda: Binder.bind(_forgetting(binder), calls[0], {}),
        "compiled model": lambda: loaded.bind(calls[0], {}),
        "torch guards": guards,
        "torch call": whole,
        "nothing": lambda: None,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            found[name].append(block(way))
    return found


def compiled_of(model: nn.Module, binder: Binder, item: Traced, device: torch.device) -> CompiledModel:
    """Return a compiled model of one traced program, whose pieces are never run."""
    program = LoadedProgram(
        low=item.low,
        high=item.high,
        calling=item.trace.calling,
        bind=lambda *_: lambda arguments, sizes: (),
        variants=(LoadedVariant(item.low, item.high, False, ()),),
        binder=binder,
        output=build_output({"constant": None}),
    )
    manifest: Any = SimpleNamespace(observed=(), entry_key="", model=SimpleNamespace(identity="bench"))
    return CompiledModel(model, device, manifest, [program], lambda digest: b"")


def _forgetting(binder: Binder) -> Binder:
    binder.forget()
    return binder


def block(way: Callable[[], object]) -> float:
    """Return nanoseconds a call, over one block."""
    for _ in range(50):
        way()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        way()
    return (time.perf_counter_ns() - start) / CALLS


def torch_ways(
    model: nn.Module, calls: Sequence[tuple[Tensor, ...]]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return torch.compile's guards on the model's frame, and its call, over a backend that does nothing."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    torch._dynamo.reset()
    nothing = (torch.empty(0),)
    compiled: Any = torch.compile(model, backend=lambda graph, inputs: lambda *_: nothing, dynamic=True)
    for args in calls:
        compiled(*args)
    forward: Any = model.forward
    (entry,) = _debug_get_cache_entry_list(forward.__func__.__code__)
    frame = {"self": model, **{f"x{index}": tensor for index, tensor in enumerate(calls[0])}}
    manager: Any = entry.guard_manager
    if not manager.check(frame):
        raise SystemExit("torch.compile's guards do not hold for the call they were made of")
    return lambda: manager.check(frame), lambda: compiled(*calls[0])


def asked(model: nn.Module, count: int, device: torch.device) -> Any:
    """Return the request that the module is traced for."""
    return make_request(
        model,
        specs=tuple(parse_declaration(f"x{index}:float32[n,8]") for index in range(count)),
        sizes=(),
        max_tokens=512,
        device=device,
        identity="bench:guards",
        args={},
        splitting_ops=(),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=True,
    )


if __name__ == "__main__":
    main()
