"""Signatures: over the manifest's very bytes, by trusted keys only, and before any blob is opened."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pwcc.cache import signing, strict, trust
from pwcc.cache.errors import CorruptEntry, SigningUnavailable, StoreError, UntrustedEntry, UsageError
from pwcc.cache.ids import LookupKey, blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.signing import Signature
from pwcc.cache.signing_keys import KeyId, PrivateKey, PublicKey, is_exposed, read_public
from pwcc.cache.store import EntryRef, Store
from pwcc.cache.trust import SignaturePolicy, TrustedKey, TrustedKeys, is_required, keys_directory


@pytest.fixture(scope="module")
def ours() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture(scope="module")
def theirs() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def ref(store: Store, manifest: Manifest) -> EntryRef:
    store.publish(manifest)
    (found,) = store.entries()
    return found


def requiring(root: Path, *keys: PrivateKey) -> Store:
    """Open a store that gives out only what one of these keys signed."""
    store = Store.open(root)
    trusted = tuple(TrustedKey(key.public, f"key {number}") for number, key in enumerate(keys))
    store.require(SignaturePolicy(trusted, Path("nowhere")).admit)
    return store


def refusal(store: Store, ref: EntryRef) -> str:
    with pytest.raises(UntrustedEntry) as caught:
        store.read_manifest(ref)
    return str(caught.value)


# What is admitted


def test_a_signed_entry_is_read_and_nothing_digested_changed(
    store: Store, ref: EntryRef, manifest: Manifest, ours: PrivateKey
) -> None:
    before = store.read_manifest_bytes(ref)
    path = signing.sign_entry(store, ref, ours)
    assert path == ref.path / "signatures" / f"{ours.public.id}.json"
    assert store.read_manifest_bytes(ref) == before
    assert requiring(store.root, ours).read_manifest(ref) == manifest
    assert [item.name for item in ref.path.iterdir() if item.name != "signatures"] == ["manifest.json"]
    first = path.read_bytes()
    signing.sign_entry(store, ref, ours)
    assert path.read_bytes() == first, "the same key and bytes give the same file, so that an export is stable"
    assert list(store.tmp.iterdir()) == []


def test_without_a_signature_or_by_a_stranger(
    store: Store, ref: EntryRef, ours: PrivateKey, theirs: PrivateKey
) -> None:
    assert "got none" in refusal(requiring(store.root, ours), ref)
    signing.sign_entry(store, ref, theirs)
    message = refusal(requiring(store.root, ours), ref)
    assert f"only signatures of {theirs.public.id[:12]}, not trusted here" in message
    assert "pwcc trust add" in message
    assert "no key is trusted" in refusal(requiring(store.root), ref)
    assert requiring(store.root, ours, theirs).read_manifest(ref)


def test_several_signers(store: Store, ref: EntryRef, ours: PrivateKey, theirs: PrivateKey) -> None:
    for key in (ours, theirs):
        signing.sign_entry(store, ref, key)
    for key in (ours, theirs):
        assert requiring(store.root, key).read_manifest(ref)
    signing.path_of(ref.path, ours.public.id).write_bytes(b"{}")
    assert requiring(store.root, ours, theirs).read_manifest(ref), "one good signature is enough"
    assert "cannot be read" in refusal(requiring(store.root, ours), ref)


def test_the_signature_is_over_every_byte_of_the_manifest(
    store: Store, ref: EntryRef, ours: PrivateKey
) -> None:
    signing.sign_entry(store, ref, ours)
    (signature,) = (signing.read(ref.path, key) for key in signing.names(ref.path))
    assert signature is not None
    data = store.read_manifest_bytes(ref)
    assert signature.verifies(data)
    for offset in range(0, len(data), 97):
        flipped = bytearray(data)
        flipped[offset] ^= 1
        assert not signature.verifies(bytes(flipped))
    assert not signature.verifies(data + b"\n")
    assert not signature.verifies(b"")


def test_no_other_message_of_the_key_is_a_signature(store: Store, ref: EntryRef, ours: PrivateKey) -> None:
    """What a key signs for another purpose must not admit an entry."""
    data = store.read_manifest_bytes(ref)
    for message in (data, b"other\0" + data, blob_digest(data).encode()):
        signing.write(ref, Signature(ours.public, ours.sign(message)), tmp=store.tmp)
        assert "not over this manifest" in refusal(requiring(store.root, ours), ref)


def test_a_changed_manifest_with_right_digests_is_refused_before_it_is_parsed(
    store: Store, ref: EntryRef, manifest: Manifest, ours: PrivateKey
) -> None:
    signing.sign_entry(store, ref, ours)
    ref.manifest.write_bytes(replace(manifest, tuned=True).serialise())
    assert store.read_manifest(ref).tuned, "digests alone do not find it"
    assert "not over this manifest" in refusal(requiring(store.root, ours), ref)
    ref.manifest.write_bytes(b"not JSON at all")
    assert "not over this manifest" in refusal(requiring(store.root, ours), ref)


def test_a_signed_manifest_serves_only_under_its_own_keys(
    store: Store, ref: EntryRef, ours: PrivateKey
) -> None:
    signing.sign_entry(store, ref, ours)
    elsewhere = store.entry_ref(LookupKey("a" * 32), ref.entry_key)
    shutil.copytree(ref.path, elsewhere.path)
    with pytest.raises(CorruptEntry, match="expected the manifest of"):
        requiring(store.root, ours).read_manifest(elsewhere)


def test_another_keys_file_under_a_trusted_name(
    store: Store, ref: EntryRef, ours: PrivateKey, theirs: PrivateKey
) -> None:
    signing.sign_entry(store, ref, theirs)
    signing.path_of(ref.path, theirs.public.id).rename(signing.path_of(ref.path, ours.public.id))
    assert "not over this manifest" in refusal(requiring(store.root, ours), ref)
    (state,) = signing.states(ref, store.read_manifest_bytes(ref), {ours.public.id: "ours"})
    assert (state.valid, state.trusted) == (False, True)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "huge", "looping link", "device"])
def test_what_is_no_plain_small_file_is_a_bad_signature(
    store: Store, ref: EntryRef, ours: PrivateKey, tmp_path: Path, kind: str
) -> None:
    good = signing.sign_entry(store, ref, ours)
    data = good.read_bytes()
    good.unlink()
    if kind == "pipe":
        os.mkfifo(good)
    elif kind == "folder":
        good.mkdir()
    elif kind == "link":
        (tmp_path / "target").write_bytes(data)
        good.symlink_to(tmp_path / "target")
    elif kind == "looping link":
        good.symlink_to(good)
    elif kind == "device":
        good.symlink_to("/dev/zero")
    else:
        good.write_bytes(data + b" " * 5000)
    assert "cannot be read" in refusal(requiring(store.root, ours), ref)
    assert [state.valid for state in signing.states(ref, b"", {})] == [False]


def test_a_flood_of_signature_files_hides_nothing(store: Store, ref: EntryRef, ours: PrivateKey) -> None:
    signing.sign_entry(store, ref, ours)
    for number in range(600):
        (ref.path / "signatures" / f"{number:032x}.json").write_bytes(b"x")
    (ref.path / "signatures" / "../signatures/evil name.json").write_bytes(b"x")
    assert requiring(store.root, ours).read_manifest(ref)
    assert len(signing.names(ref.path)) == signing.MAX_SIGNATURES


def test_copies_and_races_keep_a_signature(
    store: Store, ref: EntryRef, manifest: Manifest, ours: PrivateKey, tmp_path: Path
) -> None:
    signing.sign_entry(store, ref, ours)
    shutil.copytree(store.root, tmp_path / "copy")
    copied = requiring(tmp_path / "copy", ours)
    (there,) = copied.entries()
    assert copied.read_manifest(there) == manifest
    assert not store.publish(manifest).won
    assert requiring(store.root, ours).read_manifest(ref) == manifest


def test_a_writer_that_requires_signatures_replaces_what_it_does_not_trust(
    store: Store, ref: EntryRef, manifest: Manifest, ours: PrivateKey
) -> None:
    """Another manifest under the same keys is set aside; its very own bytes are its own, signed or not."""
    own = requiring(store.root, ours)
    assert not own.publish(manifest).won
    ref.manifest.write_bytes(replace(manifest, tuned=True).serialise())
    assert own.publish(manifest).won
    assert store.read_manifest(ref) == manifest


def test_a_damaged_entry_is_not_signed(
    store: Store, ref: EntryRef, manifest: Manifest, ours: PrivateKey
) -> None:
    path = store.blob_path(manifest.programs[0].stitch)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"#")
    with pytest.raises(CorruptEntry):
        signing.sign_entry(store, ref, ours)
    assert not (ref.path / "signatures").exists()


# The chain from the manifest to every blob


def test_a_blob_that_the_manifest_does_not_list_cannot_be_read_through_the_entry(
    store: Store, manifest: Manifest
) -> None:
    """A record may name any digest: what is not in the signed list stays closed, also if it is in the store."""
    stray = store.put_blob(b"code that nobody signed")
    read = store.reader(manifest)
    assert store.read_blob(stray)
    with pytest.raises(CorruptEntry, match="that the manifest lists"):
        read(stray)
    for digest, size in manifest.blobs.items():
        assert len(read(digest)) == size


def test_a_listed_blob_that_grew_is_not_read_to_its_end(store: Store, manifest: Manifest) -> None:
    digest = next(iter(manifest.blobs))
    path = store.blob_path(digest)
    path.chmod(0o644)
    with path.open("ab") as stream:
        stream.truncate(2**40)
    with pytest.raises(CorruptEntry, match="at most"):
        store.reader(manifest)(digest)


# Signature files


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": True},
        {"algorithm": "none"},
        {"algorithm": "x" * 1000},
        {"public_key": "0" * 63},
        {"public_key": "G" * 64},
        {"public_key": "A" * 64},
        {"signature": "0" * 64},
        {"signature": " " * 128},
        {"signature": None},
        {"extra": 1},
    ],
)
def test_signature_files_are_parsed_strictly(change: dict[str, object]) -> None:
    good = json.loads(Signature(PublicKey(bytes(32)), bytes(64)).to_bytes())
    assert Signature.parse(strict.canonical(good), where="x").key == PublicKey(bytes(32))
    with pytest.raises(CorruptEntry):
        Signature.parse(strict.canonical({**good, **change}), where="x")


def test_states_for_people(store: Store, ref: EntryRef, ours: PrivateKey, theirs: PrivateKey) -> None:
    data = store.read_manifest_bytes(ref)
    signing.sign_entry(store, ref, ours)
    signing.write(ref, Signature(theirs.public, bytes(64)), tmp=store.tmp)
    found = {state.key: state for state in signing.states(ref, data, {ours.public.id: "ci"})}
    assert str(found[ours.public.id]) == f"valid, by {ours.public.id[:12]}, trusted as ci"
    assert str(found[theirs.public.id]).startswith(f"NOT VALID, by {theirs.public.id[:12]}, not trusted")
    assert found[ours.public.id].to_json()["valid"] is True


# Keys


def test_a_key_file_is_private_standard_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    umask = os.umask(0)
    try:
        key = PrivateKey.generate()
        public = key.write(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not is_exposed(path)
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")
    assert PrivateKey.read(path).public == key.public == read_public(str(public))
    assert read_public(key.public.raw.hex()) == key.public
    before = path.read_bytes(), public.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        PrivateKey.generate().write(path)
    path.unlink()
    with pytest.raises(UsageError, match="exists"):
        PrivateKey.generate().write(path)
    assert not path.exists(), "no half of a pair is left"
    assert public.read_bytes() == before[1]
    path.write_bytes(before[0])
    path.chmod(0o640)
    assert is_exposed(path)
    assert key.public.raw.hex() not in repr(key)


def test_what_is_no_key(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption as Encrypted
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    other = rsa.generate_private_key(65537, 2048)
    ours = PrivateKey.generate()._key
    encoded = (Encoding.PEM, PrivateFormat.PKCS8)
    private = {
        "rsa": (other.private_bytes(*encoded, NoEncryption()), "another algorithm"),
        "encrypted": (ours.private_bytes(*encoded, Encrypted(b"x")), "without a pass phrase"),
        "text": (b"hello", "something else"),
        "empty": (b"", "something else"),
    }
    for name, (data, message) in private.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=message):
            PrivateKey.read(tmp_path / name)
    public = {
        "rsa.pub": (
            other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            "algorithm",
        ),
        "private.pub": (ours.private_bytes(*encoded, NoEncryption()), "got a private one"),
        "text.pub": (b"hello", "something else"),
    }
    for name, (data, message) in public.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=message):
            read_public(str(tmp_path / name))
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises((UsageError, StoreError)):
            PrivateKey.read(path)
        with pytest.raises((UsageError, StoreError)):
            read_public(str(path))


# Trusted keys


def test_the_directory_of_trusted_keys(tmp_path: Path, ours: PrivateKey, theirs: PrivateKey) -> None:
    keys = TrustedKeys(tmp_path / "deep" / "trust")
    assert keys.all() == []
    assert keys.add(ours.public, "ci") is True
    assert keys.add(ours.public, "ci 2") is False
    assert keys.names() == {ours.public.id: "ci 2"}
    with pytest.raises(UsageError, match="another key"):
        keys.add(theirs.public, "ci 2")
    keys.add(theirs.public, "them")
    for name in ("", "  ", "x" * 129, "a\nb", "\x1b[2J"):
        with pytest.raises(UsageError, match="name"):
            keys.add(theirs.public, name)
    for text in ("nobody", "", ours.public.id[:3]):
        with pytest.raises(UsageError, match="no trusted key"):
            keys.remove(text)
    assert keys.remove("them").key == theirs.public
    assert keys.remove(ours.public.id[:8]).name == "ci 2"
    assert keys.all() == []
    assert list(keys.root.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_keys_that_others_may_write_are_refused(tmp_path: Path, ours: PrivateKey, mode: int) -> None:
    keys = TrustedKeys(tmp_path / "trust")
    keys.add(ours.public, "ci")
    keys.root.chmod(mode)
    for use in (keys.all, lambda: keys.add(ours.public, "x"), lambda: keys.remove("ci")):
        with pytest.raises(StoreError, match="only their owner may write"):
            use()
    keys.root.chmod(0o755)
    (path,) = keys.root.iterdir()
    path.chmod(0o666)
    with pytest.raises(StoreError, match="only their owner may write"):
        keys.all()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give files away")
def test_keys_of_another_user_are_refused(tmp_path: Path, ours: PrivateKey) -> None:
    keys = TrustedKeys(tmp_path / "trust")
    keys.add(ours.public, "ci")
    os.chown(keys.root, 65534, 65534)
    with pytest.raises(StoreError, match="of this user or root"):
        keys.all()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"x", b'{"schema":1,"name":"a","public_key":"' + b"0" * 64 + b'"}']
)
def test_a_damaged_key_is_an_error_not_one_fewer(tmp_path: Path, ours: PrivateKey, data: bytes) -> None:
    keys = TrustedKeys(tmp_path / "trust")
    keys.add(ours.public, "ci")
    (keys.root / f"{'1' * 32}.json").write_bytes(data)
    with pytest.raises(CorruptEntry):
        keys.all()


def test_what_the_environment_says(tmp_path: Path) -> None:
    assert keys_directory({"PWCC_TRUSTED_KEYS": str(tmp_path)}) == tmp_path
    assert keys_directory({}).name == "trust"
    for text, required in {"1": True, "Yes": True, "on": True, "": False, "0": False, "no": False}.items():
        assert is_required(environment={"PWCC_REQUIRE_SIGNATURE": text}) is required
        assert is_required(True, {"PWCC_REQUIRE_SIGNATURE": text}), "an argument adds, and lifts nothing"
    assert not is_required(environment={})
    with pytest.raises(UsageError, match="PWCC_REQUIRE_SIGNATURE"):
        is_required(environment={"PWCC_REQUIRE_SIGNATURE": "tru"})


def test_without_cryptography_a_required_signature_is_an_error(
    store: Store, ref: EntryRef, ours: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signing.sign_entry(store, ref, ours)
    keys = TrustedKeys(tmp_path / "trust")
    keys.add(ours.public, "ci")
    environment = {"PWCC_TRUSTED_KEYS": str(keys.root)}
    policy = SignaturePolicy.required(environment)
    policy.admit(ref, store.read_manifest_bytes(ref))
    for name in ("cryptography", "cryptography.exceptions", "cryptography.hazmat.primitives.asymmetric"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    uses: dict[str, Callable[[], object]] = {
        "required": lambda: SignaturePolicy.required(environment),
        "admit": lambda: policy.admit(ref, store.read_manifest_bytes(ref)),
        "generate": PrivateKey.generate,
        "read": lambda: PrivateKey.read(tmp_path / "k"),
        "public": lambda: read_public("k.pub"),
    }
    for name, use in uses.items():
        with pytest.raises(SigningUnavailable, match="cryptography"):
            use()
        assert name
    assert keys.names() == {ours.public.id: "ci"}, "listing and removing need it not"
    (state,) = signing.states(ref, b"", keys.names())
    assert (state.valid, state.problem) == (None, "cryptography is not installed")


def test_restrict(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PWCC_REQUIRE_SIGNATURE", raising=False)
    monkeypatch.setenv("PWCC_TRUSTED_KEYS", str(tmp_path))
    trust.restrict(store)
    assert not store.is_restricted
    trust.restrict(store, True)
    assert store.is_restricted
    again = Store.open(store.root)
    monkeypatch.setenv("PWCC_REQUIRE_SIGNATURE", "1")
    trust.restrict(again)
    assert again.is_restricted


def test_a_key_id_is_of_the_public_bytes() -> None:
    assert PublicKey(bytes(32)).id == KeyId("66687aadf862bd776c8fc18b8e9f8e20")
    assert PublicKey(bytes(31) + b"\1").id != PublicKey(bytes(32)).id
