"""Every parser of the store's bytes against files made to break it: one kind of error, bounded cost."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pwcc.cache import about, elf, strict
from pwcc.cache.errors import CorruptEntry, PwccError
from pwcc.cache.factors import FactorTree
from pwcc.cache.ids import blob_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.requirements import Requirement
from pwcc.cache.sealed import CompiledProgram, CppKernel, InputFacts, SealedPiece, TritonKernel
from pwcc.cache.signing import Signature
from pwcc.cache.signing_keys import PublicKey
from pwcc.cache.store import Store
from tests.hostile import changed, encoded, hostile, only_expected, spoiled

Parse = Callable[[bytes], object]
fuzz = settings(max_examples=150, deadline=2000)

SEALED = SealedPiece(
    source=blob_digest(b"program"),
    code=CompiledProgram("a70d0d0a", blob_digest(b"code")),
    device_type="cuda",
    inputs=(InputFacts("symint", value="u0"), InputFacts("tensor", "float32", ("u0", 8), (8, 1))),
    outputs=1,
    mutated=(1,),
    realigned=(1,),
    aligned=(),
    kernels=(
        TritonKernel("k", blob_digest(b"k"), "k", 0, 4, "OOi", "9.0", "XBLOCK=4", ("xnumel", "1", "1"), 32, 0),
        CppKernel("c", blob_digest(b"c"), ("float*",)),
    ),
    externs=("mm",),
    fallbacks=("aten::sort.stable",),
    ops=("aten.mm.default",),
    constants=None,
    tuned=False,
    requirements=(Requirement("cpu_flags", ("avx2",)), Requirement("os", "linux")),
).to_bytes()
FACTORS = strict.canonical(
    FactorTree.of(
        environment={"A": None}, configuration={"sizes": [1, {"x": 2.5}]}, compiler={"t": "2"}
    ).to_json()
)
SIGNATURE = Signature(PublicKey(bytes(32)), bytes(64)).to_bytes()


def factors(data: bytes) -> object:
    return FactorTree.from_json(strict.loads(data, where="factors"))


@fuzz
@given(hostile(SEALED))
def test_piece_records(data: bytes) -> None:
    only_expected(lambda data: SealedPiece.from_bytes(data, where="piece"), data)


@fuzz
@given(hostile(FACTORS))
def test_factors(data: bytes) -> None:
    only_expected(factors, data)


@fuzz
@given(hostile(SIGNATURE))
def test_signature_files(data: bytes) -> None:
    only_expected(lambda data: Signature.parse(data, where="signature"), data)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, put_entry: Callable[..., Manifest]) -> Manifest:
    return put_entry(Store.create(tmp_path_factory.mktemp("cache")))


@fuzz
@given(st.data())
def test_manifests(manifest: Manifest, data: st.DataObject) -> None:
    """The digest in the head keeps accidents out; an attacker computes it. Head and body are changed."""
    sealed = manifest.serialise()
    head, body = about.split(sealed, where="test")
    kind = data.draw(st.sampled_from(("body", "bytes", "whole")))
    if kind == "whole":
        changed_data = data.draw(spoiled(sealed))
    elif kind == "bytes":
        changed_data = about.seal(head, data.draw(spoiled(body)))
    else:
        changed_data = about.seal(head, encoded(data.draw(changed(json.loads(body)))))
    only_expected(Manifest.parse, changed_data)


@fuzz
@given(st.data())
def test_heads_of_manifests(manifest: Manifest, data: st.DataObject) -> None:
    _, body = about.split(manifest.serialise(), where="test")
    rest = b"," + body[1:]
    head = json.loads(about.seal(about.About.of(manifest), body)[len(b'{"about":') : -len(rest)])
    changed_head = data.draw(changed(head))
    only_expected(Manifest.parse, b'{"about":' + encoded(changed_head) + rest)


@settings(max_examples=300, deadline=2000)
@given(st.data())
def test_shared_objects(data: st.DataObject) -> None:
    whole = Path(sys.modules["xxhash._xxhash"].__file__ or "").read_bytes()
    start = data.draw(st.integers(0, 8192))
    damaged = whole[:start] + data.draw(st.binary(min_size=1, max_size=16)) + whole[start + 8 :]
    cut = damaged[: data.draw(st.integers(0, len(damaged)))]
    for case in (damaged, cut):
        only_expected(lambda data: elf.needed_versions(data, where="object"), case)


# Strict JSON: what a parser that is only correct would let through


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":1e999}',
        b'{"x":-1e999}',
        b'{"x":1.' + b"0" * 100 + b"}",
        b'{"x":"\\ud800"}',
        b'{"\\udfff":1}',
        b'["\\uDC00\\uD800"]',
        b"\xef\xbb\xbf{}",
        b'{"x":"\xed\xa0\x80"}',
        b"{}\x00",
        b"\x00{}",
        "{}".encode("utf-16"),
    ],
)
def test_what_no_writer_of_ours_writes(text: bytes) -> None:
    with pytest.raises(CorruptEntry, match="test"):
        strict.loads(text, where="test")


@pytest.mark.parametrize("text", [b'"\\ud83d\\ude00"', b'"\\\\ud800"', b'{"x":1.5e-300}', b"[1e15]"])
def test_what_only_looks_like_it(text: bytes) -> None:
    assert strict.loads(text, where="test") == json.loads(text)


def test_messages_hold_a_bounded_part_of_what_came() -> None:
    huge = "x" * 10**6
    for value in (huge, [huge], {huge: 1}, [[huge] * 50] * 50, list(range(10**5))):
        fields = strict.Fields({"a": value}, "test")
        with pytest.raises(CorruptEntry) as caught:
            fields.int_("a")
        assert len(str(caught.value)) < 300
    with pytest.raises(CorruptEntry) as caught:
        strict.Fields({huge: 1}, "test").done()
    assert len(str(caught.value)) < 300


# Bounded: the worst files that fit under the limits, in a process that may use little


WORST = """
import resource, sys, time
from pathlib import Path
from pwcc.cache import about, strict
from pwcc.cache.errors import PwccError
from pwcc.cache.factors import FactorTree
from pwcc.cache.ids import factor_digest
from pwcc.cache.manifest import Manifest
from pwcc.cache.sealed import SealedPiece

MAX = strict.MAX_BYTES
def fill(piece, begin, end):
    return begin + piece * ((MAX - len(begin) - len(end)) // len(piece)) + end
million = b'{"blobs":{' + b",".join(b'"%064x":1' % n for n in range(600_000)) + b"}}"
cases = {
    "brackets": b"[" * MAX,
    "objects": fill(b"{},", b"[", b"1]"),
    "lists": fill(b"[],", b"[", b"1]"),
    "numbers": fill(b"1,", b"[", b"1]"),
    "digits": fill(b"9", b"[", b"]"),
    "fraction": fill(b"9", b"[1.", b"]"),
    "string": fill(b"x", b'["', b'"]'),
    "escapes": fill(b"\\\\u0041", b'["', b'"]'),
    "surrogates": fill(b"\\\\ud800", b'["', b'"]'),
    "keys": million,
    "deep lists": b"[" * 60 + fill(b"[1],", b"[", b"1]")[: MAX - 200] + b"]" * 60,
}
parsers = {
    "loads": lambda data: strict.loads(data, where="x"),
    "manifest": lambda data: Manifest.parse(b'{"about":' + data),
    "piece": lambda data: SealedPiece.from_bytes(data, where="x"),
    "factors": lambda data: FactorTree.from_json(strict.loads(data, where="x")),
}
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for case, data in cases.items():
    for name, parse in parsers.items():
        started = time.process_time()
        try:
            parse(data)
            ending = "parsed"
        except PwccError as error:
            ending = type(error).__name__
            assert len(str(error)) < 3000, (case, name)
        print(case, name, ending, round(time.process_time() - started, 2), sep="|", flush=True)
"""


@pytest.mark.slow
def test_the_worst_files_cost_bounded_time_and_memory() -> None:
    """64 MiB each, in an address space of 1 GiB: no MemoryError, no crash, seconds at most."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WORST)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert len(rows) == 44
    for case, name, ending, seconds in rows:
        assert ending == "CorruptEntry" or (name == "loads" and case in ("string", "escapes", "keys")), (
            case,
            name,
        )
        assert float(seconds) < 10, (case, name, seconds)


def test_a_pipe_in_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptEntry, match="plain file"):
        strict.read_bounded(tmp_path / "pipe")


def test_a_large_limit_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"{}")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, hard))
    try:
        assert strict.read_bounded(tmp_path / "small", max_bytes=2**33) == b"{}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_every_error_of_a_parser_is_ours() -> None:
    """The helper of these tests would let nothing else pass."""
    assert only_expected(lambda data: data, b"")
    with pytest.raises(ValueError, match="other"):
        only_expected(lambda data: (_ for _ in ()).throw(ValueError("other")), b"")
    assert issubclass(CorruptEntry, PwccError)
