"""What the pass fix_functionalization saves a model whose graph writes a KV cache that stacks its layers.

python benchmarks/bench_functionalization.py --device cpu|cuda [--quick]

One model, compiled whole with --passes none and with the default passes; both in turns, in one process.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lab
import torch
from bench_ranges import turns
from torch import Tensor, nn
from torch.nn import functional as F

import pwcc
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import Store
from pwcc.compile.compiled_model import CompiledModel

LAYERS, HEADS, WIDTH = 4, 8, 128
WAYS = ("none", "default")
NOTE = (
    f"{LAYERS} layers, {HEADS} key heads of {WIDTH}; keys and values in `[layers, 2, slots, heads, width]`, "
    "written by `cache[layer, 0, slots] = k`, read by torch's attention; the graph is one piece. "
    "Allocated: the buffers that are as large as one layer's keys, or larger; they and the writes are those of "
    "all programs of the entry, of which one is for 1 token alone. Step: medians, in turns. In brackets: "
    "without the pass."
)


class Decoder(nn.Module):
    """Attention layers over a cache that belongs to the graph."""

    cache: Tensor

    def __init__(self, slots: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(LAYERS, 2, slots, HEADS, WIDTH, dtype=dtype))
        hidden = HEADS * WIDTH
        self.qkv = nn.ModuleList(nn.Linear(hidden, 3 * hidden, bias=False, dtype=dtype) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, hidden]`` to ``[tokens, hidden]``; tokens go to the first slots."""
        slots = torch.arange(x.shape[0], device=x.device)
        for layer, project in enumerate(self.qkv):
            q, k, v = project(x).view(-1, 3, HEADS, WIDTH).unbind(1)
            self.cache[layer, 0, slots] = k
            self.cache[layer, 1, slots] = v
            keys, values = (self.cache[layer, i].transpose(0, 1) for i in (0, 1))
            x = x + F.scaled_dot_product_attention(q.transpose(0, 1), keys, values).transpose(0, 1).flatten(1)
        return x


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=1).parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)  # on few shared cores a second thread measures whoever else is there
    rows: list[Sequence[str]] = []
    data: dict[str, object] = {}
    slots, counts = cases(given)
    made = {way: compiled(slots, max(counts), given.device, way) for way in WAYS}
    for tokens in counts:
        figures = measure(made, tokens, given.device)
        data[f"{slots} slots, {tokens} tokens"] = figures
        rows.append((str(slots), str(tokens), *(show(figures, name) for name in SHOWN)))
        print(*rows[-1], flush=True)
    columns = ("slots", "tokens", "writes in place", "allocated MiB", "peak MiB above weights", "step us")
    lab.publish(given, "functionalization", columns, rows, note=NOTE, data=data)


SHOWN = ("matches", "allocated_mib", "peak_mib", "step_us")


def show(figures: dict[str, dict[str, float]], name: str) -> str:
    """Return a figure with the pass, and in brackets the one without."""
    with_, without = (figures[way].get(name) for way in ("default", "none"))
    if with_ is None or without is None:
        return "-"
    return lab.show(with_) if name == "matches" else f"{lab.show(with_)} ({lab.show(without)})"


def cases(given: argparse.Namespace) -> tuple[int, tuple[int, ...]]:
    """Return the slots of the cache and the batches that are measured on a device."""
    if given.quick:
        return 256, (4,)
    return (4096, (1, 16)) if given.device == "cpu" else (32768, (1, 64))


@dataclass(frozen=True)
class Made:
    """One compiled model, the module that holds its cache, and what its code tells."""

    call: CompiledModel
    model: Decoder
    code: dict[str, float]


def compiled(slots: int, most: int, device: str, way: str) -> Made:
    """Compile and load the model under one list of passes."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = Decoder(slots, dtype).eval().requires_grad_(False).to(device)
    with tempfile.TemporaryDirectory(prefix="pwcc-bench-") as cache:
        pwcc.precompile(
            model,
            cache_dir=cache,
            inputs=[f"x:{str(dtype).removeprefix('torch.')}[n,{HEADS * WIDTH}]"],
            max_tokens=most,
            splitting_ops=(),
            passes=way,
        )
        made = Made(pwcc.load(model, cache_dir=cache), model, of_code(Path(cache), slots))
    print(way, made.code, flush=True)
    return made


def measure(made: dict[str, Made], tokens: int, device: str) -> dict[str, dict[str, float]]:
    """Return figures by way; both must compute the same."""
    dtype = made["none"].model.cache.dtype
    x = torch.randn(tokens, HEADS * WIDTH, device=device, dtype=dtype)
    figures = {way: {**item.code, **peak(item.call, x)} for way, item in made.items()}
    results = [item.call(x) for item in made.values()]
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
    torch.testing.assert_close(*(item.model.cache for item in made.values()), rtol=0.02, atol=0.02)
    times = turns({way: functools.partial(item.call, x) for way, item in made.items()}, device)
    for way in WAYS:
        figures[way]["step_us"] = times[way]
    return figures


def of_code(cache: Path, slots: int) -> dict[str, float]:
    """Return what the sealed program allocates, and the pass's matches."""
    store = Store.open(cache)
    (ref,) = store.entries()
    manifest = store.read_manifest(ref)
    allocated, matches, width = 0, 0, 4
    for program in manifest.programs:
        for digest in program.variants[0].pieces:
            record = SealedPiece.from_bytes(store.read_blob(digest), where="piece")
            width = 4 if record.device_type == "cpu" else 2
            matches += sum(c.matches for c in record.passes if c.name == "fix_functionalization")
            text = store.read_blob(record.source).decode()
            shapes = re.findall(r"empty_strided_\w+\(\(([\d, ]*)\)", text)  # those that depend on no size
            elements = [math.prod(int(part) for part in shape.split(",") if part.strip()) for shape in shapes]
            allocated += sum(count for count in elements if count >= slots * HEADS * WIDTH)
    return {"allocated_mib": allocated * width / 2**20, "matches": float(matches)}


def peak(compiled: CompiledModel, x: Tensor) -> dict[str, float]:
    """Return the most memory that a call takes beyond what was there; CUDA only."""
    if x.device.type != "cuda":
        return {}
    compiled(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compiled(x)
    torch.cuda.synchronize()
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


if __name__ == "__main__":
    main()
