"""Small forwards that write, alias, draw or differentiate, as a table: what must come of each.

``EQUAL`` ones leave outputs, arguments, state and aliasing as eager does, call after call. ``REFUSED`` ones
are refused by a named reason and the line. All take ``x: float32[n, 8]`` and the tensors of :class:`Base`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Any]
EQUAL: list[Forward] = []
REFUSED: list[tuple[Forward, str]] = []


class Base(nn.Module):
    """Tensors that the forwards write: a cache of 64 rows, a row, a counter, and tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(64, 8))
        self.register_buffer("row", torch.zeros(8))
        self.register_buffer("pos", torch.zeros((), dtype=torch.int64))
        self.pairs = [(torch.zeros(4, 8), torch.zeros(4, 8)) for _ in range(2)]
        self.tables = {"one": torch.randn(8), "two": torch.randn(8)}


def make(forward: Forward) -> nn.Module:
    """Return a model whose ``forward`` is the given one."""
    model: nn.Module = type(forward.__name__, (Base,), {"forward": forward})()
    return model.eval()


def equal(forward: Forward) -> Forward:
    EQUAL.append(forward)
    return forward


def refused(words: str) -> Callable[[Forward], Forward]:
    def mark(forward: Forward) -> Forward:
        REFUSED.append((forward, words))
        return forward

    return mark


def attend(x: Tensor) -> Tensor:
    """Cut here: an operation that writes its output argument, outside every piece."""
    out = torch.empty_like(x)
    torch.ops.pwcctest.attend(x, out)
    return out


# --- buffers written in place: before, in and across pieces, and by the splitting operation ---


@equal
def indexed(self: Any, x: Tensor) -> Any:
    rows = torch.arange(x.shape[0])
    self.cache.index_put_((rows,), x)
    y = attend(self.cache[rows])
    self.cache[rows] = y
    return y * 1


@equal
def copied_into_a_slice(self: Any, x: Tensor) -> Any:
    self.cache[: x.shape[0]].copy_(x)
    y = attend(x)
    return y + self.cache[: x.shape[0]]


@equal
def before_and_after(self: Any, x: Tensor) -> Any:
    self.row.add_(1)
    y = attend(x + self.row)
    self.row.add_(y.sum(0))
    return y + self.row


@equal
def sliced(self: Any, x: Tensor) -> Any:
    self.cache[2:4] = 1.5
    self.cache[:, ::2] += 1
    y = attend(x)
    self.cache[1:3, 1:3] = 7
    return y + self.cache[1]


@equal
def masked(self: Any, x: Tensor) -> Any:
    self.cache.masked_fill_(self.cache > 1, 0.5)
    y = attend(x)
    self.row.masked_fill_(y.sum(0) > 0, 3)
    return y


@equal
def by_the_splitting_op(self: Any, x: Tensor) -> Any:
    torch.ops.pwcctest.attend(x, self.cache[: x.shape[0]])
    return self.cache[: x.shape[0]] + 1


@equal
def through_views(self: Any, x: Tensor) -> Any:
    flat = self.cache.view(-1)
    part = flat[8:16]
    part.add_(1)
    y = attend(x + part)
    flat.mul_(2)
    return y + self.cache[1]


@equal
def by_index_methods(self: Any, x: Tensor) -> Any:
    self.cache.index_fill_(0, torch.arange(1, 3), 3.0)
    self.cache.index_copy_(0, torch.arange(4, 5), x[:1])
    self.cache.index_add_(0, torch.arange(1), x[:1])
    self.cache.scatter_(0, torch.zeros(1, 8, dtype=torch.int64), x[:1])
    self.row.fill_(2)
    return attend(x) + self.row


@equal
def by_out_and_foreach(self: Any, x: Tensor) -> Any:
    torch.add(x, 1, out=self.cache[: x.shape[0]])
    torch.sum(x, 0, out=self.row)
    torch._foreach_add_([self.row, self.cache], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    return attend(x) + self.row


@equal
def swapped(self: Any, x: Tensor) -> Any:
    kept = self.row.clone()
    self.row.copy_(self.cache[0])
    self.cache[0].copy_(kept + x.sum(0))
    return x + self.row


@equal
def batch_statistics(self: Any, x: Tensor) -> Any:
    return F.batch_norm(x.repeat(2, 1), self.row, self.cache[0], training=True)


@equal
def counted(self: Any, x: Tensor) -> Any:
    rows = (self.pos + torch.arange(x.shape[0])) % 64
    self.cache[rows] = x
    self.pos.add_(x.shape[0])
    return attend(x) + self.cache.sum(0)


@equal
def in_containers(self: Any, x: Tensor) -> Any:
    for keys, values in self.pairs:
        keys[0].add_(x.sum(0))
        values.add_(keys)
    y = attend(x + self.tables["one"])
    self.pairs[0][1].mul_(2)
    return y + self.tables["two"] + self.pairs[0][1][0]


# --- arguments written in place ---


@equal
def argument_written(self: Any, x: Tensor) -> Any:
    x.add_(1)
    y = attend(x)
    x.mul_(2)
    return y


@equal
def argument_written_and_returned(self: Any, x: Tensor) -> Any:
    return x.add_(1)


@equal
def argument_relu(self: Any, x: Tensor) -> Any:
    return F.relu(x, inplace=True) + 1


# --- views among outputs, arguments and weights ---


@equal
def views_of_the_argument(self: Any, x: Tensor) -> Any:
    return x[:, 2:5], x.t(), x * 2


@equal
def views_of_each_other(self: Any, x: Tensor) -> Any:
    y = x + 1
    return y, y[:, 1:], y.t()


@equal
def view_written_in_a_later_piece(self: Any, x: Tensor) -> Any:
    y = x + 1
    z = attend(y)
    part = y[:, :4]
    part.add_(z[:, :4])
    return y, part


@equal
def view_of_the_argument_written(self: Any, x: Tensor) -> Any:
    part = x[:, ::2]
    part.mul_(2)
    y = attend(x)
    part.add_(1)
    return part, y


@equal
def views_of_weights(self: Any, x: Tensor) -> Any:
    return self.cache[:2], attend(x), self.lin.weight.t()


@equal
def overlapping_views_in_one_piece(self: Any, x: Tensor) -> Any:
    one, other = self.cache[:, :4], self.cache[:, 2:6]
    one.add_(1)
    return other.sum() + x


@equal
def overlapping_views_across(self: Any, x: Tensor) -> Any:
    one, other = x[:, :4], x[:, 2:6]
    y = attend(x)
    one.add_(1)
    return other * 1 + y[:, :4]


@equal
def equal_values_are_two_tensors(self: Any, x: Tensor) -> Any:
    return x + 1, x + 1


@equal
def equal_values_one_written_later(self: Any, x: Tensor) -> Any:
    one = x + 1
    other = x + 1
    y = attend(one)
    one.mul_(2)
    return one, other, y


@equal
def equal_zeros_one_written_between(self: Any, x: Tensor) -> Any:
    one, other = torch.zeros_like(x), torch.zeros_like(x)
    torch.ops.pwcctest.attend(x, one)
    return one, other + 1, other


@equal
def clones_keep_their_values(self: Any, x: Tensor) -> Any:
    before, mine = self.row.clone(), x.clone()
    y = attend(x)
    self.row.add_(1)
    mine.add_(y)
    return before + y, mine


@equal
def shape_changed_in_place_inside(self: Any, x: Tensor) -> Any:
    y = x + 1
    z = attend(y)
    y.transpose_(0, 1)
    z.unsqueeze_(0)
    return y * 1, z + 1


@refused("changes the shape, the layout or the memory of a tensor that exists outside it (resize_)")
def resizes_a_buffer(self: Any, x: Tensor) -> Any:
    self.cache.resize_(32, 8)
    return x + 1


@refused("(transpose_)")
def transposes_an_argument(self: Any, x: Tensor) -> Any:
    x.transpose_(0, 1)
    return x * 2


@refused("(t_)")
def transposes_a_buffer(self: Any, x: Tensor) -> Any:
    self.cache.t_()
    return x + self.cache.sum()


@refused("(unsqueeze_)")
def unsqueezes_a_buffer(self: Any, x: Tensor) -> Any:
    self.row.unsqueeze_(0)
    return x + self.row


@refused("(as_strided_)")
def restrides_a_buffer(self: Any, x: Tensor) -> Any:
    self.row.as_strided_((2, 4), (4, 1))
    return x + self.row.sum()


@refused("(set_)")
def sets_a_buffer(self: Any, x: Tensor) -> Any:
    self.row.set_(x[0].clone())
    return x * 2


@refused(".data =)")
def assigns_data_of_a_buffer(self: Any, x: Tensor) -> Any:
    self.row.data = x[0]
    return x * 2


@refused("the memory that a tensor stands for (.data)")
def writes_through_data(self: Any, x: Tensor) -> Any:
    x.data.add_(1)
    return x * 2


@refused("the memory that a tensor stands for (.data =)")
def assigns_data_of_a_value(self: Any, x: Tensor) -> Any:
    y = x + 1
    y.data = x * 2
    return y * 2


@refused("the memory that a tensor stands for (resize_)")
def resizes_a_value(self: Any, x: Tensor) -> Any:
    y = x + 1
    y.resize_(2, 8)
    return y


@refused("the memory that a tensor stands for (set_ or .data =)")
def sets_a_value(self: Any, x: Tensor) -> Any:
    y = x + 1
    y.set_(x)  # type: ignore[call-overload]
    return y * 2


# --- random numbers ---


@equal
def dropout_of_evaluation(self: Any, x: Tensor) -> Any:
    y = F.dropout(x + 1, 0.5, self.training)
    return F.dropout(y, 0.0, True) + F.alpha_dropout(y, 0.5) + F.rrelu(y)


@equal
def drawn_in_a_splitting_op(self: Any, x: Tensor) -> Any:
    return torch.ops.pwcctest.draw(x) + 1


@equal
def an_operator_of_that_name(self: Any, x: Tensor) -> Any:
    return torch.ops.pwcctest.dropout(x) + 1


@refused("the graph draws random numbers (dropout)")
def dropout(self: Any, x: Tensor) -> Any:
    return F.dropout(x, 0.5, training=True)


@refused("the graph draws random numbers (dropout)")
def dropout_by_default(self: Any, x: Tensor) -> Any:
    return F.dropout(x)


@refused("the graph draws random numbers (dropout)")
def dropout_of_torch(self: Any, x: Tensor) -> Any:
    return torch.dropout(x, 0.1, train=True)


@refused("the graph draws random numbers (dropout1d)")
def dropout_of_channels(self: Any, x: Tensor) -> Any:
    return F.dropout1d(x, 0.5, training=True)


@refused("the graph draws random numbers (alpha_dropout)")
def alpha_dropout(self: Any, x: Tensor) -> Any:
    return F.alpha_dropout(x, 0.5, training=True)


@refused("the graph draws random numbers (rrelu)")
def random_relu(self: Any, x: Tensor) -> Any:
    return F.rrelu(x, training=True)


@refused("the graph draws random numbers (gumbel_softmax)")
def gumbel(self: Any, x: Tensor) -> Any:
    return F.gumbel_softmax(x)


@refused("the graph draws random numbers (scaled_dot_product_attention)")
def attention_dropout(self: Any, x: Tensor) -> Any:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)


@refused("the graph draws random numbers (rand)")
def uniform(self: Any, x: Tensor) -> Any:
    return x + torch.rand(8)


@refused("the graph draws random numbers (randn_like)")
def normal(self: Any, x: Tensor) -> Any:
    return x + torch.randn_like(x)


@refused("the graph draws random numbers (bernoulli)")
def bernoulli(self: Any, x: Tensor) -> Any:
    return torch.bernoulli(torch.sigmoid(x))


@refused("the graph draws random numbers (multinomial)")
def multinomial(self: Any, x: Tensor) -> Any:
    return torch.multinomial(torch.softmax(x, -1), 1) + x


@refused("the graph draws random numbers (normal_)")
def filled(self: Any, x: Tensor) -> Any:
    return torch.empty(8).normal_() + x


@refused("draws random numbers with Python's random")
def python_random(self: Any, x: Tensor) -> Any:
    return x * random.random()


@refused("draws random numbers with Python's random")
def python_integer(self: Any, x: Tensor) -> Any:
    return x * random.randint(1, 10)


@refused("draws random numbers with Python's random")
def python_generator(self: Any, x: Tensor) -> Any:
    return x * random.Random(3).random()


@refused("draws random numbers with Python's random")
def python_choice(self: Any, x: Tensor) -> Any:
    return x * random.choice([1, 2, 3])


@refused("draws random numbers with NumPy")
def numpy_random(self: Any, x: Tensor) -> Any:
    return x * np.random.rand()


@refused("draws random numbers with NumPy (default_rng)")
def numpy_generator(self: Any, x: Tensor) -> Any:
    return x * float(np.random.default_rng(0).random())


@refused("reads or sets torch's random state (manual_seed)")
def seeds(self: Any, x: Tensor) -> Any:
    torch.manual_seed(0)
    return x + 1


@refused("reads or sets torch's random state (get_rng_state)")
def reads_the_state(self: Any, x: Tensor) -> Any:
    return x + torch.get_rng_state().float().sum()


@refused("makes or uses a torch.Generator")
def torch_generator(self: Any, x: Tensor) -> Any:
    return x + torch.rand(8, generator=torch.Generator())


# --- gradients ---


@equal
def gradients_switched_on_inside(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x + 1
    z = attend(y)
    torch.set_grad_enabled(False)
    with torch.inference_mode():
        return z * 2


@refused("asks for gradients")
def requires_them(self: Any, x: Tensor) -> Any:
    return (x + 1).requires_grad_()


@refused("asks for gradients")
def computes_them(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad((z * z).sum(), z)[0]


@refused("takes derivatives")
def by_functorch(self: Any, x: Tensor) -> Any:
    return torch.func.grad(lambda z: (z * z).sum())(x)


@refused("takes derivatives")
def forward_mode(self: Any, x: Tensor) -> Any:
    return torch.func.jvp(lambda z: z * z, (x,), (x,))[1]
