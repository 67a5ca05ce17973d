"""Loading where a signature is required: verified before the first blob is opened, never skipped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pwcc
from pwcc.cache import about, signing, strict
from pwcc.cache.errors import CacheMiss, CorruptEntry, SigningUnavailable
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece
from pwcc.cache.signing_keys import PrivateKey
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.trust import TrustedKeys
from pwcc.compile.models.llama import Llama, LlamaConfig
from pwcc.compile.piece_cache import PieceCache
from tests.conftest import Warm

pytestmark = [
    pytest.mark.slow,
    # what Inductor's own modules say while they are imported
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(layers=2)).eval()


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivateKey:
    """A key that this host trusts."""
    made = PrivateKey.generate()
    TrustedKeys(tmp_path / "trust").add(made.public, "ci")
    monkeypatch.setenv("PWCC_TRUSTED_KEYS", str(tmp_path / "trust"))
    monkeypatch.delenv("PWCC_REQUIRE_SIGNATURE", raising=False)
    return made


@pytest.fixture
def cache(llama: Warm, tmp_path: Path) -> tuple[Store, EntryRef, Manifest]:
    store = Store.open(llama.copy(tmp_path / "cache"))
    (ref,) = store.entries()
    return store, ref, store.read_manifest(ref)


Opened = list[str]
_opened: list[Opened] = []


def _notice(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened:
        _opened[-1].append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else "")


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Every path that is opened during the test."""
    if not getattr(sys, "_pwcc_test_hook", False):
        sys.addaudithook(_notice)
        sys._pwcc_test_hook = True  # type: ignore[attr-defined]
    _opened.append([])
    yield _opened[-1]
    _opened.pop()


def blobs(opened: Opened) -> list[str]:
    return [path for path in opened if "/blobs/" in path]


def test_signed_entries_load_and_others_are_a_miss_before_any_blob(
    cache: tuple[Store, EntryRef, Manifest], model: Llama, key: PrivateKey, opened: Opened
) -> None:
    store, ref, _ = cache
    with pytest.raises(CacheMiss) as caught:
        pwcc.load(model, cache_dir=store.root, require_signature=True)
    assert caught.value.exit_code == 3
    assert caught.value.hint == "sign it: pwcc sign; or trust its signer's key: pwcc trust add"
    assert f"{ref.entry_key[:12]}: expected a signature by a trusted key, got none" in str(caught.value)
    assert any(path.endswith("manifest.json") for path in opened)
    assert blobs(opened) == [], "not even to explain"

    signing.sign_entry(store, ref, PrivateKey.generate())
    opened.clear()
    with pytest.raises(CacheMiss, match="not trusted here") as caught:
        pwcc.load(model, cache_dir=store.root, require_signature=True)
    assert "pwcc trust add" in str(caught.value)
    assert "pwcc compile" not in str(caught.value)
    assert blobs(opened) == []

    path = signing.sign_entry(store, ref, key)
    opened.clear()
    compiled = pwcc.load(model, cache_dir=store.root, require_signature=True)
    assert compiled.receipt.is_clean
    assert opened.index(str(path)) < opened.index(blobs(opened)[0])
    ids = torch.arange(3)
    with torch.no_grad():
        assert torch.allclose(compiled(ids, ids), model(ids, ids), atol=1e-4)


def test_an_unsigned_entry_of_another_model_is_no_reason_to_sign(
    cache: tuple[Store, EntryRef, Manifest], key: PrivateKey
) -> None:
    other = Llama(LlamaConfig(layers=3)).eval()
    with pytest.raises(CacheMiss) as caught:
        pwcc.load(other, cache_dir=cache[0].root, require_signature=True)
    assert "pwcc sign" not in str(caught.value)
    assert caught.value.hint == f"run: pwcc compile --model ... --cache-dir {cache[0].root}"


def test_the_environment_requires_it_too(
    cache: tuple[Store, EntryRef, Manifest], model: Llama, key: PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ref, _ = cache
    assert pwcc.load(model, cache_dir=store.root)
    monkeypatch.setenv("PWCC_REQUIRE_SIGNATURE", "1")
    with pytest.raises(CacheMiss, match="got none"):
        pwcc.load(model, cache_dir=store.root)
    signing.sign_entry(store, ref, key)
    assert pwcc.load(model, cache_dir=store.root)


def test_without_cryptography_nothing_is_skipped(
    cache: tuple[Store, EntryRef, Manifest],
    model: Llama,
    key: PrivateKey,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, ref, _ = cache
    signing.sign_entry(store, ref, key)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    opened.clear()
    with pytest.raises(SigningUnavailable, match=r"extra 'sign': in a checkout, pip install '\.\[sign\]'"):
        pwcc.load(model, cache_dir=store.root, require_signature=True)
    assert blobs(opened) == []
    assert pwcc.load(model, cache_dir=store.root), "where none is required it is not needed"


def test_an_edited_manifest_is_a_miss_and_stays_where_it_is(
    cache: tuple[Store, EntryRef, Manifest], model: Llama, key: PrivateKey
) -> None:
    store, ref, manifest = cache
    signing.sign_entry(store, ref, key)
    ref.manifest.write_bytes(replace(manifest, profile="mine").serialise())
    assert pwcc.load(model, cache_dir=store.root), "its digests are right"
    with pytest.raises(CacheMiss, match="the signature of ci is not over this manifest"):
        pwcc.load(model, cache_dir=store.root, require_signature=True)
    assert ref.manifest.exists()


Edit = Callable[[SealedPiece, BlobDigest], SealedPiece]


@pytest.mark.parametrize(
    "edit",
    [
        lambda record, stray: replace(record, source=stray, code=None),
        lambda record, stray: replace(record, constants=stray),
        lambda record, stray: replace(record, kernels=(replace(record.kernels[0], blob=stray),)),
    ],
)
def test_a_record_cannot_reach_beyond_the_manifest(
    cache: tuple[Store, EntryRef, Manifest], model: Llama, edit: Edit
) -> None:
    """A blob that lies in the store, intact, but is not among those that the manifest lists: never opened."""
    store, ref, manifest = cache
    stray = store.put_blob(b"raise SystemExit('executed')")
    old = next(
        digest
        for digest in manifest.piece_records()
        if SealedPiece.from_bytes(store.read_blob(digest), where="x").kernels
    )
    record = edit(SealedPiece.from_bytes(store.read_blob(old), where="x"), stray)
    new = store.put_blob(record.to_bytes())
    body = about.split(manifest.serialise(), where="x")[1].replace(old.encode(), new.encode())
    value = json.loads(body)
    value["blobs"][new] = len(record.to_bytes())
    forged = Manifest.parse(about.seal(about.About.of(manifest_of(value)), strict.canonical(value)))
    ref.manifest.write_bytes(forged.serialise())
    with pytest.raises((CacheMiss, CorruptEntry), match="expected a blob that the manifest lists"):
        pwcc.load(model, cache_dir=store.root)


def manifest_of(value: dict[str, object]) -> Manifest:
    """The manifest of these fields, whose head is computed from them."""
    return Manifest._parse(strict.Fields(value, "x"))


def test_a_compile_neither_hits_nor_uses_again_what_nobody_signed(
    llama: Warm, tmp_path: Path, key: PrivateKey
) -> None:
    root = llama.copy(tmp_path / "cache")
    options: tuple[str | Path, ...] = (
        "compile",
        *llama.model,
        *llama.options,
        "--cache-dir",
        root,
        "--frozen",
        "--require-signature",
    )
    trusted = {"PWCC_TRUSTED_KEYS": os.environ["PWCC_TRUSTED_KEYS"]}
    done = llama.machine.pwcc(*options, code=3, **trusted)
    assert "expected a signature by a trusted key, got none" in done.stderr
    assert "next: sign it: pwcc sign; or trust its signer's key: pwcc trust add; or run without" in done.stderr
    store = Store.open(root)
    (ref,) = store.entries()
    signing.sign_entry(store, ref, key)
    assert "hit" in llama.machine.pwcc(*options, code=0, **trusted).stdout


def test_piece_records_are_not_used_again_where_signatures_are_required(llama: Warm) -> None:
    """They carry no signature: whoever may write to the cache could have put any there."""
    store = Store.open(llama.root)
    seen: list[object] = []

    class Reading(PieceCache):
        def key(self, task: object) -> object:  # type: ignore[override]
            seen.append(task)
            raise LookupError

    from pwcc.compile.target import target_of

    pieces = Reading(store, target_of(torch.device("cpu")))
    with pytest.raises(LookupError):
        pieces.get("task")  # type: ignore[arg-type]
    store.require(lambda ref, data: None)
    assert pieces.get("task") is None  # type: ignore[arg-type]
    assert seen == ["task"]


def test_the_command_line_says_why(llama: Warm, tmp_path: Path, key: PrivateKey) -> None:
    trusted = {"PWCC_TRUSTED_KEYS": os.environ["PWCC_TRUSTED_KEYS"]}
    load: tuple[str | Path, ...] = ("load", llama.root, *llama.model, "--require-signature")
    answer = llama.machine.pwcc_json(*load, code=3, **trusted)
    assert "expected a signature by a trusted key" in answer["error"]["reasons"][0]
