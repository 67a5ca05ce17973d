"""The off switches on the command line: what each refuses, what each shows, and that no key holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pwcc.cache.host_record import read_host_record
from pwcc.cli import main

MODEL = ("--model", "llama-tiny", "--arg", "layers=1", "--device", "cpu")


def answer(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 0) -> dict[str, Any]:
    assert main([*map(str, argv), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_env_and_key_show_them_and_no_key_holds_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {"PWCC_DISABLE": False, "PWCC_RECACHE": False, "PWCC_FROZEN": False}
    before = answer(capsys, "key", *MODEL)
    assert before["switches"] == off
    monkeypatch.setenv("PWCC_RECACHE", "yes")
    monkeypatch.setenv("PWCC_LEVEL", "2")
    after = answer(capsys, "key", *MODEL)
    assert after["switches"] == {**off, "PWCC_RECACHE": True}
    assert {**before, "switches": None} == {**after, "switches": None}
    assert answer(capsys, "env", "--device", "cpu")["switches"] == {**off, "PWCC_RECACHE": True}
    for command in (("env", "--device", "cpu"), ("key", *MODEL)):
        assert main(list(command)) == 0
        lines = capsys.readouterr().out.splitlines()
        start = lines.index("switches, which no key holds") + 1
        shown = lines[start : start + 3]
        assert [line.split()[0].rstrip(":") for line in shown] == list(off)
        assert [line.split()[1] in ("on", "yes") for line in shown] == [False, True, False]


def test_a_host_record_with_switches_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWCC_FROZEN", "1")
    host = tmp_path / "host.json"
    host.write_text(json.dumps(answer(capsys, "env", "--device", "cpu")))
    assert read_host_record(host).device.type == "cpu"


@pytest.mark.parametrize("command", [("env",), ("key", *MODEL), ("compile", *MODEL)])
def test_a_bad_value_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PWCC_DISABLE", "sometimes")
    assert main(list(command)) == 2
    assert "expected PWCC_DISABLE to be 1 or 0, got 'sometimes'" in capsys.readouterr().err


def test_disabled_commands_say_so_and_touch_no_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWCC_DISABLE", "1")
    cache = tmp_path / "cache"
    error = answer(capsys, "compile", *MODEL, "--cache-dir", cache, code=2)["error"]
    assert error["type"] == "CacheDisabled"
    assert "PWCC_DISABLE is on" in error["message"]
    assert not cache.exists()
    assert main(["compile", *MODEL, "--cache-dir", str(cache), "--frozen"]) == 2
    assert "PWCC_DISABLE and --frozen contradict each other" in capsys.readouterr().err


def test_disabled_a_load_is_refused_and_a_dry_run_and_an_inspection_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pwcc.cache.store import Store

    Store.create(tmp_path / "cache")
    monkeypatch.setenv("PWCC_DISABLE", "1")
    assert main(["load", str(tmp_path / "cache"), *MODEL]) == 2
    assert "a load has nothing to work with" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "cache")]) == 0
    assert main(["compile", *MODEL, "--dry-run"]) == 0


def test_frozen_by_the_environment_is_frozen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PWCC_FROZEN", "1")
    cache = tmp_path / "cache"
    error = answer(capsys, "compile", *MODEL, "--cache-dir", cache, code=3)["error"]
    assert (error["type"], error["where"]) == ("CacheMiss", str(cache))
    assert not cache.exists()
    monkeypatch.setenv("PWCC_RECACHE", "1")
    assert main(["compile", *MODEL, "--cache-dir", str(cache)]) == 2
    assert "PWCC_RECACHE and PWCC_FROZEN contradict each other" in capsys.readouterr().err
