from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from pwcc.cache import owners
from pwcc.cache.owners import Owner


def test_this_process_is_alive_and_names_nobody() -> None:
    owner = owners.current()
    assert owner.pid == os.getpid()
    assert owner.is_local
    assert owner.is_alive() is True
    assert owners.parse(str(owner)) == owner
    assert platform.node() not in str(owner)
    name = owners.staging_name()
    assert owners.parse(name) == owner
    assert owners.staging_name() != name


def test_a_number_that_was_given_out_again_is_another_owner() -> None:
    owner = owners.current()
    assert Owner(owner.host, owner.pid, owner.start - 1).is_alive() is False
    assert Owner("0" * 12, owner.pid, owner.start).is_alive() is None


def test_a_dead_process() -> None:
    code = "from pwcc.cache import owners; print(owners.current())"
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    owner = owners.parse(text.strip())
    assert owner is not None
    assert owner.is_local
    assert owner.is_alive() is False


def test_a_fork_is_another_owner() -> None:
    before = owners.current()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(owners.current()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = owners.parse(os.read(read, 200).decode())
    os.close(read)
    os.close(write)
    assert found is not None
    assert (found.pid, before.pid) == (child, os.getpid())


@pytest.mark.parametrize("text", ["", "x", "0-1-2", "0" * 12 + "-1", "0" * 32])
def test_other_names_have_no_owner(text: str) -> None:
    assert owners.parse(text) is None


def test_a_huge_number_is_a_dead_process() -> None:
    assert Owner(owners.host_id(), 9_999_999_999, 1).is_alive() is False
