"""``pwcc key``, ``pwcc env`` and the options of the environment policy; nothing is compiled here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pwcc.cache.host_record import read_host_record
from pwcc.cache.store import Store
from tests.cli.conftest import Run

MODEL = ("--model", "llama-tiny", "--arg", "layers=1", "--device", "cpu")


def test_the_tree_known_before_a_trace(run: Run) -> None:
    done = run("key", *MODEL, "--sizes", "1,2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert len(found["lookup_key"]) == 32
    assert set(found["known"]) == {"environment", "configuration", "compiler"}
    assert found["known"]["configuration"]["factors"]["model"] == "builtin:llama-tiny"
    assert found["known"]["configuration"]["factors"]["model arguments"] == {"layers": 1}
    assert found["lookup"]["device"]["type"] == "cpu"
    assert (found["entry_key"], found["after_tracing"]) == (None, None)
    again = json.loads(run("key", *MODEL, "--sizes", "1,2", "--json").stdout)
    assert again == found
    other = json.loads(run("key", *MODEL, "--sizes", "1", "--json").stdout)
    assert other["lookup_key"] == found["lookup_key"]  # sizes are no part of it
    groups = found["known"]
    changed = [name for name in groups if groups[name]["digest"] != other["known"][name]["digest"]]
    assert changed == ["configuration"]


def test_as_text(run: Run) -> None:
    done = run("key", *MODEL)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("lookup key  ")
    assert lines[1] == "entry key   known after tracing"
    assert "known after tracing; --cache-dir shows" in lines[-1]


def test_the_variable_names_the_cache_and_one_where_nothing_is_yet_is_no_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWCC_CACHE_DIR", str(tmp_path / "nothing"))
    assert run("key", *MODEL).returncode == 0
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("PWCC_CACHE_DIR", str(tmp_path / "file"))
    done = run("key", *MODEL)
    assert done.returncode == 1
    assert "expected a pwcc cache directory" in done.stderr


def test_without_a_model_is_a_usage_error(run: Run) -> None:
    done = run("key")
    assert done.returncode == 2
    assert "--show-policy" in done.stderr


def test_the_policy_is_shown_with_every_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("MYAPP_TOKEN", "abc")
    options = ("key", "--show-policy", "--env-include", "MYAPP_*", "--env-exclude", "OMP_*")
    done = run(*options)
    assert done.returncode == 0
    text = done.stdout
    assert text.index("excluded by this site") < text.index("included by this site") < text.index("read, with")
    assert "TORCHINDUCTOR_FREEZING" in text
    assert "*_DIR: a location" in text
    assert "abc" not in text
    assert "/somewhere" not in text
    found = json.loads(run(*options, "--json").stdout)
    assert found["site"] == {"include": ["MYAPP_*"], "exclude": ["OMP_*"]}
    assert all(line["pattern"] and line["reason"] for line in (*found["read"], *found["excluded"]))
    assert found["here"]["TORCHINDUCTOR_FREEZING"]["factor"] is True
    assert found["here"]["TORCHINDUCTOR_CACHE_DIR"]["factor"] is False
    assert found["here"]["MYAPP_TOKEN"] == {"factor": True, "pattern": "MYAPP_*", "reason": "the site's policy"}


def test_a_configuration_file_is_found_and_added_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    empty = tmp_path / "work"
    empty.mkdir()
    monkeypatch.chdir(empty)

    def site(*options: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads(run("key", "--show-policy", "--json", *options).stdout)["site"]
        return found

    assert site() == {"include": [], "exclude": []}
    users = tmp_path / "config" / "pwcc" / "pwcc.toml"
    users.parent.mkdir(parents=True)
    users.write_text('[environment]\ninclude = ["FROM_USER"]\n')
    assert site()["include"] == ["FROM_USER"]
    (empty / "pwcc.toml").write_text('[environment]\ninclude = ["FROM_HERE"]\n')
    assert site("--env-include", "MORE")["include"] == ["FROM_HERE", "MORE"]
    named = tmp_path / "named.toml"
    named.write_text('[environment]\nexclude = ["A"]\n')
    assert site("--config", str(named)) == {"include": [], "exclude": ["A"]}


@pytest.mark.parametrize(
    "command", [("key", "--show-policy"), ("env",), ("explain", *MODEL), ("compile", *MODEL)]
)
def test_a_bad_configuration_is_one_usage_error(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "pwcc.toml"
    path.write_text("[environment]\ninclud = []\n")
    with_cache = command[0] in ("explain", "compile")
    cache = ("--cache-dir", Store.create(tmp_path / "cache").root) if with_cache else ()
    done = run(*command, *cache, "--config", path)
    assert done.returncode == 2
    assert "unknown key environment.includ" in done.stderr
    assert str(path) in done.stderr


def test_env_is_what_explain_reads(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYAPP_MODE", "fast")
    done = run("env", "--device", "cpu", "--env-include", "MYAPP_*", "--json")
    assert done.returncode == 0
    path = tmp_path / "host.json"
    path.write_text(done.stdout)
    record = read_host_record(path)
    assert record.environment["MYAPP_MODE"] == "fast"
    assert record.site.values == {"MYAPP_MODE": "fast"}
    assert record.facts["os"] == "linux"
    assert record.device.type == "cpu"
    text = run("env", "--device", "cpu", "--env-include", "MYAPP_*").stdout
    assert "MYAPP_MODE" in text
    assert "global numeric modes" in text
