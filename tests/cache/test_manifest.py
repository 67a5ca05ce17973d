from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pwcc.cache import about, strict
from pwcc.cache.errors import CorruptEntry, NewerFormat
from pwcc.cache.ids import BlobDigest, factor_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.store import Store

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, put_entry: Callable[..., Manifest]) -> Manifest:
    return put_entry(Store.create(tmp_path_factory.mktemp("cache")))  # flushed to disk once, not per test


def body_of(manifest: Manifest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(about.split(manifest.serialise(), where="test")[1])
    return body


def resealed(manifest: Manifest, edit: Edit) -> bytes:
    body = body_of(manifest)
    edit(body)
    return about.seal(about.About.of(manifest), strict.canonical(body))


def test_round_trip(manifest: Manifest) -> None:
    data = manifest.serialise()
    assert Manifest.parse(data) == manifest
    assert Manifest.parse(data).serialise() == data


def test_same_fields_same_bytes(manifest: Manifest) -> None:
    shuffled = replace(manifest, blobs=dict(sorted(manifest.blobs.items(), reverse=True)))
    assert shuffled.serialise() == manifest.serialise()


def test_it_is_one_json_object_that_begins_with_about(manifest: Manifest) -> None:
    data = manifest.serialise()
    assert data.startswith(b'{"about":')
    value = json.loads(data)
    assert {"about", "schema", "programs", "blobs", "sources"} <= value.keys()
    assert not any(word in data.decode() for word in ("/home", "/root", "/tmp"))


def test_a_future_schema_is_told_apart_from_damage(manifest: Manifest) -> None:
    with pytest.raises(NewerFormat, match="newer pwcc wrote it"):
        Manifest.parse(resealed(manifest, lambda b: b.update(schema=2, surprise=1)))
    summary = replace(about.About.of(manifest), schema=2)
    with pytest.raises(NewerFormat, match="newer pwcc wrote it"):
        Manifest.parse(about.seal(summary, strict.canonical(body_of(manifest))))


def test_every_truncation_is_found(manifest: Manifest) -> None:
    data = manifest.serialise()
    for cut in range(0, len(data), 37):
        with pytest.raises(CorruptEntry):
            Manifest.parse(data[:cut])
    with pytest.raises(CorruptEntry):
        Manifest.parse(data + b"\n")


def test_every_flipped_byte_is_found(manifest: Manifest) -> None:
    data = manifest.serialise()
    for offset in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[offset] ^= 0x01
        with pytest.raises((CorruptEntry, NewerFormat)):
            Manifest.parse(bytes(damaged))


def put(path: str, value: object) -> Edit:
    def edit(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = body
        for name in parents:
            place = place[int(name)] if name.isdigit() else place[name]
        place[int(last) if last.isdigit() else last] = value

    return edit


HOSTILE: dict[str, Edit] = {
    "key of another form": put("entry_key", "../../../../etc"),
    "short key": put("lookup_key", "ab"),
    "uppercase key": put("lookup_key", "A" * 32),
    "key with a newline": put("lookup_key", "a" * 32 + "\n"),
    "number as text": put("min_tokens", "1"),
    "bool as number": put("min_tokens", True),
    "float as number": put("min_tokens", 1.0),
    "negative": put("min_tokens", -1),
    "huge": put("max_tokens", 2**40),
    "range reversed": put("max_tokens", 0),
    "schema zero": put("schema", 0),
    "schema text": put("schema", "1"),
    "unknown field": put("extra", 1),
    "unknown nested field": put("programs.0.variants.0.extra", 1),
    "size outside": put("sizes", [65]),
    "size twice": put("sizes", [8, 8]),
    "sizes not a list": put("sizes", {"0": 8}),
    "too many sizes": put("sizes", list(range(10_001))),
    "index out of range": put("programs.0.pieces", [0, 3]),
    "index negative": put("programs.0.pieces", [-1]),
    "index bool": put("programs.0.pieces", [True]),
    "records missing": put("programs.0.variants.0.pieces", []),
    "record not listed": put("programs.0.variants.0.pieces.0", "0" * 64),
    "stitch not listed": put("programs.0.stitch", "0" * 64),
    "predicates not listed": put("predicates", "0" * 64),
    "digest traversal": put("predicates", "../" + "0" * 61),
    "digest uppercase": put("predicates", "A" * 64),
    "blob name traversal": put("blobs", {"../../x": 1}),
    "blob size negative": put("blobs", {"0" * 64: -1}),
    "blob size text": put("blobs", {"0" * 64: "1"}),
    "blobs a list": put("blobs", []),
    "variant kind": put("programs.0.variants.0.kind", "symbolic"),
    "dynamic with size": put("programs.0.variants.0.size", 4),
    "static without size": put("programs.0.variants.1.size", None),
    "variant outside": put("programs.0.variants.0.high", 65),
    "variant reversed": put("programs.0.variants.0.low", 65),
    "piece name traversal": put("programs.0.unique.0.name", "../x"),
    "piece name hidden": put("programs.0.unique.0.name", ".x"),
    "piece digest": put("programs.0.unique.0.digest", "x"),
    "op with escape": put("programs.0.unique.0.ops.0", "\x1b[2J"),
    "ops a string": put("programs.0.unique.0.ops", "aten.mm"),
    "program outside": put("programs.0.max_tokens", 65),
    "programs an object": put("programs", {}),
    "identity with escape": put("model.identity", "llama\x1b]0;x\x07"),
    "identity too long": put("model.identity", "x" * 5000),
    "args a list": put("model.args", []),
    "device a path": put("device.type", "../cpu"),
    "profile a path": put("profile", "a/b"),
    "source traversal": put("sources.0.path", "../../etc/passwd"),
    "source absolute": put("sources.0.path", "/etc/passwd"),
    "source kind": put("sources.0.kind", "pickle"),
    "requirement a string": put("requirements.0", "linux"),
    "counts text": put("counts.pieces", "3"),
    "counts float": put("counts.pieces", 3.5),
    "null manifest field": put("model", None),
    "missing field": lambda body: body.pop("torch"),
    "about differs": put("torch", "9.9"),
    "deep": put("model.args.x", json.loads("[" * 70 + "]" * 70)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_fields(name: str, manifest: Manifest) -> None:
    with pytest.raises(CorruptEntry):
        Manifest.parse(resealed(manifest, HOSTILE[name]))


@pytest.mark.parametrize(
    "body",
    [
        b'{"schema":1,"schema":1}',
        b'{"x":NaN}',
        b'{"x":Infinity}',
        b'{"x":' + b"9" * 400 + b"}",
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":"\xff"}',
        b"{}",
        b"[]",
        b"",
    ],
)
def test_hostile_bytes(body: bytes, manifest: Manifest) -> None:
    with pytest.raises(CorruptEntry):
        Manifest.parse(about.seal(about.About.of(manifest), body))
    with pytest.raises(CorruptEntry):
        Manifest.parse(body)


@pytest.mark.parametrize("head", [b"1", b"[", b"{", b'{"a":1}', b'{"schema":1}', b"[" * 100_000, b'"\xff"'])
def test_hostile_heads(head: bytes) -> None:
    with pytest.raises(CorruptEntry):
        Manifest.parse(b'{"about":' + head)


def test_serialise_refuses_what_could_not_be_read_back(manifest: Manifest) -> None:
    absent = BlobDigest("0" * 64)
    for bad in (
        replace(manifest, sizes=(65,)),
        replace(manifest, predicates=absent),
        replace(manifest, profile="a/b"),
        replace(manifest, counts={"x": 2**70}),
    ):
        with pytest.raises(CorruptEntry):
            bad.serialise()


def test_about_follows_the_fields(manifest: Manifest) -> None:
    found = about.split(replace(manifest, counts={"unsealed": 2}).serialise(), where="test")[0]
    assert (found.pieces, found.unique, found.variants, found.records, found.unsealed) == (3, 3, 2, 6, 2)
    assert found.bytes == sum(manifest.blobs.values())


def test_non_ascii_arguments(manifest: Manifest) -> None:
    model = replace(manifest.model, args={"name": "größe 模型"}, tree_digest=factor_digest(b"x"))
    changed = replace(manifest, model=model)
    assert Manifest.parse(changed.serialise()) == changed
