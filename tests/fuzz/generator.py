"""Small random models as Python source: a seed says which constructs, in which order, on which values.

Every value that a construct takes or makes is float32 ``[n, 8]``, so that any construct may follow any other. A
construct is a few lines of text with ``{a}`` and ``{b}`` for values, ``{o}`` for the new one and ``{i}`` for a
number that is used nowhere else. The text is what a user could have written; nothing in it knows of pwcc.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 8
MAX_TOKENS: Final = 64


@dataclass(frozen=True)
class Construct:
    """Lines of ``forward``. ``rare``: refused or served in part today. ``exact``: must see no rounding before it."""

    name: str
    text: str
    rare: bool = False
    exact: bool = False
    rounds: bool = False
    needs: frozenset[str] = frozenset()


def _constructs() -> list[Construct]:
    def c(
        name: str, text: str, *needs: str, rare: bool = False, exact: bool = False, rounds: bool = False
    ) -> Construct:
        return Construct(name, text, rare, exact, rounds, frozenset(needs))

    return [
        # what a piece is made of
        c("linear", "{o} = self.lin({a})"),
        c("same linear twice", "{o} = self.lin(self.lin({a}))"),
        c("tied weight", "{o} = F.linear({a}, self.tied) * 0.5"),
        c("norm", "{o} = self.norm({a})"),
        c("shared submodule", "{o} = self.blocks[0]({a}) + self.blocks[1]({b})"),
        c("loop over modules", "{o} = {a}\nfor block in self.blocks:\n    {o} = {o} + block({o})"),
        c("parameter list", "{o} = {a} * self.scales[0] + self.scales[1]"),
        c("plain tensor", "{o} = {a} + self.plain"),
        c("float attribute", "{o} = {a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + self.eps)"),
        c("add", "{o} = {a} + {b}"),
        c("gate", "{o} = F.silu({a}) * {b}"),
        c("softmax", "{o} = F.softmax({a}, dim=-1) @ self.lin.weight"),
        c("einsum", "{o} = torch.einsum('nh,hk->nk', {a}, self.tied) * 0.3"),
        c("bmm of heads", "q{i} = {a}.view(-1, 2, 4).transpose(0, 1)\n"
          "{o} = torch.bmm(q{i}, self.tied[:4].expand(2, 4, 8).contiguous())[0] * 0.3"),
        c("embedding", "{o} = {a} + self.emb(ids)"),
        # tuples and views
        c("chunk", "q{i}, k{i}, v{i} = self.big({a}).chunk(3, -1)\n{o} = q{i} * k{i} + v{i}"),
        c("chunk, one part kept", "{o} = self.big({a}).chunk(3, dim=-1)[1]"),
        c("split", "q{i}, k{i} = {a}.split([4, 4], -1)\n{o} = torch.cat([k{i}, q{i}], -1)"),
        c("unbind", "q{i}, k{i}, v{i} = self.big({a}).view(-1, 3, 8).unbind(1)\n{o} = q{i} - v{i} * k{i}"),
        c("var_mean", "v{i}, m{i} = torch.var_mean({a}, -1, keepdim=True)\n{o} = ({a} - m{i}) / (v{i} + 1.0)"),
        c("topk", "t{i}, j{i} = {a}.topk(4, -1)\n{o} = torch.cat([t{i}, j{i}.float() * 0.1], -1)", exact=True),
        c("max with index", "m{i} = {a}.max(-1, keepdim=True)\n{o} = {a} - m{i}.values + m{i}.indices * 0.01", exact=True),
        c("sort", "{o} = {a}.sort(-1).values"),
        c("reshape", "{o} = {a}.reshape(-1, 2, 4).transpose(1, 2).reshape(-1, 8)"),
        c("view of a view", "{o} = {a}.view({a}.shape).unsqueeze(0).squeeze(0) + 0.5"),
        c("slice of features", "{o} = torch.cat([{a}[:, 4:], {b}[:, :4]], -1)"),
        c("rotary", "x{i}, y{i} = {a}[..., :4], {a}[..., 4:]\n{o} = torch.cat([-y{i}, x{i}], -1) * self.cos[:n] + {a}"),
        c("complex rotary", "z{i} = torch.view_as_complex({a}.reshape(-1, 4, 2).contiguous())\n"
          "{o} = torch.view_as_real(z{i} * (1 + 2j)).reshape(-1, 8) * 0.5", rare=True),
        c("pad", "{o} = F.pad({a}, (1, 0))[:, :-1]"),
        c("roll", "{o} = {a}.roll(1, -1) + {b}"),
        c("stack", "{o} = torch.stack([{a}, {b}], 1).mean(1)"),
        c("masked fill", "{o} = {a}.masked_fill({b} > 0.3, 0.25)", exact=True),
        c("where", "{o} = torch.where({a} > {b}, {a}, -{b})"),
        c("triangle", "m{i} = torch.ones(n, n, device=x.device).tril()\n{o} = (m{i} @ {a}) / n"),
        c("gather", "{o} = {a}.gather(-1, (ids % 8).unsqueeze(-1).expand(-1, 8))"),
        c("index by tensor", "{o} = {a}[torch.arange(n - 1, -1, -1, device=x.device)]"),
        # sizes
        c("arange", "{o} = {a} + torch.arange(n, device=x.device).unsqueeze(-1) * 0.01"),
        c("full", "{o} = {a} * torch.full((n, 8), 0.7, device=x.device)"),
        c("size as a number", "{o} = {a} / {a}.size(0)"),
        c("root of a size", "{o} = {a} * (n ** 0.5)"),
        c("size into a shape", "{o} = torch.zeros({a}.shape, device=x.device) + {b}"),
        c("twice the tokens", "{o} = torch.cat([{a}, {b}], 0)[n:]"),
        c("mean over tokens", "{o} = {a} - {a}.mean(0, keepdim=True)"),
        c("last token", "{o} = {a} + {b}[-1:]"),
        c("expand", "{o} = self.buf.expand(n, 8) * {a}"),
        c("cumsum", "{o} = {a}.cumsum(0) / (1 + torch.arange(n, device=x.device).unsqueeze(1))"),
        c("branch on the size", "{o} = {a} * 2 if n > 16 else {a} + 1", rare=True),
        c("branch on a remainder", "{o} = {a} * 2 if n % 4 == 0 else {a} + 1", rare=True),
        c("pairs of tokens", "{o} = {a}.view(-1, 2, 8).flip(1).view(-1, 8)", rare=True),
        # arguments
        c("optional tensor", "{o} = {a} if extra is None else {a} + extra", "extra"),
        c("bool argument", "{o} = {a} * 1.5 if flag else {a} - 0.5", "flag"),
        c("int argument", "{o} = {a} * k", "k"),
        c("int attribute", "{o} = {a}.roll(self.k, -1)"),
        # cuts
        c("attend", "o{i} = torch.empty_like({a})\ntorch.ops.fuzz.attend({a}, o{i})\n{o} = o{i} + {b}"),
        c("attend, scaled", "o{i} = torch.zeros_like({a})\ntorch.ops.fuzz.attend({a}, o{i}, 0.5)\n{o} = o{i} * {a}"),
        c("attend twice in a row", "o{i} = torch.empty_like({a})\np{i} = torch.empty_like({a})\n"
          "torch.ops.fuzz.attend({a}, o{i})\ntorch.ops.fuzz.attend(o{i}, p{i})\n{o} = p{i} + 1"),
        c("attend into a view", "o{i} = torch.empty(n, 16, device=x.device)\ntorch.ops.fuzz.attend({a}, o{i}[:, :8])\n"
          "o{i}[:, 8:] = {b}\n{o} = o{i}[:, :8] + o{i}[:, 8:]"),
        c("pair", "{o}, r{i} = torch.ops.fuzz.pair({a}, {b})\n{o} = {o} + r{i}.mean()"),
        c("pair, one part unused", "{o} = torch.ops.fuzz.pair({a}, {b})[0]"),
        c("note", "torch.ops.fuzz.note({a})\n{o} = {a} + 0.1"),
        c("opaque operator", "{o} = torch.ops.fuzz.inside({a}, shift=3)"),
        c("tuple over a cut", "q{i}, k{i} = self.big({a})[:, :16].chunk(2, -1)\no{i} = torch.empty_like(q{i})\n"
          "torch.ops.fuzz.attend(q{i}.contiguous(), o{i})\n{o} = o{i} * k{i}"),
        c("size over a cut", "s{i} = {a}.shape\no{i} = torch.empty(s{i}, device=x.device)\ntorch.ops.fuzz.attend({a}, o{i})\n"
          "{o} = o{i}.view(s{i}[0], s{i}[1])"),
        # regions
        c("no_grad", "with torch.no_grad():\n    {o} = self.lin({a}) + {b}"),
        c("autocast", "with torch.autocast(x.device.type, torch.bfloat16):\n    l{i} = self.lin({a})\n{o} = l{i}.float() + {b}",
          rounds=True),
        c("autocast off", "with torch.autocast(x.device.type, enabled=False):\n    {o} = self.lin({a})"),
        c("autocast over a cut", "o{i} = torch.empty_like({a})\nwith torch.autocast(x.device.type, torch.bfloat16):\n"
          "    l{i} = self.lin({a})\n    torch.ops.fuzz.attend(l{i}.float(), o{i})\n    m{i} = self.lin(o{i})\n"
          "{o} = m{i}.float() + l{i}.float()", rare=True, rounds=True),
        c("low precision", "{o} = ({a}.to(torch.bfloat16) * 1.5).float()", rounds=True),
        c("double", "{o} = ({a}.double() / 3).float()"),
        # state
        c("in place on a copy", "{o} = {a}.clone()\n{o}.mul_(0.5).add_(1)"),
        c("assign to a slice", "{o} = {a}.clone()\n{o}[:, 0] = {b}[:, 1]"),
        c("assign through a view", "{o} = {a}.clone()\nw{i} = {o}.view(-1, 2, 4)\nw{i}[:, 1] += 1.0"),
        c("count in a buffer", "self.count.add_(1)\n{o} = {a} + self.count * 0.001"),
        c("running mean", "self.running.mul_(0.9).add_({a}.detach().mean(0) * 0.1)\n{o} = {a} - self.running"),
        c("cache write", "self.kv[:n] = {a}\n{o} = self.kv[:n] * 0.5 + {b}"),
        c("cache write by index", "self.kv.index_copy_(0, ids, {a})\n{o} = self.kv[ids] + 0.1", rare=True),
        c("cache write, then a cut", "self.kv[:n].copy_({a})\no{i} = torch.empty_like({a})\n"
          "torch.ops.fuzz.attend(self.kv[:n], o{i})\n{o} = o{i}"),
        c("cut into the cache", "torch.ops.fuzz.attend({a}, self.kv[:n])\n{o} = self.kv[:n] + {b}"),
        # what is refused
        c("dropout", "{o} = F.dropout({a}, 0.5, training=True)", rare=True),
        c("data dependent", "{o} = {a} * 2 if {a}.sum() > 0 else {a}", rare=True),
        c("rebinding", "self.last = {a}\n{o} = {a} + 1", rare=True),
    ]  # fmt: skip


CONSTRUCTS: Final = tuple(_constructs())

_MODULE = '''"""Model {seed} of the generator."""

import dataclasses
from typing import NamedTuple, Optional

import fuzz_ops  # noqa: F401
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass
class Output:
    first: Tensor
    second: Optional[Tensor] = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.big = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.emb = nn.Embedding(64, 8)
        block = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block, block, nn.Linear(8, 8)])
        self.tied = self.lin.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8))])
        self.register_buffer("buf", torch.rand(8))
        self.register_buffer("cos", torch.rand(64, 8), persistent=False)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("kv", torch.zeros(64, 8))
        self.plain = torch.rand(8)
        self.eps = {eps}
        self.k = {k}
        self.last = None

    def forward({signature}):
        n = x.shape[0]
        val0 = x
{body}
        return {output}


def factory():
    torch.manual_seed({seed})
    return Model().eval()
'''

OUTPUTS: Final = (
    "{a}",
    "{a}, {b}",
    "[{a}, {a}]",
    "{{'first': {a}, 'second': {b}, 'n': None}}",
    "Output({a}, {b})",
    "Output({a})",
    "Pair({a}, {b})",
    "{a}, x",
    "{a}, {a}[:, :4]",
    "{a}, ({b}, {a}.view(-1))",
    "{a}, n",
    "{a}, {b}.shape",
)
PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "extra": ("extra: Optional[Tensor] = None",),
    "flag": ("flag: bool = False", "flag: bool = True"),
    "k": ("k: int = 2", "k: float = 0.5"),
}


@dataclass(frozen=True)
class Generated:
    """One model: its source, the constructs in it, its static sizes, and whether ``extra`` is a tensor."""

    seed: int
    source: str
    constructs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    rounds: bool = False
    gives_extra: bool = False


def generate(seed: int, *, rare: float = 0.05) -> Generated:
    """Return model ``seed``; ``rare`` is the chance that a construct is one of the rare ones."""
    rng = random.Random(seed)
    common = [c for c in CONSTRUCTS if not c.rare]
    unusual = [c for c in CONSTRUCTS if c.rare]
    values, lines, names = ["val0"], [], list[str]()
    needs: set[str] = set()
    rounded = False
    for index in range(rng.randint(2, 7)):
        pool: Sequence[Construct] = unusual if rng.random() < rare else common
        if rounded:  # a comparison after rounding may fall either way
            pool = [c for c in pool if not c.exact]
        chosen = rng.choice(pool)
        recent = values[-3:]
        made = f"val{len(values)}"
        text = chosen.text.format(a=values[-1], b=rng.choice(recent), o=made, i=index)
        lines += text.split("\n")
        values.append(made)
        names.append(chosen.name)
        needs |= chosen.needs
        rounded |= chosen.rounds
    output = rng.choice(OUTPUTS).format(a=values[-1], b=rng.choice(values))
    used = [name for name in PARAMETERS if name in needs]
    signature = ", ".join(
        ["self", "x: Tensor", "ids: Tensor", *(rng.choice(PARAMETERS[name]) for name in used)]
    )
    source = _MODULE.format(
        seed=seed,
        eps=rng.choice(["1e-6", "1e-3"]),
        k=rng.choice([1, 3]),
        signature=signature,
        body="\n".join(" " * 8 + line for line in lines),
        output=output,
    )
    return Generated(
        seed=seed,
        source=source,
        constructs=tuple(names),
        sizes=(7,) if rng.random() < 0.25 else (),
        rounds=rounded,
        gives_extra="extra" in used and rng.random() < 0.5,
    )
