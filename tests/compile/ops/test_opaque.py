"""``pwcc::opaque``: a module of the live model run eagerly, with the tensors that the caller brings."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import ArgumentError
from pwcc.compile.ops import opaque
from pwcc.compile.ops.blocks import BlockAllocator
from pwcc.compile.ops.forward_context import forward_context
from pwcc.compile.ops.opaque import KERNEL, key_of, register
from pwcc.compile.ops.paged import AttentionMetadata, PagedKVCache


class Scan(nn.Module):
    """Reads its tokens one after the other, in Python."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("decay", torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        state, rows = torch.zeros(x.shape[1]), []
        for row in x:
            state = state * self.get_buffer("decay") + self.inner(row)
            rows.append(state)
        return torch.stack(rows)


def call(module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    result: Tensor = module(*inputs)
    return result


def run(module: nn.Module, key: str, x: Tensor, *, sequential: bool = True) -> Tensor:
    out = torch.empty_like(x)
    weights = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        torch.ops.pwcc.opaque([x], weights, out, key, sequential)
    return out


@pytest.fixture
def scan() -> Scan:
    torch.manual_seed(0)
    return Scan()


def test_it_computes_what_the_module_does(scan: Scan) -> None:
    key = key_of(scan, "mixer", {})
    assert register(key, scan, call) == ("decay", "inner.weight", "inner.bias")
    x = torch.randn(5, 4)
    out, weights = torch.empty_like(x), [scan.decay, scan.inner.weight, scan.inner.bias]
    with torch.no_grad():
        torch.ops.pwcc.opaque([x], weights, out, key, True)
        assert torch.equal(out, scan(x))


def test_it_computes_as_in_evaluation_although_models_are_built_in_training_mode(scan: Scan) -> None:
    module = nn.Sequential(scan, nn.Dropout(0.5))
    assert module.training
    key = key_of(module, "mixer", {})
    register(key, module, call)
    x = torch.randn(5, 4)
    module.eval()
    with torch.no_grad():
        expected = module(x)
    out, weights = torch.empty_like(x), [scan.decay, scan.inner.weight, scan.inner.bias]
    with torch.no_grad():
        torch.ops.pwcc.opaque([x], weights, out, key, True)
    assert torch.equal(out, expected)


def test_the_tensors_are_the_callers(scan: Scan) -> None:
    """Two models of one kind in a process share the key, not the weights."""
    torch.manual_seed(1)
    other = Scan()
    key = key_of(scan, "mixer", {})
    assert key == key_of(other, "mixer", {})
    for module in (scan, other):
        register(key, module, call)
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    for module in (scan, other):
        with torch.no_grad():
            torch.ops.pwcc.opaque([x], [module.decay, module.inner.weight, module.inner.bias], out, key, True)
            assert torch.equal(out, module(x))
    template = opaque._templates[key].module
    assert all(tensor.is_meta for tensor in [*template.parameters(), *template.buffers()])


@pytest.mark.parametrize("changed", ["name", "configuration", "class"])
def test_the_key_tells_modules_apart(scan: Scan, changed: str) -> None:
    module: nn.Module = nn.Linear(4, 4) if changed == "class" else scan
    key = key_of(module, "b" if changed == "name" else "a", {"n": 2 if changed == "configuration" else 1})
    assert key != key_of(scan, "a", {"n": 1})


def test_a_module_that_is_not_here_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"no module of this process is 'layers.0.mixer 0000'"):
        torch.ops.pwcc.opaque([torch.ones(1)], [], torch.ones(1), "layers.0.mixer 0000", True)


def metadata(cache: PagedKVCache, *lengths: tuple[int, int]) -> AttentionMetadata:
    """A batch of sequences with (tokens before, new tokens)."""
    allocator = BlockAllocator(num_blocks=cache.num_blocks, block_size=cache.block_size)
    batch = [(allocator.allocate(before + new), new) for before, new in lengths]
    return AttentionMetadata.build(batch, block_size=cache.block_size)


def test_state_from_token_to_token_needs_one_whole_sequence(scan: Scan) -> None:
    key = key_of(scan, "layers.0.mixer", {})
    names = register(key, scan, call)
    weights = [scan.get_parameter(n) if n != "decay" else scan.decay for n in names]
    cache = PagedKVCache(
        layers=1, num_blocks=16, block_size=4, kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu"
    )
    x, out = torch.randn(4, 4), torch.empty(4, 4)
    for lengths, fits in (([(0, 4)], True), ([(0, 2), (0, 2)], False), ([(3, 4)], False)):
        for sequential in (True, False):
            with torch.no_grad(), forward_context(metadata=metadata(cache, *lengths), cache=cache):
                if fits or not sequential:
                    torch.ops.pwcc.opaque([x], weights, out, key, sequential)
                    continue
                with pytest.raises(
                    ArgumentError, match=r"layers.0.mixer keeps state from token to token"
                ) as caught:
                    torch.ops.pwcc.opaque([x], weights, out, key, sequential)
                assert KERNEL in (caught.value.hint or "")


def test_a_server_may_bring_its_own(scan: Scan) -> None:
    key = key_of(scan, "mixer", {})
    names = register(key, scan, call)
    seen: list[Any] = []

    def kernel(
        _context: object, key: str, inputs: Sequence[Tensor], weights: dict[str, Tensor], out: Tensor
    ) -> None:
        seen.append((key, list(weights)))
        out.copy_(inputs[0] * 2)

    x, out = torch.randn(2, 4), torch.empty(2, 4)
    with forward_context(extras={KERNEL: kernel}):
        torch.ops.pwcc.opaque([x], [torch.zeros(1)] * len(names), out, key, True)
    assert torch.equal(out, x * 2)
    assert seen == [(key, list(names))]


def test_threads_take_turns(scan: Scan) -> None:
    key = key_of(scan, "mixer", {})
    names = register(key, scan, call)
    models = [Scan() for _ in range(4)]
    x = torch.randn(20, 4)
    wrong: list[int] = []

    def work(index: int) -> None:
        module, out = models[index], torch.empty_like(x)
        weights = [module.decay if n == "decay" else module.get_parameter(n) for n in names]
        with torch.no_grad():
            expected = module(x)
            for _ in range(20):
                torch.ops.pwcc.opaque([x], weights, out, key, True)
                if not torch.equal(out, expected):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
