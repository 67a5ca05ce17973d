from __future__ import annotations

from typing import Any

import pytest

from tests.zoo.conftest import Load

REFUSED = {  # what their own classes refuse in a tiny form; all are excluded or failing rows of docs/zoo.md
    "dots3_note",
    "gemma4_assistant",
    "prophetnet",
}


def test_every_architecture_has_a_tiny_configuration(zoo: Load) -> None:
    tiny, architectures = zoo("tiny"), zoo("architectures")
    refused = set()
    for name in architectures.ARCHITECTURES:
        try:
            config = tiny.tiny_config(name)
        except Exception:
            refused.add(name)
            continue
        assert config.model_type
    assert refused <= REFUSED
    assert len(architectures.ARCHITECTURES) > 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}),
        ("gemma2", {"sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
        ("deepseek_v3", {"qk_nope_head_dim": 16, "v_head_dim": 20, "head_dim": 8, "q_lora_rank": 32}),
        ("bert", {"is_decoder": True}),
        ("deepseek_v32", {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}),
        ("glm_moe_dsa", {"index_topk": 8, "indexer_types": ["full", "shared", "full"]}),
    ],
)
def test_sizes_shrink_by_name(zoo: Load, name: str, expected: dict[str, Any]) -> None:
    config = zoo("tiny").tiny_config(name)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_next", "gemma4_text", "hy_v4"])
def test_every_kind_of_layer_occurs(zoo: Load, name: str) -> None:
    from transformers import CONFIG_MAPPING

    config, default = zoo("tiny").tiny_config(name), CONFIG_MAPPING[name]()
    assert set(config.layer_types) == set(default.layer_types)
    assert config.num_hidden_layers == len(config.layer_types) <= 6


def test_nested_configurations_shrink_too(zoo: Load) -> None:
    text = zoo("tiny").tiny_config("gemma3").get_text_config()
    assert (text.hidden_size, text.sliding_window, text.vocab_size) == (64, 8, 128)


def test_overrides_name_architectures_and_reasons(zoo: Load) -> None:
    known = zoo("architectures").ARCHITECTURES
    for name, override in zoo("overrides").OVERRIDES.items():
        assert name in known
        assert override.reason
        assert override.values
