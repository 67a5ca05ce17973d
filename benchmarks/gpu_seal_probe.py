"""Probe: seal small pieces on this machine's device, load each in a bare process, compare and time.

Run it first on a new GPU or torch. It compiles with the sealing profile alone (no tracer, no store):
a dynamic (unbacked) piece, the same with static sizes with and without autotuning, an operator that
falls back to ATen, an in-place update of a misaligned input, a user's own Triton kernel, and ours. Every
sealed piece is then loaded in a process whose compiler is out of reach and whose Inductor and Triton
directories are empty. All failures are printed in full and the run goes on.

    python benchmarks/gpu_seal_probe.py [--device cuda|cpu] [--only NAME] [--out DIR] [--no-autotune]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN, INNER = 1024, 2816


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--no-autotune", action="store_true")
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        return load_and_compare(Path(options.child), options.device)
    out = Path(options.out or tempfile.mkdtemp(prefix="pwcc-probe-"))
    out.mkdir(parents=True, exist_ok=True)
    # before torch is imported: Inductor's workers and Triton read these
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TRITON_CACHE_DIR": str(out / "triton"),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    }
    import torch

    print(f"torch {torch.__version__} python {sys.version.split()[0]} device {options.device}")
    if options.device == "cuda":
        print(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    failed = []
    for case in cases(options.device, autotune=not options.no_autotune):
        if options.only and options.only not in case.name:
            continue
        print(f"\n=== {case.name}", flush=True)
        try:
            run_case(case, out / case.name, options.device)
            print(f"--- {case.name}: ok", flush=True)
        except Exception:  # noqa: BLE001 (one run must teach the most)
            failed.append(case.name)
            traceback.print_exc(file=sys.stdout)
            print(f"--- {case.name}: FAILED", flush=True)
    print(f"\n{len(failed)} failed: {failed}")
    return 1 if failed else 0


@dataclass(frozen=True)
class Case:
    """One piece: a module, its inputs by token count, which argument dims are dynamic, how it is compiled."""

    name: str
    make: Callable[[], tuple[Any, Callable[[int], tuple[Any, ...]]]]
    tokens: int
    dynamic: bool
    autotune: bool = False
    run_at: tuple[int, ...] = ()


def cases(device: str, *, autotune: bool) -> list[Case]:
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.Parameter(torch.randn(HIDDEN, dtype=dtype, device=device))
            self.up = torch.nn.Linear(HIDDEN, 2 * INNER, bias=False, dtype=dtype, device=device)
            self.down = torch.nn.Linear(INNER, HIDDEN, bias=True, dtype=dtype, device=device)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            variance = x.float().pow(2).mean(-1, keepdim=True)
            normed = (x.float() * torch.rsqrt(variance + 1e-5)).to(x.dtype) * self.norm
            gate, value = self.up(normed).chunk(2, -1)
            return self.down(torch.nn.functional.silu(gate) * value) + x, x.float().sum(-1)

    class Fallback(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, order = torch.sort(x * 2, dim=-1, stable=True)
            return values.cumsum(-1), order + torch.arange(x.shape[-1], device=x.device)

    class Update(torch.nn.Module):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            state.add_(x.sum())
            return x * state

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    def mlp() -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
        return Mlp(), lambda n: (tensor(n, HIDDEN),)

    def fallback() -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
        return Fallback(), lambda n: (tensor(n, 64),)

    def update() -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
        calls = itertools.count()  # compiled for an aligned state, then called with one that is not
        return Update(), lambda n: (tensor(n, 64), tensor(65)[1:] if next(calls) else tensor(64))

    found = [
        Case("mlp-dynamic", mlp, 24, True, run_at=(1, 2, 7, 16, 100)),
        Case("mlp-static-8", mlp, 8, False),
        Case("fallback", fallback, 8, False),
        Case("update-misaligned", update, 8, False, run_at=(8,)),
    ]
    if device == "cuda":
        found.append(Case("user-triton", user_triton, 8, True, run_at=(1, 5, 33)))
        found.append(Case("fused-fp8", fused_fp8, 8, True, run_at=(1, 5, 33)))
        found.append(Case("fused-fp8-scaled-mm", functools.partial(fused_fp8, scaled=True), 8, False))
    if autotune:
        found.append(Case("mlp-static-1-autotune", mlp, 1, False, autotune=True))
    return found


def fused_fp8(scaled: bool = False) -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
    """Norm and gate with quantisation in our own Triton kernels, the projection between them in 8 bits."""
    import torch

    import pwcc.compile.ops.fused  # noqa: F401  registers the operators
    from pwcc.compile.torch_private import fused_lowering

    fused_lowering.install()
    ops, fp8, dtype = torch.ops.pwcc, torch.float8_e4m3fn, torch.bfloat16

    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            up = torch.randn(2 * INNER, HIDDEN, device="cuda") / HIDDEN**0.5
            self.norm = torch.nn.Parameter(torch.ones(HIDDEN, dtype=dtype, device="cuda"))
            self.up = torch.nn.Parameter(up.to(fp8 if scaled else dtype), requires_grad=False)
            self.register_buffer("scale", torch.tensor([0.02], device="cuda"))
            self.register_buffer("one", torch.tensor([1.0], device="cuda"))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, total = ops.fused_add_rms_norm_static_fp8_quant(x, x * 0.5, self.norm, self.scale, 1e-5)
            if scaled:
                made = torch._scaled_mm(q, self.up.t(), scale_a=self.scale, scale_b=self.one, out_dtype=dtype)
            else:
                made = torch.nn.functional.linear((q.float() * self.scale).to(dtype), self.up)
            gate, value = made.chunk(2, -1)
            rows, scales = ops.silu_and_mul_dynamic_per_token_fp8_quant(gate, value, 1e-6)
            return rows.float() * scales, total

    return Fused(), lambda n: (torch.randn(n, HIDDEN, dtype=dtype, device="cuda"),)


def user_triton() -> tuple[Any, Callable[[int], tuple[Any, ...]]]:
    import torch
    from user_kernel import scale_add

    class UserTriton(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            out = torch.empty_like(y)
            count = y.numel()
            scale_add[((count + 255) // 256,)](y, out, count, 3.0, BLOCK=256)
            return out * 2

    return UserTriton(), lambda n: (torch.randn(n, 128, dtype=torch.bfloat16, device="cuda"),)


USER_KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale_add(x, out, count, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    tl.store(out + at, tl.load(x + at, mask=keep) * scale + 1, mask=keep)
"""


def run_case(case: Case, out: Path, device: str) -> None:
    import torch

    from pwcc.cache.ids import BlobDigest, blob_digest
    from pwcc.compile.sealing.seal import seal

    out.mkdir(parents=True, exist_ok=True)
    (out / "user_kernel.py").write_text(USER_KERNEL)
    sys.path.insert(0, str(out))

    def put(data: bytes) -> BlobDigest:
        digest = blob_digest(data)
        (out / digest).write_bytes(data)
        return digest

    torch.manual_seed(0)
    model, inputs = case.make()
    args = inputs(case.tokens)
    with torch.no_grad():
        eager = model(*clones(args))
        compiled, run = compile_piece(model, args, case, device)
    print("program:")
    samples = []
    with torch.no_grad():
        for given in (args, *map(inputs, case.run_at)):
            samples.append(run(given))
        torch.testing.assert_close(samples[0][1][0].float(), flat(eager)[0].float(), rtol=2e-2, atol=2e-2)
    try:
        began = time.perf_counter()
        record, digest = seal(compiled(), put)
        print(
            f"sealed in {time.perf_counter() - began:.3f} s: {len(record.kernels)} kernels, {record.externs=}"
        )
        print((out / record.source).read_text())
        print(json.dumps({k: v for k, v in record.to_json().items() if k != "ops"}, indent=1))
    except Exception:
        explain(compiled())
        raise
    (out / "record").write_text(digest)
    torch.save(samples, out / "samples.pt")
    child(out, device)


def clones(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item.clone() if hasattr(item, "clone") else item for item in args)


def flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def compile_piece(model: Any, args: tuple[Any, ...], case: Case, device: str) -> tuple[Any, Any]:
    """Trace and compile with the sealing profile.

    Return (() -> CompiledPiece, args -> (the inner call's inputs before, its outputs, its inputs after)).
    """
    import torch
    from torch._dynamo import convert_frame
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config

    from pwcc.compile.sealing.builder_paths import builder_paths
    from pwcc.compile.sealing.driver import write_driver
    from pwcc.compile.sealing.profile import cpu_profile, cpu_target, cuda_profile
    from pwcc.compile.torch_private.inductor_cpp import inductor_directories

    torch._dynamo.reset()
    if case.dynamic:
        mark_unbacked(args[0], 0)
    with get_metrics_context(), dynamo_timed("capture"):
        out = convert_frame.fullgraph_capture(model.forward, args, {})
    graph, fake = out.backend_input.graph_module, out.backend_input.fake_mode
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    examples = [node.meta["example_value"] for node in placeholders]
    real = out.backend_input.example_inputs
    print(f"{len(placeholders)} placeholders, {sum(isinstance(e, torch.SymInt) for e in examples)} symbols")
    if device == "cuda":
        profile = cuda_profile(autotune=case.autotune)
    else:
        target = cpu_target("x86-64-v3")
        prefixes = builder_paths(inductor_directories())
        driver = write_driver(
            Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "driver", march=target.march, path_prefixes=prefixes
        )
        profile = cpu_profile("x86-64-v3", driver=driver)
    print("profile", profile)
    captured: list[Any] = []
    seen: list[list[Any]] = []
    live: list[list[Any]] = []

    def inner(gm: Any, inner_examples: Any, **kwargs: Any) -> Any:
        result = compile_fx.compile_fx_inner(gm, inner_examples, **kwargs)
        captured.append((inner_examples, kwargs, result))

        def call(inputs: list[Any]) -> Any:
            seen.append([kept(item) for item in inputs])
            live.append(list(inputs))
            return result(inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    began = time.perf_counter()
    context = torch._guards.TracingContext(fake)
    with (
        torch._guards.tracing(context),
        config.patch(profile),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        function = compile_fx.compile_fx(graph, examples, inner_compile=inner)
    print(f"compiled in {time.perf_counter() - began:.2f} s")

    def run(given: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...], list[Any]]:
        values = [
            given[0].shape[0] if isinstance(e, (int, torch.SymInt)) else r
            for e, r in zip(examples, real, strict=True)
        ]
        for position, value in enumerate(values):
            for before, now in zip(args, given, strict=True):
                if value is before:
                    values[position] = now
        began = time.perf_counter()
        with config.patch(profile):  # tuning is lazy and reads it
            outputs = function(*values)
        print(f"ran at {tuple(given[0].shape)} in {time.perf_counter() - began:.3f} s")
        return seen[-1], tuple(kept(item) for item in outputs), [kept(item) for item in live[-1]]

    def compiled() -> Any:
        return compiled_piece(captured[-1], device)

    return compiled, run


def kept(item: Any) -> Any:
    """Copy a tensor with its strides and its misalignment."""
    import torch

    if not isinstance(item, torch.Tensor):
        return item
    skew = item.data_ptr() % 16 // item.element_size()
    span = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True)) + 1 if item.numel() else 0
    storage = torch.empty(span + skew, dtype=item.dtype, device=item.device)[skew:]
    return torch.as_strided(storage, item.shape, item.stride(), skew).copy_(item)


def compiled_piece(captured: Any, device: str) -> Any:
    import torch
    from torch._inductor.codecache import PyCodeCache

    from pwcc.compile.sealing.compiled import CompiledPiece, InputFacts
    from pwcc.compile.sealing.profile import cpu_target

    examples, kwargs, result = captured

    def dim(value: Any) -> int | str:
        return int(value) if isinstance(value, int) else str(value.node.expr)

    def facts(value: Any) -> InputFacts:
        if isinstance(value, torch.Tensor):
            shape, stride = tuple(map(dim, value.shape)), tuple(map(dim, value.stride()))
            return InputFacts("tensor", str(value.dtype).removeprefix("torch."), shape, stride)
        return InputFacts("symint" if isinstance(value, torch.SymInt) else "int", value=dim(value))

    module = next(
        m for m in PyCodeCache.modules if m.__file__ and Path(m.__file__).read_text() == result.source_code
    )
    return CompiledPiece(
        source=result.source_code,
        module=module,
        constants=result.constants or {},
        inputs_to_check=result.inputs_to_check,
        mutated_inputs=tuple(result.mutated_input_idxs),
        device_type=device,
        device_index=0 if device == "cuda" else None,
        inputs=[facts(value) for value in examples],
        static_inputs=tuple(kwargs.get("static_input_idxs") or ()),
        defers_input_alignment=getattr(result, "_defers_input_alignment", False),
        cpu_flags=cpu_target("x86-64-v3").cpu_flags if device == "cpu" else (),
    )


def explain(piece: Any) -> None:
    print("wrapper:\n" + piece.source)
    for name, value in vars(piece.module).items():
        launchers = getattr(value, "launchers", None)
        if launchers is None:
            continue
        print(f"kernel {name}: {type(value).__name__}, {len(launchers)} launchers, {value.triton_meta}")
        for result in value.compile_results:
            print("  result", type(result).__name__, result.config)
        for launcher in launchers:
            kernel = getattr(launcher.__globals__.get("runner"), "__self__", None)
            print("  launcher", launcher.__code__.co_varnames, launcher.config, type(kernel).__name__)
            print(
                "  kernel", {k: str(v)[:300] for k, v in vars(kernel).items()} if kernel is not None else None
            )


def child(out: Path, device: str) -> None:
    import pwcc

    empty = out / "empty"
    (empty / "inductor").mkdir(parents=True, exist_ok=True)
    (empty / "triton").mkdir(exist_ok=True)
    environment = {
        "PATH": "/nonexistent",
        "CC": "/nonexistent/cc",
        "CXX": "/nonexistent/c++",
        "HOME": str(empty),
        "TORCHINDUCTOR_CACHE_DIR": str(empty / "inductor"),
        "TRITON_CACHE_DIR": str(empty / "triton"),
        "PYTHONPATH": str(Path(pwcc.__file__).parent.parent),
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, __file__, "--child", str(out), "--device", device]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=False)
    print(result.stdout + result.stderr[-6000:])
    written = [str(path) for path in empty.rglob("*") if path.is_file()]
    print("files written by the child:", written)
    if result.returncode or written:
        raise RuntimeError(f"child exit {result.returncode}, wrote {written}")


def load_and_compare(out: Path, device: str) -> int:
    """In a bare process: load the piece, compare every sample bit by bit, time calls."""
    import torch

    samples = torch.load(out / "samples.pt", weights_only=True)
    if device == "cuda":
        torch.empty(1, device=device)
    started = time.perf_counter()
    from pwcc.cache.sealed import SealedPiece
    from pwcc.compile.runtime.piece import PieceLoader

    imported = time.perf_counter()
    record = SealedPiece.from_bytes((out / (out / "record").read_text()).read_bytes(), where="record")
    loader = PieceLoader(lambda digest: (out / digest).read_bytes(), torch.device(device, 0))
    piece = loader.load(record)
    loaded = time.perf_counter()
    print(f"import {1e3 * (imported - started):.2f} ms, load {1e3 * (loaded - imported):.2f} ms")
    heavy = [
        name
        for name in sys.modules
        if name.split(".")[0] in ("triton", "sympy") or name.startswith(("torch._dynamo", "torch._inductor"))
    ]
    print("compiler modules:", heavy)
    worst = 0.0
    with torch.no_grad():
        for inputs, expected, after in samples:
            given = [kept(item) for item in inputs]
            results = [*piece.call(list(given)), *(given[index] for index in record.mutated)]
            wanted = [*expected, *(after[index] for index in record.mutated)]
            for index, (a, b) in enumerate(zip(results, wanted, strict=True)):
                same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                difference = 0.0 if same else float((a.double() - b.double()).abs().max())
                worst = max(worst, difference)
                print(f"  output {index}: equal={same} max|d|={difference:g} {tuple(getattr(a, 'shape', ()))}")
        inputs = samples[0][0]
        for _ in range(20):
            piece.call(list(inputs))
        synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        synchronize()
        began = time.perf_counter()
        for _ in range(200):
            piece.call(list(inputs))
        issued = time.perf_counter()
        synchronize()
        ended = time.perf_counter()
        print(f"call: host {(issued - began) * 5e3:.1f} us, with device {(ended - began) * 5e3:.1f} us")
    return 1 if heavy or worst > 1e-2 else 0


if __name__ == "__main__":
    raise SystemExit(main())
