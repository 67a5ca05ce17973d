"""Every way to dispatch a call, in turns in one process; ``bench_dispatch.py`` starts it by ``lab.py``."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from dispatch_model import WIDTH, Stack

TOKENS = 4
ROUNDS = 40
CALLS = 200
Call = Callable[[], Any]


def prime(job: dict[str, Any]) -> dict[str, object]:
    """Import what any way imports."""
    import torch._dynamo
    import torch._inductor.compile_fx

    import pwcc.compile.api  # noqa: F401

    started = time.perf_counter()
    torch.ones(8, 8, device=job["device"]).mm(torch.ones(8, 8, device=job["device"]))
    return {"first_operation_s": time.perf_counter() - started}


@torch.no_grad()
def dispatch(job: dict[str, Any]) -> dict[str, object]:
    """Return the microseconds of a call by way, and of the compiled graph alone."""
    import pwcc

    if job["device"] == "cpu":
        torch.set_num_threads(1)
    layers = job["model"]["args"]["layers"]
    x = torch.randn(TOKENS, WIDTH, device=job["device"])
    made: dict[str, Any] = {"eager": _stack(Stack, layers, job)}
    guarded = _stack(Stack, layers, job)
    made["torch.compile"] = torch.compile(guarded, fullgraph=True)
    without: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    made["no guards"] = torch.compile(_stack(Stack, layers, job), fullgraph=True, options=without)
    with tempfile.TemporaryDirectory() as cache:
        options = {"max_tokens": 64, "cache_dir": cache, "splitting_ops": (), "first_call": "wait"}
        for level in (2, 3):
            decorated = pwcc.support_compile(level=level, **options)(type(f"Level{level}", (Stack,), _home()))
            made[f"level {level}"] = _stack(decorated, layers, job)
        # Not dynamic=True, which would make every float attribute an input of the graph.
        torch._dynamo.mark_dynamic(x, 0)
        wanted = made["eager"](x)
        for call in made.values():
            torch.testing.assert_close(call(x), wanted)
        calls: dict[str, Call] = {name: _bound(call, x) for name, call in made.items()}
        calls["graph alone"] = _alone(made["level 3"], x, cache)
        times = _in_turns(calls, job["device"])
    return {
        "calls": {name: {"us": 1e6 * statistics.median(found)} for name, found in times.items()},
        "guards": _guards(guarded, x),
        "parameters": sum(1 for _ in guarded.parameters()),
        "state": str(made["level 3"].compile_state.phase.value),
    }


def _home() -> dict[str, object]:
    return {"__module__": Stack.__module__}


def _stack(cls: Any, layers: int, job: dict[str, Any]) -> Any:
    return cls(layers).to(job["device"]).eval().requires_grad_(False)


def _bound(call: Any, x: torch.Tensor) -> Call:
    return lambda: call(x)


def _alone(model: Any, x: torch.Tensor, cache: str) -> Call:
    """Return the compiled graph with its arguments in place: what no way of dispatching can go below."""
    import pwcc

    compiled = pwcc.load(model, cache_dir=cache)
    program = compiled.programs[0]
    tensors, sizes = program.binder.bind((x,), {})
    run = program.select(TOKENS)
    return lambda: run(tensors, sizes)


def _in_turns(calls: dict[str, Call], device: str) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(50):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            if device != "cpu":
                torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - started) / CALLS)
    return times


def _guards(model: torch.nn.Module, x: torch.Tensor) -> int:
    """Count what Dynamo guards of this call."""
    from pwcc.compile.torch_private import dynamo

    return len(list(dynamo.fullgraph_capture(model.forward, (x,), {}).guards))


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    print(json.dumps({"prime": prime, "dispatch": dispatch}[job["way"]](job)))
