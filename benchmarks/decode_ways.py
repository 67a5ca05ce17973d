"""One way to run a decode step over a paged KV cache, in a process of its own; ``lab.py`` starts it.

Every way decodes the same tokens of the same sequences over the same cache contents, so that outputs compare.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from ways import STEPS, Subject, answer, prime

CONTEXT = 128  # tokens of every sequence, the one that is decoded included
BLOCK = 16
# FULL graphs read a block table of this many tokens whatever the sequences have: the cost of one graph for all.
MAX_SEQ_LEN = 256
MAX_TOKENS = 8192
LISTED = 256  # the largest size of the capture cost's list: 1, 2, 4, 8, 16, ... 256


class Decode:
    """A model, its entry, a filled paged KV cache, and one decode batch per number of sequences.

    Without an entry (``compiled`` None) attention is the default kernel.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.subject = Subject(job)
        from pwcc.compile.ops.kv_layout import observe_kv_layout
        from pwcc.compile.ops.paged_attention import paged_attention

        self.model, self.device = self.subject.model, self.subject.device
        self.compiled: Any = None
        self.kernel: Any = paged_attention
        if job["store"]:
            import pwcc

            self.compiled = pwcc.load(self.model, cache_dir=job["store"])
            self.kernel = self.compiled.attention_kernel
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        layout = observe_kv_layout(lambda: self.model(one, one))
        if layout is None:
            raise RuntimeError("the model has no attention")
        blocks = max(STEPS) * -(-CONTEXT // BLOCK) + 1
        self.cache = layout.cache(num_blocks=blocks, block_size=BLOCK, device=self.device)
        generator = torch.Generator(self.device).manual_seed(1)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.normal_(generator=generator)
        self.kv_token_bytes = layout.block_bytes(BLOCK) // BLOCK
        self.batches = {n: self._batch(n, blocks) for n in job["sizes"] or STEPS}

    def _batch(self, n: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        from pwcc.compile.ops.blocks import BlockAllocator
        from pwcc.compile.ops.paged import AttentionMetadata

        allocator = BlockAllocator(num_blocks=blocks, block_size=BLOCK)
        sequences = [allocator.allocate(CONTEXT) for _ in range(n)]
        metadata = AttentionMetadata.build([(s, 1) for s in sequences], block_size=BLOCK, device=self.device)
        ids = torch.arange(7, 7 + n, device=self.device)
        return ids, torch.full((n,), CONTEXT - 1, device=self.device), metadata

    def measure(self, call: Callable[..., Any]) -> dict[str, object]:
        """Return step times and what the outputs were, by number of sequences."""
        found: dict[str, object] = {}
        for n, batch in self.batches.items():
            bound = functools.partial(call, *batch)
            for _ in range(3):  # whatever is compiled, recorded or instantiated at first
                output = bound()
            logits = output.float()
            found[str(n)] = {
                "norm": float(logits.norm()),
                "tokens": logits.argmax(-1).tolist(),
                "step_ms": 1e3 * statistics.median(self.subject.blocks(bound)),
                "issue_ms": 1e3 * statistics.median(self.subject.issues(bound)),
            }
        return found

    def with_context(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that sets the forward context around a model's."""
        from pwcc.compile.ops.forward_context import forward_context

        def call(ids: torch.Tensor, positions: torch.Tensor, metadata: Any) -> Any:
            with forward_context(metadata=metadata, cache=self.cache, kernel=self.kernel):
                return model(ids, positions)

        return call


def eager(job: dict[str, Any]) -> dict[str, object]:
    """Run the model as it is."""
    decode = Decode(job)
    return {"steps": decode.measure(decode.with_context(decode.model))}


def torch_compile(job: dict[str, Any]) -> dict[str, object]:
    """Compile every size for itself, as pwcc's static variants are; attention is opaque to the compiler."""
    decode = Decode(job)
    mode = None if job["turn"] == "default" else job["turn"]
    compiled = torch.compile(decode.model, fullgraph=True, dynamic=False, mode=mode)
    started = time.perf_counter()
    found = {"steps": decode.measure(decode.with_context(compiled))}
    return found | {"all_s": time.perf_counter() - started}


def pwcc_compile(job: dict[str, Any]) -> dict[str, object]:
    """Compile an entry; ``tuned`` with autotune."""
    subject = Subject(job)
    import pwcc

    report = pwcc.precompile(
        subject.model,
        cache_dir=job["store"],
        sizes=job["sizes"],
        max_tokens=MAX_TOKENS,
        jobs=job["jobs"],
        autotune=job["turn"] == "tuned",
    )
    return {"compile_s": subject.elapsed(), "hit": report.hit, "bytes": report.bytes}


def pwcc_steps(job: dict[str, Any]) -> dict[str, object]:
    """Run an entry in every mode; one that fails leaves its message."""
    decode = Decode(job)
    return {"load_ms": decode.compiled.receipt.total_ms} | {
        mode: _or_failure(functools.partial(_mode_steps, decode, mode, job["sizes"]))
        for mode in ("NONE", "PIECEWISE", "FULL")
    }


def _mode_steps(decode: Decode, mode: str, sizes: Sequence[int]) -> dict[str, object]:
    # The steps are decode steps, so the graphs of other batches are not needed.
    runner = _runner(decode, "FULL_DECODE_ONLY" if mode == "FULL" else mode, sizes=tuple(sizes))
    try:
        report = runner.capture()
        steps = decode.measure(runner)
        others = {other.value: count for other, count in runner.stats.by_mode.items() if other.value != mode}
        if any(others.values()):
            raise RuntimeError(f"expected every step in mode {mode}, got some in others: {others}")
        return {"steps": steps, "capture": report.to_json(), "stats": runner.stats.to_json()}
    finally:
        runner.close()


def capture_cost(job: dict[str, Any]) -> dict[str, object]:
    """Capture the default list up to 256, in every mode and with every option, one after another."""
    decode = Decode(job)
    kinds: Mapping[str, Mapping[str, Any]] = {
        "PIECEWISE": {},
        "FULL_DECODE_ONLY": {},
        "PIECEWISE, instantiated at first replay": {"instantiate": "lazy"},
        "FULL_DECODE_ONLY, instantiated at first replay": {"instantiate": "lazy"},
        "PIECEWISE, in the background": {"background": True},
        "FULL_AND_PIECEWISE": {},
    }
    return {
        name: _or_failure(functools.partial(_cost, decode, name.split(",")[0], options))
        for name, options in kinds.items()
    }


def _cost(decode: Decode, mode: str, options: Mapping[str, Any]) -> dict[str, object]:
    from pwcc.capture.size_list import default_sizes

    # Half the largest size: the list goes to twice the most sequences.
    sizes = default_sizes(max_num_seqs=LISTED // 2, max_tokens=MAX_TOKENS)
    runner = _runner(decode, mode, sizes=sizes, **options)
    try:
        before = free_bytes(decode.device)
        started = time.perf_counter()
        report = runner.capture()
        decode.subject.synchronize()
        returned = time.perf_counter() - started
        runner.join()
        decode.subject.synchronize()
        seconds = time.perf_counter() - started
        return {
            "sizes": len(sizes),
            "largest": max(sizes),
            "returned_s": returned,
            "seconds": seconds,
            "driver_bytes": before - free_bytes(decode.device),
            "report": report.to_json(),
        }
    finally:
        runner.close()
        if decode.device.type == "cuda":
            torch.cuda.empty_cache()


def _runner(decode: Decode, mode: str, *, sizes: tuple[int, ...], **options: Any) -> Any:
    from pwcc.capture.modes import CaptureMode
    from pwcc.capture.planning import plan_for
    from pwcc.capture.runner import GraphRunner

    plan = plan_for(
        decode.compiled,
        mode=CaptureMode(mode),
        sizes=sizes,
        max_num_seqs=max(sizes),
        max_seq_len=MAX_SEQ_LEN,
        on_failure="raise",
        **options,
    )
    return GraphRunner(decode.compiled, plan, cache=decode.cache, kernel=decode.kernel, outputs="static")


def floor(job: dict[str, Any]) -> dict[str, object]:
    """Measure the copy bandwidth, and how long reading every weight once takes at it."""
    decode = Decode(job)
    size = 4 * 2**30 if decode.device.type == "cuda" else 64 * 2**20
    source = torch.ones(size, dtype=torch.uint8, device=decode.device)
    target = torch.empty_like(source)
    copy = min(decode.subject.blocks(lambda: target.copy_(source), blocks=15))
    bandwidth = 2 * size / copy
    embeddings = {id(m.weight) for m in decode.model.modules() if isinstance(m, torch.nn.Embedding)}
    held = {id(p): p for p in decode.model.parameters()}
    # An embedding is read by row, unless it is the output projection too.
    tied = {id(m.weight) for m in decode.model.modules() if isinstance(m, torch.nn.Linear)}
    read = sum(p.numel() * p.element_size() for key, p in held.items() if key not in embeddings - tied)
    return {
        "bandwidth": bandwidth,
        "weight_bytes": sum(p.numel() * p.element_size() for p in held.values()),
        "read_bytes": read,
        "kv_token_bytes": decode.kv_token_bytes,
        "floor_ms": 1e3 * read / bandwidth,
    }


def free_bytes(device: torch.device) -> int:
    """Return the device's free memory as the driver counts it, after work and cached blocks are gone."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _or_failure(run: Callable[[], dict[str, object]]) -> dict[str, object]:
    try:
        return run()
    except Exception as error:  # noqa: BLE001  the other modes' figures are worth having
        return {"failure": f"{type(error).__name__}: {error}"[:600]}


FOUND: dict[str, Callable[[dict[str, Any]], dict[str, object]]] = {
    "prime": prime,
    "floor": floor,
    "decode eager": eager,
    "decode torch.compile": torch_compile,
    "pwcc compile": pwcc_compile,
    "decode pwcc": pwcc_steps,
    "capture cost": capture_cost,
}


if __name__ == "__main__":
    answer(FOUND)
