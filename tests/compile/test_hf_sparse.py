"""Attention that chooses its keys by an index runs whole, as one splitting operation, and answers rightly."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError, ModelError
from pwcc.compile import hf
from pwcc.compile.hf_checks import require_servable
from pwcc.compile.hf_opaque import OpaqueSparseAttention, make_opaque
from pwcc.compile.hf_sparse import causal_mask, convention_of, is_sparse, obstacle
from pwcc.compile.ops import opaque
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.dense import AttentionParams, dense_causal_attention
from pwcc.compile.ops.forward_context import ForwardContext, forward_context, use_forward_context
from pwcc.compile.ops.paged import AttentionMetadata

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

MLA: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 3,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v32": {**MLA, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]},
    "glm_moe_dsa": {
        **MLA,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense"] * 3,
        "indexer_types": ["full", "shared", "full"],
    },
    "deepseek_v4": {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "head_dim": 16,
        "q_lora_rank": 16,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["moe"] * 3,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
        "sliding_window": 4,
        "index_topk": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
}


@torch.no_grad()
def models(kind: str, **changed: Any) -> tuple[Any, hf.HFDecoder]:
    """transformers' own model with eager attention, and ours with the same weights."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SIZES[kind], **changed})
    plain = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in plain.parameters():
        deviation = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.normal_(float(parameter.dim() == 1), deviation, generator=generator)
    ours = hf.HFDecoder(hf.build_causal_lm(config)).eval()
    ours.model.load_state_dict(plain.state_dict())
    return plain, ours


@torch.no_grad()
def logits(model: Any, tokens: int) -> Tensor:
    ids, positions = torch.arange(tokens) * 7 % 64, torch.arange(tokens)
    result: Tensor
    if isinstance(model, hf.HFDecoder):
        result = model(ids, positions)
    else:
        result = model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return result


def sparse(model: nn.Module) -> list[OpaqueSparseAttention]:
    return [module for module in model.modules() if isinstance(module, OpaqueSparseAttention)]


@pytest.mark.parametrize("kind", list(SIZES))
def test_names_and_numbers_stay_and_the_index_matters(kind: str) -> None:
    plain, ours = models(kind)
    assert list(ours.model.state_dict()) == list(plain.state_dict())
    assert len(sparse(ours)) == {"deepseek_v32": 2, "glm_moe_dsa": 3, "deepseek_v4": 2}[kind]
    for tokens in (1, 3, 20):
        torch.testing.assert_close(logits(ours, tokens), logits(plain, tokens), atol=1e-5, rtol=1e-5)
    everything, _ = models(kind, index_topk=64)
    assert (logits(everything, 20) - logits(ours, 20)).abs().max() > 0.1


@pytest.mark.parametrize(("kind", "layers"), [("deepseek_v32", []), ("deepseek_v4", [0])])
def test_only_layers_without_an_index_attend_through_the_operator(kind: str, layers: list[int]) -> None:
    seen: list[int] = []

    def kernel(
        _context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        seen.append(params.layer)
        dense_causal_attention(q, k, v, out, params)

    _, ours = models(kind)
    with use_forward_context(ForwardContext(kernel=kernel)):
        logits(ours, 5)
    assert seen == layers


def test_the_live_model_keeps_its_own_attention() -> None:
    _, ours = models("deepseek_v32")
    assert ours.model.config._attn_implementation == "pwcc"
    for module in sparse(ours):
        copied: Any = opaque._templates[module._key].module
        assert module.config._attn_implementation == "pwcc"  # type: ignore[union-attr]
        assert copied.config._attn_implementation == "eager"
        assert copied.config is copied.indexer.config
        assert not copied.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indices_that_a_layer_hands_on_are_exact(dtype: torch.dtype) -> None:
    plain, ours = models("glm_moe_dsa", index_topk=5)
    plain, ours = plain.to(dtype), ours.to(dtype)
    states = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = torch.arange(9)[None]
    rotary = plain.model.rotary_emb(states, positions)
    full, shared = (layer.self_attn for layer in plain.model.layers[:2])
    given = {"position_embeddings": rotary, "position_ids": positions}
    masked = {**given, "attention_mask": causal_mask(states, None)}
    with torch.no_grad():
        mixed, _, indices = full(states, **masked)
        ours_mixed, nothing, ours_indices = sparse(ours)[0](states, **given)
        assert nothing is None
        assert ours_mixed.dtype == dtype
        assert torch.equal(ours_mixed, mixed)
        assert torch.equal(ours_indices, indices)
        assert ours_indices.dtype == torch.int32
        expected = shared(states, **masked, prev_topk_indices=indices)[0]
        again, _, passed_on = sparse(ours)[1](states, **given, prev_topk_indices=ours_indices)
    assert torch.equal(again, expected)
    assert passed_on is ours_indices


def test_fewer_tokens_than_indices_are_padded_and_the_padding_is_not_read() -> None:
    plain, ours = models("glm_moe_dsa", index_topk=16)
    states = torch.ones(1, 2, 32)
    given: dict[str, Any] = {
        "position_embeddings": plain.model.rotary_emb(states, torch.arange(2)[None]),
        "position_ids": torch.arange(2)[None],
    }
    with torch.no_grad():
        indices = sparse(ours)[0](states, **given)[2]
        assert indices is not None
        assert indices.shape == (1, 2, 16)
        read = sparse(ours)[1](states, **given, prev_topk_indices=indices)[0]
        spoilt = torch.cat([indices[..., :2], torch.full((1, 2, 14), 99, dtype=torch.int32)], dim=-1)
        assert torch.equal(read, sparse(ours)[1](states, **given, prev_topk_indices=spoilt)[0])
    with pytest.raises(ValueError, match="expected prev_topk_indices"):
        sparse(ours)[1](states, **given)


def test_a_cache_or_a_mask_is_refused() -> None:
    module = sparse(models("deepseek_v32")[1])[0]
    rotary = (torch.ones(1, 2, 8), torch.zeros(1, 2, 8))
    for wrong in ({"cache": object()}, {"attention_mask": torch.zeros(1, 1, 2, 2)}):
        with pytest.raises(ValueError, match="expected neither a cache nor a mask"):
            module(torch.zeros(1, 2, 32), rotary, position_ids=torch.arange(2)[None], **wrong)


@pytest.mark.parametrize("history", [False, True])
def test_a_batch_of_several_sequences_or_with_history_is_refused(history: bool) -> None:
    _, ours = models("deepseek_v32")
    allocator = BlockAllocator(num_blocks=8, block_size=4)
    sizes = [(5, 1)] if history else [(2, 2), (3, 3)]
    batch = [(allocator.allocate(length), query) for length, query in sizes]
    tokens = sum(count for _, count in batch)
    metadata = AttentionMetadata.build(batch, block_size=4)
    with forward_context(metadata=metadata), pytest.raises(ArgumentError, match="self_attn keeps state"):
        logits(ours, tokens)


def test_making_opaque_twice_changes_nothing() -> None:
    _, ours = models("deepseek_v32")
    assert make_opaque(ours.model, {}) == []


def test_the_mask_is_transformers_own() -> None:
    mask = causal_mask(torch.zeros(1, 4, 2), 2)
    assert mask.shape == (1, 1, 4, 4)
    low = torch.finfo(torch.float32).min
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mask[0, 0], torch.where(torch.tensor(seen) == 1, 0.0, low))
    assert torch.equal(causal_mask(torch.zeros(1, 3, 2), None)[0, 0] == 0, torch.ones(3, 3).tril() == 1)


class Indexer(nn.Module):
    index_topk = 2


class Rotary(nn.Module):
    rope_type: object = "default"


class PlainAttention(nn.Module):
    """The form that is known: sparse only where it holds an indexer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="pwcc")

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        return hidden_states, None


class OtherArgumentsAttention(PlainAttention):
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, shared_kv_states: Any
    ) -> tuple[Tensor, None]:
        return hidden_states, None


class NoRotaryAttention(PlainAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return hidden_states, None


class HandsOnAttention(PlainAttention):
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor,
        prev_topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, None, Tensor | None]:
        return hidden_states, None, prev_topk_indices


def holding(attention: nn.Module, **parts: nn.Module) -> nn.Module:
    for name, part in {"indexer": Indexer(), **parts}.items():
        setattr(attention, name, part)
    return attention


def changing_rotary(rope_type: object) -> Rotary:
    rotary = Rotary()
    rotary.rope_type = rope_type
    return rotary


def unnumbered() -> Indexer:
    indexer = Indexer()
    indexer.index_topk = 0
    return indexer


def without_config() -> nn.Module:
    attention = PlainAttention()
    del attention.config
    return holding(attention)


def refused() -> Iterator[tuple[nn.Module, str]]:
    yield holding(OtherArgumentsAttention()), "takes shared_kv_states"
    yield holding(NoRotaryAttention()), "takes no position_embeddings"
    yield without_config(), "has no configuration"
    yield holding(PlainAttention(), rotary=changing_rotary("dynamic")), "change with the length"
    yield holding(PlainAttention(), rotary=changing_rotary({"main": "longrope"})), "change with the length"
    yield holding(HandsOnAttention(), indexer=unnumbered()), "whose number is not known"


@pytest.mark.parametrize(("attention", "match"), list(refused()))
def test_an_unknown_form_is_refused_by_name(attention: nn.Module, match: str) -> None:
    model: Any = nn.ModuleDict({"self_attn": attention})
    assert is_sparse(attention)
    assert convention_of(attention) is None
    with pytest.raises(ModelError, match=rf"self_attn \({type(attention).__name__}\) .*{match}") as caught:
        require_servable(model)
    assert "test_hf_sparse.py:" in (caught.value.where or "")
    assert make_opaque(model, {}) == []


def test_an_index_that_no_attention_holds_is_refused() -> None:
    model: Any = nn.ModuleDict({"layer": nn.ModuleDict({"indexer": Indexer()})})
    with pytest.raises(ModelError, match=r"layer.indexer \(Indexer\) selects or adds keys, and no attention"):
        require_servable(model)


def test_what_is_known_has_no_obstacle() -> None:
    known = holding(PlainAttention(), rotary=changing_rotary("yarn"))
    assert obstacle(known) is None
    assert convention_of(known) is not None
    assert not is_sparse(PlainAttention())
    assert make_opaque(nn.ModuleDict({"self_attn": known}), {}) == ["self_attn"]
    reader, chooser = convention_of(HandsOnAttention()), convention_of(holding(HandsOnAttention()))
    assert reader is not None
    assert chooser is not None
    assert (reader.shares, reader.reads, reader.chosen) == (True, True, 0)
    assert (chooser.shares, chooser.reads, chooser.chosen) == (True, False, 2)
