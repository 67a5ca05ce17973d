import importlib
import importlib.util
import math
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pwcc.cache.errors import UsageError
from pwcc.compile.ops import attention as attention_module
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.dense import AttentionParams
from pwcc.compile.ops.forward_context import (
    ForwardContext,
    current_forward_context,
    forward_context,
    use_forward_context,
)
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """One query, head and key at a time, in Python floats of float64 tensors."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            first = first if chunk is None else max(first, t // chunk * chunk)
            logits = []
            for s in range(first, t + 1):
                x = float(q[t, h].double() @ k[s, h // group].double()) * scale
                x = x if softcap is None else softcap * math.tanh(x / softcap)
                logits.append(x if bias is None else x + float(bias[h % bias.shape[0], t, s]))
            total = sum(math.exp(x) for x in logits) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
            for s, x in zip(range(first, t + 1), logits, strict=True):
                out[t, h] += math.exp(x) / total * v[s, h // group]
    return out


def qkv(tokens: int, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, heads, dim, generator=generator),
        torch.randn(tokens, kv_heads, dim, generator=generator),
        torch.randn(tokens, kv_heads, dim, generator=generator),
    )


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [
        (None, None, False),
        (3, None, False),
        (None, 2.0, False),
        (None, None, True),
        (2, 1.5, True),
        (1, None, False),
    ],
)
def test_without_context_it_attends_causally_over_one_sequence(
    tokens: int, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    q, k, v = qkv(tokens)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    out = torch.full_like(q, float("nan"))
    assert torch.ops.pwcc.attention(q, k, v, out, 0, 0.3, window, softcap, sinks) is None
    torch.testing.assert_close(out, naive(q, k, v, 0.3, window, softcap, sinks))


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("window", "chunk"), [(None, 3), (2, 3), (None, 1), (None, 100)])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_chunks_do_not_see_each_other_and_a_bias_is_added(
    tokens: int, window: int | None, chunk: int, rows: int
) -> None:
    q, k, v = qkv(tokens)
    out = torch.full_like(q, float("nan"))
    bias = torch.randn(rows, tokens, tokens) if rows else None
    torch.ops.pwcc.attention(q, k, v, out, 0, 0.3, window, None, None, chunk, bias)
    torch.testing.assert_close(out, naive(q, k, v, 0.3, window, chunk=chunk, bias=bias))


def test_a_bias_beside_a_kv_cache_is_refused() -> None:
    q, k, v = qkv(2)
    allocator = BlockAllocator(num_blocks=2, block_size=4)
    sequence = allocator.allocate(2)
    metadata = AttentionMetadata.build([(sequence, 2)], block_size=4)
    cache = PagedKVCache(layers=1, num_blocks=2, block_size=4, kv_heads=2, head_dim=8)
    with (
        forward_context(metadata=metadata, cache=cache),
        pytest.raises(UsageError, match="bias or mask of its own"),
    ):
        torch.ops.pwcc.attention(q, k, v, torch.empty_like(q), 0, 0.3, bias=torch.zeros(1, 2, 2))


def test_optional_arguments_may_be_left_out_and_strided_inputs_work() -> None:
    packed = torch.randn(5, 8, 8)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    out = torch.empty(5, 4, 8)
    torch.ops.pwcc.attention.default(q, k, v, out, 3, 0.5)
    torch.testing.assert_close(out, naive(q, k, v, 0.5))


def test_import_and_call_import_no_compiler() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import pwcc.compile.ops.attention
from pwcc.compile.ops.forward_context import forward_context
q = torch.randn(3, 4, 8); k = torch.randn(3, 2, 8); out = torch.empty_like(q)
torch.ops.pwcc.attention(q, k, k, out, 0, 1.0)
torch.ops.pwcc.attention(q, k, k, out, 0, 1.0, 2, 5.0)
with forward_context(kernel=lambda *a: None):
    torch.ops.pwcc.attention(q, k, k, out, 0, 1.0)
bad = [m for m in ("torch._dynamo", "torch._inductor", "triton", "sympy") if m in set(sys.modules) - before]
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_second_copies_of_the_module_leave_the_op_alone() -> None:
    importlib.reload(attention_module)
    spec = importlib.util.spec_from_file_location("another_name", str(attention_module.__file__))
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    q, k, v = qkv(2)
    out = torch.empty_like(q)
    torch.ops.pwcc.attention(q, k, v, out, 0, 1.0)
    torch.testing.assert_close(out, naive(q, k, v, 1.0))


def test_fake_kernel_runs_on_fake_and_meta_tensors() -> None:
    with FakeTensorMode():
        q, k = torch.empty(3, 4, 8, device="cuda"), torch.empty(3, 2, 8, device="cuda")
        assert torch.ops.pwcc.attention(q, k, k, torch.empty_like(q), 0, 1.0) is None
    meta = torch.empty(3, 4, 8, device="meta")
    torch.ops.pwcc.attention(meta, meta, meta, torch.empty_like(meta), 0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.empty(3, 32)}, "ranks q=2"),
        ({"k": torch.empty(3, 3, 8), "v": torch.empty(3, 3, 8)}, "divisible by kv_heads, got 4 and 3"),
        ({"k": torch.empty(3, 2, 16)}, r"k=\[2, 16\]"),
        ({"out": torch.empty(3, 4, 16)}, r"out=\[4, 16\]"),
        ({"v": torch.empty(3, 2, 8, dtype=torch.bfloat16)}, "one dtype"),
        ({"sinks": torch.empty(3)}, r"sinks of shape \[4\], got \[3\]"),
    ],
)
def test_fake_kernel_refuses_wrong_shapes(change: dict[str, Tensor], message: str) -> None:
    tensors = {"q": torch.empty(3, 4, 8), "out": torch.empty(3, 4, 8)}
    tensors |= {"k": torch.empty(3, 2, 8), "v": torch.empty(3, 2, 8)} | change
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=message):
        torch.ops.pwcc.attention(**meta, layer=0, scale=1.0)


def test_a_plugged_kernel_gets_every_argument() -> None:
    seen: list[tuple[ForwardContext, AttentionParams]] = []

    def kernel(
        context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor, params: AttentionParams, /
    ) -> None:
        seen.append((context, params))
        out.fill_(7.0)

    q, k, v = qkv(2)
    out, sinks = torch.empty_like(q), torch.ones(4)
    with forward_context(kernel=kernel, extras={"plan": 1}) as context:
        torch.ops.pwcc.attention(q, k, v, out, 5, 0.25, 3, 2.0, sinks)
    assert seen[0][0] is context
    assert seen[0][0].extras == {"plan": 1}
    layer, scale, window, softcap, seen_sinks, chunk, bias = seen[0][1]
    assert (chunk, bias) == (None, None)
    assert (layer, scale, window, softcap) == (5, 0.25, 3, 2.0)
    assert seen_sinks is not None
    assert torch.equal(seen_sinks, sinks)
    assert (out == 7.0).all()


def test_contexts_nest_end_on_errors_and_belong_to_one_thread() -> None:
    outer, inner = ForwardContext(), ForwardContext()
    in_thread: list[ForwardContext | None] = []
    with use_forward_context(outer):
        with use_forward_context(inner):
            assert current_forward_context() is inner
        assert current_forward_context() is outer
        failing = torch.empty(2, 4, 8)
        with pytest.raises(UsageError), use_forward_context(inner):
            torch.ops.pwcc.attention(failing, failing, failing, failing, 0, 1.0)
        assert current_forward_context() is outer
        thread = threading.Thread(target=lambda: in_thread.append(current_forward_context()))
        thread.start()
        thread.join()
    assert current_forward_context() is None
    assert in_thread == [None]


def test_the_default_kernel_needs_metadata_and_cache() -> None:
    q, k, v = qkv(2)
    with forward_context(), pytest.raises(UsageError, match="metadata and cache"):
        torch.ops.pwcc.attention(q, k, v, torch.empty_like(q), 0, 1.0)
