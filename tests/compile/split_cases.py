"""Small forwards that are hard to split, as a table: name, forward, and what must come of it.

``EQUAL`` ones compute what eager does, at every size. ``REFUSED`` ones are refused by a named reason and the
line. All take ``x: float32[n, 8]`` and the weights of :class:`Base`; ``TWO`` take ``y: float32[n, 8]`` as well,
``SIZED`` ones ``y: float32[m, 8]``, whose size is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Any]
EQUAL: list[Forward] = []
TWO: list[Forward] = []
SIZED: list[Forward] = []
REFUSED: list[tuple[Forward, str]] = []


class Base(nn.Module):
    """Weights and attributes that the forwards use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        self.big = nn.Linear(8, 24)
        self.emb = nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 8, 3, stride=2, padding=1)
        self.gru = nn.GRU(8, 8)
        self.unused = nn.Linear(3, 3)
        self.scale = 2.5
        self.count = 3
        self.register_buffer("buf", torch.randn(8))


def make(forward: Forward) -> nn.Module:
    """Return a model whose ``forward`` is the given one."""
    model: nn.Module = type(forward.__name__, (Base,), {"forward": forward})()
    return model


def equal(forward: Forward) -> Forward:
    EQUAL.append(forward)
    return forward


def two(forward: Forward) -> Forward:
    TWO.append(forward)
    return forward


def sized(forward: Forward) -> Forward:
    SIZED.append(forward)
    return forward


def refused(words: str) -> Callable[[Forward], Forward]:
    def register(forward: Forward) -> Forward:
        REFUSED.append((forward, words))
        return forward

    return register


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


ops = torch.ops.pwcctest

# --- tuples ----------------------------------------------------------------------------------------


@equal
def list_of_a_splitting_op(self: Any, x: Tensor) -> Any:
    first, second, _ = ops.many(self.lin(x))
    return self.lin(first) + second


@equal
def list_into_a_splitting_op(self: Any, x: Tensor) -> Any:
    return ops.joined(list(self.big(x).chunk(3, -1))) * 2


@equal
def tuple_into_a_splitting_op_and_beyond(self: Any, x: Tensor) -> Any:
    parts = self.big(x).split(8, -1)
    joined = ops.joined(parts)
    return joined[:, :8] * parts[1], parts


@equal
def tuples_returned(self: Any, x: Tensor) -> Any:
    y = attend(x)
    return y.chunk(2, -1), torch.var_mean(y, -1), tuple(y.topk(3, -1)), y.unbind(1)


@equal
def named_results_returned(self: Any, x: Tensor) -> Any:
    y = attend(x)
    return y.topk(3, -1), {"max": y.max(0), "sorted": torch.sort(x, -1)}


@equal
def sorted_across(self: Any, x: Tensor) -> Any:
    values, order = torch.sort(x, -1)
    y = attend(values)
    return torch.zeros_like(y).scatter(-1, order, y), x.argsort(-1), x.kthvalue(2, -1).values


@equal
def parts_on_both_sides(self: Any, x: Tensor) -> Any:
    a, b, c = self.big(x).chunk(3, -1)
    first = attend(a)
    second = attend(b * first)
    return second + c + a


@equal
def parts_of_parts(self: Any, x: Tensor) -> Any:
    left, right = self.big(x).chunk(2, -1)
    y = attend(x)
    return y[:, :4] + left.chunk(3, -1)[1] * right.split([4, 8], -1)[0]


# --- sizes -----------------------------------------------------------------------------------------


@equal
def shape_taken_apart_and_joined(self: Any, x: Tensor) -> Any:
    heads = attend(x).view((*x.shape[:-1], 2, 4)).transpose(0, 1)
    return heads.reshape(x.size()[0] * 2, 4), heads.new_zeros((*x.shape, 2)), x.shape.numel() * x


@equal
def square_of_the_size_across(self: Any, x: Tensor) -> Any:
    scores = (x @ x.t()).reshape(-1)
    y = attend(x)
    return scores.view(x.shape[0], -1) @ y


@equal
def twice_the_size(self: Any, x: Tensor) -> Any:
    doubled = attend(torch.cat([x, x + 1]))
    return doubled[: x.shape[0]] + doubled[x.shape[0] :]


@equal
def only_a_computed_size(self: Any, x: Tensor) -> Any:
    y = attend(torch.cat([x, x, x[:1]]))
    return y * 2 + torch.arange(y.shape[0])[:, None]


@equal
def strided_convolution(self: Any, x: Tensor) -> Any:
    y = self.conv(x.t()[None])
    y = attend(y[0].t().contiguous())
    return F.gelu(y) + y.shape[0]


@equal
def blocks(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    padded = F.pad(x, (0, 0, 0, (-n) % 4))
    y = attend(padded).view(-1, 4, 8)
    return y.sum(1), y.flatten(0, 1)[:n]


@equal
def halves_of_a_doubled_size(self: Any, x: Tensor) -> Any:
    pairs = attend(torch.cat([x, x])).view(2, -1, 8)
    return pairs[0] - pairs[1], pairs.transpose(0, 1).reshape(-1, 16)


@equal
def sizes_returned(self: Any, x: Tensor) -> Any:
    y = attend(torch.cat([x, x]))
    return y, x.shape[0], y.shape[0], [x.shape[0] * 3 + 1], {"n": len(x), "numel": x.numel(), "d": x.shape[1]}


@equal
def shapes_returned(self: Any, x: Tensor) -> Any:
    y = attend(x)
    return y.shape, (y * 2).size(), torch.cat([y, y]).shape, tuple(x.shape)


@equal
def shape_of_an_argument_returned(self: Any, x: Tensor) -> Any:
    return attend(x), x.shape, [x.size(), x.size(0)], x.shape[1:]


@two
def shape_of_an_unused_argument(self: Any, x: Tensor, y: Tensor) -> Any:
    return attend(x), y.shape, y.size(0)


@equal
def size_of_a_piece_returned(self: Any, x: Tensor) -> Any:
    return self.lin(x).reshape(-1).shape[0], attend(x)


@equal
def floats_returned(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    return attend(x), n**0.5, math.sqrt(n), n / 3, 1.5, float(n)


@equal
def float_made_and_returned(self: Any, x: Tensor) -> Any:
    scale = x.shape[0] ** 0.5
    return attend(x * scale) / scale, scale


@equal
def condition_returned(self: Any, x: Tensor) -> Any:
    return attend(x), x.shape[0] > 3, x.shape[0] * 2 == 14


@equal
def floats_across(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    scale, other = n**-0.5, math.sqrt(n + 1)
    y = attend(x * scale)
    z = attend(y * other)
    return z * scale + other, math.log2(n) * z


@equal
def float_of_a_float_across(self: Any, x: Tensor) -> Any:
    scale = 1.0 / math.sqrt(x.shape[0])
    double = scale * 2
    y = attend(x * double)
    return y * double + scale


@equal
def rounded_sizes(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    y = attend(x)
    return y * math.floor(n / 2) + math.ceil(n / 2) + int(n * 0.5) + n // 3 + n % 5


@equal
def sizes_cut_towards_zero(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    y = attend(x * int(-n / 2)) + int((5 - n) / 3) + int(n / -4)
    return y + torch.zeros(n + int(-n / 2), 8).sum(), int(-n / 2), int((5 - n) / 3), int(n / 3)


@equal
def sizes_rounded_to_even(self: Any, x: Tensor) -> Any:
    half = round(x.shape[0] / 2)
    return attend(x * half) + half, half


@equal
def first_row_broadcast(self: Any, x: Tensor) -> Any:
    y = attend(x + x[:1])
    return y - y[-1:], y[:1].expand(x.shape[0], 8), x.mean(0, keepdim=True).expand(3, 8)


@equal
def size_of_a_root(self: Any, x: Tensor) -> Any:
    root = int(x.shape[0] ** 0.5)
    y = attend(x * root)
    return y + root + torch.full((8,), root), root, root * 2 + 1


@equal
def size_in_arithmetic(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    y = attend(x) * n
    return y / n + torch.full((n, 1), n) + torch.tensor(n) + max(n, 4) - min(n, 4)


@equal
def numbers_of_the_model(self: Any, x: Tensor) -> Any:
    return attend(x * self.scale) * self.count + self.scale


@equal
def numbers_among_the_arguments(
    self: Any, x: Tensor, scale: float = 0.5, count: int = 3, on: bool = True
) -> Any:
    y = attend(x * scale + count)
    return (y * scale if on else y) + count, scale, count


@equal
def embedded(self: Any, x: Tensor) -> Any:
    y = self.emb(x.abs().long() % 30).sum(1) * self.scale
    return attend(y) * self.scale + self.emb(x.argmax(-1))


# --- where the splitting operation is, and what it returns -----------------------------------------


@equal
def splitting_op_without_a_result(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    ops.note(y)
    return y * 2


@equal
def result_unused(self: Any, x: Tensor) -> Any:
    ops.one(self.lin(x))
    return self.lin(x) * 2


@equal
def results_unused(self: Any, x: Tensor) -> Any:
    ops.two(x)
    first, _ = ops.two(x)
    return first


@equal
def result_used_twice_and_returned(self: Any, x: Tensor) -> Any:
    y = ops.one(x)
    return y, self.lin(y), ops.one(y), y


@equal
def three_in_a_row(self: Any, x: Tensor) -> Any:
    return attend(attend(attend(x)))


@equal
def three_kinds_in_a_row(self: Any, x: Tensor) -> Any:
    first, second = ops.two(ops.one(x))
    return ops.joined([attend(first), second])


@equal
def splitting_op_on_weights_only(self: Any, x: Tensor) -> Any:
    return ops.one(self.lin.weight)[0] + x


@equal
def piece_of_a_view(self: Any, x: Tensor) -> Any:
    return ops.one(ops.one(x).view(-1, 4).t())


@equal
def piece_that_does_nothing(self: Any, x: Tensor) -> Any:
    y = F.dropout(ops.one(x), 0.5, self.training)
    return ops.one(y.contiguous().to(torch.float32).view(y.shape))


@equal
def piece_that_only_makes_constants(self: Any, x: Tensor) -> Any:
    y = ops.one(x)
    return ops.joined([y, torch.zeros(x.shape[0], 2)])


@equal
def allocation_that_is_filled(self: Any, x: Tensor) -> Any:
    y = ops.one(x)
    out = torch.empty(x.shape[0], 8)
    out.fill_(2.0)
    return ops.one(y) + out


# --- outputs and inputs ----------------------------------------------------------------------------


@equal
def input_among_the_outputs(self: Any, x: Tensor) -> Any:
    y = attend(x)
    return x, {"y": y, "x": x}, [y, (y, x)], None


@equal
def view_of_an_input_returned(self: Any, x: Tensor) -> Any:
    return attend(x), x[:, :4], x.t(), x.view(-1)


@equal
def weight_among_the_outputs(self: Any, x: Tensor) -> Any:
    return attend(x), self.lin.weight, self.buf, self.lin.weight.t()


@equal
def nothing_but_constants(self: Any, x: Tensor) -> Any:
    return torch.ones(x.shape[0], 2), torch.arange(4), 7


@two
def unused_argument(self: Any, x: Tensor, y: Tensor) -> Any:
    return attend(x)


@two
def unused_first_argument(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.lin(attend(y)), y


@two
def argument_used_late(self: Any, x: Tensor, y: Tensor) -> Any:
    return attend(attend(x) * 2) + y, y, x


@two
def arguments_exchanged(self: Any, x: Tensor, y: Tensor) -> Any:
    return attend(y) - attend(x), y, x


# --- two sizes -------------------------------------------------------------------------------------


@sized
def sum_of_the_sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    both = attend(torch.cat([self.lin(x), y]))
    return attend(both) * 2, both[: x.shape[0]], both[x.shape[0] :]


@sized
def pieces_of_one_size_each(self: Any, x: Tensor, y: Tensor) -> Any:
    a = attend(self.lin(x))
    b = attend(self.lin(y))
    return self.lin(a), self.lin(b)


@sized
def product_of_the_sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    scores = self.lin(x) @ y.t()
    return attend(scores).softmax(-1) @ y, attend(scores.t().contiguous()).reshape(-1)


@sized
def only_the_second_size(self: Any, x: Tensor, y: Tensor) -> Any:
    z = attend(y)
    return z * x.sum() + y.shape[0], torch.arange(y.shape[0])


@sized
def sizes_cut_towards_zero_by_either_sign(self: Any, x: Tensor, y: Tensor) -> Any:
    n, m = x.shape[0], y.shape[0]
    factor = int((n + 1) / (2 * m - 7))
    return attend(x) * factor + int((n - m) / m), factor, int((m - n) / 3), int(n / (n - 20)), y


@sized
def numbers_of_two_sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    n, m = x.shape[0], y.shape[0]
    scale = math.sqrt(n + 2 * m)
    z = attend(x * scale) / scale
    return z, attend(y) * (n / m), n * m, n + m, m**0.5, (n, m), max(n, m), y.shape


@sized
def blocks_of_two_sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    n, m = x.shape[0], y.shape[0]
    grid = (x[:, None] + y[None]).view(n * m, 8)
    z = attend(grid).view(n, m, 8)
    return z.sum(1), z.transpose(0, 1).reshape(m, n * 8), z.new_zeros(2 * n, m // 2 + 1)


@sized
def autocast_of_two_sizes(self: Any, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        a = self.lin(attend(torch.cat([x, y])))
        return a[: x.shape[0]] @ self.lin(attend(y)).t()


# --- regions ---------------------------------------------------------------------------------------


@equal
def autocast_across(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
        y = attend(y)
        return self.lin(y), self.lin(x).dtype == torch.bfloat16


@equal
def autocast_begins_in_one_piece(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(self.lin(y) @ self.lin.weight)
    return self.lin(y.float())


@equal
def autocast_around_the_splitting_op_only(self: Any, x: Tensor) -> Any:
    y = self.lin(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.project(y, self.lin.weight)
    return self.lin(y)


@equal
def splitting_op_outside_the_region(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x)
        with torch.autocast("cpu", enabled=False):
            y = ops.project(y.float(), self.lin.weight)
        y = self.lin(y)
    return ops.project(y.float(), self.lin.weight)


@equal
def autocast_of_two_dtypes(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.float16):
        y = self.lin(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = attend(self.big(y))[:, :8]
            z = self.big(y)
        return z, self.lin(attend(y))


@equal
def autocast_with_the_default_dtype(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        return self.lin(attend(self.lin(x)))


@equal
def autocast_of_another_device(self: Any, x: Tensor) -> Any:
    with torch.autocast("cuda", torch.float16):
        return self.lin(attend(self.lin(x)))


@equal
def autocast_off(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return self.lin(attend(self.lin(x)))


@equal
@torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator]
def autocast_as_a_decorator(self: Any, x: Tensor) -> Any:
    return self.lin(attend(self.lin(x)))


@equal
def parts_made_in_a_region(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        parts = self.big(x).chunk(3, -1)
    y = attend(x)
    a = parts[1] @ self.lin.weight.to(torch.bfloat16)
    return y + a + parts[2]


@equal
def number_in_a_region(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.lin(x) * x.shape[0] ** 0.5
    return self.lin(attend(y.float())) * x.shape[0] ** 0.5


@equal
def no_grad_across(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = attend(self.lin(x))
    with torch.enable_grad():
        y = self.lin(attend(y))
        with torch.set_grad_enabled(False):
            y = attend(y) * 2
    return y.detach()


@equal
def regions_of_two_kinds(self: Any, x: Tensor) -> Any:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = attend(self.lin(x))
        with torch.inference_mode():
            y = self.lin(attend(y))
    return y * 1.0


# --- higher-order operations and constants ---------------------------------------------------------


@equal
def checkpointed(self: Any, x: Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(self.lin, x, use_reentrant=False) + checkpoint(self.lin, x, use_reentrant=True)


@equal
def splitting_op_in_a_checkpoint(self: Any, x: Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    def block(y: Tensor, factor: Tensor) -> Any:
        a, b = self.big(y)[:, :16].chunk(2, -1)
        return attend(self.lin(a)) * factor, b

    first, second = checkpoint(block, x, self.buf, use_reentrant=False)
    return attend(first) + second


@equal
def checkpoint_in_a_checkpoint(self: Any, x: Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    def inner(y: Tensor) -> Any:
        return attend(self.lin(y))

    def outer(y: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            z: Tensor = checkpoint(inner, y, use_reentrant=False)
            return self.lin(z)

    return checkpoint(outer, x, use_reentrant=False) * 2


@equal
def written_in_a_checkpoint(self: Any, x: Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    def block(y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        torch.ops.pwcctest.attend(y, out)
        return out.add_(1)

    return checkpoint(block, self.lin(x), use_reentrant=False)


def _region(y: Tensor, weight: Tensor) -> Tensor:
    return attend(y @ weight) * 2


region: Any = torch.compiler.nested_compile_region(_region)


@equal
def marked_regions(self: Any, x: Tensor) -> Any:
    return region(region(x, self.lin.weight), self.lin.weight)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@equal
def autograd_function(self: Any, x: Tensor) -> Any:
    function = cast(Any, Doubled)
    return function.apply(attend(function.apply(self.lin(x))))


@equal
def constant_tensors(self: Any, x: Tensor) -> Any:
    first = torch.tensor([1.0, 2.0] * 4) + torch.tensor(3) + torch.as_tensor([0.5] * 8)
    ramp = torch.arange(8) + torch.linspace(0, 1, 8)
    y = attend(x * first)
    return y + first + ramp, torch.eye(3), torch.tensor([[1, 2], [3, 4]]), torch.tensor(True)


@equal
def constant_that_only_crosses(self: Any, x: Tensor) -> Any:
    table = torch.arange(8, dtype=torch.float32) ** 2
    y = attend(x)
    return attend(y) * table


@refused("cond, a higher-order operation")
def condition_on_data(self: Any, x: Tensor) -> Any:
    return torch.cond(attend(x).sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


@refused("flex_attention")
def flexible_attention(self: Any, x: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    q = x.view(1, 1, x.shape[0], 8).expand(1, 1, x.shape[0], 8)
    return flex_attention(torch.cat([q, q], -1), torch.cat([q, q], -1), torch.cat([q, q], -1))


@refused("scan, a higher-order operation")
def scanned(self: Any, x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(8), x)


@refused("map_impl, a higher-order operation")
def mapped(self: Any, x: Tensor) -> Any:
    from torch._higher_order_ops.map import map as map_

    return cast(Any, map_)(lambda row: row * 2, x)


@refused("while_loop, a higher-order operation")
def looped(self: Any, x: Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return cast(Any, while_loop)(lambda y: y.sum() < 10, lambda y: (y + 1,), (self.lin(x),))


@refused("condition on its sizes")
def float_into_a_splitting_op(self: Any, x: Tensor) -> Any:
    out = torch.empty_like(x)
    scale = 1 / x.shape[0]
    ops.attend(x, out, scale)
    return out * scale


@refused("RNN, GRU, or LSTM")
def recurrent(self: Any, x: Tensor) -> Any:
    return attend(self.gru(x)[0])


@refused("condition on its sizes")
def tensor_of_a_root(self: Any, x: Tensor) -> Any:
    y = torch.zeros(int(x.shape[0] ** 0.5) + 1, 8) + self.buf
    return attend(y) * 2


@refused("run time")
def number_of_the_data(self: Any, x: Tensor) -> Any:
    return attend(x) * x.sum().item()


@refused("Batching rule not implemented")
def splitting_op_in_a_vmap(self: Any, x: Tensor) -> Any:
    return torch.vmap(attend)(x)


@refused("chooses attention backends")
def backend_of_attention(self: Any, x: Tensor) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = x.view(1, 1, -1, 8)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)
