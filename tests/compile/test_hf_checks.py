"""Architectures that would answer wrongly on flat tokens are refused when they are built."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ModelError
from pwcc.compile import hf
from pwcc.compile.hf_checks import require_known_state, require_servable, takes_positions
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import ForwardContext, use_forward_context

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def model(name: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return hf.build_causal_lm(AutoConfig.for_model(name, **values))


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("bloom", {**TINY, "n_head": 2}, "BloomAttention computes attention itself"),
        ("falcon", TINY, "FalconForCausalLM computes attention itself"),
        (
            "bart",
            {"vocab_size": 64, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2},
            r"BartForCausalLM.forward takes no position_ids",
        ),
        ("bert", {**TINY, "is_decoder": False}, "is not causal"),
    ],
)
def test_what_would_answer_wrongly_is_refused_with_its_line(
    name: str, values: dict[str, Any], match: str
) -> None:
    with torch.device("meta"), pytest.raises(ModelError, match=match) as error:
        hf.HFDecoder(model(name, **values))
    if "not causal" not in match:
        assert f"modeling_{name}.py:" in (error.value.where or "")


def test_attention_over_an_encoder_that_is_not_there_is_no_reason() -> None:
    with torch.device("meta"):
        built = model("bert", **TINY, is_decoder=True, add_cross_attention=True)
    require_servable(built)
    assert takes_positions(built)


def test_a_model_without_attention_needs_no_positions() -> None:
    with torch.device("meta"):
        built = model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    require_servable(built)
    assert not takes_positions(built)


@pytest.mark.parametrize(("size", "value_size"), [(12, 8), (8, 12), (8, 8)])
def test_values_may_have_another_size_than_keys(size: int, value_size: int) -> None:
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    q, k = torch.randn(1, 4, 5, size), torch.randn(1, 2, 5, size)
    v = torch.randn(1, 2, 5, value_size)
    out, _ = hf.pwcc_attention_forward(module, q, k, v, None)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_attention_that_is_not_causal_is_refused_when_it_runs() -> None:
    module = nn.Module()
    module.layer_idx, module.is_causal = 0, False  # type: ignore[assignment]
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="not causal"):
        hf.pwcc_attention_forward(module, q, q, q, None)


@pytest.mark.parametrize("tuned", [False, True])
def test_chunked_attention_runs_and_a_scale_by_own_positions_only_on_whole_sequences(tuned: bool) -> None:
    seen: list[tuple[int | None, bool]] = []
    sizes = {**TINY, "num_key_value_heads": 1, "intermediate_size": 32, "intermediate_size_mlp": 32}
    built = hf.HFDecoder(
        model(
            "llama4_text",
            **sizes,
            head_dim=16,
            num_local_experts=2,
            attention_chunk_size=4,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
            attn_temperature_tuning=tuned,
        )
    )

    def kernel(_context: Any, _q: Any, _k: Any, _v: Any, out: Tensor, params: AttentionParams) -> None:
        seen.append((params.chunk, params.bias is not None))
        out.zero_()

    with torch.no_grad(), use_forward_context(ForwardContext(kernel=kernel)):
        built(torch.arange(5), torch.arange(5))
    assert seen == [(4, tuned), (None, tuned)]


def test_state_beside_the_keys_is_refused_unless_it_is_opaque() -> None:
    """What no form of ``hf_opaque`` knows would lose its state between two calls, silently."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        **TINY,
        "intermediate_size": 32,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
    }
    config = AutoConfig.for_model("lfm2", **values)
    plain = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"layers.0.conv \(Lfm2ShortConv\) keeps state") as caught:
        require_known_state(plain)
    assert caught.value.where is not None
    assert "modeling_lfm2.py:" in caught.value.where
    hf.HFDecoder(hf.build_causal_lm(config))


def test_the_source_of_a_class_is_read_once_however_many_layers_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python parses the whole file for each look, which took minutes for models of 60 layers."""
    read: list[object] = []
    original = inspect.getsource

    def getsource(what: Any) -> str:
        read.append(what)
        return original(what)

    built = model("llama", **TINY, intermediate_size=32, num_key_value_heads=1)
    monkeypatch.setattr(inspect, "getsource", getsource)
    require_known_state(built)
    assert len(read) == len(set(read)) > 3


def test_attention_that_runs_twice_under_one_number_is_refused_beside_a_kv_cache() -> None:
    from pwcc.cache.errors import UsageError
    from pwcc.compile.ops.kv_layout import observe_kv_layout

    values = {**TINY, "intermediate_size": 32, "num_key_value_heads": 2}
    decoder = hf.HFDecoder(model("diffllama", **values)).eval()
    ids = torch.arange(3)
    seen: list[Tensor | None] = []

    def kernel(
        _context: ForwardContext, _q: Tensor, _k: Tensor, _v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        seen.append(params.bias)
        out.zero_()

    with torch.no_grad(), use_forward_context(ForwardContext(kernel=kernel)):
        decoder(ids, ids)
    assert len(seen) == 4
    assert all(bias is not None for bias in seen)  # which the kernel over a KV cache refuses by name
    with torch.no_grad(), pytest.raises(UsageError, match="runs more than once"):
        observe_kv_layout(lambda: decoder(ids, ids))
