"""Provoke what must never go unnoticed in captured graphs, and show what each says.

python benchmarks/capture_safety.py --model llama-8b --arg layers=2 [--cache-dir DIR] [--device cuda]

A weight that moved before the first replay and after it, an input buffer that is another one, a capture after
the plan was done, memory that runs out while capturing (policy ``raise``, then ``fallback``). On a CPU the fake
backend and an allocator that is made to refuse stand in. Exit code 1 if an error did not come, or the runner is
not right afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from random_batches import loaded, row_error
from traffic import Traffic

from pwcc.cache.errors import CaptureLockedError, CaptureMemoryError, MovedInputError, PwccError
from pwcc.capture.backend import GraphBackend, backend_for
from pwcc.capture.fake import FakeBackend
from pwcc.capture.modes import CaptureMode
from pwcc.capture.plan import CapturePlan
from pwcc.capture.planning import plan_for
from pwcc.capture.runner import GraphRunner
from pwcc.cli.model_options import find_device
from pwcc.compile.check import MODEL_TOLERANCE
from pwcc.compile.model_ref import ModelRef, build, parse_args
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.kv_layout import observe_kv_layout

SIZES = (1, 2, 4, 8, 64, 256)
FITTING = 8  # the largest size that the stand-in allocator grants
ROOM = 96  # MiB left on a GPU: of llama-8b's width small sizes fit, the logits of the largest do not


class ScarceFake(FakeBackend):
    """A fake backend whose allocator can refuse what is recorded for more than ``FITTING`` tokens."""

    scarce = False

    def record(self, call: Callable[..., Any], inputs: Any, **options: Any) -> Any:
        """Record, or raise what PyTorch's allocator raises."""
        tokens = max(
            (t.shape[0] for t in inputs if isinstance(t, torch.Tensor) and t.dtype == torch.int64), default=0
        )
        if self.scarce and tokens > FITTING:  # token ids are the first piece's
            raise torch.OutOfMemoryError(f"made to refuse {tokens} tokens")
        return super().record(call, inputs, **options)


class Scene:
    """A model, its entry and a KV cache, and runners over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = find_device(options.device)
        self.room = options.room * 2**20
        self.model = build(
            ModelRef.parse(options.model), args=parse_args(options.arg), device=self.device, weights="random"
        ).module
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        layout = observe_kv_layout(lambda: self.model(one, one))
        if layout is None:
            raise RuntimeError("the model never calls pwcc::attention")
        self.compiled = loaded(self.model, options)
        self.cache = layout.cache(num_blocks=512, block_size=16, device=self.device)
        self.tolerance = MODEL_TOLERANCE[str(layout.dtype).removeprefix("torch.")]
        self.traffic = Traffic(
            seed="safety",
            blocks=BlockAllocator(num_blocks=512, block_size=16),
            vocab=100,
            max_tokens=8,
            max_num_seqs=8,
            max_seq_len=64,
            device=self.device,
        )
        self.backend = backend_for(self.device) if self.device.type == "cuda" else ScarceFake()

    def plan(self, **options: Any) -> CapturePlan:
        """Return a plan of every demonstration's sizes."""
        given = {"mode": CaptureMode.PIECEWISE, "on_failure": "raise"} | options
        return plan_for(self.compiled, sizes=SIZES, max_num_seqs=8, max_seq_len=64, **given)

    def runner(self, plan: CapturePlan, **options: Any) -> GraphRunner:
        """Return a runner, nothing captured."""
        backend: GraphBackend = self.backend
        return GraphRunner(self.compiled, plan, cache=self.cache, backend=backend, **options)

    @torch.inference_mode()
    def right(self, runner: GraphRunner, *, persistent: torch.Tensor | None = None) -> bool:
        """Tell whether a batch through the runner equals eager."""
        batch = self.traffic.next()
        ids = batch.ids
        if persistent is not None:
            persistent[: len(ids)] = ids
            ids = persistent[: len(ids)]
        got = runner(ids, batch.positions, batch.metadata)
        with forward_context(metadata=batch.metadata, cache=self.cache):
            wanted = self.model(batch.ids, batch.positions)
        return row_error(got, wanted) <= self.tolerance

    @contextmanager
    def little_memory(self) -> Iterator[None]:
        """Leave ``room`` bytes to PyTorch's allocator on a GPU; make the fake one refuse on a CPU."""
        if isinstance(self.backend, ScarceFake):
            self.backend.scarce = True
            yield
            self.backend.scarce = False
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(self.device)[1]
        granted = torch.cuda.memory_reserved(self.device) + self.room
        torch.cuda.set_per_process_memory_fraction(granted / total, self.compiled.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.compiled.device)


def expect(kind: type[PwccError], run: Callable[[], object], *words: str) -> dict[str, Any]:
    """Run what must fail; return what it said, and whether that is the right error with these words."""
    try:
        run()
    except PwccError as error:
        said = str(error)
        return {"error": type(error).__name__, "said": said} | {
            "ok": isinstance(error, kind) and all(word in said for word in words)
        }
    return {"error": None, "said": "nothing was raised", "ok": False}


def moved_weight(scene: Scene, *, first: bool) -> dict[str, Any]:
    """Replace a weight's memory after capture, before the first replay or (debug mode) after some."""
    runner = scene.runner(scene.plan(), debug=not first)
    runner.capture()
    fine = first or scene.right(runner)
    name, weight = list(scene.model.named_parameters())[-1]
    held = weight.data
    weight.data = held.clone()
    found = expect(MovedInputError, lambda: scene.right(runner), name)
    weight.data = held
    found["ok"] = found["ok"] and fine and scene.right(runner)  # back where it was captured
    runner.close()
    return found


def moved_input(scene: Scene) -> dict[str, Any]:
    """Pass another tensor than the persistent buffer that was captured."""
    buffer = torch.zeros(max(SIZES), dtype=torch.int64, device=scene.device)
    runner = scene.runner(scene.plan(), inputs={"input_ids": buffer})
    runner.capture()
    fine = scene.right(runner, persistent=buffer)
    found = expect(PwccError, lambda: scene.right(runner), "input_ids")
    found["ok"] = found["ok"] and fine and scene.right(runner, persistent=buffer)
    runner.close()
    return found


def after_lock(scene: Scene) -> dict[str, Any]:
    """Capture once more when the plan is done."""
    runner = scene.runner(scene.plan())
    runner.capture()
    found = expect(CaptureLockedError, runner.capture)
    found["ok"] = found["ok"] and scene.right(runner)
    runner.close()
    return found


def out_of_memory(scene: Scene) -> dict[str, Any]:
    """Run out of memory: with advice, then by the next mode."""
    runner = scene.runner(scene.plan())
    with scene.little_memory():
        found = expect(CaptureMemoryError, runner.capture, "out of memory")
    # What was captured before the failure is gone, and the same runner captures once there is memory.
    found["ok"] = found["ok"] and scene.right(runner)
    runner.close()
    return found


def out_of_memory_fallback(scene: Scene) -> dict[str, Any]:
    """Run out of memory, and serve what was captured and everything else without graphs."""
    runner = scene.runner(scene.plan(on_failure="fallback"))
    with scene.little_memory():
        report = runner.capture()
    failed = sorted({row.measured.size for row in report.failed})
    captured = sorted({row.measured.size for row in report.rows if row.error is None})
    said = report.failed[0].error if report.failed else "nothing failed"
    fine = all(scene.right(runner) for _ in range(10))
    runner.close()
    return {"said": said, "failed": failed, "captured": captured, "ok": bool(failed) and fine}


def main() -> int:
    """Run every demonstration; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cache-dir", type=Path, help="the entry's cache; compiled into if it holds none")
    parser.add_argument("--static-sizes", default="1", help="of an entry that is compiled")
    parser.add_argument("--device")
    parser.add_argument("--room", type=int, default=ROOM, help="MiB left on a GPU that is to run out of memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pwcc-safety-") as folder:
        options.cache_dir = options.cache_dir or Path(folder)
        scene = Scene(options)
        found = {
            "weight moved before the first replay": moved_weight(scene, first=True),
            "weight moved later, debug mode": moved_weight(scene, first=False),
            "another input buffer": moved_input(scene),
            "capture after the lock": after_lock(scene),
            "out of memory, policy raise": out_of_memory(scene),
            "out of memory, policy fallback": out_of_memory_fallback(scene),
        }
    print(json.dumps(found, indent=1))
    return 0 if all(one["ok"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
