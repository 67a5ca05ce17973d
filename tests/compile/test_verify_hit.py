"""The poison check: two builds give the same bytes, and an entry that was tampered with is found out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pwcc
from pwcc.cache import strict
from pwcc.cache.ids import BlobDigest, FactorDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store
from pwcc.cli import main
from pwcc.cli.report_view import report_lines, verified_lines, verify_error
from pwcc.compile.report import CompileReport, HitCheck
from pwcc.compile.verify_hit import compare
from pwcc.compile.verify_numbers import Side
from tests.conftest import Warm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # what Inductor's modules say
]

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu() + 0.5)
        return out


def compiled(root: Path, **options: Any) -> CompileReport:
    torch.manual_seed(0)
    return pwcc.precompile(
        Small().eval().requires_grad_(False),
        cache_dir=root,
        max_tokens=64,
        inputs=["x:float32[n,8]"],
        splitting_ops=(),
        **options,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small") / "cache"
    assert not compiled(root, verify_hit=True).hit
    return root


def only(root: Path) -> tuple[Store, Path, Manifest]:
    store = Store.open(root)
    (ref,) = store.entries()
    return store, ref.manifest, store.read_manifest(ref)


def replaced(store: Store, manifest: Manifest, old: bytes, new: bytes) -> Manifest:
    """Publish another program for every piece, all digests in order: what a poisoner with a shell does."""
    swapped: dict[BlobDigest, BlobDigest] = {}
    blobs = dict(manifest.blobs)

    def put(data: bytes) -> BlobDigest:
        digest = store.put_blob(data)
        blobs[digest] = len(data)
        return digest

    for program in manifest.programs:
        for variant in program.variants:
            for digest in variant.pieces:
                record = json.loads(store.read_blob(digest))
                text = store.read_blob(record["source"])
                assert text.count(old) >= 1, text.decode()
                record["source"] = put(text.replace(old, new))
                record["code"] = None  # else the byte code is what runs
                swapped[digest] = put(strict.canonical(record))
    programs = tuple(
        replace(
            program,
            variants=tuple(
                replace(variant, pieces=tuple(swapped[digest] for digest in variant.pieces))
                for variant in program.variants
            ),
        )
        for program in manifest.programs
    )
    return replace(manifest, programs=programs, blobs=dict(sorted(blobs.items())))


def test_a_hit_that_is_what_the_compile_gives_is_verified(small: Path) -> None:
    before = sorted(path for path in small.rglob("*") if "locks" not in path.parts)
    report = compiled(small, verify_hit=True)
    assert report.hit
    assert report.verified is not None
    assert report.verified.ok, report.verified.differences
    assert report.verified.compared > 5
    assert report.verified.differences == ()
    assert sorted(path for path in small.rglob("*") if "locks" not in path.parts) == before


def test_without_the_option_nothing_is_compiled_again(small: Path) -> None:
    report = compiled(small)
    assert report.hit
    assert report.verified is None


def test_a_poisoned_entry_is_found_with_its_lines_and_numbers(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry is intact by every digest, and wrong: it returns its first output twice as large."""
    root = tmp_path / "cache"
    shutil.copytree(small, root)
    store, path, manifest = only(root)
    poisoned = replaced(store, manifest, b"return (", b"return tuple(2 * x for x in (")
    poisoned = replaced_end(store, poisoned)
    path.write_bytes(poisoned.serialise())
    model = Small().eval().requires_grad_(False)
    x = torch.randn(4, 8)
    served = pwcc.load(model, cache_dir=root)
    assert not torch.allclose(served(x), model(x))  # it really serves wrong answers
    report = compiled(root, verify_hit=True)
    assert report.hit
    check = report.verified
    assert check is not None
    assert not check.ok
    named = [difference.what for difference in check.differences]
    assert "program 0 piece p0 n=1..64: piece.py" in named
    text = next(item for item in check.differences if item.what.endswith("piece.py"))
    assert any("+     " in line and "return (" in line for line in text.lines), text
    assert any("2 * x for x in" in line for line in text.lines), text
    assert check.errors["program 0 piece p0 n=1..64"] == pytest.approx(1.0)
    shown = "\n".join(report_lines(report, width=100))
    assert "verify FAILED" in shown
    assert "piece.py" in shown
    assert "off by 1 (relative)" in shown


def replaced_end(store: Store, manifest: Manifest) -> Manifest:
    """Close the bracket that the replacement opened, at the end of the return line."""
    digest = manifest.programs[0].variants[0].pieces[0]
    text = store.read_blob(json.loads(store.read_blob(digest))["source"]).decode()
    line = next(line for line in text.splitlines() if "return tuple(" in line)
    return replaced(store, manifest, line.encode(), line.encode() + b")")


def _with_program(manifest: Manifest, store: Store, field: str) -> Manifest:
    (program,) = manifest.programs
    data = store.read_blob(getattr(program, field)) + b" "
    digest = store.put_blob(data)
    blobs = dict(sorted({**manifest.blobs, digest: len(data)}.items()))
    return replace(manifest, programs=(replace(program, **{field: digest}),), blobs=blobs)  # type: ignore[arg-type]


def test_every_difference_is_named(small: Path) -> None:
    store, _, manifest = only(small)
    same = Side(manifest, store.read_blob)
    assert compare(same, same, CPU).ok

    def found(other: Manifest) -> HitCheck:
        return compare(Side(other, store.read_blob), same, CPU)

    for field, words in (("stitch", "stitch.py"), ("calling", "calling convention")):
        check = found(_with_program(manifest, store, field))
        assert not check.ok
        assert f"program 0: {words}" in [item.what for item in check.differences]
    check = found(replace(manifest, requirements=()))
    assert [item.what for item in check.differences] == ["manifest"]
    assert check.differences[0].lines
    extra = store.put_blob(b"left behind")
    check = found(replace(manifest, blobs=dict(sorted({**manifest.blobs, extra: 11}.items()))))
    assert [item.what for item in check.differences] == [f"blob {extra[:12]}"]


def test_another_trace_is_told_from_a_poisoned_entry(small: Path) -> None:
    store, _, manifest = only(small)
    same = Side(manifest, store.read_blob)

    def found(other: Manifest) -> HitCheck:
        return compare(Side(other, store.read_blob), same, CPU)

    poisoned = found(_with_program(manifest, store, "stitch"))
    assert poisoned.retraced == ()
    assert "the entry is not what this compile gives" in verify_error(poisoned)

    (program,) = manifest.programs
    (piece,) = program.unique
    ops = (*piece.ops[:-1], "aten.sin.default")
    for changed, words in (
        (replace(piece, digest=FactorDigest("0" * 32), ops=ops), "operation aten.sin.default, now "),
        (replace(piece, digest=FactorDigest("0" * 32)), "the same operations, with other values"),
    ):
        check = found(replace(manifest, programs=(replace(program, unique=(changed,)),)))
        assert not check.ok
        assert len(check.retraced) == 1
        assert f"the graph of piece {piece.name} differs" in check.retraced[0]
        assert words in check.retraced[0]
        assert "an input changed that the key does not see" in verify_error(check)
        assert check.retraced[0] in "\n".join(verified_lines(check))
    value = json.loads(store.read_blob(manifest.predicates))
    assert value["groups"]
    value["groups"].pop()
    digest = store.put_blob(strict.canonical(value))
    assert digest != manifest.predicates
    check = found(replace(manifest, predicates=digest, blobs={**manifest.blobs, digest: 1}))
    assert check.retraced[0].startswith("predicates differ: + ")


def test_figures_that_hang_on_the_number_of_threads_agree_within_tolerance(small: Path) -> None:
    store, _, manifest = only(small)
    assert manifest.numerics is not None
    text = store.read_blob(manifest.numerics)

    def checked(**figures: object) -> HitCheck:
        value = json.loads(text)
        value["programs"][0]["variants"][0][0][0].update(figures)
        data = strict.canonical(value)
        digest = store.put_blob(data)
        blobs = dict(sorted({**manifest.blobs, digest: len(data)}.items()))
        other = replace(manifest, numerics=digest, blobs=blobs)
        return compare(Side(other, store.read_blob), Side(manifest, store.read_blob), CPU)

    assert checked(sealed=1e-7, compiled=1e-7).ok
    for figures in ({"sealed": 0.5}, {"tolerance": 0.0, "sealed": 1.0}, {"size": 9}, {"sealed": "none"}):
        check = checked(**figures)
        assert [item.what for item in check.differences] == ["numerics"], figures
        assert not check.ok


def test_a_tuned_entry_is_compared_by_programs_and_numbers(small: Path) -> None:
    store, _, manifest = only(small)
    tuned = replace(manifest, tuned=True, requirements=())
    check = compare(Side(tuned, store.read_blob), Side(manifest, store.read_blob), CPU)
    assert check.ok
    assert check.tuned


def test_the_command_says_what_differs_and_exits_1(
    decoder: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pwcc.compile import precompile as module
    from pwcc.compile.report import HitDifference

    bad = HitCheck(
        False, 9, (HitDifference("program 0: stitch.py", ("line 1: - a", "line 1: + b")),), {}, False
    )
    monkeypatch.setattr(module, "compile_again", lambda *_: bad)
    options = ["compile", *decoder.model, *decoder.options, "--cache-dir", str(decoder.root), "--verify-hit"]
    assert main(options) == 1
    out, err = capsys.readouterr()
    assert "verify FAILED: 1 of 9 blobs" in out
    assert "line 1: + b" in out
    assert "is not what this compile gives" in err
