"""Nothing of who compiled, and where, is in an entry: planted secrets are searched in every file."""

from __future__ import annotations

import base64
import getpass
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Machine

pytestmark = pytest.mark.slow

MODEL = """
# COMMENT-gatto-7f3a: do not ship
import os
import torch
from torch import nn

KEY = os.environ["API_KEY"]

class Tiny(nn.Module):
    '''DOCSTRING-volpe-91cc'''
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.where = "at " + os.environ["DATABASE_URL"]
        self.hub = {"t": os.environ["HF_TOKEN"]}
        self.limit = len(os.environ["TINY_LIMIT"])  # COMMENT-grillo-2b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # COMMENT-balena-55d1
        y = torch.relu(self.proj(x)) * self.limit
        if KEY.startswith("sk") and self.where != "" and self.hub["t"] != "":
            y = y * 3
        return torch.softmax(y, -1) + 1.0

def factory() -> Tiny:
    print("STDOUT-lucignolo-3")
    return Tiny().eval()
"""

SECRETS = {
    "API_KEY": "sk-mastro-ciliegia-0042",
    "TINY_LIMIT": "OBSERVED-fatina-1881",
    "HF_TOKEN": "hf_melampo_31337",
    "AWS_SECRET_ACCESS_KEY": "aws-alidoro-77",
    "TORCHINDUCTOR_SECRET_PATH": "/srv/eugenio-inductor",
    "DATABASE_URL": "postgres://mangiafoco:pw@db.internal/x",
    "HTTP_PROXY": "http://proxyuser-romeo:pw@127.0.0.1:9",
    "HOSTNAME": "builder-campo-dei-miracoli",
    "SLURM_JOB_ID": "job-acchiappacitrulli",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Machine]:
    """One small model, compiled by somebody with secrets, in folders that say who they are."""
    root = tmp_path_factory.mktemp("leaks")
    machine = Machine.make(root / "polendina-machine", "antonio-the-builder")
    model = machine.folder("home") / "checkout-of-geppo" / "tiny_model.py"
    model.parent.mkdir()
    model.write_text(MODEL)
    cache = root / "store-of-the-whale"
    machine.pwcc(
        "compile", "--model", f"{model}:factory", "--input", "x:float32[n,8]", "--max-tokens", "16",
        "--splitting-ops", "", "--device", "cpu", "--cache-dir", cache, code=0, **SECRETS,
    )  # fmt: skip
    return cache, machine


def planted(cache: Path, machine: Machine) -> Iterator[tuple[str, str]]:
    yield from SECRETS.items()
    for word in re.findall(r"(?:COMMENT|DOCSTRING|STDOUT)-[\w-]+", MODEL):
        yield "source", word
    for part in ("home", "tmp", "work", "caches"):
        yield part, machine.folder(part).name
    yield "user", "antonio-the-builder"
    yield "checkout", "checkout-of-geppo"
    yield "store", cache.name
    yield "machine", "polendina-machine"
    yield "interpreter", sys.prefix
    yield "repository", f"{REPOSITORY}/"
    if len(socket.gethostname()) > 5:
        yield "host", socket.gethostname()
    if len(getpass.getuser()) > 5:
        yield "login", getpass.getuser()


def forms(text: str) -> Iterator[bytes]:
    """The text as it may lie in a file: plain, as UTF-16, in hexadecimal, in base64 at any offset."""
    data = text.encode()
    yield data
    yield text.encode("utf-16-le")
    yield data.hex().encode()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + data)
        yield encoded[(0, 2, 3)[offset] : len(encoded) - 4]


def test_no_file_of_a_store_holds_a_secret(built: tuple[Path, Machine]) -> None:
    cache, machine = built
    files = [path for path in cache.rglob("*") if path.is_file() and path.parent.name not in ("locks", "tmp")]
    assert len(files) > 10
    kinds = {data[:4] == b"\x7fELF" for data in map(Path.read_bytes, files)}
    assert kinds == {True, False}, "a shared object is among them"
    found = [
        (str(path.relative_to(cache)), what, text)
        for path in files
        for what, text in planted(cache, machine)
        if any(form in path.read_bytes() for form in forms(text)) or text in str(path.relative_to(cache))
    ]
    assert found == []


def test_no_file_names_a_place_of_the_file_system(built: tuple[Path, Machine]) -> None:
    """Absolute paths of any machine, but for those that every Linux has."""
    cache, _ = built
    pattern = re.compile(rb"/(?:home|root|tmp|work|var/tmp|Users|mnt|srv|usr/local|opt)/[\w.\-/]+")
    found = {
        (path.name, match.decode())
        for path in cache.rglob("*")
        if path.is_file() and path.name not in ("README", "CACHEDIR.TAG") and path.parent.name != "locks"
        for match in pattern.findall(path.read_bytes())
    }
    assert found == set()


def test_shared_objects_are_stripped(built: tuple[Path, Machine]) -> None:
    cache, _ = built
    objects = [p for p in cache.rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\x7fELF"]
    assert objects
    for path in objects:
        done = subprocess.run(["readelf", "-SW", str(path)], capture_output=True, text=True, check=True)
        names = re.findall(r"\] (\.\S+)", done.stdout)
        assert names
        assert [
            n for n in names if n.startswith((".debug", ".symtab", ".comment.", ".note.gnu.build-id"))
        ] == []


def test_what_was_observed_still_decides(built: tuple[Path, Machine]) -> None:
    """The value is not stored, and another one of it is another key: a digest is."""
    cache, machine = built
    model = machine.folder("home") / "checkout-of-geppo" / "tiny_model.py"
    load = ("load", cache, "--model", f"{model}:factory", "--input", "x:float32[n,8]", "--device", "cpu")
    assert machine.pwcc(*load, code=0, **SECRETS).returncode == 0
    for name in ("TINY_LIMIT", "API_KEY", "DATABASE_URL", "HF_TOKEN"):
        done = machine.pwcc(*load, code=3, **{**SECRETS, name: "postgres://another-one:pw@db"})
        assert SECRETS[name] not in done.stdout + done.stderr
        assert "another-one" not in done.stdout + done.stderr


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    text = "sk-mastro-ciliegia-0042"
    coded = [base64.b64encode(b"x" * number + text.encode() + b"tail") for number in range(3)]
    for number, data in enumerate(
        (*coded, text.encode(), text.encode("utf-16-le"), text.encode().hex().encode())
    ):
        assert any(form in b"head " + data + b" tail" for form in forms(text)), number
