"""Compile, or load, some generated models in this process and compare them with eager; one JSON line each.

python -m tests.fuzz.one build|load WORK DEVICE SEED ...

``build`` writes each model's source below WORK, compiles it into WORK/cache and compares what is loaded from
there; ``load`` takes the sources and WORK/moved, as another process on another day would.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pwcc
from tests.fuzz.generator import MAX_TOKENS, Generated, generate

SEQUENCE = (7, 1, 16, 2, 33, 3, MAX_TOKENS, 7)
"""Token counts of successive calls: state carries over from one to the next."""


class WrongError(Exception):
    """The compiled model and eager disagree."""


def main() -> None:
    """Do what the command line says; a model that breaks does not keep the others from their turn."""
    phase, work, device, *seeds = sys.argv[1:]
    sys.path.insert(0, str(work))
    for text in seeds:
        made = generate(int(text))
        print(
            json.dumps({"seed": made.seed, "phase": phase, **verdict(phase, Path(work), device, made)}),
            flush=True,
        )


def verdict(phase: str, work: Path, device: str, made: Generated) -> dict[str, object]:
    """Say how one model fared: ``ok``, ``refused`` by name, ``wrong``, or ``broken`` by another error."""
    try:
        return (build if phase == "build" else load)(work, device, made)
    except pwcc.PwccError as error:
        found = {"type": type(error).__name__, "message": error.message, "where": error.where}
        return {"verdict": "refused", **found}
    except WrongError as error:
        return {"verdict": "wrong", "message": str(error)}
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        return {"verdict": "broken", "type": type(error).__name__, "message": str(error), "report": lines[-12:]}


def build(work: Path, device: str, made: Generated) -> dict[str, object]:
    """Compile one model into ``work/cache`` and compare it as loaded here."""
    splitting: Sequence[str] = importlib.import_module("fuzz_ops").SPLITTING
    source_of(work, made).write_text(made.source)
    factory = factory_of(work, made)
    model = factory().to(device)
    report = pwcc.precompile(
        model,
        cache_dir=work / "cache",
        sizes=made.sizes,
        max_tokens=MAX_TOKENS,
        inputs=lambda tokens: arguments(made, tokens, device, 0),
        splitting_ops=splitting,
        jobs=1,
        tag=f"m{made.seed}",
    )
    refused = compare(
        made, factory().to(device), pwcc.load(model, cache_dir=work / "cache", tag=f"m{made.seed}"), device
    )
    counters = report.counters
    return {"verdict": "ok", "pieces": counters.pieces, "compiles": counters.compiles, "refused_sizes": refused}


def load(work: Path, device: str, made: Generated) -> dict[str, object]:
    """Load one model from ``work/moved`` and compare it; nothing may be compiled."""
    factory = factory_of(work, made)
    model = factory().to(device)
    loaded = pwcc.load(model, cache_dir=work / "moved", tag=f"m{made.seed}")
    refused = compare(made, factory().to(device), loaded, device)
    receipt = loaded.receipt
    done = {
        name: value
        for name in ("dynamo_frames", "inductor_compiles", "triton_compiles", "autotune_runs")
        if (value := getattr(receipt, name, 0))
    }
    if done:
        raise WrongError(f"a load compiled: {done}")
    return {"verdict": "ok", "refused_sizes": refused}


def source_of(work: Path, made: Generated) -> Path:
    """Return where a model's source lies."""
    return work / f"fuzz_model_{made.seed}.py"


def factory_of(work: Path, made: Generated) -> Callable[[], nn.Module]:
    """Import a model's source and return its factory."""
    name = f"fuzz_model_{made.seed}"
    spec = importlib.util.spec_from_file_location(name, source_of(work, made))
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    factory: Callable[[], nn.Module] = module.factory
    return factory


def arguments(made: Generated, tokens: int, device: str, call: int) -> dict[str, object]:
    """Return the arguments of one call; equal for equal ``call`` and size."""
    generator = torch.Generator().manual_seed(1000 * call + tokens)
    given: dict[str, object] = {
        "x": torch.randn(tokens, 8, generator=generator).to(device),
        "ids": torch.randperm(MAX_TOKENS, generator=generator)[:tokens].to(device),
    }
    if made.gives_extra:
        given["extra"] = torch.randn(tokens, 8, generator=generator).to(device)
    return given


def compare(made: Generated, eager: nn.Module, compiled: Callable[..., object], device: str) -> list[int]:
    """Call both in turn and compare results, aliasing, arguments and state; return sizes refused by name.

    A size that the compiled model refuses is not shown to eager either, so that their states stay comparable.
    """
    tolerance = 5e-2 if made.rounds else 2e-4
    refused: list[int] = []
    for call, tokens in enumerate(SEQUENCE):
        ours, theirs = (arguments(made, tokens, device, call) for _ in range(2))
        with torch.no_grad():
            try:
                got = compiled(**ours)
            except pwcc.CallError:
                refused.append(tokens)
                continue
            wanted = eager(**theirs)
        where = f"call {call}, {tokens} tokens"
        same(got, wanted, tolerance, where)
        same(ours, theirs, tolerance, f"{where}, arguments afterwards")
        links, expected = sharing(got, ours), sharing(wanted, theirs)
        if links != expected:
            raise WrongError(f"{where}: eager's results share memory as {expected}, compiled ones as {links}")
        held: Mapping[str, Tensor] = getattr(compiled, "live_weights", dict)()
        same(
            {n: held[n] for n, _ in eager.named_buffers() if n in held},
            dict(eager.named_buffers()),
            tolerance,
            f"{where}, buffers",
        )
    return refused


def same(got: object, wanted: object, tolerance: float, where: str) -> None:
    """Raise ``WrongError`` unless two structures have the same types and nearly the same numbers."""
    if isinstance(wanted, Tensor):
        if not isinstance(got, Tensor) or got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise WrongError(f"{where}: expected {described(wanted)}, got {described(got)}")
        scale = max(1.0, float(wanted.double().abs().max())) if wanted.numel() else 1.0
        if wanted.numel() and not torch.allclose(
            got.double(), wanted.double(), rtol=0, atol=tolerance * scale, equal_nan=True
        ):
            error = float((got.double() - wanted.double()).abs().max())
            raise WrongError(f"{where}: differs by {error:.3g} at scale {scale:.3g}")
        return
    if type(got) is not type(wanted):
        raise WrongError(f"{where}: expected a {type(wanted).__name__}, got a {type(got).__name__}")
    if dataclasses.is_dataclass(wanted):
        names = [item.name for item in dataclasses.fields(wanted)]
        same([getattr(got, n) for n in names], [getattr(wanted, n) for n in names], tolerance, where)
    elif isinstance(wanted, Mapping):
        pair: Any = got
        if list(pair) != list(wanted):
            raise WrongError(f"{where}: expected keys {list(wanted)}, got {list(pair)}")
        for name in wanted:
            same(pair[name], wanted[name], tolerance, f"{where}, {name}")
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
        others: Any = got
        if len(others) != len(wanted):
            raise WrongError(f"{where}: expected {len(wanted)} items, got {len(others)}")
        for one, other in zip(others, wanted, strict=True):
            same(one, other, tolerance, where)
    elif got != wanted:
        raise WrongError(f"{where}: expected {wanted!r}, got {got!r}")


def described(value: object) -> str:
    """Return what a tensor looks like."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def sharing(result: object, given: Mapping[str, object]) -> list[list[str]]:
    """Return the groups of results and arguments that share memory."""
    named = {f"argument {name}": value for name, value in given.items() if isinstance(value, Tensor)}
    for index, value in enumerate(leaves(result)):
        named[f"result {index}"] = value
    groups: dict[int, list[str]] = {}
    for name, value in named.items():
        groups.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


def leaves(value: object) -> list[Tensor]:
    """Return a result's tensors in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for item in dataclasses.fields(value) for t in leaves(getattr(value, item.name))]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in leaves(item)]
    return []


if __name__ == "__main__":
    main()
