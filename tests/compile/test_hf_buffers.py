"""Buffers that ``forward`` moves to where they already are stay as they are, and others are not touched."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.compile import hf
from pwcc.compile.hf_buffers import moved_names
from pwcc.compile.trace import SizeMode, trace

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

TINY: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "dff": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_ctrl_computes_the_same_and_rebinds_nothing(dtype: torch.dtype, tolerance: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("ctrl", **TINY)
    ours = hf.HFDecoder(hf.build_causal_lm(config, dtype=dtype)).eval()
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    plain.load_state_dict(ours.model.state_dict())
    before = ours.get_buffer("model.transformer.pos_encoding")
    ids = torch.arange(5)
    with torch.no_grad():
        logits = ours(ids, ids)
        expected = plain(input_ids=ids[None], position_ids=ids[None], use_cache=False).logits[0]
    assert ours.get_buffer("model.transformer.pos_encoding") is before
    assert torch.equal(before, plain.transformer.pos_encoding)  # as its first call left it
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)


def test_a_settled_model_is_settled_once_and_pickles() -> None:
    from transformers import AutoConfig

    ours = hf.HFDecoder(hf.build_causal_lm(AutoConfig.for_model("ctrl", **TINY))).eval()
    again = pickle.loads(pickle.dumps(hf.HFDecoder(ours.model).eval()))
    before = again.get_buffer("model.transformer.pos_encoding")
    ids = torch.arange(5)
    with torch.no_grad():
        assert torch.equal(again(ids, ids), ours(ids, ids))
    assert again.get_buffer("model.transformer.pos_encoding") is before


def test_a_move_that_would_change_something_is_refused() -> None:
    from transformers import AutoConfig

    ours = hf.HFDecoder(hf.build_causal_lm(AutoConfig.for_model("ctrl", **TINY)))
    ours.get_submodule("model.transformer.w").double()
    with pytest.raises(ValueError, match=r"pos_encoding to torch\.float64"):
        ours(torch.arange(3), torch.arange(3))


def test_ctrl_traces_into_one_graph() -> None:
    from transformers import AutoConfig

    ours = hf.HFDecoder(hf.build_causal_lm(AutoConfig.for_model("ctrl", **TINY))).eval()
    ids = torch.arange(5)
    traced = trace(ours, [ids, ids.clone()], {0: [0], 1: [0]}, mode=SizeMode.UNBACKED, low=1, high=8)
    targets = [str(node.target) for node in traced.graph_module.graph.nodes]
    assert targets.count("pwcc.attention") == 1


class Tables(nn.Module):
    moved: Tensor
    scaled: Tensor
    both: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.moved = self.moved.to(x.device, dtype=x.dtype)
        self.other = self.moved.to(x.device)
        self.scaled = self.scaled.to(x.device) * 2
        self.both = self.both.to(x.device)
        self.both += 1
        return x


def test_only_what_is_moved_and_nothing_else_counts() -> None:
    assert moved_names(Tables.forward) == {"moved"}
    assert moved_names(len) == set()
