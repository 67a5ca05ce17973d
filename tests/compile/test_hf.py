import copy
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pwcc.cache.errors import ModelError, UsageError
from pwcc.compile import hf
from pwcc.compile.input_values import make_inputs
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_ref import ModelRef, build, materialize
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma": {},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0, "layer_types": ALTERNATING},
    "gemma3_text": {"sliding_window": 4, "layer_types": ALTERNATING},
    "gpt_oss": {
        "sliding_window": 4,
        "layer_types": ALTERNATING,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}
ASKED = [family for family in FAMILIES if family != "gpt_oss"]  # gpt_oss only shows that sinks arrive


def directory(tmp_path: Path, family: str) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **SIZES, **FAMILIES[family]).save_pretrained(tmp_path)
    return tmp_path


def reference(path: Path, module: torch.nn.Module) -> Any:
    """transformers' own eager attention on the same weights, from a configuration of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(module.get_submodule("model").state_dict())
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_tokens_give_transformers_own_logits(tmp_path: Path, family: str) -> None:
    path = directory(tmp_path, family)
    built = build(ModelRef.parse(str(path)), weights="none", dtype="float32")
    assert built.identity.startswith("hf:")
    assert {p.device.type for p in built.module.parameters()} == {"meta"}
    materialize(built.module, device="cpu", seed=0)
    model = reference(path, built.module)
    for name, buffer in model.named_buffers():  # rotary frequencies, which no weight file holds
        assert torch.equal(buffer, built.module.get_buffer(f"model.{name}")), name
    assert len(list(built.module.parameters())) == len(list(model.parameters()))  # ties
    ids, positions = make_inputs(input_specs(built.module), 13)
    with torch.no_grad():
        logits = built.module(ids, positions)
        expected = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    assert logits.shape == (13, 128)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ASKED)
def test_one_graph_with_one_attention_per_layer(tmp_path: Path, family: str) -> None:
    from torch._dynamo import convert_frame, reset
    from torch._dynamo.decorators import mark_unbacked
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    module = build(ModelRef.parse(str(directory(tmp_path, family))), weights="random").module
    inputs = make_inputs(input_specs(module), 8)
    for tensor in inputs:
        mark_unbacked(tensor, 0)
    with torch.no_grad(), get_metrics_context(), dynamo_timed("capture"):
        captured = convert_frame.fullgraph_capture(module.forward, inputs, {})
    reset()
    assert captured.backend_input is not None
    nodes = captured.backend_input.graph_module.graph.nodes
    calls = Counter(str(node.target) for node in nodes if node.op == "call_function")
    assert calls["pwcc.attention"] == 3
    windows = [node.args[6] for node in nodes if str(node.target) == "pwcc.attention"]
    sliding = FAMILIES[family].get("layer_types", ["sliding_attention"] * 3)
    window = FAMILIES[family].get("sliding_window")
    assert windows == [window if kind == "sliding_attention" else None for kind in sliding]


def test_paged_cache_serves_a_hugging_face_model(tmp_path: Path) -> None:
    module = build(ModelRef.parse(str(directory(tmp_path, "gemma2"))), weights="random").module
    ids, positions = make_inputs(input_specs(module), 9)
    with torch.no_grad():
        whole = module(ids, positions)
        allocator = BlockAllocator(num_blocks=8, block_size=4)
        cache = PagedKVCache(layers=3, num_blocks=8, block_size=4, kv_heads=2, head_dim=16)
        sequence, rows = allocator.allocate(6), []
        for start, stop in ((0, 6), (6, 7), (7, 9)):
            if start:
                allocator.append(sequence, stop - start)
            metadata = AttentionMetadata.build([(sequence, stop - start)], block_size=4)
            with forward_context(metadata=metadata, cache=cache):
                rows.append(module(ids[start:stop], positions[start:stop]))
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-4, rtol=1e-4)


def test_identity_config_and_arguments_are_portable(tmp_path: Path) -> None:
    path = directory(tmp_path, "qwen3")
    built = build(ModelRef.parse(str(path)), args={"rms_norm_eps": 1e-3, "num_hidden_layers": 3})
    assert built.identity == "hf:Qwen3ForCausalLM"
    assert built.args == {"rms_norm_eps": 1e-3, "num_hidden_layers": 3}
    assert built.config["rms_norm_eps"] == 1e-3
    assert str(tmp_path) not in json.dumps(dict(built.config))
    with pytest.raises(UsageError, match="has no 'rms_eps'") as caught:
        build(ModelRef.parse(str(path)), args={"rms_eps": 1e-3})
    assert "rms_norm_eps" in str(caught.value)


def test_real_weights_come_from_the_directory(tmp_path: Path) -> None:
    path = directory(tmp_path, "llama")
    made = build(ModelRef.parse(str(path)), weights="random", seed=5).module
    assert isinstance(made, hf.HFDecoder)
    made.model.save_pretrained(path)
    read = build(ModelRef.parse(str(path)), weights="real").module
    ids = torch.arange(4)
    assert torch.equal(read(ids, ids), made(ids, ids))


def test_building_leaves_the_configuration_alone(tmp_path: Path) -> None:
    config = hf.load_config(str(directory(tmp_path, "llama")), {})
    before = copy.deepcopy(config.to_dict())
    model = hf.build_causal_lm(config, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "pwcc"
    assert config._attn_implementation != "pwcc"
    assert config.to_dict() == before


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path, "gemma3_text")
    with pytest.raises(ModelError, match="not causal"):
        build(ModelRef.parse(str(path)), args={"use_bidirectional_attention": True})
    (path / "config.json").write_text('{"model_type": "not_a_model"}')
    with pytest.raises(UsageError, match="model_type 'not_a_model' is not known"):
        build(ModelRef.parse(str(path)))
    (path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot build the configuration"):
        build(ModelRef.parse(str(path)))


@pytest.mark.parametrize(
    "extra", [{"attention_mask": torch.ones(1)}, {"position_bias": torch.ones(1)}, {"dropout": 0.1}]
)
def test_attention_refuses_what_the_op_does_not_do(extra: dict[str, Any]) -> None:
    q = torch.ones(1, 2, 3, 4)
    module = torch.nn.Module()
    arguments: dict[str, Any] = {"attention_mask": None} | extra
    with pytest.raises(ValueError, match="'pwcc'"):
        hf.pwcc_attention_forward(module, q, q, q, **arguments)
    with pytest.raises(ValueError, match="no layer_idx"):
        hf.pwcc_attention_forward(module, q, q, q, None)


def test_missing_transformers_is_said_plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(UsageError, match=r"'\.\[hf\]'"):
        build(ModelRef.parse(str(tmp_path)))


def attending(tokens: int = 5) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    return module, q, k, v


@pytest.mark.parametrize("biased", [False, True])
def test_sinks_of_each_token_enlarge_the_denominator(biased: bool) -> None:
    """Inkling 2 gives ``sinks`` [1, heads, tokens, 1] beside a bias; ignoring them was a wrong answer."""
    module, q, k, v = attending()
    sinks, bias = torch.randn(1, 4, 5, 1), torch.randn(1, 4, 5, 5) if biased else None
    out, _ = hf.pwcc_attention_forward(module, q, k, v, None, position_bias=bias, sinks=sinks)
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5 + (0 if bias is None else bias)
    masked = logits.masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    weights = torch.cat([masked, sinks], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))
    with pytest.raises(ValueError, match="one kind of sinks"):
        hf.pwcc_attention_forward(module, q, k, v, None, s_aux=torch.zeros(4), sinks=sinks)


def test_sinks_of_each_token_beside_a_kv_cache_are_refused() -> None:
    module, q, k, v = attending(tokens=2)
    sequence = BlockAllocator(num_blocks=2, block_size=4).allocate(2)
    metadata = AttentionMetadata.build([(sequence, 2)], block_size=4)
    cache = PagedKVCache(layers=1, num_blocks=2, block_size=4, kv_heads=2, head_dim=8)
    with (
        forward_context(metadata=metadata, cache=cache),
        pytest.raises(UsageError, match="bias or mask of its own"),
    ):
        hf.pwcc_attention_forward(module, q, k, v, None, sinks=torch.zeros(1, 4, 2, 1))


def test_an_argument_that_may_change_the_result_is_an_error_by_name() -> None:
    module, q, k, v = attending()
    harmless = {"position_ids": torch.arange(5), "use_cache": False, "indices": None, "is_causal": True}
    out, _ = hf.pwcc_attention_forward(module, q, k, v, None, **harmless)  # type: ignore[arg-type]
    plain, _ = hf.pwcc_attention_forward(module, q, k, v, None)
    assert torch.equal(out, plain)
    with pytest.raises(ValueError, match="does not know what Module gives: block_table, indices"):
        hf.pwcc_attention_forward(module, q, k, v, None, indices=torch.zeros(1), block_table=1)
    with pytest.raises(ValueError, match="not causal"):
        hf.pwcc_attention_forward(module, q, k, v, None, is_causal=False)


def test_attention_over_depth_takes_no_mask_and_no_sinks() -> None:
    _, q, k, v = attending()
    kind = type("SomeAttentionResidual", (torch.nn.Module,), {})
    with pytest.raises(ValueError, match="expects SomeAttentionResidual to give queries"):
        hf.pwcc_attention_forward(kind(), q, k, v, None, sinks=torch.zeros(1, 4, 5, 1))
