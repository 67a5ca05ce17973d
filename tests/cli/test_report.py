"""``pwcc report``: one page that shows what an entry holds, needs nothing from elsewhere and runs nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pwcc.cache import costs, strict, tuning
from pwcc.cache.costs import Costs, PieceCost
from pwcc.cache.ids import BlobDigest, EntryKey, factor_digest
from pwcc.cache.manifest import DeviceSummary, Manifest, ModelSummary, Program, UniquePiece, Variant
from pwcc.cache.operators import DecodeAttention
from pwcc.cache.sealed_kernels import TritonKernel
from pwcc.cache.store import Store
from pwcc.cache.tuning import Candidate, EntryTuning, PieceTuning, TunedChoice

Run = Callable[..., subprocess.CompletedProcess[str]]
Publish = Callable[..., Path]
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page, and refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


KERNEL = "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rms_norm_rsqrt_static_fp8_quant_view_12"
LAYERS = 32


def stitched(first: int, last: int) -> bytes:
    """A program of LAYERS layers in the form of the real one: pieces, and attention between them."""
    calls = [0, *[1] * (LAYERS - 1), 2]
    body = "\n".join(
        f"        v{i}, = p{piece}([v{i}, ])" + ("" if piece == 2 else f"\n        o0(v{i})")
        for i, piece in enumerate(calls)
    )
    return (
        f"def bind(pieces, operation, constant, weights):\n    p0, p1, p2, = pieces  # {first}..{last}\n"
        f"    o0 = operation('torch.ops.pwcc.attention')\n    def run(arguments, sizes):\n{body}\n"
        "        return (v0, )\n    return run\n"
    ).encode()


@pytest.fixture
def gpu_entry(store: Store, toy: Manifest, publish: Publish) -> Path:
    """An entry as a tuned compile for a GPU leaves it, of the real dataclasses: two programs, ranges, costs."""
    blobs: dict[BlobDigest, int] = dict(toy.blobs)

    def put(data: bytes) -> BlobDigest:
        digest = store.put_blob(data)
        blobs[digest] = len(data)
        return digest

    def record(size: int, *, matches: int) -> BlobDigest:
        kernel = TritonKernel(
            name=KERNEL,
            blob=put(b"\x7fELF" + bytes(20_000 + size)),
            symbol="triton_",
            shared=16_384,
            num_warps=8,
            arg_types="OOiO",
            capability="9.0",
            config="XBLOCK: 8, R0_BLOCK: 2048, num_warps: 8, num_stages: 1",
            grid=("(xnumel + 7) // 8", "1", "1"),
            registers=48,
            spills=0,
        )
        return put(
            strict.canonical(
                {
                    "schema": 1,
                    "externs": ["mm"],
                    "fallbacks": [],
                    "passes": [{"name": "rms_norm_static_fp8", "matches": matches}],
                    "kernels": [kernel.to_json()],
                    "inputs": [{"kind": "tensor", "dtype": "bfloat16", "shape": ["s0", 4096], "value": None}],
                }
            )
        )

    def program(low: int, high: int, *variants: Variant) -> Program:
        unique = tuple(
            UniquePiece(factor_digest(f"{low} {name}".encode()), name, ("aten.mm.default",) * 12)
            for name in ("p0", "p1", "p2")
        )
        pieces = (0, *[1] * (LAYERS - 1), 2)
        stitch = put(stitched(low, high))
        return Program(low, high, stitch, toy.programs[0].calling, (), LAYERS, pieces, unique, variants)

    def variant(low: int, high: int, *, static: bool = False) -> Variant:
        kind, size = ("static", low) if static else ("dynamic", None)
        return Variant(kind, size, low, high, tuple(record(10 * low + i, matches=i) for i in range(3)))

    path = publish(
        "9a",
        model=ModelSummary("hf:Llama", {}, 8_030_261_248, 16_060_522_496, "bfloat16", toy.model.tree_digest),
        device=DeviceSummary("cuda", "NVIDIA H200", "9.0"),
        max_tokens=8192,
        sizes=(1, 2),
        tuned=True,
        programs=(
            program(1, 1, variant(1, 1, static=True)),
            program(2, 8192, variant(2, 64), variant(65, 8192), variant(2, 2, static=True)),
        ),
        decode_attention=(DecodeAttention("bfloat16", 32, 8, 128, False, False, None, record(7, matches=0)),),
        blobs=blobs,
    )
    key = EntryKey("9a".ljust(32, "0"))
    names = [f"p{i} {v}" for i in range(3) for v in ("n=1", "n=2", "n=2..64", "n=65..8192")]
    taken = {"trace": 14.2, "split": 0.4, "compile": 61.0, "publish": 0.9, "tune": 9.0, "total": 76.5}
    cost = {name: PieceCost(4.5 + i, 1.0 + i / 9) for i, name in enumerate(names)}
    cost["p2 n=2"] = PieceCost(0.0, 0.0)
    costs.write(store, key, Costs(taken, cost, 4))
    tried = (
        Candidate("XBLOCK: 1, R0_BLOCK: 2048, num_warps: 16, num_stages: 1", 9.5),
        Candidate("XBLOCK: 8, R0_BLOCK: 2048, num_warps: 8, num_stages: 1", 3.25),
        Candidate("XBLOCK: 64, R0_BLOCK: 64, num_warps: 8, num_stages: 1", None),
    )
    choices = (
        TunedChoice("kernel", KERNEL, tried[1].config, descent=True, candidates=tried),
        TunedChoice("operation", "mm 1x4096", "triton_mm_4", candidates=(Candidate("triton_mm_4", 7.0),)),
    )
    tuned = {"p0 n=1": PieceTuning(choices, 12), "p1 n=1": PieceTuning(choices[:1])}
    tuning.write(store, EntryTuning(key, tuned))
    return path


def test_a_tuned_entry_of_a_gpu(run: Run, store: Store, gpu_entry: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    assert run("report", gpu_entry, "-o", out).returncode == 0
    page = Page(out.read_text())
    for shown in (
        "Program 0: 1 to 1 tokens",
        "Program 1: 2 to 8192 tokens",
        "33 pieces, 3 different, cut at 32 splitting operations.",
        "2-64, 65-8192",
        "dynamic 65..8192",
        "matches of rms_norm_static_fp8",
        KERNEL,
        "(xnumel + 7) // 8 x 1 x 1",
        "16,384 B",
        "Attention of decode steps",
        "76.5 s in all; pieces in 4 processes at once.",
        "from the piece cache",
        "12 timing runs",
        "XBLOCK: 8, R0_BLOCK: 2048, num_warps: 8, num_stages: 1 (found by coordinate descent)",
        f"{KERNEL}: 2 candidates; 1 could not run",
        "XBLOCK: 1, R0_BLOCK: 2048, num_warps: 16, num_stages: 1",
    ):
        assert shown in page.text, shown
    boxes = [value for name, value in page.attributes if name == "class" and value in ("piece", "cut")]
    assert boxes == [*["piece", "cut"] * LAYERS, "piece"] * 2
    targets = {f"#{value}" for name, value in page.attributes if name == "id"}
    assert {value for name, value in page.attributes if name == "href"} == targets


def test_a_page_about_an_entry(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("0a")
    out = tmp_path / "r.html"
    done = run("report", store.root, "0a00", "-o", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(out) in done.stdout
    page = Page(out.read_text())
    for shown in ("builtin:toy", "Where the bytes are", "kernels", "Factors of the key", "aten.mm.default"):
        assert any(shown in text for text in page.text), shown
    assert any(text.startswith("the order of its calls: ") for text in page.text)  # its stitch is no program


def test_it_needs_nothing_from_elsewhere(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("0a")
    run("report", store.root, "-o", tmp_path / "r.html")
    page = Page((tmp_path / "r.html").read_text())
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed"}
    links = [value for name, value in page.attributes if name in ("href", "src")]
    assert all(value is not None and value.startswith("#") for value in links)


def test_what_an_entry_says_of_itself_is_text(
    run: Run, store: Store, publish: Publish, toy: Manifest, tmp_path: Path
) -> None:
    name = "x:<script>alert(1)</script>"
    publish("0a", model=ModelSummary(name, {"a": '"><b>'}, 1, 4, "float32", toy.model.tree_digest))
    assert run("report", store.root, "-o", tmp_path / "r.html").returncode == 0
    text = (tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_seconds_are_shown_where_they_were_kept(
    run: Run, store: Store, publish: Publish, tmp_path: Path
) -> None:
    publish("0a")
    run("report", store.root, "-o", tmp_path / "r.html")
    assert "they are not here" in (tmp_path / "r.html").read_text()
    costs.write(
        store,
        EntryKey("0a".ljust(32, "0")),
        Costs({"trace": 3.0, "total": 9.5}, {"p0 n=8": PieceCost(4, 1)}, 2),
    )
    run("report", store.root, "-o", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "9.5 s in all; pieces in 2 processes at once" in text
    assert "4.00 s + first run 1.00 s" in text


def test_the_entry_may_be_named_in_three_ways(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    entry = publish("0a")
    for words in ([store.root, "0a00"], [store.root], [entry]):
        done = run("report", *words, "-o", tmp_path / "r.html", "--json")
        assert json.loads(done.stdout)["entry_key"] == "0a".ljust(32, "0")
    publish("0b")
    done = run("report", store.root, "-o", tmp_path / "other.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected the key of one entry, since the cache holds 2" in done.stderr
    assert not (tmp_path / "other.html").exists()


def test_a_file_that_cannot_be_written(run: Run, store: Store, publish: Publish, tmp_path: Path) -> None:
    publish("0a")
    done = run("report", store.root, "-o", tmp_path / "none" / "r.html")
    assert done.returncode == 2
    assert "expected a file in a directory that exists" in done.stderr
    assert "Traceback" not in done.stderr
