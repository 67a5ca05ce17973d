"""Artifact: ten architectures in bfloat16 at real layer shapes on a GPU, two layers each.

PYTHONPATH=src python zoo/gpu.py [--jobs 4] [--only llama,...] [--work DIR]

Each is compiled in one process and loaded in a fresh one; both compare 1, 7 and 32 tokens with a float32 run
of transformers' own attention on the same weights. The error must stay near the one that transformers' own
bfloat16 run has. Model types that the installed transformers does not know are named and skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
TOKENS: Final = (1, 7, 32)
MAX_TOKENS: Final = 64
SHORT_WINDOW: Final = 16
"""Instead of the checkpoint's 4096, so that the window matters at 32 tokens."""
LIMIT_S: Final = 330


def grouped(hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """Return the sizes that most decoders name alike."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        **more,
    }


ALTERNATING: Final = ["sliding_attention", "full_attention"]

SHAPES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama-3.1-8B", grouped(4096, 14336, 32, 8, 128256, rms_norm_eps=1e-5)),
    "mistral": ("Mistral-7B-v0.1", grouped(4096, 14336, 32, 8, 32000, sliding_window=SHORT_WINDOW)),
    "qwen2": ("Qwen2.5-7B", grouped(3584, 18944, 28, 4, 152064)),
    "qwen3": ("Qwen3-8B", grouped(4096, 12288, 32, 8, 151936, head_dim=128)),
    "gemma2": (
        "gemma-2-9b",
        grouped(
            3584,
            14336,
            16,
            8,
            256000,
            head_dim=256,
            sliding_window=SHORT_WINDOW,
            layer_types=ALTERNATING,
            query_pre_attn_scalar=256,
        ),
    ),
    "phi3": ("phi-4", grouped(5120, 17920, 40, 10, 100352, pad_token_id=0)),
    "olmo2": ("OLMo-2-1124-7B", grouped(4096, 11008, 32, 32, 100352)),
    "starcoder2": ("starcoder2-7b", grouped(4608, 18432, 36, 4, 49152, sliding_window=SHORT_WINDOW)),
    "granite": (
        "granite-3.1-8b",
        grouped(
            4096,
            12800,
            32,
            8,
            49155,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0078125,
            logits_scaling=16.0,
        ),
    ),
    "mixtral": (
        "Mixtral-8x7B-v0.1",
        grouped(4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
    ),
    "gpt_oss": (
        "gpt-oss-20b",
        grouped(
            2880,
            2880,
            64,
            8,
            201088,
            head_dim=64,
            sliding_window=SHORT_WINDOW,
            layer_types=ALTERNATING,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
    ),
}
"""Model type -> the checkpoint whose layer shapes these are, and its figures. gpt_oss is the eleventh."""


def main() -> int:
    """Run all, print one line each and a JSON document; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "zoo-gpu")
    parser.add_argument("--results", type=Path, help="write the results here")
    parser.add_argument("--stage", nargs=2, metavar=("STAGE", "TYPE"), help="one stage, here; used by itself")
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(guarded(*options.stage, options.work, options.device)))
        return 0
    chosen = [name for name in options.only.split(",") if name] or list(SHAPES)

    def measure(name: str) -> tuple[str, dict[str, Any]]:
        found: dict[str, Any] = {"checkpoint": SHAPES[name][0]}
        for stage in ("compile", "load"):
            found[stage] = in_process(stage, name, options)
            print(f"{name} ({SHAPES[name][0]}) {stage}: {shown(found[stage])}", file=sys.stderr, flush=True)
            if not found[stage]["ok"]:
                break
        return name, found

    started = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(pool.map(measure, chosen))
    skipped = [name for name, found in results.items() if "skipped" in found["compile"]]
    bad = [name for name in results if name not in skipped and not results[name].get("load", {}).get("ok")]
    document = {"seconds": round(time.perf_counter() - started), "failed": bad, "skipped": skipped, **results}
    print(json.dumps(document, indent=1))
    if options.results:
        options.results.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if bad else 0


def in_process(stage: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one stage in a fresh Python."""
    command = [sys.executable, str(HERE / "gpu.py"), "--stage", stage, name]
    command += ["--work", str(options.work), "--device", options.device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"ok": False, "reason": f"no answer within {LIMIT_S} s"}
    except (ValueError, IndexError):
        return {"ok": False, "reason": f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"}
    return found


def shown(result: Mapping[str, Any]) -> str:
    """Return a result as one line."""
    if not result["ok"]:
        return f"{result['reason']} ({result.get('where')})"
    return ", ".join(f"{key} {value}" for key, value in result.items() if key != "ok")


def guarded(stage: str, name: str, work: Path, device: str) -> dict[str, Any]:
    """Run one stage; a failure is a result."""
    import one

    started = time.perf_counter()
    try:
        from transformers import CONFIG_MAPPING

        if name not in CONFIG_MAPPING:
            result = {"ok": False, "skipped": True, "reason": f"this transformers knows no {name}"}
        else:
            result = {"ok": True, **measured(stage, name, work, device)}
    except Exception as error:
        result = {"ok": False, "reason": one.reason_of(error), "where": one.where_of(error)}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def measured(stage: str, name: str, work: Path, device: str) -> dict[str, Any]:
    """Compile, or only load, and compare with float32; the entry lies in ``work``."""
    import one
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from weights import fill

    import pwcc
    from pwcc.compile import hf
    from pwcc.compile.inputs import input_specs
    from pwcc.compile.model_ref import ModelRef, build, materialize
    from pwcc.compile.precompile import precompile

    directory = work / "configs" / name
    AutoConfig.for_model(name, **SHAPES[name][1]).save_pretrained(directory)
    made = build(ModelRef.parse(str(directory)), weights="none", dtype="bfloat16", device=device)
    module = made.module
    materialize(module, device=device, seed=0)
    fill(module)
    found: dict[str, Any] = {}
    cache = work / "cache" / name
    if stage == "compile":
        report = precompile(
            module,
            cache_dir=cache,
            specs=input_specs(module),
            sizes=(1,),
            max_tokens=MAX_TOKENS,
            device=device,
            identity=made.identity,
            args=made.args,
            jobs=4,
            observation=made.observation,
        )
        counters = report.counters
        found = {
            "pieces": counters.compiled_pieces,
            "unique": counters.unique_pieces,
            "kernels": report.kernels,
        }
    loaded = pwcc.load(module, cache_dir=cache)
    if stage == "load":
        if not loaded.receipt.is_clean:
            raise one.Wrong(f"loading was not clean: {'; '.join(loaded.receipt.evidence)}")
        found["load_ms"] = round(loaded.receipt.total_ms, 1)

    state = module.get_submodule("model").state_dict()
    models = {}
    for kind, dtype in (("exact", torch.float32), ("eager", torch.bfloat16)):
        config = hf.load_config(str(directory), {})
        with torch.device(device):
            other = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
        other.load_state_dict(state)
        models[kind] = other
    worst = worst_eager = 0.0
    with torch.no_grad():
        for tokens in TOKENS:
            generator = torch.Generator().manual_seed(tokens)
            ids = torch.randint(3, 30000, (tokens,), generator=generator).to(device)
            positions = torch.arange(tokens, device=device)
            got = loaded(ids, positions).float()
            exact, eager = (
                model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
                for model in (models["exact"], models["eager"])
            )
            error, own = (float((one_ - exact).norm() / exact.norm()) for one_ in (got, eager))
            worst, worst_eager = max(worst, error), max(worst_eager, own)
            if not error <= 1.5 * own + 0.02:
                raise one.Wrong(
                    f"error {error:.3g} of the logits' norm at {tokens} tokens; "
                    f"transformers' own bfloat16 {own:.3g}"
                )
    return {**found, "error": round(worst, 5), "eager_error": round(worst_eager, 5)}


if __name__ == "__main__":
    sys.exit(main())
