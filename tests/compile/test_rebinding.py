"""A forward that rebinds what its module holds is refused by name and line; the dump shows what it would do."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import UnsealableError
from pwcc.compile.decompiled import decompiled
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.precompile import plan, precompile


class Counting(nn.Module):
    """Holds a buffer, a list and a plain attribute; ``change`` is what its forward does to itself."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.count = 0
        self.log: list[Tensor] = []
        self.inner = nn.LayerNorm(8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        assert isinstance(self.seen, Tensor)
        y: Tensor = self.inner(x) * self.scale + self.seen
        return y


def assigns(self: Any) -> None:
    self.seen = self.seen + 1


def registers(self: Any) -> None:
    self.register_buffer("seen", self.seen + 1)


def adds_another(self: Any) -> None:
    self.register_buffer("other", self.seen + 1)


def sets(self: Any) -> None:
    setattr(self, "se" + "en", self.seen * 2)


def writes_the_table(self: Any) -> None:
    self._buffers["seen"] = self.seen * 2


def keeps(self: Any) -> None:
    self.cache = self.seen * 2


def counts(self: Any) -> None:
    self.count += 1


def appends(self: Any) -> None:
    self.log.append(self.seen + 1)


def rebinds_deeper(self: Any) -> None:
    self.inner.count = self.scale * 2


REBOUND: dict[Callable[[Any], None], str] = {
    assigns: "self.seen (a buffer that is rebound)",
    registers: "self.seen (a buffer that is rebound)",
    adds_another: "self.other (a buffer that is rebound)",
    sets: "self.seen (a buffer that is rebound)",
    writes_the_table: "self.seen (a buffer that is rebound)",
    keeps: "self.cache",
    counts: "self.count",
    appends: "self.log",
    rebinds_deeper: "self.inner.count",
}


def planned(change: Callable[[Any], None], dump: Path | None = None) -> object:
    model = Counting(change).eval()
    return plan(
        model,
        specs=input_specs(model, declarations=("x:float32[n,8]",)),
        sizes=(),
        max_tokens=16,
        device="cpu",
        identity="test",
        dump=dump,
    )


def compiled(change: Callable[[Any], None], dump: Path, *, cache_dir: Path) -> object:
    model = Counting(change).eval()
    return precompile(
        model,
        cache_dir=cache_dir,
        specs=input_specs(model, declarations=("x:float32[n,8]",)),
        sizes=(),
        max_tokens=16,
        device="cpu",
        identity="test",
        dump=dump,
        jobs=1,
    )


@pytest.mark.parametrize("change", REBOUND, ids=lambda change: change.__name__)
def test_what_is_rebound_is_named_with_its_line(change: Callable[[Any], None]) -> None:
    with pytest.raises(UnsealableError) as caught:
        planned(change)
    assert caught.value.message == f"forward changes {REBOUND[change]}, which compiled code would not do"
    line = change.__code__.co_firstlineno + 1
    assert str(caught.value.where).startswith(f"{__file__}:{line}: ")


def test_an_update_in_place_is_fine(tmp_path: Path) -> None:
    def copies(self: Any) -> None:
        self.seen.copy_(self.seen + 1)

    planned(copies, tmp_path / "dump")
    text = (tmp_path / "dump" / "program0" / "bytecode.py").read_text()
    assert text.startswith("# what Dynamo runs in place of forward")
    assert "__compiled_fn" in text


@pytest.mark.parametrize("way", ["plan", "compile"])
def test_the_dump_of_a_refused_compile_holds_what_the_bytecode_would_do(tmp_path: Path, way: str) -> None:
    pytest.importorskip("depyf")
    dump = tmp_path / "dump"
    run = planned if way == "plan" else functools.partial(compiled, cache_dir=tmp_path / "cache")
    with pytest.raises(UnsealableError) as caught:
        run(assigns, dump)
    path = dump / "refused.py"
    assert str(path) in str(caught.value.hint)
    text = path.read_text()
    assert text.splitlines()[0] == "# what Dynamo runs in place of forward, decompiled by depyf"
    assert "_buffers.update({'seen': graph_out_0[" in text
    compile(text, str(path), "exec")


def test_without_a_dump_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsealableError):
        planned(assigns)
    assert list(tmp_path.iterdir()) == []


def test_without_depyf_the_text_is_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    text = decompiled(assigns.__code__)
    first, *rest = text.splitlines()
    assert first.startswith("# what Dynamo runs in place of assigns, as instructions; to see it as Python, ")
    assert "'.[depyf]'" in first
    assert any("STORE_ATTR" in line and "seen" in line for line in rest)


def test_bytecode_that_depyf_cannot_read_is_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(code: types.CodeType) -> str:
        raise NotImplementedError("MATCH_KEYS")

    monkeypatch.setitem(sys.modules, "depyf", types.SimpleNamespace(decompile=fails))
    text = decompiled(assigns.__code__)
    assert "depyf could not decompile it: NotImplementedError: MATCH_KEYS" in text.splitlines()[0]
    assert "STORE_ATTR" in text


def test_the_command_line_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pwcc.cli import main

    source = tmp_path / "rebinds.py"
    source.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Rebinds(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        '        self.register_buffer("seen", torch.zeros(8))\n\n'
        "    def forward(self, x):\n        self.seen = self.seen + 1\n        return x + self.seen\n"
    )
    model = build(ModelRef.parse(f"{source}:Rebinds")).module
    assert "seen" in dict(model.named_buffers())
    dump = tmp_path / "dump"
    argv = ["compile", "--model", f"{source}:Rebinds", "--input", "x:float32[n,8]", "--device", "cpu"]
    assert main([*argv, "--dump", str(dump), "--cache-dir", str(tmp_path / "cache"), "--dry-run"]) == 1
    assert (dump / "refused.py").is_file()
