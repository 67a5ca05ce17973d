"""Faults that users of such caches reported elsewhere, where no other test of ours has the same scenario."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pwcc
from pwcc.cache.errors import CacheMiss
from pwcc.compile.report import CompileReport
from tests.compile.test_numeric_state import call
from tests.key.conftest import Keyed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]


class Sharded(nn.Module):
    """A rank that bakes the bounds of its slice."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x[:, self.rank * 4 : (self.rank + 1) * 4] * self.scale)


def compiled(model: nn.Module, root: Path, **options: Any) -> CompileReport:
    given: dict[str, Any] = {"max_tokens": 64, "inputs": ["x:float32[n,8]"], "splitting_ops": ()}
    return pwcc.precompile(model.eval(), cache_dir=root, **given, **options)


@pytest.fixture(scope="module")
def options_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


def test_ranks_with_slices_of_their_own_never_swap_code(options_root: Path) -> None:
    """18: rank 0, then rank 1, then rank 0 again, in one cache; each equals its own eager."""
    x = torch.randn(5, 8)
    for rank, hit in ((0, False), (1, False), (0, True)):
        model = Sharded(rank).eval().requires_grad_(False)
        if not hit:
            with pytest.raises(CacheMiss):
                pwcc.load(model, cache_dir=options_root)
        assert compiled(model, options_root).hit == hit
        assert torch.allclose(pwcc.load(model, cache_dir=options_root)(x), model(x))


def test_options_of_inductor_are_part_of_the_entry_but_not_of_a_load(options_root: Path) -> None:
    """79 and 32: another option is another entry; either entry loads with and without the option."""
    from torch._inductor import config

    model = Sharded(0).requires_grad_(False)
    with config.patch("cpp.min_chunk_size", 1234):
        first = compiled(model, options_root)
        assert not first.hit
        assert compiled(model, options_root).hit
        inside = pwcc.load(model, cache_dir=options_root, entry=first.entry_key)
    plain = compiled(model, options_root)
    assert plain.hit  # that of the test before
    assert plain.entry_key != first.entry_key
    outside = pwcc.load(model, cache_dir=options_root, entry=first.entry_key)
    assert inside.manifest == outside.manifest


def test_fifty_loads_on_the_host_that_built_it(keyed: Keyed, model: nn.Module) -> None:
    """27: never rejected by its own host."""
    assert {keyed.load(model).manifest.entry_key for _ in range(50)} == {keyed.entry}


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "inference mode": (torch.inference_mode, True),
    "device of the entry": (lambda: torch.device("cpu"), True),
    "autocast that is off": (lambda: torch.autocast("cpu", enabled=False), True),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), False),
    "default dtype": (lambda: call(torch.set_default_dtype, torch.bfloat16, torch.float32), False),
    "another device": (lambda: torch.device("meta"), False),
}


@pytest.fixture
def hits(keyed: Keyed, model: nn.Module) -> Iterator[Callable[[], bool]]:
    def ask() -> bool:
        found = []
        for request in (keyed.load, keyed.recompile):
            try:
                request(model)
                found.append(True)
            except CacheMiss:
                found.append(False)
        assert found[0] == found[1]
        return found[0]

    yield ask
    assert ask()


@pytest.mark.parametrize("name", CONTEXTS)
def test_ambient_state_counts_alike_on_both_sides(hits: Callable[[], bool], name: str) -> None:
    """76: what is ambient when an entry is asked for is compared with what was ambient when it was made."""
    enter, expected = CONTEXTS[name]
    with enter():
        assert hits() == expected


def test_the_threads_of_the_builder_do_not_bind_a_host(keyed: Keyed, model: nn.Module) -> None:
    """10: the number of threads neither misses nor changes the answer, and the recorded check holds."""
    before = torch.get_num_threads()
    x = torch.randn(33, 8)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            loaded = keyed.load(model)
            assert torch.allclose(loaded(x), model(x), atol=1e-6)
            assert loaded.check().ok
    finally:
        torch.set_num_threads(before)
