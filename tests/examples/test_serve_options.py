"""The server's options: what cannot be is one usage error, before torch allocates anything."""

from __future__ import annotations

import pytest

from tests.examples.conftest import module


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "99999"), "--port: expected 0 to 65535"),
        (("--port", "-1"), "--port: expected 0 to 65535"),
        (("--num-blocks", "1"), "--num-blocks: expected at least 2"),
    ],
)
def test_an_option_that_cannot_be(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        module("serve").parse(options)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_cache_without_room_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve.py", "--model", "llama-tiny", "--arg", "layers=1", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*argv, "--block-size", "999999999999999999"])
    assert module("serve").main() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory for a KV cache of")
    assert "lower --num-blocks or --block-size" in said
