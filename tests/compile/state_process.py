"""Compile every model of ``state_models.py`` into a cache, or load and call it: ``compile|serve CACHE [cuda]``.

Serving prints, as JSON, what differs from eager in four calls, by model; the last argument is misaligned.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import pwcc
from pwcc.compile.runtime.held import named_tensors
from tests.compile.aliasing import aliasing, difference
from tests.compile.state_models import MODELS, register_attend

CUT = ("pwcctest::attend",)


def build(name: str, device: str) -> nn.Module:
    with torch.device(device):
        return MODELS[name]().eval()


def argument(call: int, size: int, device: str) -> Tensor:
    values = torch.randn(size, 8, generator=torch.Generator().manual_seed(call))
    skew = call % 4 == 3
    memory = torch.zeros(size * 8 + skew, device=device)[skew:].view(size, 8)
    return memory.copy_(values)


def compile_all(cache: Path, device: str) -> None:
    for name in MODELS:
        model = build(name, device)
        before = {key: tensor.clone() for key, tensor in named_tensors(model)}
        pwcc.precompile(
            model,
            cache_dir=cache,
            inputs=["x:float32[n,8]"],
            max_tokens=12,
            splitting_ops=CUT,
            jobs=1,
            trust_dir=True,
            tag=name,
        )
        changed = [key for key, tensor in named_tensors(model) if not torch.equal(tensor, before[key])]
        if changed:
            raise SystemExit(f"{name}: compiling changed {changed}")


def serve_all(cache: Path, device: str) -> None:
    found: dict[str, list[str]] = {}
    for name in MODELS:
        model = build(name, device)
        eager = copy.deepcopy(model)
        compiled = pwcc.load(model, cache_dir=cache, tag=name, trust_dir=True)
        found[name] = []
        for call, size in enumerate((3, 1, 5, 4)):
            wanted_x, x = argument(call, size, device), argument(call, size, device)
            with torch.no_grad():
                wanted, got = eager(wanted_x), compiled(x)
            state, wanted_state = dict(named_tensors(model)), dict(named_tensors(eager))
            found[name] += [
                f"call {call}: {text}" for text in difference((got, x, state), (wanted, wanted_x, wanted_state))
            ]
            here, there = aliasing(got, {"x": x, **state}), aliasing(wanted, {"x": wanted_x, **wanted_state})
            if here != there:
                found[name].append(f"call {call}: aliasing {here}, eager {there}")
    print(json.dumps(found))


if __name__ == "__main__":
    register_attend()
    task = {"compile": compile_all, "serve": serve_all}[sys.argv[1]]
    task(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
