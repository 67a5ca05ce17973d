"""Key: what the general rules of ``tiny.py`` cannot know of single architectures, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Override:
    """Values of one architecture's configuration and why they are needed."""

    reason: str
    values: Mapping[str, Any]


ALTERNATING = ["sliding_attention", "full_attention"]

INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 1,
}

SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 20,
}

DECODER = Override("a BERT is an encoder unless it is told to be a decoder", {"is_decoder": True})

OVERRIDES: Final[Mapping[str, Override]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        DECODER,
    ),
    "bamba": Override("the default has no attention layer", {"attn_layer_indices": [1]}),
    "cohere_compass_text": Override(
        "the default has no rotary parameters for its layers",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "dbrx": Override(
        "the default attention configuration lacks the rotary base that the model reads",
        {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 2.0}},
    ),
    "deepseek_v4": Override(
        "every kind of attention, with several compressed keys at 32 tokens, of which the index chooses two",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "partial_rotary_factor": 0.5,
            "index_topk": 2,
            "o_groups": 2,
            "o_lora_rank": 16,
        },
    ),
    "dots3_note": Override(
        "the towers' adapters must have the width of what they connect; sliding layers have sizes of their own",
        {
            "text_config": SLIDING,
            "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
            "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        },
    ),
    "dots3_note_text": Override("sliding layers have sizes of their own", SLIDING),
    "gemma3n_text": Override(
        "two layers share the keys of the last of each kind before them",
        {
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "intermediate_size": 96,
            "laurel_rank": 8,
        },
    ),
    "glm_moe_dsa": Override(
        "a layer that uses the keys chosen by the one before",
        {
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention"] * 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "granitemoehybrid": Override(
        "the default has no attention layer", {"layer_types": ["linear_attention", "full_attention"]}
    ),
    "jamba": Override(
        "one attention layer and one of experts in every second place",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "lfm2": Override(
        "the default has attention layers only",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    ),
    "lfm2_moe": Override(
        "the default names no layer types", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    ),
    "mamba2": Override(
        "heads times head size must be the expanded width", {"num_heads": 4, "head_dim": 32, "n_groups": 2}
    ),
    "minimax_m3_vl_text": Override(
        "the default has no layer with an indexer, which chooses two blocks beside the query's own",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
        },
    ),
    "nemotron": Override("the default leaves the number of key heads open", {"num_key_value_heads": 2}),
    "nemotron_h": Override("groups must divide the mixer's heads", {"n_groups": 2}),
    "qwen4_exp": Override("full attention needs an indexer, which is unset", {"text_config": INDEXED}),
    "qwen4_exp_text": Override("full attention needs an indexer, which is unset", INDEXED),
    "recurrent_gemma": Override("attention comes in the third layer", {"num_hidden_layers": 3}),
    "xmod": Override(
        "a decoder, and the language of its adapters", {"is_decoder": True, "default_language": "en_XX"}
    ),
    "zaya": Override("the class accepts one expert per token only", {"num_experts_per_tok": 1}),
    "zamba": Override(
        "the attention block is shared by two layers",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
        },
    ),
}
