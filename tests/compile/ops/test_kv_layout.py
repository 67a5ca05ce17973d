"""The KV cache's shape is seen in a call, for any model, and one cache that cannot hold it is refused."""

from __future__ import annotations

import pytest
import torch

import pwcc.compile.ops.attention  # noqa: F401
from pwcc.cache.errors import UsageError
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.ops.kv_layout import KVLayout, observe_kv_layout


def attend(layer: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    q = torch.ones(3, 4, size, dtype=dtype)
    k = torch.ones(3, kv_heads, size, dtype=dtype)
    out = torch.full_like(q, 7)
    torch.ops.pwcc.attention(q, k, k, out, layer, 1.0)
    return out


def test_a_models_layout_is_its_configurations() -> None:
    model = build(ModelRef.parse("llama-tiny"), args={"layers": 3}, weights="random").module
    ids = torch.zeros(2, dtype=torch.int64)
    layout = observe_kv_layout(lambda: model(ids, ids))
    assert layout == KVLayout(layers=3, kv_heads=2, head_dim=32, dtype=torch.float32)


def test_the_largest_layer_counts_and_outputs_are_defined() -> None:
    outs: list[torch.Tensor] = []
    layout = observe_kv_layout(lambda: outs.extend([attend(5, 2, 8), attend(1, 2, 8)]))
    assert layout is not None
    assert layout.layers == 6
    assert all(out.eq(0).all() for out in outs)


def test_a_model_without_attention_needs_no_cache() -> None:
    assert observe_kv_layout(lambda: torch.ones(2)) is None


@pytest.mark.parametrize(
    ("second", "said"), [((1, 1, 8), "1 x 8 float32 and 2 x 8 float32"), ((1, 2, 4), "2 x 4 float32")]
)
def test_layers_that_differ_are_refused(second: tuple[int, int, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        observe_kv_layout(lambda: (attend(0, 2, 8), attend(*second)))


def test_a_layer_that_attends_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="layer number 1 runs more than once"):
        observe_kv_layout(lambda: [attend(0, 2, 8), attend(1, 2, 8), attend(1, 2, 8)])


def test_bytes_of_a_block_are_those_of_a_cache() -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    cache = layout.cache(num_blocks=5, block_size=4, device="cpu")
    held = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert held == 5 * layout.block_bytes(4)
    assert cache.keys[0].dtype is torch.bfloat16
