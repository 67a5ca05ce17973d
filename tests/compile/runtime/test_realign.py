"""Misaligned inputs are copied before a piece and written back after it, as Inductor's outer callable does."""

from __future__ import annotations

import torch

from pwcc.compile.runtime.realign import ALIGNMENT, clone_preserving_strides, realigning


def skewed(*shape: int) -> torch.Tensor:
    storage = torch.arange(64.0)[1:]
    tensor = torch.as_strided(storage, shape, (shape[-1], 1), 1)
    assert tensor.data_ptr() % ALIGNMENT
    return tensor


def test_nothing_to_check_means_no_layer() -> None:
    def call(args: list[object]) -> tuple[object, ...]:
        return tuple(args)

    assert realigning(call, (), (0,)) is call


def test_copies_what_is_askew_and_nothing_else() -> None:
    askew, straight = skewed(4, 8), torch.zeros(4, 8)
    seen: list[object] = []

    def call(args: list[object]) -> tuple[object, ...]:
        seen.extend(args)
        return ()

    realigning(call, (0, 1), ())([askew, straight])
    first = seen[0]
    assert isinstance(first, torch.Tensor)
    assert first is not askew
    assert first.data_ptr() % ALIGNMENT == 0
    assert torch.equal(first, askew)
    assert seen[1] is straight


def test_writes_back_mutated_inputs_only() -> None:
    written, read = skewed(4, 8), skewed(4, 8)
    before = read.clone()

    def call(args: list[object]) -> tuple[object, ...]:
        for tensor in args:
            assert isinstance(tensor, torch.Tensor)
            tensor.add_(1)
        return ()

    expected = written + 1
    realigning(call, (0, 1), (0,))([written, read.clone().as_strided((4, 8), (8, 1))])
    assert torch.equal(written, expected)
    realigning(call, (0,), ())([read])
    assert torch.equal(read, before)


def test_copies_keep_strides_and_empty_shapes() -> None:
    tensor = torch.arange(64.0).as_strided((3, 4), (16, 2))
    copy = clone_preserving_strides(tensor)
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)
    assert clone_preserving_strides(torch.empty(0, 4)).shape == (0, 4)


def test_a_view_of_a_copy_becomes_a_view_of_the_input() -> None:
    askew, straight = skewed(4, 8), torch.zeros(4, 8)

    def call(args: list[object]) -> tuple[object, ...]:
        first, second = args
        assert isinstance(first, torch.Tensor)
        first.add_(1)
        return first, first[1:, ::2], first.view(torch.int32)[2], second, first.sum()

    expected = askew + 1
    whole, part, other, same, total = realigning(call, (0, 1), (0,))([askew, straight])
    assert whole is askew
    assert same is straight
    assert isinstance(part, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert isinstance(total, torch.Tensor)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, expected)
    assert part.data_ptr() == askew[1:, ::2].data_ptr()
    assert torch.equal(part, expected[1:, ::2])
    assert other.data_ptr() == askew[2].data_ptr()
    assert torch.equal(other, expected.view(torch.int32)[2])
    assert torch.equal(total, expected.sum())
    part.zero_()
    assert torch.equal(askew[1:, ::2], torch.zeros(3, 4))
