"""What a compile does and what it need not do again, counted exactly; and how it fails."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pwcc
from pwcc.cache.errors import CacheMiss, PwccError, TraceError, UsageError
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import Store
from pwcc.cli import main
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_ref import BuiltModel, ModelRef, build
from pwcc.compile.precompile import plan, precompile
from pwcc.compile.report import CompilePlan, CompileReport, Progress
from tests.conftest import Machine, Warm

pytestmark = [
    pytest.mark.slow,
    # what Inductor's own modules say while they are imported or run
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

MODEL = """
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Breaks(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y + 1


class ReadsAValue(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return self.linear(x)


LIBRARY = torch.library.Library("pwcc_test_precompile", "DEF")
LIBRARY.define("absent(Tensor x) -> Tensor")
torch.library.register_fake("pwcc_test_precompile::absent", torch.empty_like, lib=LIBRARY)
LIBRARY.define("unfaked(Tensor x) -> Tensor")
LIBRARY.impl("unfaked", lambda x: x + 1, "CPU")


class Absent(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.ops.pwcc_test_precompile.absent(y)


class Unfaked(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pwcc_test_precompile.unfaked(self.linear(x))


def example_inputs(num_tokens: int) -> tuple[torch.Tensor]:
    return (torch.randn(num_tokens, 16),)
"""


def line_of(text: str) -> int:
    (found,) = (number for number, line in enumerate(MODEL.splitlines(), 1) if text in line)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "plain_models.py"
    path.write_text(MODEL)
    return path


def compile_here(built: BuiltModel, cache: Path, *sizes: int, **options: Any) -> CompileReport:
    """What the command line does, in this process."""
    return precompile(
        built.module,
        cache_dir=cache,
        specs=input_specs(built.module, example_inputs=built.example_inputs),
        sizes=sizes,
        max_tokens=options.pop("max_tokens", 8192),
        device="cpu",
        identity=built.identity,
        args=built.args,
        observation=built.observation,
        **options,
    )


def llama_of(**args: object) -> BuiltModel:
    return build(ModelRef.parse("llama-tiny"), args={"layers": 2, **args})


def plan_of(**args: object) -> CompilePlan:
    built = llama_of(**args)
    return plan(
        built.module,
        specs=input_specs(built.module),
        sizes=(),
        max_tokens=8192,
        device="cpu",
        identity=built.identity,
        args=built.args,
    )


def files(root: Path) -> dict[str, bytes]:
    """Everything that a store holds for good, by path."""
    kept = [path for part in ("entries", "blobs", "pieces") for path in (root / "v1" / part).rglob("*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in kept if path.is_file()}


def entries(root: Path) -> list[str]:
    return [ref.entry_key for ref in Store.open(root).entries()]


# Counters


def test_a_cold_compile_counts_exactly(llama: Warm) -> None:
    counters, plan_ = llama.report["counters"], llama.report["plan"]
    layers, sizes = 2, 2
    assert counters.pop("kernels_sealed") == llama.report["kernels"] > 0
    blobs = len(list((llama.root / "v1/blobs").rglob("*/*/*")))
    # stitch, calling, predicates, factors, numerics, details; piece graphs
    of_the_entry = 6 + counters["unique_pieces"]
    assert counters.pop("blobs_written") == blobs - of_the_entry
    assert counters == {
        "graphs_seen": 1,
        "pieces": 2 * layers + 1,
        "compiled_pieces": layers + 1,
        "unique_pieces": 3,
        "splits": layers,
        "variants": 1 + sizes,
        "compiles": 3 * (1 + sizes),
        "piece_cache_hits": 0,
        "autotunes": 0,
        "tuning_runs": 0,
    }
    assert (llama.report["hit"], plan_["pieces"]) == (False, ["p0", "p1", "p2"])
    assert plan_["variants"] == ["n=1..8192", "n=1", "n=2"]
    assert llama.report["warnings"] == []
    assert entries(llama.root) == [llama.report["entry_key"]]


def test_the_second_run_is_a_hit_whoever_runs_it(llama: Warm, tmp_path: Path) -> None:
    """Another user, home, temporary and working directory and hash seed; the cache lies elsewhere too."""
    cache = llama.copy(tmp_path / "moved")
    other = Machine.make(tmp_path / "machine", "lampwick")
    before = files(cache)
    report = other.pwcc_json(
        "compile", *llama.model, *llama.options, "--cache-dir", cache, PYTHONHASHSEED="4242", FOO="bar"
    )
    assert report["hit"] is True
    assert report["entry_key"] == llama.report["entry_key"]
    assert report["counters"]["compiles"] == report["counters"]["graphs_seen"] == 0
    assert report["counters"]["pieces"] == 5
    assert report["seconds"]["total"] < 5
    assert files(cache) == before
    text = other.pwcc("compile", *llama.model, *llama.options, "--cache-dir", cache).stdout
    assert text.startswith(f"hit: entry {report['entry_key'][:12]}, nothing compiled")


def test_this_process_hits_what_the_command_line_compiled(llama: Warm, tmp_path: Path) -> None:
    """Even one that has Dynamo and Inductor loaded: their defaults are no difference."""
    for name in ("torch._dynamo", "torch._inductor.config"):
        importlib.import_module(name)
    report = compile_here(llama_of(), llama.copy(tmp_path / "cache"), 2, 1, 2)
    assert (report.hit, report.entry_key) == (True, llama.report["entry_key"])


def test_more_equal_layers_compile_nothing(llama: Warm, tmp_path: Path) -> None:
    events: list[Progress] = []
    report = compile_here(llama_of(layers=3), llama.copy(tmp_path / "cache"), 1, 2, on_progress=events.append)
    assert not report.hit
    assert (report.counters.pieces, report.counters.unique_pieces) == (7, 3)
    assert (report.counters.compiles, report.counters.piece_cache_hits) == (0, 9)
    assert (report.counters.kernels_sealed, report.counters.blobs_written) == (0, 0)
    assert report.plan.pieces == ("p0", "p1", "p1", "p2")
    assert [piece.uses for piece in report.plan.unique] == [1, 2, 1]
    assert Progress("compile", 9, 9) in events


def test_tied_weights_are_the_same_pieces(llama: Warm, tmp_path: Path) -> None:
    report = compile_here(llama_of(tied=True), llama.copy(tmp_path / "cache"), 1, 2)
    assert (report.counters.compiles, report.counters.piece_cache_hits) == (0, 9)
    assert report.entry_key != llama.report["entry_key"]


@pytest.mark.parametrize("change", [{"eps": 1e-4}, {"theta": 5e5}])
def test_a_changed_constant_is_another_piece(change: dict[str, object]) -> None:
    before = [piece.digest for piece in plan_of().unique]
    after = [piece.digest for piece in plan_of(**change).unique]
    changed = [a != b for a, b in zip(before, after, strict=True)]
    assert changed == ([True, True, True] if "eps" in change else [True, False, False])


def test_an_added_size_compiles_only_its_variants(decoder: Warm, tmp_path: Path) -> None:
    cache = decoder.copy(tmp_path / "cache")
    built = build(ModelRef.parse(decoder.model[1]), args={"layers": 2})
    report = compile_here(built, cache, 2, 5, cpu_baseline="x86-64-v3")
    assert not report.hit
    assert (report.counters.compiles, report.counters.piece_cache_hits) == (3, 6)
    assert report.plan.variants == ("n=1..8192", "n=2", "n=5")
    assert len(entries(cache)) == 2
    again = compile_here(built, cache, 2, cpu_baseline="x86-64-v3")
    assert (again.hit, again.entry_key) == (True, decoder.report["entry_key"])
    compiled = pwcc.load(build(ModelRef.parse(decoder.model[1]), args={"layers": 2}, weights="random").module,
                         cache_dir=cache)  # fmt: skip
    assert compiled.sizes == (2, 5)  # most static sizes win


def test_an_edited_comment_compiles_nothing(decoder: Warm, tmp_path: Path, machine: Machine) -> None:
    cache = decoder.copy(tmp_path / "cache")
    path = tmp_path / "tiny_decoder.py"
    original = Path(decoder.model[1].rpartition(":")[0]).read_text()
    path.write_text(original.replace("class Block(", "# another remark\nclass Block(", 1))
    model = ("--model", f"{path}:factory", *decoder.model[2:])
    report = machine.pwcc_json("compile", *model, *decoder.options, "--cache-dir", cache)
    assert report["hit"] is False
    assert report["counters"]["graphs_seen"] == 1
    assert (report["counters"]["compiles"], report["counters"]["piece_cache_hits"]) == (0, 6)
    assert sorted(entries(cache)) == sorted([report["entry_key"], decoder.report["entry_key"]])
    assert report["lookup_key"] == decoder.report["lookup_key"]
    assert machine.pwcc_json("load", cache, *model, "--check")["entry"] == report["entry_key"]
    # and the original still finds its own entry
    old = machine.pwcc_json("load", cache, *decoder.model)
    assert old["entry"] == decoder.report["entry_key"]


def test_frozen_takes_a_hit_and_refuses_a_miss(llama: Warm, tmp_path: Path) -> None:
    cache = llama.copy(tmp_path / "cache")
    before = files(cache)
    assert compile_here(llama_of(), cache, 1, 2, frozen=True).hit
    with pytest.raises(CacheMiss, match="no entry of these options for builtin:llama-tiny") as caught:
        compile_here(llama_of(), cache, 1, 2, 3, frozen=True)
    assert caught.value.exit_code == 3
    assert "configuration/options.sizes: built with [1, 2], now [1, 2, 3]" in caught.value.reasons[0]
    assert files(cache) == before


def test_frozen_misses_where_nothing_was_restored(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for cache in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(CacheMiss, match="empty or does not exist"):
            compile_here(llama_of(), cache, 1, frozen=True)
    assert not (tmp_path / "absent").exists()
    assert not any((tmp_path / "empty").iterdir())


def test_a_dump_of_a_hit_is_said_to_be_none(llama: Warm, tmp_path: Path) -> None:
    cache = llama.copy(tmp_path / "cache")
    report = compile_here(llama_of(), cache, 1, 2, dump=tmp_path / "dump")
    assert report.hit
    assert "--dump wrote nothing" in report.warnings[0]
    assert not (tmp_path / "dump").exists()


def test_the_library_hits_its_own_entry(llama: Warm, tmp_path: Path) -> None:
    """``pwcc.precompile`` of a live model: the same pieces, an entry of its own identity."""
    cache = llama.copy(tmp_path / "cache")
    model = llama_of().module
    report = pwcc.precompile(model, cache_dir=cache, sizes=[1, 2], device="cpu")
    assert (report.counters.compiles, report.counters.piece_cache_hits) == (0, 9)
    again = pwcc.precompile(model, cache_dir=str(cache), sizes=[1, 2], device="cpu", frozen=True)
    assert (again.hit, again.entry_key) == (True, report.entry_key)


# The same bytes everywhere


@pytest.fixture(scope="module")
def twice(decoder: Warm, tmp_path_factory: pytest.TempPathFactory) -> Warm:
    """The decoder once more: another machine, model path, cache and hash seed, and two workers."""
    root = tmp_path_factory.mktemp("again")
    machine = Machine.make(root / "machine", "lampwick")
    shutil.copy(decoder.model[1].rpartition(":")[0], machine.folder("work") / "tiny_decoder.py")
    model = ("--model", "tiny_decoder.py:factory", *decoder.model[2:])
    report = machine.pwcc_json(
        "compile", *model, *decoder.options, "--jobs", "2", "--cache-dir", root / "cache", PYTHONHASHSEED="7"
    )
    return Warm(root / "cache", machine, model, decoder.options, report)


def test_two_compiles_give_the_same_bytes(decoder: Warm, twice: Warm) -> None:
    assert twice.report["counters"] == decoder.report["counters"]
    first, second = files(decoder.root), files(twice.root)
    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []


def test_a_compile_leaves_no_other_files(twice: Warm, llama: Warm) -> None:
    for warm in (twice, llama):
        for part in ("home", "tmp", "caches"):
            assert [p for p in warm.machine.folder(part).rglob("*") if p.is_file()] == [], part
        assert list((warm.root / "v1/tmp").iterdir()) == []


def test_no_stored_byte_names_the_builder(llama: Warm, qwen3: Warm, decoder: Warm) -> None:
    for warm in (llama, qwen3, decoder):
        machine = warm.machine
        secrets = {
            str(machine.root),
            machine.env["USER"],
            *(str(machine.folder(part)) for part in ("home", "tmp", "work", "caches")),
            str(warm.root),
            sys.prefix,
            str(Path(pwcc.__file__).resolve().parent),
            "A small decoder of one's own",  # a docstring and
            "registers torch.ops.pwcc.attention",  # a comment of the model's source
        }
        for name, data in files(warm.root).items():
            assert [secret for secret in secrets if secret.encode() in data] == [], name


# The plan, the dump, and looking at an entry


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["compile", "--model", "llama-tiny", "--device", "cpu", "--sizes", "1,8", "--dry-run"]
    argv += ["--cache-dir", str(tmp_path / "cache"), "--dump", str(tmp_path / "dump")]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan"]
    assert (found["splits"], found["pieces"]) == (4, ["p0", "p1", "p1", "p1", "p2"])
    assert [piece["uses"] for piece in found["unique"]] == [1, 3, 1]
    assert found["variants"] == ["n=1..8192", "n=1", "n=8"]
    assert found["splitting_ops"] == ["pwcc::attention", "pwcc::opaque"]
    assert found["size_mode"] == "unbacked"
    assert not (tmp_path / "cache").exists()
    folder = tmp_path / "dump/program0"
    assert {path.name for path in folder.iterdir()} == {"bytecode.py", "graph.py", "stitch.py"}
    graph = (folder / "graph.py").read_text()
    assert "torch.ops.pwcc.attention" in graph
    assert "# piece 3 of 9 (p1)" in graph
    stitch = (folder / "stitch.py").read_text()
    compile(stitch, "stitch.py", "exec")
    assert stitch.count("pwcc.attention") >= 1
    piece = (tmp_path / "dump/pieces/p1/graph.py").read_text()
    compile(piece, "graph.py", "exec")
    assert piece.startswith(f"# {found['unique'][1]['digest']}\n")
    assert "torch.nn.functional.silu" in piece or "silu" in piece
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan for builtin:llama-tiny on cpu; nothing was compiled")
    assert "5, of which 3 are unique" in text


def test_a_dump_holds_every_sealed_piece(llama: Warm, tmp_path: Path) -> None:
    cache = llama.copy(tmp_path / "cache")
    compile_here(llama_of(layers=3), cache, 1, 2, dump=tmp_path / "dump")
    variants = ("n=1..8192", "n=1", "n=2")
    folders = sorted((tmp_path / "dump/pieces").glob("*/n=*"))
    assert [(f.parent.name, f.name) for f in folders] == sorted(
        (f"p{i}", v) for i in range(3) for v in variants
    )
    for folder in folders:
        record = SealedPiece.from_bytes((folder / "piece.json").read_bytes(), where=folder.name)
        names = {f"{kernel.name}.so" for kernel in record.kernels}
        assert {path.name for path in folder.iterdir()} == {"inductor.py", "piece.json", "piece.py"} | names
        compile((folder / "piece.py").read_text(), "piece.py", "exec")
        for name in names:
            assert (folder / name).read_bytes().startswith(b"\x7fELF")


def test_inspect_shows_a_real_entry(llama: Warm, capsys: pytest.CaptureFixture[str]) -> None:
    key = llama.report["entry_key"]
    assert main(["inspect", str(llama.root), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["entries"]
    assert listed["model"] == "builtin:llama-tiny"
    assert (listed["sizes"], listed["unique"], listed["sealed"]) == ([1, 2], 3, 1.0)
    assert main(["inspect", str(llama.root), key[:8], "--json"]) == 0
    detail = json.loads(capsys.readouterr().out)
    assert detail["entry_key"] == key
    assert detail["missing_blobs"] == []
    (program,) = detail["programs"]
    kernels = 0
    for piece, planned in zip(program["unique"], llama.report["plan"]["unique"], strict=True):
        assert piece["ops"] == planned["ops"]
        for record in piece["records"]:
            kernels += len(record["kernels"])
            assert {kernel["kind"] for kernel in record["kernels"]} == {"cpp"}
    assert kernels == llama.report["kernels"]
    modules = {source["module"] for source in detail["sources"]}
    assert "pwcc.compile.models.llama" in modules
    assert main(["inspect", str(llama.root), key[:8], "--full"]) == 0
    text = capsys.readouterr().out
    for part in ("torch.nn.functional.silu", "cpp_fused_", "n=2", "pwcc.compile.models.llama", "mm", "avx"):
        assert part in text, part


# Failures


def compile_argv(models: Path, name: str, cache: Path, *argv: str) -> list[str]:
    model = [
        "--model",
        f"{models}:{name}",
        "--device",
        "cpu",
        "--cpu-baseline",
        "x86-64-v3",
        "--cache-dir",
        str(cache),
    ]
    return ["compile", *model, *argv]


def refused(
    capsys: pytest.CaptureFixture[str], models: Path, name: str, cache: Path, *argv: str, code: int = 1
) -> str:
    """Compile what must fail; return stderr. No entry may be left."""
    assert main(compile_argv(models, name, cache, *argv)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert list((cache / "v1/entries").rglob("manifest.json")) == []
    assert not (cache / "v1/tmp").exists() or list((cache / "v1/tmp").iterdir()) == []
    return err[err.index("error: ") :]


@pytest.mark.parametrize("name", ["Breaks", "ReadsAValue"])
def test_a_graph_break_names_file_and_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    err = refused(capsys, models, name, tmp_path / "cache")
    assert err.startswith("error: the model does not trace into one graph: ")
    text = "torch._dynamo.graph_break()" if name == "Breaks" else "if x.sum() > 0:"
    assert f"{models}:{line_of(text)}: {text.strip()}" in err


def test_an_operation_without_a_fake_names_file_and_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(capsys, models, "Unfaked", tmp_path / "cache")
    assert f"{models}:{line_of('return torch.ops.pwcc_test_precompile.unfaked')}: return" in err


def test_a_piece_that_fails_names_piece_operation_and_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(capsys, models, "Absent", tmp_path / "cache", "--splitting-ops", "")
    assert err.startswith("error: piece p0 (n=1..8192): Inductor or what it compiled failed on ")
    assert "pwcc_test_precompile::absent: NotImplementedError: Could not run" in err
    line = line_of("return torch.ops.pwcc_test_precompile.absent(y)")
    assert f"at: {models}:{line}: return torch.ops.pwcc_test_precompile.absent(y)" in err
    assert len(err) < 1500


def test_an_operation_of_the_models_own_library_compiles_with_workers_too(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker does not import the model, so such a piece must be compiled here: the same message."""
    argv = ["--splitting-ops", "", "--sizes", "1,2", "--jobs", "2"]
    err = refused(capsys, models, "Absent", tmp_path / "cache", *argv)
    assert "failed on pwcc_test_precompile::absent" in err


def test_no_split_point_is_said_loudly(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = compile_argv(models, "Plain", tmp_path / "cache", "--json")
    assert main(argv) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    (warning,) = report["warnings"]
    assert warning.startswith("no split point: the graph holds none of pwcc::attention")
    assert f"warning: {warning}" in err
    assert (report["counters"]["splits"], report["counters"]["pieces"]) == (0, 1)
    # a hit says it again: whoever reads only the second run must not miss it
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["hit"] is True
    assert "warning: no split point" in err
    assert main([*argv, "--dry-run"]) == 0
    assert "warning: " in capsys.readouterr().err
    whole = [*argv, "--splitting-ops", ""]
    assert main(whole) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["warnings"], json.loads(out)["counters"]["compiles"]) == ([], 0)
    assert "warning" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "sizes": [0]}, "expected sizes within 1..8192, got 0"),
        ({"device": "cpu", "sizes": [1, 9000]}, "expected sizes within 1..8192, got 9000"),
        ({"device": "cpu", "max_tokens": 0}, "expected --max-tokens of at least 1, got 0"),
        ({"device": "mps"}, "expected a cpu or cuda device, got mps"),
        (
            {"device": "cpu", "cpu_baseline": "avx3"},
            "expected a CPU baseline of x86-64-v2, x86-64-v3, x86-64-v4, native, got 'avx3'",
        ),
    ],
)
def test_impossible_requests(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="expected") as caught:
        pwcc.precompile(llama_of().module, cache_dir=tmp_path / "cache", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a model in eval mode"):
        pwcc.precompile(llama_of().module.train(), cache_dir=tmp_path / "cache", device="cpu")


@pytest.mark.parametrize(("device", "says"), [("tpu", "got 'tpu'"), ("meta", "got meta"), (1.5, "got 1.5")])
def test_a_device_of_another_kind(tmp_path: Path, device: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pwcc.precompile(llama_of().module, cache_dir=tmp_path / "cache", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a CUDA device for cuda:1, but torch sees none"):
        pwcc.precompile(llama_of().module, cache_dir=tmp_path / "cache", device="cuda:1")


def test_max_tokens_0_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compile", "--model", "llama-tiny", "--max-tokens", "0", "--cache-dir", str(tmp_path / "cache")]
    assert main(argv) == 2
    assert "--max-tokens" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PwccError, match="expected a directory") as caught:
        pwcc.precompile(llama_of().module, cache_dir=tmp_path / "file", device="cpu")
    assert str(tmp_path / "file") in str(caught.value)


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


def test_a_forward_that_raises_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        pwcc.precompile(Raises().eval(), cache_dir=tmp_path / "c", device="cpu", inputs=["x:float32[n,4]"])
    assert caught.value.where is not None
    assert Path(__file__).name in caught.value.where


# Several at a time

Process = subprocess.Popen[str]


@pytest.fixture
def start(machine: Machine) -> Iterator[Callable[..., Process]]:
    """Start the program; whatever still runs at the end is killed."""
    running: list[Process] = []

    def begin(*argv: str | Path) -> Process:
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "pwcc", *map(str, argv)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=dict(machine.env),
                cwd=machine.folder("work"),
            )
        )
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_three_processes_and_one_compile(start: Callable[..., Process], models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    argv = compile_argv(models, "Plain", cache, "--splitting-ops", "", "--json")
    ended = [(p, *p.communicate(timeout=300)) for p in [start(*argv) for _ in range(3)]]
    assert [process.returncode for process, _, _ in ended] == [0, 0, 0], ended
    reports = [json.loads(out) for _, out, _ in ended]
    assert sorted(report["hit"] for report in reports) == [False, True, True]
    assert sum(report["counters"]["compiles"] for report in reports) == 1
    assert {report["entry_key"] for report in reports} == set(entries(cache))
    assert len(entries(cache)) == 1
