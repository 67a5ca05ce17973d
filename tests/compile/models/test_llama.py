import operator
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional as F

from pwcc.compile.models.llama import PRESET_DTYPES, PRESETS, Llama, LlamaConfig
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache
from pwcc.compile.weights import parameters_on_meta

TINY = PRESETS["llama-tiny"]


def built(config: LlamaConfig = TINY, seed: int = 0) -> Llama:
    model = Llama(config).eval().requires_grad_(False)
    model.init_weights(seed)
    return model


def textbook(model: Llama, ids: Tensor) -> Tensor:
    """The same decoder written without fusion, residual passing or our op."""
    c, n = model.config, ids.shape[0]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.eps).sqrt() * weight

    def rope(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.double().chunk(2, -1))
        frequency = c.theta ** (-torch.arange(0, c.head_size, 2).double() / c.head_size)
        turned = pairs * torch.polar(torch.ones(1).double(), torch.arange(n)[:, None, None] * frequency)
        return torch.cat([turned.real, turned.imag], -1).float()

    x = model.embed.weight[ids]
    for layer in model.layers:
        p = dict(layer.named_parameters())
        widths = [c.heads * c.head_size, c.kv_heads * c.head_size, c.kv_heads * c.head_size]
        q, k, v = torch.split(
            F.linear(norm(x, p["input_norm.weight"]), p["attention.qkv_proj.weight"]), widths, -1
        )
        q, k = rope(q.view(n, c.heads, -1)), rope(k.view(n, c.kv_heads, -1))
        k, v = (t.view(n, c.kv_heads, -1).repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.head_size**-0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
        x = x + F.linear(torch.einsum("hqk,khd->qhd", scores, v).flatten(1), p["attention.o_proj.weight"])
        gate, up = F.linear(norm(x, p["post_norm.weight"]), p["mlp.gate_up_proj.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, p["mlp.down_proj.weight"])
    return F.linear(norm(x, model.norm.weight), model.lm_head.weight)


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied=True, head_dim=16, kv_heads=4, layers=2)])
def test_logits_equal_the_textbook_decoder(config: LlamaConfig) -> None:
    model = built(config)
    ids = torch.randint(0, config.vocab, (9,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids, torch.arange(9)), textbook(model, ids), atol=1e-4, rtol=1e-4)


def test_paged_decode_continues_a_prompt_exactly() -> None:
    model, ids = built(), torch.arange(12) * 31 % 512
    whole = model(ids, torch.arange(12))
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    cache = PagedKVCache(layers=4, num_blocks=8, block_size=4, kv_heads=2, head_dim=32)
    sequence = allocator.allocate(7)
    rows: list[Tensor] = []
    for new in [7, 1, 1, 3]:
        if sequence.length != 7 or rows:
            allocator.append(sequence, new)
        at = torch.arange(sequence.length - new, sequence.length)
        with forward_context(metadata=AttentionMetadata.build([(sequence, new)], block_size=4), cache=cache):
            rows.append(model(ids[at], at))
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-4, rtol=1e-4)


def test_weights_follow_seed_and_name_only() -> None:
    a, b, other = built(seed=1), built(replace(TINY, layers=2), seed=1), built(seed=2)
    assert torch.equal(a.layers[1].mlp.down_proj.weight, b.layers[1].mlp.down_proj.weight)  # type: ignore[union-attr,arg-type]
    assert not torch.equal(a.embed.weight, other.embed.weight)
    assert not torch.equal(a.layers[0].mlp.down_proj.weight, a.layers[1].mlp.down_proj.weight)  # type: ignore[union-attr,arg-type]
    logits = a(torch.arange(64), torch.arange(64))
    assert 0.3 < logits.std() < 3.0
    assert abs(a.norm.weight.mean() - 1) < 0.02
    assert a.norm.weight.std() > 0.01


def test_presets_have_the_published_parameter_counts() -> None:
    counts = {}
    for name, config in PRESETS.items():
        with parameters_on_meta():
            model = Llama(config)
        counts[name] = sum(p.numel() for p in model.parameters())
        assert name in PRESET_DTYPES
    # Llama 3.2 1B: 1.236e9; Llama 3 8B: 8.030e9 (model cards)
    assert counts["llama-1b"] == 1_235_814_400
    assert counts["llama-8b"] == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "positive sizes"),
        ({"kv_heads": 3}, "divisible by kv_heads"),
        ({"hidden": 130}, "hidden divisible by heads"),
        ({"head_dim": 7}, "even head_dim"),
    ],
)
def test_impossible_configurations_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def traced() -> fx.GraphModule:
    """One fullgraph trace with both token counts unbacked."""
    from torch._dynamo import convert_frame
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    model, ids, positions = built(), torch.arange(8), torch.arange(8)
    mark_unbacked(ids, 0)
    mark_unbacked(positions, 0)
    with torch.no_grad(), get_metrics_context(), dynamo_timed("capture"):
        captured = convert_frame.fullgraph_capture(model.forward, (ids, positions), {})
    assert captured.backend_input is not None
    return captured.backend_input.graph_module


def test_it_traces_whole_with_one_attention_per_layer(traced: fx.GraphModule) -> None:
    calls = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_function")
    assert calls["pwcc.attention"] == TINY.layers
    layers = [node.args[4] for node in traced.graph.nodes if str(node.target) == "pwcc.attention"]
    assert layers == list(range(TINY.layers))


def test_pieces_between_attentions_have_three_structures(traced: fx.GraphModule) -> None:
    """Op sequences between the attentions, with arguments by relative position: first, middle, last."""
    pieces: list[list[str]] = [[]]
    order: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        if (
            node.op in ("placeholder", "output")
            or "assert" in str(node.target)
            or node.target in (operator.eq, operator.ge)
        ):
            continue
        if str(node.target) == "pwcc.attention":
            pieces.append([])
            order.clear()
            continue
        order[node] = len(order)
        arguments = map_arg(node.args, lambda a: f"%{order.get(a, 'outer')}")
        pieces[-1].append(f"{node.target} {arguments}")
    assert len(pieces) == TINY.layers + 1
    assert len({tuple(piece) for piece in pieces}) == 3
    assert len({tuple(piece) for piece in pieces[1:-1]}) == 1
