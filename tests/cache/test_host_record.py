"""A host's record comes from another machine: it is parsed strictly, and a bad one is one clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pwcc.cache import strict
from pwcc.cache.errors import UsageError
from pwcc.cache.host_record import MAX_BYTES, DeviceFacts, HostRecord, read_host_record
from pwcc.cache.policy import Policy, SiteEnvironment

RECORD = HostRecord(
    pwcc="0.1.0",
    python="3.11.4",
    torch="2.13.0 abc",
    device=DeviceFacts("cuda", "NVIDIA H200", "9.0", "13.0", None),
    facts={"os": "linux", "glibc": None, "cpu_flags": ("avx", "avx2")},
    numeric_state={"default_dtype": "torch.float32", "deterministic": False},
    environment={"OMP_NUM_THREADS": "4"},
    site=SiteEnvironment(Policy.of(include=["MYAPP"]), {"MYAPP": "x"}),
)


def write(path: Path, value: object) -> Path:
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def test_round_trip(tmp_path: Path) -> None:
    path = write(tmp_path / "host.json", json.dumps(RECORD.to_json(), indent=2).encode())
    assert read_host_record(path) == RECORD
    data = strict.canonical(RECORD.to_json())
    assert strict.canonical(HostRecord.parse(strict.loads(data, where="x"), "x").to_json()) == data


def changed(**fields: object) -> dict[str, object]:
    return {**RECORD.to_json(), **fields}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"[]", "expected an object"),
        (b'{"schema": 1}', "expected a field"),
        (b'{"schema": 1, "schema": 1}', "duplicate key"),
        (b"[" * 100_000, "expected"),
        (b"\xff", "expected JSON"),
        (changed(schema=2), "schema 1, got 2"),
        (changed(more=1), "unknown fields"),
        (changed(torch="2.13\x1b[31m"), "printable"),
        (
            changed(device={"type": "tpu", "name": None, "capability": None, "cuda": None, "machine": None}),
            "cpu or cuda",
        ),
        (changed(device={"type": "cpu"}), "expected a field"),
        (changed(facts={"os": 1}), "expected a string"),
        (changed(facts={"os": ["x"] * 2000}), "expected a string"),
        (changed(facts={"shoe_size": "44"}), "facts that this pwcc knows"),
        (changed(environment={"A": None}), "expected a string"),
        (changed(environment={"A\x1b[2J": "1"}), "printable"),
        (changed(numeric_state={"a\nb": "1"}), "printable"),
        (changed(site_environment={"include": ["*"], "exclude": [], "values": {}}), "patterns"),
    ],
)
def test_a_bad_record_is_one_clear_error(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_host_record(write(tmp_path / "host.json", value))
    assert "host.json" in str(caught.value.where)
    assert "pwcc env" in str(caught.value.hint)


def test_no_file_and_too_much(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reading failed"):
        read_host_record(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="at most"):
        read_host_record(write(tmp_path / "big.json", b" " * (MAX_BYTES + 1)))
