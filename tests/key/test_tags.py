"""Several parts of one model in one process and one cache: an entry for each, and sealed pieces shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pwcc
from pwcc.cache.errors import CacheMiss, UsageError
from pwcc.cache.store import Store
from pwcc.cli import main
from pwcc.compile.report import CompileReport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draft, self.target = Part(), Part()


def compiled(part: nn.Module, root: Path, tag: str | None, **options: Any) -> CompileReport:
    return pwcc.precompile(
        part, cache_dir=root, max_tokens=64, inputs=["x:float32[n,8]"], splitting_ops=(), tag=tag, **options
    )


def test_equal_parts_have_entries_of_their_own_and_share_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Whole().eval().requires_grad_(False)
    first = compiled(model.draft, tmp_path, "draft")
    assert first.counters.compiles == 1

    # one part alone: its entry serves neither the other part nor a load without a tag
    for tag in ("target", None):
        with pytest.raises(CacheMiss) as caught:
            pwcc.load(model.target, cache_dir=tmp_path, tag=tag)
        assert "tag" in "\n".join(caught.value.reasons)
        assert "draft" in "\n".join(caught.value.reasons)
        with pytest.raises(CacheMiss):
            compiled(model.target, tmp_path, tag, frozen=True)

    second, again = compiled(model.target, tmp_path, "target"), compiled(model.draft, tmp_path, "draft")
    assert (second.counters.compiles, second.counters.piece_cache_hits) == (0, 1)
    assert again.hit
    assert again.entry_key == first.entry_key
    assert len({first.entry_key, second.entry_key}) == len({first.lookup_key, second.lookup_key}) == 2

    # without a tag: a third one
    assert not compiled(model.draft, tmp_path, None).hit
    x = torch.randn(3, 8)
    for tag, part in (("draft", model.draft), ("target", model.target), (None, model.draft)):
        found = pwcc.load(part, cache_dir=tmp_path, tag=tag)
        assert found.manifest.tag == tag
        assert torch.allclose(found(x), part(x))
    assert len(list(Store.open(tmp_path).entries())) == 3

    assert main(["inspect", str(tmp_path), second.entry_key]) == 0
    assert "target" in capsys.readouterr().out


@pytest.mark.parametrize("tag", ["", "a b", "../up", ".hidden", "x" * 129])
def test_a_tag_is_a_plain_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError, match="expected a tag of letters"):
        compiled(Part().eval(), tmp_path, tag)
    Store.create(tmp_path)
    with pytest.raises(UsageError, match="expected a tag of letters"):
        pwcc.load(Part().eval(), cache_dir=tmp_path, tag=tag)
