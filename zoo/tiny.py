"""Key: a tiny configuration of any architecture, made from what its configuration class says by default.

Sizes shrink by the name of the attribute. Lists with one element per layer are cut to one layer of each kind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from overrides import OVERRIDES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HIDDEN: Final = 64
HEADS: Final = 4
HEAD_DIM: Final = 16
VOCABULARY: Final = 128
POSITIONS: Final = 128
WINDOW: Final = 8  # well below the 32 tokens of the longest comparison
LAYERS: Final = 2
MOST_LAYERS: Final = 6

LAYER_COUNTS: Final = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)

SIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS
    ),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "expert_ffn_hidden_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), POSITIONS),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "top_k_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("top_k", "num_experts_per_token"), 2),
    "rotary_dim": 8,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    "num_expert_group": 1,
    "num_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 20,
    # indexers, which choose fewer keys than the longest comparison has
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": HEAD_DIM,
    "hidden_size_per_layer_input": 16,
    "type_vocab_size": 2,
    # state-space and linear-attention mixers
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "lru_width": HIDDEN,
    "linear_head_dim": HEAD_DIM,
    "linear_num_heads": HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
}
"""New values by attribute name, where the class has an int there."""

UNSET: Final = ("head_dim", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
"""Attributes that get their value where the class leaves them None, too."""

CAPS: Final[Mapping[str, float]] = {
    # small, so that a bound that was forgotten would be seen
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}

KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a tiny configuration of ``model_type``, of at least :data:`LAYERS` layers.

    Every kind of layer that the default configuration has occurs, as far as :data:`MOST_LAYERS` allows.
    Raise what the configuration class raises for values that it refuses.
    """
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    override = OVERRIDES.get(model_type)
    values = tiny_values(cls(), override.values if override else {})
    return cls(**values)


def tiny_values(default: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments that make a tiny one of ``default``'s class; ``given`` are final."""
    from transformers import PreTrainedConfig

    values: dict[str, Any] = {}
    attributes = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    for name, value in attributes.items():
        if isinstance(value, PreTrainedConfig):
            nested = given.get(name, {})
            values[name] = {**tiny_values(value, nested), "model_type": value.model_type}
        elif isinstance(value, int) and not isinstance(value, bool):
            values |= _number(name, value, attributes)
        elif value is None and name in UNSET:
            values[name] = SIZES[name]
        elif name in CAPS and value is not None:
            values[name] = CAPS[name]
    if "qk_rope_head_dim" in values and attributes.get("head_dim") == attributes["qk_rope_head_dim"]:
        values["head_dim"] = values["qk_rope_head_dim"]
    values |= _layers(default, attributes)
    for name, value in given.items():
        if not isinstance(attributes.get(name), PreTrainedConfig):
            values[name] = copy.deepcopy(value)
    return values


def _number(name: str, value: int, attributes: Mapping[str, Any]) -> dict[str, int]:
    if name in KV_HEADS:
        heads = next(
            (attributes[n] for n in ("num_attention_heads", "n_head", "num_heads") if n in attributes), 0
        )
        return {name: HEADS if value == heads else min(value, 2)}
    if name.endswith("token_id") or name.endswith("token_index"):
        return {name: value % VOCABULARY} if value >= VOCABULARY else {}
    return {name: SIZES[name]} if name in SIZES else {}


def _layers(default: PreTrainedConfig, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the per-layer lists to one layer of each kind, and count those layers."""
    counts = [name for name in LAYER_COUNTS if isinstance(getattr(default, name, None), int)]
    if not counts:
        return {}
    depth = getattr(default, counts[0])
    lists = {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (list, tuple)) and len(value) == depth and depth > 1
    }
    if not lists:
        return dict.fromkeys(counts, LAYERS)
    rows = list(dict.fromkeys(zip(*(map(repr, value) for value in lists.values()), strict=True)))[:MOST_LAYERS]
    first = [next(i for i in range(depth) if tuple(repr(v[i]) for v in lists.values()) == row) for row in rows]
    first = (first * LAYERS)[: max(LAYERS, len(first))]
    cut: dict[str, Any] = {name: [value[i] for i in first] for name, value in lists.items()}
    return {**cut, **dict.fromkeys(counts, len(first))}
