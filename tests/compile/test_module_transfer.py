"""A module in another process: its form, ties and buffers are the same, its weights stay here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pwcc.cache.errors import ModelError
from pwcc.compile.background_worker import take_over
from pwcc.compile.children import failure_of
from pwcc.compile.levels import CompileConfig
from pwcc.compile.model_tree import model_tree
from pwcc.compile.module_transfer import Parcel, pack, unpack
from pwcc.compile.numeric_state import numeric_state
from tests.compile.decorated import Affine, DecoratedOuter


class Tied(nn.Module):
    """Two names of one parameter, one of one buffer, a strided one, and a tensor attribute."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.ones(3, 5).t(), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("again", self.table)
        self.register_buffer("scratch", torch.tensor([True, False]), persistent=False)
        self.plain = torch.arange(4)


def sent(module: nn.Module, config: CompileConfig | None = None) -> tuple[Parcel, str]:
    return unpack(pack(Parcel(module, (), ((), (1, 2)), config or CompileConfig(tag="t"), numeric_state())))


def test_the_tree_is_the_same_and_no_weight_is_sent() -> None:
    module = Tied().eval()
    parcel, device = sent(module)
    other = parcel.module
    assert isinstance(other, Tied)
    assert model_tree(other).digest() == model_tree(module).digest()
    assert device == "cpu"
    assert all(parameter.is_meta for parameter in other.parameters())
    assert other.head.weight is other.embed.weight
    assert other.turned.stride() == module.turned.stride()
    assert not other.turned.requires_grad
    assert not other.training
    assert other.table is other.again
    for name in ("table", "scratch", "plain"):
        assert torch.equal(getattr(other, name), getattr(module, name))
    assert (parcel.stages, parcel.config.tag) == (((), (1, 2)), "t")


def test_what_is_sent_is_small() -> None:
    module = nn.Linear(1024, 1024)
    assert len(pack(Parcel(module, (), (), CompileConfig(), {}))) < 20_000


def test_decorated_modules_arrive_with_a_state_of_their_own() -> None:
    module = DecoratedOuter()
    other = sent(module)[0].module
    assert model_tree(other).digest() == model_tree(module).digest()
    assert vars(other)["_pwcc_state"] is not vars(module)["_pwcc_state"]


class Main(Affine):
    """Pretends to be defined in the program's main file."""


def test_what_another_process_cannot_import_or_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Main, "__module__", "__main__")
    with pytest.raises(ModelError, match="Main is defined in the program's main file"):
        sent(Main())
    module = Affine()
    module.callback = lambda: None  # type: ignore[assignment]
    with pytest.raises(ModelError, match="cannot be sent to another process: "):
        sent(module)
    module = Affine()
    module.plain = torch.eye(2).to_sparse()
    with pytest.raises(ModelError, match="a tensor of type Tensor cannot be sent"):
        sent(module)


def test_modes_are_taken_over_or_refused_by_name() -> None:
    modes = numeric_state()
    take_over(modes)
    assert numeric_state() == modes
    with pytest.raises(
        ModelError, match=r"cannot take over its numeric modes: autocast.cpu is 'torch.bfloat16'"
    ):
        take_over({**modes, "autocast.cpu": "torch.bfloat16"})


def test_an_error_of_the_other_process_is_one_here() -> None:
    found = failure_of(
        {"error": "ModelError", "message": "no", "where": "a.py:1", "hint": None, "report": "Traceback"}
    )
    assert (type(found), found.message, found.where, found.hint) == (ModelError, "no", "a.py:1", None)
    assert found.__notes__ == ["Traceback"]
    assert type(failure_of({"error": "Unknown", "message": "no"})).__name__ == "PieceCompileError"
