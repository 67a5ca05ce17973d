"""What a call may leave out is part of the key."""

from __future__ import annotations

from torch import Tensor, nn

from pwcc.compile.signature import parameter_names, signature_facts


class Scaled(nn.Module):
    def forward(self, x: Tensor, k: float = 2.0, *, mode: tuple[int, ...] = (1, 2)) -> Tensor:
        return x * k * mode[0]


def test_defaults_are_facts_of_the_signature() -> None:
    model = Scaled()
    before = signature_facts(model)
    assert [name for name, _ in before] == ["x", "k", "mode"]
    assert parameter_names(model) == ["x", "k"]
    defaults = Scaled.forward.__defaults__
    try:
        Scaled.forward.__defaults__ = (3.0,)
        assert signature_facts(model) != before
    finally:
        Scaled.forward.__defaults__ = defaults
    assert signature_facts(model) == before


def test_another_keyword_default_is_another_signature() -> None:
    model = Scaled()
    before = signature_facts(model)
    kept = dict(Scaled.forward.__kwdefaults__ or {})
    try:
        Scaled.forward.__kwdefaults__ = {"mode": (1, 3)}
        assert signature_facts(model) != before
    finally:
        Scaled.forward.__kwdefaults__ = kept
