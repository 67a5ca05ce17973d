"""Mixers and experts of Hugging Face models as splitting operations, under the names that checkpoints have."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pwcc.compile import hf
from pwcc.compile.hf_opaque import OpaqueExperts, OpaqueMixer, make_opaque

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

SIZES: Mapping[str, Mapping[str, Any]] = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4},
    "qwen3_next": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


def models(kind: str) -> tuple[Any, Any]:
    """The same model twice: transformers' own, and with opaque modules."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **SIZES[kind])
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = copy.deepcopy(plain)
    assert make_opaque(ours, hf.portable_config(config))
    return plain, ours


@pytest.mark.parametrize("kind", list(SIZES))
def test_names_and_numbers_stay(kind: str) -> None:
    plain, ours = models(kind)
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict())
    assert any(isinstance(module, OpaqueMixer) for module in ours.modules())
    for tokens in (1, 3, 9):
        ids = torch.arange(tokens)[None] % 64
        with torch.no_grad():
            assert torch.equal(ours(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


def test_weights_that_come_later_are_used() -> None:
    """The op takes the tensors that the module holds when it is called."""
    plain, ours = models("mamba")
    changed = {name: tensor * 1.5 for name, tensor in plain.state_dict().items()}
    plain.load_state_dict(changed, assign=True)
    ours.load_state_dict(changed, assign=True)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


def test_a_cache_or_a_mask_is_refused() -> None:
    _, ours = models("mamba")
    mixer = next(module for module in ours.modules() if isinstance(module, OpaqueMixer))
    with pytest.raises(ValueError, match="expected neither a cache nor a mask"):
        mixer(torch.zeros(1, 2, 32), cache=object())


def test_experts_that_loop_are_opaque_and_others_are_not() -> None:
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    holder = torch.nn.Module()
    holder.experts = DbrxExperts(
        DbrxFFNConfig(hidden_size=8, ffn_hidden_size=8, moe_num_experts=2, moe_top_k=1)
    )
    holder.plain = torch.nn.Linear(8, 8)
    assert make_opaque(holder, {}) == ["experts"]
    assert isinstance(holder.experts, OpaqueExperts)
    assert type(holder.plain) is torch.nn.Linear


@pytest.mark.parametrize("before", [True, False])
def test_language_adapters_are_opaque_and_the_default_language_is_used(before: bool) -> None:
    """Built in training mode, with dropout, as models are; the operation computes as in evaluation."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "xmod",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        is_decoder=True,
        languages=["de_DE", "en_XX"],
        default_language="en_XX",
        ln_before_adapter=before,
    )
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    ours = copy.deepcopy(plain)
    names = make_opaque(ours, hf.portable_config(config))
    assert [name.rpartition(".")[2] for name in names] == ["output"]
    ids = torch.arange(5)[None]
    with torch.no_grad():
        expected = plain.eval()(ids, use_cache=False).logits
        assert torch.equal(ours.eval()(ids, use_cache=False).logits, expected)
        other = torch.zeros(1, dtype=torch.int64)
        assert not torch.equal(ours(ids, lang_ids=other, use_cache=False).logits, expected)
