"""What a load accepts, and what it refuses: by name, with the exit code that says what to do."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pwcc
from pwcc.cache import about, holds, strict
from pwcc.cache.errors import (
    CacheMiss,
    CorruptEntry,
    HostMismatch,
    NotAStore,
    StoreError,
    UntrustedStore,
    UsageError,
)
from pwcc.cache.ids import LookupKey
from pwcc.cache.manifest import DeviceSummary, Manifest
from pwcc.cache.requirements import Requirement
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.store import EntryRef, Store
from pwcc.cli import main
from pwcc.compile.inputs import input_specs
from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.models.llama import Llama, LlamaConfig
from pwcc.compile.precompile import precompile
from pwcc.compile.report import CompileReport
from tests.conftest import Warm
from tests.mounts import mounted

pytestmark = [
    pytest.mark.slow,
    # what Inductor's own modules say while they are imported
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def model_of(**config: object) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**{"layers": 2, **config})).eval()  # type: ignore[arg-type]


def decoder_of(warm: Warm) -> nn.Module:
    return build(ModelRef.parse(warm.model[1]), args={"layers": 2}, weights="random").module


def only(root: Path) -> tuple[Store, EntryRef, Manifest]:
    store = Store.open(root)
    (ref,) = store.entries()
    return store, ref, store.read_manifest(ref)


def miss(model: nn.Module, root: Path, **options: Any) -> CacheMiss:
    with pytest.raises(CacheMiss) as caught:
        pwcc.load(model, cache_dir=root, **options)
    assert not isinstance(caught.value, HostMismatch)
    assert caught.value.exit_code == 3
    assert caught.value.where == str(root)
    return caught.value


# The live model


def test_a_load_is_clean_and_says_what_it_did(llama: Warm) -> None:
    compiled = pwcc.load(model_of(), cache_dir=llama.root)
    receipt = compiled.receipt
    assert receipt.is_clean, receipt
    assert (receipt.entry_key, receipt.pieces, receipt.variants) == (llama.report["entry_key"], 3, 3)
    assert list(receipt.steps_ms) == ["lookup", "candidates", "eligibility", "blobs", "pieces", "bind"]
    assert 0 < receipt.bytes < llama.report["bytes"]  # not factors, predicates and piece graphs
    assert (compiled.sizes, compiled.device) == ((1, 2), torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"eps": 1e-4}, "eps"),
        ({"theta": 5e5}, "theta"),
        ({"heads": 8, "kv_heads": 4, "head_dim": 16}, "head"),
    ],
)
def test_an_equal_parameter_tree_with_another_constant_is_a_miss(
    llama: Warm, config: dict[str, object], named: str
) -> None:
    other = model_of(**config)
    assert [(n, p.shape) for n, p in other.named_parameters()] == [
        (n, p.shape) for n, p in model_of().named_parameters()
    ]
    error = miss(other, llama.root)
    (reason,) = error.reasons
    assert reason.startswith(llama.report["entry_key"][:12])
    assert named in reason
    assert str(next(iter(config.values()))) in reason  # the live value


@pytest.mark.parametrize("attribute", ["eps", "scale", "heads"])
def test_one_changed_attribute_is_a_miss(llama: Warm, attribute: str) -> None:
    model = model_of()
    owner = model.norm if attribute == "eps" else model.layers[1].attention
    setattr(owner, attribute, getattr(owner, attribute) * 2)
    (reason,) = miss(model, llama.root).reasons
    assert attribute in reason


def test_another_structure_is_a_miss(llama: Warm) -> None:
    for other, named in (
        (model_of(layers=3), "model.layers._modules: compiled with keys '0', '1', found keys '0', '1', '2'"),
        (model_of(tied=True), "tensor lm_head.weight: compiled with "),
        (model_of().double(), "parameter torch.float32 [512, 128], now parameter torch.float64 [512, 128]"),
        (model_of(vocab=500), "parameter torch.float32 [512, 128], now parameter torch.float32 [500, 128]"),
    ):
        (reason,) = miss(other, llama.root).reasons
        assert reason.startswith(llama.report["entry_key"][:12])
        assert named in reason


def test_a_forward_hook_is_a_miss(llama: Warm) -> None:
    model = model_of()
    model.layers[0].register_forward_hook(lambda *_: None)
    assert "hook" in str(miss(model, llama.root))


# The process


@pytest.fixture
def modes() -> Iterator[None]:
    """Restore what the tests below change."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    backends: Any = torch.backends
    for backend in (backends.cuda, backends.mkldnn):
        backend.matmul.fp32_precision = "none"  # setting the legacy one leaves "ieee" here
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("modes")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "default_dtype: compiled with 'torch.float32'"),
        (
            lambda: torch.set_float32_matmul_precision("high"),
            "fp32_precision.mkldnn.matmul: compiled with 'ieee', now 'tf32'",
        ),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic: compiled with False, now True"),
    ],
)
def test_another_numeric_mode_is_a_miss_that_names_it(
    llama: Warm, change: Callable[[], None], named: str
) -> None:
    model = model_of()
    change()
    (reason,) = miss(model, llama.root).reasons
    assert "global modes differ: " in reason
    assert named in reason


def test_tf32_and_autocast_are_named(llama: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast.cpu: compiled with False, now 'torch.bfloat16'" in str(miss(model, llama.root))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    assert "fp32_precision.cuda.conv" in str(miss(model, llama.root))


def test_grad_mode_does_not_matter(llama: Warm) -> None:
    model = model_of()
    with torch.no_grad():
        assert pwcc.load(model, cache_dir=llama.root).receipt.is_clean
    with torch.inference_mode():
        assert pwcc.load(model, cache_dir=llama.root).receipt.is_clean


# Sources


def test_an_edited_source_is_a_miss_that_names_the_module(decoder: Warm, tmp_path: Path) -> None:
    """In a process of its own: a second file of one stem has another module name."""
    path = tmp_path / "tiny_decoder.py"
    path.write_text(Path(decoder.model[1].rpartition(":")[0]).read_text() + "# the end\n")
    done = decoder.machine.pwcc(
        "load", decoder.root, "--model", f"{path}:factory", *decoder.model[2:], "--json", code=3
    )
    error = json.loads(done.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("CacheMiss", 3)
    (reason,) = error["reasons"]
    assert "source tiny_decoder: tiny_decoder.py changed (was " in reason


# Which entry


def here(model: str, root: Path, *sizes: int, **options: object) -> CompileReport:
    built = build(ModelRef.parse(model), args={"layers": 2})
    return precompile(
        built.module,
        cache_dir=root,
        specs=input_specs(built.module, example_inputs=built.example_inputs),
        sizes=sizes,
        device="cpu",
        identity=built.identity,
        args=built.args,
        observation=built.observation,
        **{"max_tokens": 8192, **options},  # type: ignore[arg-type]
    )


def test_most_sizes_win_then_the_newest_and_a_profile_decides(llama: Warm, tmp_path: Path) -> None:
    root = llama.copy(tmp_path / "cache")
    none, one = here("llama-tiny", root), here("llama-tiny", root, 2)
    named = here("llama-tiny", root, 1, 2, profile="small")
    assert len({none.entry_key, one.entry_key, named.entry_key, llama.report["entry_key"]}) == 4
    os.utime(named.path / "manifest.json", (1, 1))
    model = model_of()
    assert pwcc.load(model, cache_dir=root).manifest.entry_key == llama.report["entry_key"]
    assert pwcc.load(model, cache_dir=root, profile="small").manifest.entry_key == named.entry_key
    for report in (none, one, named):
        compiled = pwcc.load(model, cache_dir=root, entry=report.entry_key[:12])
        assert compiled.manifest.entry_key == report.entry_key
    assert pwcc.load(model, cache_dir=root, entry=none.entry_key).sizes == ()
    reasons = miss(model, root, profile="large").reasons
    assert len(reasons) == 4
    assert f"{named.entry_key[:12]}: profile: expected 'large', got 'small'" in reasons
    assert f"{none.entry_key[:12]}: profile: expected 'large', got None" in reasons
    reasons = miss(model, root, entry="ffff").reasons
    assert f"{none.entry_key[:12]}: entry: expected a key that starts with 'ffff'" in reasons


# Damage

Damage = Callable[[Path], None]


def kernel_of(root: Path) -> Path:
    """The file of a kernel that one piece in one variant uses."""
    store, _, manifest = only(root)
    pieces = [piece for variant in manifest.programs[0].variants for piece in variant.pieces]
    records = [SealedPiece.from_bytes(store.read_blob(piece), where="piece") for piece in pieces]
    uses = Counter(blob for record in records for blob in {kernel.blob for kernel in record.kernels})
    return store.blob_path(next(blob for blob, count in uses.items() if count == 1))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_a_kernel(root: Path) -> None:
    flip(kernel_of(root))


def lose_a_kernel(root: Path) -> None:
    kernel_of(root).unlink()


def swap_two_blobs(root: Path) -> None:
    store, _, manifest = only(root)
    first, second = manifest.programs[0].stitch, manifest.programs[0].calling
    a, b = store.blob_path(first), store.blob_path(second)
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)


def truncate_the_manifest(root: Path) -> None:
    _, ref, _ = only(root)
    ref.manifest.write_bytes(ref.manifest.read_bytes()[:-100])


def empty_the_manifest(root: Path) -> None:
    _, ref, _ = only(root)
    ref.manifest.write_bytes(b"")


def flip_the_predicates(root: Path) -> None:
    store, _, manifest = only(root)
    flip(store.blob_path(manifest.predicates))


def write_as_a_newer_pwcc(root: Path) -> None:
    _, ref, manifest = only(root)
    body = {**manifest._body(), "schema": 99}
    ref.manifest.write_bytes(about.seal(about.About.of(manifest), strict.canonical(body)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_a_kernel, "expected SHA-256"),
        (lose_a_kernel, "expected a blob, found none"),
        (swap_two_blobs, "expected at most"),
    ],
)
def test_a_damaged_blob_is_a_miss_by_name_and_the_entry_is_set_aside(
    decoder: Warm, tmp_path: Path, damage: Damage, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = decoder.copy(tmp_path / "cache")
    damage(root)
    key = decoder.report["entry_key"]
    (reason,) = miss(decoder_of(decoder), root).reasons
    assert reason.startswith(key[:12])
    assert said in reason
    assert "blobs/sha256" in reason
    assert list(Store.open(root).entries()) == []
    # The next load still says why, until a compile has made the entry again.
    assert main(["load", str(root), *decoder.model]) == 3
    err = capsys.readouterr().err
    assert "is in quarantine" in err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate_the_manifest, "manifest"),
        (empty_the_manifest, "manifest"),
        (flip_the_predicates, "expected SHA-256"),
        (write_as_a_newer_pwcc, "expected manifest schema 1, got 99: a newer pwcc wrote it"),
    ],
)
def test_an_unreadable_entry_is_a_miss_with_its_reason(
    decoder: Warm, tmp_path: Path, damage: Damage, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A miss, not a failure: another entry may serve, and a compile would replace this one."""
    root = decoder.copy(tmp_path / "cache")
    damage(root)
    (reason,) = miss(decoder_of(decoder), root).reasons
    assert reason.startswith(decoder.report["entry_key"][:12])
    assert said in reason
    # A newer pwcc's entry is intact: it stays.
    assert (list(Store.open(root).entries()) != []) is (damage is write_as_a_newer_pwcc)
    assert main(["load", str(root), *decoder.model, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 3


@pytest.mark.parametrize(
    ("damage", "compiles"),
    [
        (flip_a_kernel, 1),
        (lose_a_kernel, 1),
        (swap_two_blobs, 0),
        (truncate_the_manifest, 0),
        (flip_the_predicates, 0),
    ],
)
def test_a_compile_heals_what_is_damaged_and_nothing_else(
    decoder: Warm, tmp_path: Path, damage: Damage, compiles: int
) -> None:
    root = decoder.copy(tmp_path / "cache")
    damage(root)
    report = here(decoder.model[1], root, 2, cpu_baseline="x86-64-v3")
    assert not report.hit
    assert (report.counters.compiles, report.counters.piece_cache_hits) == (compiles, 6 - compiles)
    assert report.entry_key == decoder.report["entry_key"]
    compiled = pwcc.load(decoder_of(decoder), cache_dir=root)
    assert compiled.manifest.entry_key == decoder.report["entry_key"]
    assert compiled.check().ok
    assert here(decoder.model[1], root, 2, cpu_baseline="x86-64-v3").hit


def test_a_damaged_entry_beside_a_good_one_does_not_matter(decoder: Warm, tmp_path: Path) -> None:
    root = decoder.copy(tmp_path / "cache")
    other = here(decoder.model[1], root, cpu_baseline="x86-64-v3")
    store = Store.open(root)
    (ref,) = (ref for ref in store.entries() if ref.entry_key != other.entry_key)
    ref.manifest.write_bytes(b"{}")
    compiled = pwcc.load(decoder_of(decoder), cache_dir=root)
    assert compiled.manifest.entry_key == other.entry_key
    (line,) = compiled.receipt.damaged
    assert line.startswith(ref.entry_key[:12])


def test_the_best_entry_is_damaged_and_the_next_one_serves(
    decoder: Warm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The damage shows only when its blobs are read: after it was chosen."""
    root = decoder.copy(tmp_path / "cache")
    store, best, _ = only(root)
    other = here(decoder.model[1], root, cpu_baseline="x86-64-v3")
    mine = set(store.read_manifest(best).blobs)
    (less,) = (ref for ref in store.entries() if ref.entry_key == other.entry_key)
    flip(store.blob_path(sorted(mine - set(store.read_manifest(less).blobs))[0]))
    stitch = store.read_manifest(best).programs[0].stitch
    if stitch not in store.read_manifest(less).blobs:
        flip(store.blob_path(stitch))
    for piece in store.read_manifest(best).piece_records():
        if piece not in store.read_manifest(less).blobs:
            flip(store.blob_path(piece))
    before = tree(root / "v1/blobs")
    assert main(["load", str(root), *decoder.model, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["entry"] == other.entry_key
    assert answer["receipt"]["clean"]
    assert answer["receipt"]["files_written"] == 0
    (line,) = answer["receipt"]["damaged"]
    assert "expected SHA-256" in line
    assert "set aside in quarantine" in line
    assert err.count("warning: an entry could not be used") == 1
    assert [ref.entry_key for ref in store.entries()] == [other.entry_key]
    assert tree(root / "v1/blobs") == before


def test_a_damaged_entry_of_another_user_is_only_reported(
    decoder: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = decoder.copy(tmp_path / "cache")
    flip_a_kernel(root)
    os.chown(root, 12345, -1)
    before = tree(root)
    with pytest.raises(UntrustedStore, match="user id 12345") as caught:
        pwcc.load(decoder_of(decoder), cache_dir=root)
    assert "--trust-dir" in str(caught.value)
    assert "expected SHA-256" in miss(decoder_of(decoder), root, trust_dir=True).reasons[0]
    monkeypatch.setenv("PWCC_TRUST_DIR", str(root))
    assert "expected SHA-256" in miss(decoder_of(decoder), root).reasons[0]
    assert tree(root) == before


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_an_entry_of_another_user_in_ones_own_cache_is_passed_over(decoder: Warm, tmp_path: Path) -> None:
    root = decoder.copy(tmp_path / "cache")
    _, ref, _ = only(root)
    os.chown(ref.manifest, 12345, -1)
    (reason,) = miss(decoder_of(decoder), root).reasons
    assert "user id 12345" in reason
    assert pwcc.load(decoder_of(decoder), cache_dir=root, trust_dir=True).manifest.entry_key == ref.entry_key


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_files_that_cannot_be_read_now_are_no_miss(
    decoder: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Compiling again would not help, and the entry is not at fault: it stays."""
    root = decoder.copy(tmp_path / "cache")
    _, ref, manifest = only(root)
    stitch = Store.open(root).blob_path(manifest.programs[0].stitch)
    real = os.open

    def broken(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(stitch):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **kwargs)

    model = decoder_of(decoder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", broken)
        with pytest.raises(StoreError, match=errno.errorcode[code]) as caught:
            pwcc.load(model, cache_dir=root)
    assert not isinstance(caught.value, CorruptEntry)
    assert caught.value.where == str(stitch)
    assert ref.manifest.exists()
    pwcc.load(decoder_of(decoder), cache_dir=root)


def test_what_passes_is_tried_again(decoder: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = os.open, set()

    def broken(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(decoder.root)) and path not in failed:
            failed.add(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", broken)
        assert pwcc.load(decoder_of(decoder), cache_dir=decoder.root).receipt.is_clean
    assert len(failed) > 10


def test_a_server_lives_on_without_its_cache(decoder: Warm, tmp_path: Path) -> None:
    root = decoder.copy(tmp_path / "cache")
    model = decoder_of(decoder)
    compiled = pwcc.load(model, cache_dir=root)
    tokens = (torch.arange(3), torch.arange(3))
    with torch.no_grad():
        before = compiled(*tokens)
    shutil.rmtree(root)
    compiled.rebind()
    with torch.no_grad():
        after = compiled(*tokens)
    assert torch.equal(before, after)


def test_a_loaded_entry_is_marked_as_in_use_for_as_long_as_it_lives(decoder: Warm, tmp_path: Path) -> None:
    root = decoder.copy(tmp_path / "cache")
    _, ref, _ = only(root)
    gc.collect()  # models of other tests
    before = descriptors()
    first = pwcc.load(decoder_of(decoder), cache_dir=root)
    more = [pwcc.load(decoder_of(decoder), cache_dir=root) for _ in range(3)]
    assert descriptors() == before + 1
    assert holds.is_held(ref.path) is True
    del first, more
    gc.collect()
    assert holds.is_held(ref.path) is False
    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_cache_on_a_mount_without_exec_serves(decoder: Warm, tmp_path: Path) -> None:
    """Kernels are mapped from memory files that hold the very bytes that were hashed."""
    with mounted(tmp_path / "noexec", "noexec,nosuid,nodev,size=64m") as place:
        root = decoder.copy(place / "cache")
        compiled = pwcc.load(decoder_of(decoder), cache_dir=root)
        assert compiled.receipt.is_clean
        assert compiled.check().ok


def test_a_read_only_mount_serves(decoder: Warm, tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "size=64m") as place:
        root = decoder.copy(place / "cache")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert pwcc.load(decoder_of(decoder), cache_dir=root).receipt.is_clean
        with pytest.raises(StoreError, match="EROFS"):
            here(decoder.model[1], root, 4, cpu_baseline="x86-64-v3")


def test_what_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    for path in (tmp_path / "file", tmp_path / "other"):
        with pytest.raises(NotAStore) as caught:
            pwcc.load(model_of(), cache_dir=path)
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 1
    (tmp_path / "empty").mkdir()
    Store.create(tmp_path / "new")
    for name in ("empty", "absent", "new"):  # as after a restore that found nothing
        found = miss(model_of(), tmp_path / name)
        assert found.hint == f"run: pwcc compile --model ... --cache-dir {tmp_path / name}"
    assert not (tmp_path / "absent").exists()


# Hosts


def forge(root: Path, *needed: Requirement) -> None:
    """Let the entry require something that no host has."""
    store, ref, manifest = only(root)
    kept = [r for r in manifest.requirements if r.kind not in {n.kind for n in needed}]
    ref.manifest.write_bytes(replace(manifest, requirements=(*kept, *needed)).serialise())
    store.read_manifest(ref)


@pytest.mark.parametrize(
    ("requirement", "named"),
    [
        (Requirement("cpu_flags", ("avx", "avx1024")), "avx1024"),
        (Requirement("python_abi", "cpython-399"), "cpython-399"),
        (Requirement("glibc", "99.1"), "99.1"),
        (Requirement("torch", "9.9.9 abc"), "9.9.9"),
        (Requirement("machine", "pdp11"), "pdp11"),
    ],
)
def test_a_host_that_lacks_something_exits_4_and_names_it(
    decoder: Warm, tmp_path: Path, requirement: Requirement, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = decoder.copy(tmp_path / "cache")
    forge(root, requirement)
    with pytest.raises(HostMismatch, match="does not meet its requirements") as caught:
        pwcc.load(decoder_of(decoder), cache_dir=root)
    (reason,) = caught.value.reasons
    assert named in reason
    assert main(["load", str(root), *decoder.model, "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == 4
    assert named in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_an_entry_for_a_gpu_on_a_host_without_one_exits_4(llama: Warm, tmp_path: Path) -> None:
    """It lies under another lookup key; the model tree tells that it is this model's."""
    root = llama.copy(tmp_path / "cache")
    store, ref, manifest = only(root)
    gpu = DeviceSummary("cuda", "NVIDIA H200", "9.0")
    needs = (*manifest.requirements, Requirement("cuda_capability", "9.0"), Requirement("cuda_version", "13.0"))
    elsewhere = store.entry_ref(LookupKey("0" * 32), ref.entry_key)
    elsewhere.path.mkdir(parents=True)
    moved = replace(manifest, device=gpu, requirements=needs, lookup_key=elsewhere.lookup_key)
    elsewhere.manifest.write_bytes(moved.serialise())
    shutil.rmtree(ref.path)
    with pytest.raises(HostMismatch) as caught:
        pwcc.load(model_of(), cache_dir=root)
    (reason,) = caught.value.reasons
    assert "built for NVIDIA H200, got cpu" in reason
    assert "9.0" in reason


def test_a_good_entry_wins_over_a_foreign_one(decoder: Warm, tmp_path: Path) -> None:
    root = decoder.copy(tmp_path / "cache")
    forge(root, Requirement("cpu_flags", ("avx1024",)))
    other = here(decoder.model[1], root, cpu_baseline="x86-64-v3")
    assert pwcc.load(decoder_of(decoder), cache_dir=root).manifest.entry_key == other.entry_key


def test_a_model_on_several_devices_is_refused(llama: Warm) -> None:
    model = model_of()
    model.norm.to("meta")
    with pytest.raises(UsageError, match="tensors are all on one device, got cpu, meta"):
        pwcc.load(model, cache_dir=llama.root)
