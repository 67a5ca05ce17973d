"""A dump shows every stage of a compile, changes nothing of what is published, and replaces an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pwcc.cache.errors import StoreError, UnsealableError
from pwcc.cache.ids import FactorDigest
from pwcc.compile.dump import dumping, rename_pieces
from pwcc.compile.dump_index import TITLE
from pwcc.compile.inputs import input_specs
from pwcc.compile.precompile import plan, precompile
from pwcc.compile.report import CompilePlan, CompileReport


class Chain(nn.Module):
    """A view of a view, which a pass makes one, before and after what is cut out."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).view(-1, 4, 2).view(-1, 2, 4).relu().view(-1, 8)
        y = torch.sort(y, dim=-1)[0]
        return (y * 2).view(-1, 4, 2).view(-1, 2, 4).relu().view(-1, 8)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return done


def planned(model: nn.Module, dump: Path | None) -> CompilePlan:
    return plan(
        model.eval(),
        specs=input_specs(model, declarations=("x:float32[n,8]",)),
        sizes=(2,),
        max_tokens=16,
        device="cpu",
        identity="test",
        splitting_ops=("aten::sort",),
        dump=dump,
    )


def compiled(cache_dir: Path, dump: Path | None, *, sizes: tuple[int, ...], jobs: int = 1) -> CompileReport:
    model = Chain().eval()
    return precompile(
        model,
        cache_dir=cache_dir,
        specs=input_specs(model, declarations=("x:float32[n,8]",)),
        sizes=sizes,
        max_tokens=16,
        device="cpu",
        identity="test",
        splitting_ops=("aten::sort",),
        dump=dump,
        jobs=jobs,
    )


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_dry_run_dumps_programs_and_pieces(tmp_path: Path) -> None:
    planned(Chain(), tmp_path / "d")
    assert tree(tmp_path / "d") == [
        "README.md",
        "pieces/p0/graph.py",
        "program0/bytecode.py",
        "program0/graph.py",
        "program0/stitch.py",
    ]
    index = (tmp_path / "d/README.md").read_text()
    assert index.startswith(TITLE)
    assert "| `program*/graph.py` |" in index
    assert "| program0 | 1 to 16 | 2 | 1 | n=1..16, n=2 |" in index
    assert "inductor.py" not in index  # it names what is there only
    assert __file__ in (tmp_path / "d/pieces/p0/graph.py").read_text()


def test_an_earlier_dump_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with dumping(folder):
        (folder / "pieces/p7").mkdir(parents=True)
        (folder / "program1").mkdir()
        (folder / "refused.py").touch()
        (folder / "notes.txt").touch()
    with dumping(folder):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "notes.txt"]
    other = tmp_path / "mine"
    (other / "pieces").mkdir(parents=True)
    (other / "README.md").write_text("# Chess\n")
    with dumping(other):
        pass
    assert (other / "pieces").is_dir()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="writing a dump"):
        planned(Chain(), tmp_path / "file")


def test_pieces_are_renamed_as_a_program_comes_first(tmp_path: Path) -> None:
    a, b, c = map(FactorDigest, "abc")
    for name in ("p0", "p1"):
        (tmp_path / "pieces" / name).mkdir(parents=True)
        (tmp_path / "pieces" / name / "was").write_text(name)
    rename_pieces(tmp_path, {a: "p0", b: "p1"}, {c: "p0", a: "p1", b: "p2"})
    found = {path.parent.name: path.read_text() for path in (tmp_path / "pieces").glob("*/was")}
    assert found == {"p1": "p0", "p2": "p1"}


def test_the_graph_of_a_refused_model(tmp_path: Path) -> None:
    with pytest.raises(UnsealableError) as caught:
        planned(Branches(), tmp_path / "d")
    path = tmp_path / "d/refused_graph.py"
    assert str(path) in str(caught.value.hint)
    assert "def forward(self" in path.read_text()
    index = (tmp_path / "d/README.md").read_text()
    assert f"The compile ended with: {caught.value.message}" in index
    assert "`refused_graph.py`" in index


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compile_is_dumped_whole_and_published_the_same(tmp_path: Path) -> None:
    """By two worker processes; then from the piece cache; then without a dump, to the same bytes."""
    cache, folder = tmp_path / "cache", tmp_path / "d"
    with_dump = compiled(cache, folder, jobs=2, sizes=(2,))
    own = folder / "pieces/p0/n=2"
    (kernel,) = own.glob("*.so")
    assert tree(own) == sorted(
        [
            "inductor.py",
            "pass-0-noop.after.txt",
            "pass-0-noop.before.txt",
            "piece.json",
            "piece.py",
            kernel.name,
        ]
    )
    assert sorted(path.name for path in (folder / "pieces/p0").iterdir()) == ["graph.py", "n=1..16", "n=2"]
    code = (own / "inductor.py").read_text()
    assert 'extern "C"' in code
    assert "async_compile" in code
    assert [
        item["name"] for item in json.loads((own / "piece.json").read_bytes())["passes"] if item["matches"]
    ] == ["noop"]
    assert (own / "pass-0-noop.before.txt").read_text().count("view") > (
        own / "pass-0-noop.after.txt"
    ).read_text().count("view")
    assert "| `pieces/*/*/inductor.py` |" in (folder / "README.md").read_text()

    plain = compiled(tmp_path / "plain", None, sizes=(2,))
    assert plain.entry_key == with_dump.entry_key
    stores = [root / "v1" for root in (cache, tmp_path / "plain")]
    kept = [[name for name in tree(root) if not name.startswith(("costs/", "locks/"))] for root in stores]
    assert kept[0] == kept[1]
    assert all((stores[0] / name).read_bytes() == (stores[1] / name).read_bytes() for name in kept[0])

    again = compiled(cache, folder, sizes=(2, 3))
    assert again.counters.piece_cache_hits == 2
    assert "PWCC_RECACHE=1" in (own / "inductor.py").read_text()
    assert "async_compile" in (folder / "pieces/p0/n=3/inductor.py").read_text()
    assert not (own / "pass-0-noop.after.txt").exists()  # of the earlier dump
