"""Random batches through a GraphRunner against the eager model, on one KV cache; resumable.

python benchmarks/random_batches.py --model llama-8b --arg layers=2 --batches 10000 --state F [--budget S]
python benchmarks/random_batches.py --smoke

Every batch runs eagerly, then what it wrote to the KV cache is made NaN, then it runs through the runner.
Checked: logits row by row, the keys and values written, that nothing else in the cache changed, that the logits
of the batch before are still what they were, and that memory does not grow. With --state, a second run goes on
where the first one ended, be it by --budget. Exit code 1 if a check failed, or batches are left to do.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from traffic import Batch, Traffic

import pwcc
from pwcc.cache.errors import CacheMiss, NotAStore, PwccError, UsageError
from pwcc.capture.modes import parse_mode
from pwcc.capture.planning import plan_for
from pwcc.capture.runner import GraphRunner
from pwcc.capture.sizes import parse_sizes
from pwcc.cli.model_options import find_device
from pwcc.compile.check import MODEL_TOLERANCE
from pwcc.compile.model_ref import ModelRef, build, parse_args
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.kv_layout import observe_kv_layout
from pwcc.compile.ops.paged import PagedKVCache

CHUNK = 100  # batches with traffic of their own
MAX_FAILURES = 20
# Bytes by which memory may grow after a process's first chunk. Every tensor is counted in ``allocated``. The
# driver also loads kernels and workspaces when they are first needed, in whichever chunk that is.
SLACK = {"allocated": 2**20, "driver": 64 * 2**20}


class Soak:
    """One model, eager and captured, over one KV cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = find_device(options.device)
        ref = ModelRef.parse(options.model)
        self.model = build(
            ref, args=parse_args(options.arg), device=self.device, weights="random", seed=options.seed
        ).module
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        layout = observe_kv_layout(lambda: self.model(one, one))
        if layout is None:
            raise UsageError("the model never calls pwcc::attention")
        self.block_size = 16
        self.num_blocks = options.num_blocks
        self.cache: PagedKVCache = layout.cache(
            num_blocks=self.num_blocks, block_size=self.block_size, device=self.device
        )
        self.compiled = loaded(self.model, options)
        limit = self.compiled.manifest.max_tokens
        plan = plan_for(
            self.compiled,
            mode=parse_mode(options.mode),
            sizes=None if options.sizes is None else parse_sizes(options.sizes, max_tokens=limit),
            max_num_seqs=options.max_num_seqs,
            max_seq_len=options.max_seq_len,
            on_failure="raise",
        )
        self.runner = GraphRunner(self.compiled, plan, cache=self.cache, debug=options.debug)
        self.report = self.runner.capture()
        self.options = options
        # Some batches are larger than every graph: the dynamic variant serves those.
        self.max_tokens = min(limit, max(plan.sizes, default=64) * 5 // 4 + 1)
        self.tolerance = MODEL_TOLERANCE[str(layout.dtype).removeprefix("torch.")]
        self.vocab = next(m for m in self.model.modules() if isinstance(m, torch.nn.Embedding)).num_embeddings
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def chunk(self, index: int, count: int) -> dict[str, Any]:
        """Run one chunk over an empty cache; return its counts, worst errors and failures."""
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.zero_()
        traffic = Traffic(
            seed=f"{self.options.seed}-{index}",
            blocks=BlockAllocator(num_blocks=self.num_blocks, block_size=self.block_size),
            vocab=self.vocab,
            max_tokens=self.max_tokens,
            max_num_seqs=self.options.max_num_seqs,
            max_seq_len=self.options.max_seq_len,
            device=self.device,
        )
        found: dict[str, Any] = {"batches": count, "kinds": collections.Counter(), "failures": []}
        before = self.modes()
        worst = {"logits": 0.0, "keys and values": 0.0}
        for number in range(count):
            batch = traffic.next()
            for what, error in self.compare(batch):
                if what in worst:
                    worst[what] = max(worst[what], error if error == error else float("inf"))
                if not error <= self.tolerance:
                    which = f"chunk {index} batch {number}, {batch.kind} of {len(batch.ids)} tokens"
                    found["failures"].append(f"{which}: {what} {error:.3g}")
            found["kinds"][batch.kind] += 1
            if len(found["failures"]) >= MAX_FAILURES:
                break
        modes = {mode: count - before[mode] for mode, count in self.modes().items()}
        return found | {"modes": modes, "worst": worst, "memory": self.memory()}

    def modes(self) -> dict[str, int]:
        """Return the runner's calls by mode since it was made."""
        return {mode.value: count for mode, count in self.runner.stats.by_mode.items()}

    @torch.inference_mode()
    def compare(self, batch: Batch) -> Iterator[tuple[str, float]]:
        """Yield each check and its error: 0 or infinity where there is no degree."""
        slots = batch.metadata.slot_mapping
        state = [tensor.flatten(0, 1) for tensor in (*self.cache.keys, *self.cache.values)]
        before = [tensor.clone() for tensor in state]
        with forward_context(metadata=batch.metadata, cache=self.cache):
            wanted = self.model(batch.ids, batch.positions)
        written = [tensor[slots] for tensor in state]
        for tensor in state:
            tensor[slots] = float("nan")  # whatever the runner does not write shows
        got = self.runner(batch.ids, batch.positions, batch.metadata)
        yield "logits", row_error(got, wanted)
        errors = [
            row_error(tensor[slots].flatten(1), old.flatten(1))
            for tensor, old in zip(state, written, strict=True)
        ]
        far = next((error for error in errors if error != error), max(errors))  # max() may pass over a NaN
        yield "keys and values", far
        same = True
        for tensor, old in zip(state, before, strict=True):
            old[slots] = tensor[slots]
            old[: self.block_size] = tensor[: self.block_size]  # the null block, where padding is written
            same = same and torch.equal(old, tensor)
        yield "the rest of the cache", 0.0 if same else float("inf")
        if self.kept is not None:
            yield "the logits of the batch before", 0.0 if torch.equal(*self.kept) else float("inf")
        self.kept = (got, got.clone())

    def memory(self) -> dict[str, int]:
        """Return what is allocated, reserved and gone from the driver's free memory, in bytes."""
        self.kept = None
        if self.device.type != "cuda":
            return {}
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "driver": total - free,
        }


def row_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest ``||got - wanted|| / ||wanted||`` of a row; NaN where there is one."""
    far = (got.float() - wanted.float()).norm(dim=1) / wanted.float().norm(dim=1).clamp(min=1e-6)
    return float(far.max())


def loaded(model: torch.nn.Module, options: argparse.Namespace) -> Any:
    """Load the model's entry; compile it first where there is none."""
    try:
        return pwcc.load(model, cache_dir=options.cache_dir)
    except (CacheMiss, NotAStore) as error:
        if type(error) not in (CacheMiss, NotAStore):
            raise
    sizes = parse_sizes(options.static_sizes, max_tokens=8192)
    pwcc.precompile(model, cache_dir=options.cache_dir, sizes=sizes)
    return pwcc.load(model, cache_dir=options.cache_dir)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the chunks that the state lacks, within the budget; return the state with its summary."""
    asked = {
        name: getattr(options, name) for name in ("model", "arg", "mode", "seed", "batches", "chunk", "sizes")
    }
    state: dict[str, Any] = {"asked": asked, "chunks": {}}
    if options.state is not None and options.state.is_file():
        state = json.loads(options.state.read_text())
        if state["asked"] != asked:
            raise UsageError(
                f"{options.state} is of another run: {state['asked']}",
                hint="remove it, or give another --state",
            )
    todo = [i for i in range(-(-options.batches // options.chunk)) if str(i) not in state["chunks"]]
    soak = Soak(options) if todo else None
    end = time.monotonic() + options.budget
    own: list[dict[str, int]] = []
    for index in todo:
        if soak is None or (own and time.monotonic() > end):
            break
        done = soak.chunk(index, min(options.chunk, options.batches - index * options.chunk))
        own.append(done["memory"])
        state["chunks"][str(index)] = done
        write(options.state, state)
        print(f"# chunk {index}: {brief(done)}", file=sys.stderr, flush=True)
        if done["failures"]:
            break
    if soak is not None:
        state.setdefault("growth", []).append(growth(own))
        soak.runner.close()
    state["summary"] = summary(state, options.batches)
    write(options.state, state)
    return state


def growth(own: list[dict[str, int]]) -> dict[str, int]:
    """Return by how much a process's memory grew from the end of its first chunk to the end of its last."""
    return {name: own[-1][name] - own[0][name] for name in own[0]} if own else {}


def summary(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """Return the totals of every chunk that is done."""
    chunks = list(state["chunks"].values())
    done = sum(chunk["batches"] for chunk in chunks)
    grown = {name: max((g.get(name, 0) for g in state.get("growth", [])), default=0) for name in SLACK}
    failures = [failure for chunk in chunks for failure in chunk["failures"]]
    if any(value > SLACK[name] for name, value in grown.items()):
        failures.append(f"memory grew: {grown}")
    return {
        "done": done,
        "of": batches,
        "modes": total(chunk["modes"] for chunk in chunks),
        "kinds": total(chunk["kinds"] for chunk in chunks),
        "worst": {name: max(c["worst"][name] for c in chunks) for name in chunks[0]["worst"]} if chunks else {},
        "grown_bytes": grown,
        "failures": failures,
        "ok": done == batches and not failures,
    }


def total(counts: Iterator[dict[str, int]]) -> dict[str, int]:
    """Add counts up."""
    found: collections.Counter[str] = collections.Counter()
    for count in counts:
        found.update(count)
    return dict(found)


def brief(chunk: dict[str, Any]) -> str:
    """Return a chunk in one line."""
    worst = ", ".join(f"{name} {value:.2g}" for name, value in chunk["worst"].items())
    return f"{chunk['modes']}, worst {worst}, {len(chunk['failures'])} failures"


def write(path: Path | None, state: dict[str, Any]) -> None:
    """Write the state whole or not at all."""
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(state, indent=1))
        part.replace(path)


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cache-dir", type=Path, help="the entry's cache; compiled into if it holds none")
    parser.add_argument("--static-sizes", default="1,8", help="of an entry that is compiled")
    parser.add_argument("--device")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--mode", default="FULL_AND_PIECEWISE")
    parser.add_argument("--sizes", help="capture sizes; default: the default list")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--debug", action="store_true", help="check addresses at every replay")
    parser.add_argument("--state", type=Path, help="progress; a run with the same file goes on")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="batches between two writes of the state")
    budget = "seconds after capturing; at least one chunk is run, and the one begun then is finished"
    parser.add_argument("--budget", type=float, default=float("inf"), help=budget)
    parser.add_argument("--smoke", action="store_true", help="50 batches of llama-tiny on the CPU")
    return parser


SMOKE = {
    "model": "llama-tiny",
    "arg": ["layers=2"],
    "device": "cpu",
    "batches": 50,
    "max_num_seqs": 16,
    "num_blocks": 128,
    "max_seq_len": 64,
}


def main() -> int:
    """Run; return the exit code."""
    parser = parser_of_options()
    if parser.parse_args().smoke:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pwcc-soak-") as folder:
        options.cache_dir = options.cache_dir or Path(folder)
        try:
            state = run(options)
        except PwccError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    print(json.dumps(state["summary"], indent=1))
    return 0 if state["summary"]["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
