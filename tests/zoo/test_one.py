"""The comparison itself: it holds where it should, and notices what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pwcc.cache.errors import PwccError
from tests.zoo.conftest import Load

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "mixtral", "gpt2", "bert"])
def test_the_eager_decoder_equals_transformers_and_a_wrong_scale_is_noticed(
    zoo: Load, tmp_path: Path, name: str
) -> None:
    one = zoo("one")
    both = one.built(name, tmp_path)
    assert one.compare(both.module, both.reference) < one.TOLERANCE / 10
    assert one.sensitivity(both.module, factor=1.25) > one.NOTICED


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("lfm2", "keeps state from token to token"),
        ("zaya", "keeps state from token to token"),
        ("minimax", "keeps state from token to token"),
        ("inkling_text", "keeps state from token to token|expected equal key/value heads"),
        ("dory", "runs more than once in one call"),
        ("deepseek_v32", "keeps state from token to token"),
        ("jetmoe", None),
    ],
)
def test_what_keeps_other_state_never_decodes_wrongly(
    zoo: Load, tmp_path: Path, name: str, match: str | None
) -> None:
    one = zoo("one")
    both = one.built(name, tmp_path)
    assert one.compare(both.module, both.reference) < one.TOLERANCE / 10
    if match is None:
        assert one.decoding(both.module) == {"decodes": "yes"}
    else:
        with pytest.raises(PwccError, match=match):
            one.decoding(both.module)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "qwen4_exp_text"])
def test_sparse_attention_equals_transformers_and_other_indices_are_noticed(
    zoo: Load, tmp_path: Path, name: str
) -> None:
    one = zoo("one")
    both = one.built(name, tmp_path)
    assert one.compare(both.module, both.reference) < one.TOLERANCE / 10
    before = both.module.state_dict()
    weights = {key: tensor.clone() for key, tensor in before.items()}
    assert one.sensitivity(both.module, factor=1.25) > one.NOTICED
    assert one.index_sensitivity(both.module) > 100 * one.NOTICED
    for key, tensor in weights.items():
        torch.testing.assert_close(before[key], tensor)


def test_a_model_without_an_indexer_has_no_index_sensitivity(zoo: Load, tmp_path: Path) -> None:
    one = zoo("one")
    assert one.index_sensitivity(one.built("gpt2", tmp_path).module) is None


def test_a_model_that_mixes_the_tokens_of_a_batch_is_noticed(zoo: Load) -> None:
    one = zoo("one")

    def call(ids: Tensor, positions: Tensor) -> Tensor:
        states = torch.sin(ids[:, None, None] * torch.arange(1, 9) + positions[:, None, None])
        out = torch.empty_like(states)
        torch.ops.pwcc.attention(states, states, states, out, 0, 1.0)
        return (out + states.cumsum(0) * mixing)[:, 0]

    mixing = 0.0
    assert one.decoding(call) == {"decodes": "yes"}
    mixing = 0.1
    with pytest.raises(one.Wrong, match="decoding over a KV cache"):
        one.decoding(call)


def test_a_window_that_is_forgotten_is_noticed(zoo: Load, tmp_path: Path) -> None:
    one = zoo("one")
    both = one.built("mistral", tmp_path)
    assert one.sensitivity(both.module, factor=1.0) == 0.0
    assert one.sensitivity(both.module, window=None) > one.NOTICED


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda logits: logits + 0.01 * logits.std(), "differ by 0.01 standard deviations"),
        (lambda logits: logits[:-1] if len(logits) > 1 else logits, "expected logits"),
        (lambda logits: logits * float("nan"), "differ by nan"),
    ],
)
def test_a_wrong_answer_is_named(zoo: Load, spoil: Any, match: str) -> None:
    one = zoo("one")

    def reference(ids: Tensor, positions: Tensor) -> Tensor:
        return torch.sin(ids[:, None] * torch.arange(1, 9) + positions[:, None])

    assert one.compare(reference, reference) == 0.0
    with pytest.raises(one.Wrong, match=match):
        one.compare(lambda ids, positions: spoil(reference(ids, positions)), reference)


def test_a_reference_without_meaning_is_refused(zoo: Load) -> None:
    one = zoo("one")

    def flat(ids: Tensor, positions: Tensor) -> Tensor:
        return torch.ones(len(ids), 8)

    with pytest.raises(one.Wrong, match="do not differ"):
        one.compare(flat, flat)


def test_weights_depend_on_their_name_alone(zoo: Load) -> None:
    fill = zoo("weights").fill
    one, two = (torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.LayerNorm(8)) for _ in "12")
    fill(one)
    fill(two)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert abs(float(next(one.parameters()).detach().std()) - 32**-0.5) < 0.03
    experts = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.empty(4, 16, 64))})
    fill(experts)
    assert abs(float(experts["weight"].detach().std()) - 0.125) < 0.01


def test_failures_name_a_portable_line(zoo: Load, tmp_path: Path) -> None:
    result = zoo("one").run_stage("trace", "bloom", tmp_path)
    assert not result["ok"]
    assert "AttentionInterface" in result["reason"]
    assert result["where"].startswith("transformers/models/bloom/modeling_bloom.py:")
    assert (tmp_path / "logs" / "bloom.trace.txt").exists()
