"""Serve a decoder over HTTP: continuous batching, paged KV cache, sealed pieces, captured graphs.

pip install '.[serve]'
pwcc compile --model llama-tiny --cache-dir warm
python examples/serve.py --model llama-tiny --cache-dir warm --port 8000
curl -s localhost:8000/generate -d '{"token_ids": [1, 2, 3], "max_new_tokens": 8}'

--model takes what `pwcc compile --model` takes, a Hugging Face directory too; text prompts need its tokenizer.
Without --cache-dir the model runs eagerly. `--check 20` answers 20 random prompts at once, compares every token
with eager, and ends. On a CPU the graphs are of the fake backend, which shows how they behave, not how fast.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from serving.checking import Verdict, compare_with_eager
from serving.engine import Engine
from serving.metrics import engine_metrics, receipt_metrics
from serving.model_step import Forward, ModelStep, uncaptured, vocabulary
from serving.scheduler import Scheduler
from torch import nn

import pwcc
from pwcc.cache.errors import PwccError, UsageError, install
from pwcc.cache.store import Store
from pwcc.capture.backend import backend_for
from pwcc.capture.checks import memory_for
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import CapturePlan
from pwcc.capture.plan_store import load_plan
from pwcc.capture.planning import plan_for
from pwcc.capture.runner import GraphRunner
from pwcc.capture.sizes import parse_sizes
from pwcc.cli.model_options import find_device
from pwcc.compile.compiled_model import CompiledModel
from pwcc.compile.model_ref import ModelKind, ModelRef, Weights, build, parse_args
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.kv_layout import observe_kv_layout

MAX_PORT = 65535


@dataclass
class Ready:
    """A model that can serve: its step, and what was done to get there."""

    module: nn.Module
    step: ModelStep
    facts: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    graph_metrics: Callable[[], str] = str


def prepare(options: argparse.Namespace) -> Ready:
    """Build the model, load its entry, make the KV cache, capture."""
    device = find_device(options.device)
    ref = ModelRef.parse(options.model)
    weights: Weights = options.weights or ("random" if ref.kind is ModelKind.BUILTIN else "real")
    started = time.perf_counter()
    built = build(
        ref,
        args=parse_args(options.arg),
        device=device,
        dtype=options.dtype,
        weights=weights,
        seed=options.seed,
    )
    module = built.module
    seconds = {"build": time.perf_counter() - started}
    one = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        layout = observe_kv_layout(lambda: module(one, one))
    if layout is None:
        raise UsageError("the model never calls pwcc::attention", hint="this example serves decoders")
    facts: dict[str, Any] = {"model": built.identity, "weights": built.weights, "device": str(device)}
    facts["kv_bytes"] = options.num_blocks * layout.block_bytes(options.block_size)
    with memory_for(f"a KV cache of {facts['kv_bytes']} bytes", hint="lower --num-blocks or --block-size"):
        cache = layout.cache(num_blocks=options.num_blocks, block_size=options.block_size, device=device)
    if options.cache_dir is None:
        step = ModelStep(uncaptured(module, cache), options.block_size, device)
        return Ready(module, step, {**facts, "load": None, "capture": None}, seconds)

    compiled = pwcc.load(module, cache_dir=options.cache_dir, profile=options.profile)
    seconds["load"] = compiled.receipt.total_ms / 1e3
    facts |= {"entry": compiled.manifest.entry_key, "load": compiled.receipt.to_json()}
    plan = find_plan(compiled, options)
    backend = backend_for(device, options.backend)
    runner = GraphRunner(compiled, plan, cache=cache, outputs="static", backend=backend)
    started = time.perf_counter()
    report = runner.capture()
    seconds["capture"] = time.perf_counter() - started
    for row in report.failed:
        say(f"not captured: {row.measured.mode} {row.measured.size}: {row.error}")
    facts |= {"mode": str(runner.plan.mode.value), "backend": backend.name, "capture": report.to_json()}
    forward: Forward = runner
    return Ready(
        module,
        ModelStep(forward, options.block_size, device),
        facts,
        seconds,
        compiled.manifest.max_tokens,
        runner.stats.prometheus,
    )


def find_plan(compiled: CompiledModel, options: argparse.Namespace) -> CapturePlan:
    """Return the plan that `pwcc capture` saved under a name, or make one; a saved one sets the limits."""
    if options.plan is not None:
        saved = load_plan(Store.open(options.cache_dir), compiled.manifest.entry_key, options.plan)
        if saved is None:
            raise UsageError(
                f"no plan {options.plan!r} is saved for entry {compiled.manifest.entry_key}",
                hint="pwcc capture saves one; leave --plan out to make one now",
            )
        options.max_num_seqs, options.max_tokens = saved.max_num_seqs, saved.max_tokens
        options.max_seq_len = saved.max_seq_len
        return saved
    limit = min(options.max_tokens, compiled.manifest.max_tokens)
    plan = plan_for(
        compiled,
        mode=CaptureMode(options.mode),
        sizes=None if options.sizes is None else parse_sizes(options.sizes, max_tokens=limit),
        max_num_seqs=options.max_num_seqs,
        max_tokens=limit,
        max_seq_len=options.max_seq_len,
    )
    for note in plan.notes:
        say(f"capture plan: {note}")
    return plan


def start(ready: Ready, options: argparse.Namespace) -> Engine:
    """Start the engine's thread."""
    most = min(options.max_tokens, ready.max_tokens or options.max_tokens)
    scheduler = Scheduler(
        BlockAllocator(num_blocks=options.num_blocks, block_size=options.block_size),
        vocab=vocabulary(ready.module),
        max_num_seqs=min(options.max_num_seqs, most),
        max_tokens=most,
        max_waiting=options.max_waiting,
        max_seq_len=options.max_seq_len,
    )
    return Engine(ready.step, scheduler)


def check(ready: Ready, options: argparse.Namespace) -> int:
    """Answer random prompts, all at once, and compare every token with eager; return the exit code."""
    options.max_waiting = max(options.max_waiting, options.check)
    engine = start(ready, options)
    rng = random.Random(options.seed)
    vocab, longest = vocabulary(ready.module), min(64, options.max_seq_len // 2)
    lengths = [rng.randint(1, longest) for _ in range(options.check)]
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    with ThreadPoolExecutor(options.check) as pool:
        answers = list(pool.map(lambda prompt: engine.generate(prompt, options.new_tokens), prompts))
    engine.close()
    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.end.reason != "length":
            print(f"a request ended with {answer.end.reason}: {answer.end.message}", file=sys.stderr)
            return 1
        verdict += compare_with_eager(ready.module, prompt, answer.tokens, ready.step.device)
    load = engine.load()
    print(f"{verdict}; {load.steps} steps, {load.preempted} preempted")
    return 0 if verdict.ok else 1


def serve(ready: Ready, options: argparse.Namespace) -> int:
    """Serve until SIGTERM or an interrupt; requests that run then are finished first."""
    try:
        import uvicorn
        from serving.http_api import Api
    except ModuleNotFoundError as error:
        raise UsageError(f"serving needs {error.name}", hint=install("serve")) from None

    listener = listen(options.host, options.port)
    engine = start(ready, options)

    def metrics() -> str:
        return ready.graph_metrics() + engine_metrics(engine.load()) + receipt_metrics(**ready.seconds)

    tokenizer, ends = find_tokenizer(options.model)
    api = Api(engine, facts=ready.facts, metrics=metrics, tokenizer=tokenizer, stop=ends)
    server = uvicorn.Server(
        uvicorn.Config(
            api.app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=options.shutdown_seconds
        )
    )
    # uvicorn ends its loop at SIGTERM and then raises the signal again, for whoever had handled it before.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    host, port = listener.getsockname()[:2]
    say(f"serving {ready.facts['model']} on http://{host}:{port}")
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        finished = engine.close(options.shutdown_seconds)
        listener.close()
    say("ended" if finished else "ended; requests that took too long were cancelled")
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Bind before the engine starts, so that a port in use is one clear message."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another --port; 0 takes a free one",
        ) from error


def find_tokenizer(model: str) -> tuple[Any, tuple[int, ...]]:
    """Return the tokenizer of a Hugging Face directory and its end tokens; None where there is none."""
    if not (Path(model) / "tokenizer_config.json").is_file():
        return None, ()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer, () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def say(text: str) -> None:
    """Print a word on stderr."""
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the model")
    parser.add_argument("--cache-dir", type=Path, help="a directory that pwcc compile filled; eager without it")
    parser.add_argument("--profile", help="take the entry of this name")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--weights", choices=("random", "real"), help="default: random for built-in models")
    parser.add_argument("--seed", type=int, default=0)
    modes = [mode.value for mode in CaptureMode]
    parser.add_argument("--mode", default=CaptureMode.FULL_AND_PIECEWISE.value, choices=modes)
    parser.add_argument("--backend", choices=("cuda", "fake"))
    parser.add_argument("--sizes", help="capture sizes such as 1,2,4-8; default: the default list")
    parser.add_argument("--plan", metavar="NAME", help="the plan that pwcc capture saved; sets the limits too")
    limits = {
        "max-num-seqs": (16, "requests that run at once"),
        "max-tokens": (256, "tokens of one step"),
        "max-seq-len": (512, "tokens of one request, prompt and answer"),
        "max-waiting": (64, "requests that may wait; more get 429"),
        "num-blocks": (512, "KV blocks; block 0 is not used"),
        "block-size": (16, "tokens of a KV block"),
        "shutdown-seconds": (30, "how long running requests may take after SIGTERM"),
        "new-tokens": (16, "tokens per prompt of --check"),
        "check": (0, "answer this many random prompts, compare with eager, and end"),
    }
    for name, (default, text) in limits.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--json", action="store_true", help="print the receipts of load and capture, then go on"
    )
    options = parser.parse_args(argv)
    for name in limits:
        least = {"check": 0, "num-blocks": 2}.get(name, 1)
        if getattr(options, name.replace("-", "_")) < least:
            parser.error(f"--{name}: expected at least {least}")
    if not 0 <= options.port <= MAX_PORT:
        parser.error(f"--port: expected 0 to {MAX_PORT}")
    return options


def main() -> int:
    """Run; return the exit code."""
    options = parse()
    try:
        ready = prepare(options)
        if options.json:
            print(json.dumps(ready.facts, indent=1), flush=True)
        return check(ready, options) if options.check else serve(ready, options)
    except PwccError as error:
        say(f"error: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
