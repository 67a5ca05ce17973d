from __future__ import annotations

import pytest

from pwcc.cache.errors import UsageError
from pwcc.cli.splitting import parse_splitting_ops


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pwcc::attention", ("pwcc::attention",)),
        ("a::b, c::d.out,a::b", ("a::b", "c::d.out")),
        ("", ()),
    ],
)
def test_names(text: str, names: tuple[str, ...]) -> None:
    assert parse_splitting_ops(text) == names


@pytest.mark.parametrize("item", ["attention", "a:b", "a::", "a::b::c", "a::b.", "torch.ops.a.b"])
def test_other_forms_are_named(item: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_splitting_ops(f"a::b,{item}")
    assert repr(item) in caught.value.message
