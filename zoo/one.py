"""Artifact: one architecture through pwcc, stage by stage, against transformers' own attention.

``trace``: the eager decoder and the traced program. ``compile``: publish an entry, load it, compare.
``load``: compare in a process that compiles nothing. Run by ``run.py``; by hand: ``one.py load TYPE WORK``.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tiny import VOCABULARY, tiny_config
from torch import Tensor, nn
from weights import fill

import pwcc
from pwcc.cache.errors import PwccError
from pwcc.compile import hf
from pwcc.compile.hf_opaque import OpaqueSparseAttention
from pwcc.compile.load import lookup
from pwcc.compile.model_ref import BuiltModel, ModelRef, build, materialize
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.dense import AttentionParams, dense_causal_attention
from pwcc.compile.ops.forward_context import ForwardContext, forward_context, use_forward_context
from pwcc.compile.ops.kv_layout import observe_kv_layout
from pwcc.compile.ops.paged import AttentionMetadata

TOKENS: Final = (1, 7, 32)
MAX_TOKENS: Final = 64
TOLERANCE: Final = 1e-3
"""Largest difference of a logit, in standard deviations of the reference's logits."""
NOTICED: Final = 5 * TOLERANCE
"""How much an attention of another scale must move a logit, for a comparison that can fail."""
SPLITTING: Final = ("pwcc::attention", "pwcc::opaque")

Result = dict[str, Any]
Call = Callable[[Tensor, Tensor], Tensor]


class Wrong(Exception):
    """A comparison that did not hold."""


@dataclass(frozen=True)
class Built:
    """One architecture as pwcc builds it, and the reference with the same weights."""

    built: BuiltModel
    module: nn.Module
    reference: Callable[[Tensor, Tensor], Tensor]


def configured(model_type: str, work: Path) -> Path:
    """Write the tiny configuration of ``model_type`` to a directory, as a checkpoint has it."""
    directory = work / "configs" / model_type
    tiny_config(model_type).save_pretrained(directory)
    return directory


def built(model_type: str, work: Path) -> Built:
    """Build both models from the configuration's directory."""
    directory = configured(model_type, work)
    made = build(ModelRef.parse(str(directory)), weights="none", dtype="float32")
    materialize(made.module, device="cpu", seed=0)
    fill(made.module)
    own = made.module.get_submodule("model")
    config = hf.load_config(str(directory), {})
    reference = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    reference.load_state_dict(own.state_dict())
    positional = "position_ids" in inspect.signature(reference.forward).parameters

    def call(ids: Tensor, positions: Tensor) -> Tensor:
        extra = {"position_ids": positions[None]} if positional else {}
        logits: Tensor = reference(input_ids=ids[None], use_cache=False, **extra).logits[0]
        return logits

    return Built(made, made.module, call)


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    """Return seeded ids and positions of one sequence."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(3, VOCABULARY, (tokens,), generator=generator), torch.arange(tokens)


@torch.no_grad()
def compare(call: Call, reference: Call) -> float:
    """Return the largest error over all token counts, in standard deviations. Raise :class:`Wrong`."""
    worst = 0.0
    for tokens in TOKENS:
        ids, positions = inputs(tokens)
        got, expected = call(ids, positions), reference(ids, positions)
        if got.shape != expected.shape:
            raise Wrong(f"expected logits {tuple(expected.shape)}, got {tuple(got.shape)} at {tokens} tokens")
        deviation = float(expected.std())
        if not deviation > 1e-3:
            raise Wrong(f"the reference's logits do not differ at {tokens} tokens: deviation {deviation:.2g}")
        error = float((got - expected).abs().max()) / deviation
        if not error <= TOLERANCE:
            raise Wrong(f"logits differ by {error:.2g} standard deviations at {tokens} tokens")
        worst = max(worst, error)
    return worst


@torch.no_grad()
def sensitivity(call: Call, **wrong: Any) -> float:
    """Return how far a wrong attention moves the logits of the longest prompt, in standard deviations.

    Of a model without ``pwcc::attention``, a matrix of its first opaque mixer or attention is made wrong.
    """
    attended = False

    def kernel(
        _context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        nonlocal attended
        attended = True
        changed = params._replace(scale=params.scale * wrong.get("factor", 1.0))
        if "window" in wrong:
            changed = changed._replace(window=wrong["window"])
        dense_causal_attention(q, k, v, out, changed)

    ids, positions = inputs(TOKENS[-1])
    right = call(ids, positions)
    with use_forward_context(ForwardContext(kernel=kernel)):
        moved = call(ids, positions)
    if not attended and isinstance(call, nn.Module):
        matrix = mixing_matrix(call)
        matrix.mul_(1.25)
        moved = call(ids, positions)
        matrix.div_(1.25)
    return float((moved - right).abs().max() / right.std())


def mixing_matrix(model: nn.Module) -> nn.Parameter:
    """Return the matrix of the first sparse attention's output, else the first of the first mixer."""
    attention = next((module for module in model.modules() if isinstance(module, OpaqueSparseAttention)), None)
    if attention is None:
        return next(p for name, p in model.named_parameters() if "mixer" in name and p.dim() >= 2)
    return [p for name, p in attention.named_parameters() if "indexer" not in name and p.dim() >= 2][-1]


@torch.no_grad()
def index_sensitivity(call: nn.Module) -> float | None:
    """Return how far other indices move the logits of the longest prompt; None of a model without an indexer.

    Every matrix of an indexer reads its inputs in reverse order, which changes what is chosen and nothing else.
    """
    matrices = [p for name, p in call.named_parameters() if ".indexer." in name and p.dim() >= 2]
    if not matrices:
        return None
    ids, positions = inputs(TOKENS[-1])
    right = call(ids, positions)
    for matrix in matrices:
        matrix.copy_(matrix.flip(-1))
    moved = call(ids, positions)
    for matrix in matrices:
        matrix.copy_(matrix.flip(-1))
    return float((moved - right).abs().max() / right.std())


@torch.no_grad()
def decoding(call: Call) -> Result:
    """Compare two sequences, decoded side by side over one paged KV cache, with each as a whole.

    Both bring a prompt, then a token; one brings two more. An architecture that keeps state of its own beside
    the keys, or mixes the tokens of a batch, fails here, and only here. Raise :class:`Wrong` where it answers
    differently, and the architecture's own error where it refuses to.
    """
    sequences = [(ids, positions) for ids, positions in (inputs(9), inputs(5))]
    layout = observe_kv_layout(lambda: call(*sequences[0]))
    whole = [call(ids, positions) for ids, positions in sequences]
    cache = None if layout is None else layout.cache(num_blocks=8, block_size=4, device="cpu")
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    held = [allocator.allocate(6), allocator.allocate(4)]
    steps = [[(0, 6), (0, 4)], [(6, 7), (4, 5)], [(7, 9)]]
    rows: list[list[Tensor]] = [[], []]
    for step in steps:
        for sequence, (start, stop) in zip(held, step, strict=False):
            if start:
                allocator.append(sequence, stop - start)
        batch = [(sequence, stop - start) for sequence, (start, stop) in zip(held, step, strict=False)]
        parts = [
            (ids[start:stop], positions[start:stop])
            for (ids, positions), (start, stop) in zip(sequences, step, strict=False)
        ]
        with forward_context(metadata=AttentionMetadata.build(batch, block_size=4), cache=cache):
            logits = call(torch.cat([ids for ids, _ in parts]), torch.cat([p for _, p in parts]))
        for own, got in zip(rows, logits.split([count for _, count in batch]), strict=False):
            own.append(got)
    for own, expected in zip(rows, whole, strict=True):
        error = float((torch.cat(own) - expected).abs().max() / expected.std())
        if not error <= TOLERANCE:
            raise Wrong(f"decoding over a KV cache moves the logits by {error:.2g} standard deviations")
    return {"decodes": "no attention" if layout is None else "yes"}


def trace_stage(model_type: str, work: Path) -> Result:
    """Compare the eager decoder, trace it, and judge what the trace saw; compiles nothing."""
    from pwcc.compile.inputs import input_specs
    from pwcc.compile.predicates import collect
    from pwcc.compile.request import make_request
    from pwcc.compile.tracing import make_plan, trace_all
    from pwcc.compile.witness import Witness

    both = built(model_type, work)
    module = both.module
    result: Result = {"eager_error": compare(module, both.reference)}
    result["sensitivity"] = sensitivity(module, factor=1.25)
    index = index_sensitivity(module)
    if index is not None:
        result["index_sensitivity"] = index
    try:
        result |= decoding(module)
    except PwccError as error:
        result["decodes"] = f"no: {reason_of(error)}"
    request = make_request(
        module,
        specs=input_specs(module),
        sizes=(),
        max_tokens=MAX_TOKENS,
        device="cpu",
        identity=both.built.identity,
        args=both.built.args,
        splitting_ops=SPLITTING,
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=both.built.observation.complete,
    )
    witness = Witness(module, request, both.built.observation)
    traced = trace_all(module, request)
    predicates = [
        predicate
        for item in traced
        for predicate in collect(
            item.trace.guards,
            model=module,
            local_scope=item.trace.local_scope,
            global_scope=item.trace.global_scope,
        ).predicates
    ]
    witness.watch(traced)
    key, _ = lookup(module, request.target)
    witness.testify(traced, predicates, key)
    plan = make_plan(module, request, traced)
    result |= {
        "graphs": len(traced),
        "splits": plan.splits,
        "pieces": len(plan.pieces),
        "unique": len(plan.unique),
        "mode": plan.size_mode,
    }
    if not plan.splits:
        raise Wrong("no call of a splitting op in the graph")
    if result["sensitivity"] < NOTICED:
        raise Wrong(f"a wrong attention scale moves the logits by {result['sensitivity']:.2g} only")
    if index is not None and index < NOTICED:
        raise Wrong(f"other indices move the logits by {index:.2g} only")
    return result


def compile_stage(model_type: str, work: Path) -> Result:
    """Compile into the zoo's cache, load the entry in this process, and compare."""
    from pwcc.compile.inputs import input_specs
    from pwcc.compile.precompile import precompile

    both = built(model_type, work)
    report = precompile(
        both.module,
        cache_dir=work / "cache",
        specs=input_specs(both.module),
        sizes=(),
        max_tokens=MAX_TOKENS,
        device="cpu",
        identity=both.built.identity,
        args=both.built.args,
        splitting_ops=SPLITTING,
        jobs=1,
        observation=both.built.observation,
    )
    loaded = pwcc.load(both.module, cache_dir=work / "cache", entry=str(report.entry_key))
    return {
        "entry": str(report.entry_key),
        "pieces": report.counters.compiled_pieces,
        "unique": report.counters.unique_pieces,
        "compiled": report.counters.compiles,
        "reused": report.counters.piece_cache_hits,
        "sealed": 100,  # a piece that cannot be sealed fails the compile
        "cold_error": compare(loaded, both.reference),
    }


def load_stage(model_type: str, work: Path) -> Result:
    """Load the entry in a process that compiled nothing, and compare."""
    both = built(model_type, work)
    loaded = pwcc.load(both.module, cache_dir=work / "cache")
    receipt = loaded.receipt
    if not receipt.is_clean:
        raise Wrong(f"loading was not clean: {'; '.join(receipt.evidence) or receipt.modules_added}")
    return {"warm_error": compare(loaded, both.reference), "load_ms": round(receipt.total_ms, 1)}


STAGES: Final[Mapping[str, Callable[[str, Path], Result]]] = {
    "trace": trace_stage,
    "compile": compile_stage,
    "load": load_stage,
}


def run_stage(stage: str, model_type: str, work: Path) -> Result:
    """Run one stage; a failure is a result, with its reason and the line it comes from."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        result = {"ok": True, **STAGES[stage](model_type, work)}
    except Exception as error:  # every failure of an architecture is a row of the table
        (work / "logs").mkdir(parents=True, exist_ok=True)
        (work / "logs" / f"{model_type}.{stage}.txt").write_text(traceback.format_exc())
        result = {"ok": False, "reason": reason_of(error), "where": where_of(error)}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def reason_of(error: Exception) -> str:
    """Return the first line of what went wrong."""
    text = error.message if isinstance(error, PwccError) else str(error)
    line = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    known = isinstance(error, (PwccError, Wrong))
    return portable(line if known else f"{type(error).__name__}: {line}")[:300]


def where_of(error: Exception) -> str | None:
    """Return ``file:line`` of the failure: the one it names, else its innermost frame outside torch."""
    named = getattr(error, "where", None)
    if named:
        return portable(str(named))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    return portable(f"{frames[-1].filename}:{frames[-1].lineno}") if frames else None


def portable(text: str) -> str:
    """Cut the directories of this machine from file names."""
    for directory in (Path(transformers.__file__).parents[1], Path(__file__).resolve().parents[1]):
        text = text.replace(f"{directory}/", "")
    text = re.sub(r"\S*/site-packages/", "", text)
    return re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", text)  # any other absolute directory


if __name__ == "__main__":
    print(json.dumps(run_stage(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
