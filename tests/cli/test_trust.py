"""Keys and signatures from the command line: what is made, what is said, and the exit codes."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pwcc.cache.signing import FOLDER
from pwcc.cache.store import Store

from .conftest import Publish, Run


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, and no setting of the person who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    monkeypatch.setenv("PWCC_TRUSTED_KEYS", str(tmp_path / "trust"))
    monkeypatch.delenv("PWCC_REQUIRE_SIGNATURE", raising=False)


def test_make_trust_list_and_remove(run: Run, tmp_path: Path) -> None:
    key = tmp_path / "ci.pem"
    made = run("trust", "keygen", key, "--json")
    assert made.returncode == 0
    told = json.loads(made.stdout)
    assert told["private"] == str(key)
    assert told["public"] == f"{key}.pub"
    assert "PRIVATE" not in made.stdout + made.stderr
    assert stat.S_IMODE(key.stat().st_mode) == 0o600

    assert run("trust", "ls").stdout == ""
    assert f"trusted: {told['key']} as ci.pem" in run("trust", "add", f"{key}.pub").stdout
    assert (
        f"trusted already: {told['key']} as ci"
        in run("trust", "add", told["public_key"], "--name", "ci").stdout
    )
    assert run("trust", "ls").stdout.splitlines()[1].split() == [told["key"], "ci"]
    listed = json.loads(run("trust", "ls", "--json").stdout)
    assert listed["keys"] == [{"key": told["key"], "name": "ci", "public_key": told["public_key"]}]
    assert run("trust", "rm", "nobody").returncode == 2
    assert run("trust", "rm", "ci").returncode == 0
    assert json.loads(run("trust", "ls", "--json").stdout)["keys"] == []


@pytest.mark.parametrize("again", [("trust", "keygen"), ("trust", "keygen", "--json")])
def test_the_users_own_key(run: Run, tmp_path: Path, again: tuple[str, ...]) -> None:
    assert run("trust", "keygen").returncode == 0
    path = tmp_path / "home" / "config" / "pwcc" / "signing-key.pem"
    before = path.read_bytes()
    done = run(*again)
    assert (done.returncode, "never overwritten" in done.stderr) == (2, True)
    assert path.read_bytes() == before


def test_sign_and_see(run: Run, publish: Publish, store: Store, tmp_path: Path) -> None:
    publish("aaaa")
    publish("bbbb")
    run("trust", "keygen", tmp_path / "k")
    done = run("sign", "aaaa", "--key", tmp_path / "k", "--cache-dir", store.root)
    assert (done.returncode, done.stdout[:11]) == (0, "signed aaaa")
    shown = run("inspect", store.root, "aaaa").stdout
    assert "valid, by " in shown
    assert "not trusted here" in shown
    run("trust", "add", tmp_path / "k.pub", "--name", "ci")
    assert "trusted as ci" in run("inspect", store.root, "aaaa").stdout
    (state,) = json.loads(run("inspect", store.root, "aaaa", "--json").stdout)["signatures"]
    assert (state["valid"], state["name"]) == (True, "ci")
    assert json.loads(run("inspect", store.root, "bbbb", "--json").stdout)["signatures"] == []

    every = run("sign", "--all", "--key", tmp_path / "k", "--cache-dir", store.root, "--json")
    assert len(json.loads(every.stdout)["entries"]) == 2
    assert len(json.loads(run("inspect", store.root, "bbbb", "--json").stdout)["signatures"]) == 1


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("sign",), 2, "--all"),
        (("sign", "aaaa", "--all"), 2, "--all"),
        (("sign", "aaaa"), 2, "pwcc trust keygen"),
        (("sign", "cccc", "--key", "KEY"), 2, "no entry's key begins with 'cccc'"),
        (("sign", "aaaa", "--key", "KEY.pub"), 2, "expected a private key"),
        (("trust", "add", "KEY"), 2, "got a private one"),
        (("trust", "add", "absent"), 2, "expected a key file, found none"),
    ],
)
def test_what_goes_wrong_is_said_once(
    run: Run, publish: Publish, store: Store, tmp_path: Path, argv: tuple[str, ...], code: int, said: str
) -> None:
    entry = publish("aaaa")
    key = tmp_path / "key.pem"
    run("trust", "keygen", key)
    words = [word.replace("KEY", str(key)) for word in argv]
    done = run(*words, *(("--cache-dir", store.root) if argv[0] == "sign" else ()))
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (entry / FOLDER).exists()


def test_a_key_that_others_may_read_is_a_warning(
    run: Run, publish: Publish, store: Store, tmp_path: Path
) -> None:
    publish("aaaa")
    run("trust", "keygen", tmp_path / "k")
    (tmp_path / "k").chmod(0o644)
    done = run("sign", "aaaa", "--key", tmp_path / "k", "--cache-dir", store.root)
    assert (done.returncode, "warning: others may read" in done.stderr) == (0, True)


def test_unsafe_trusted_keys_do_not_hide_an_entry(
    run: Run, publish: Publish, store: Store, tmp_path: Path
) -> None:
    publish("aaaa")
    run("trust", "keygen", tmp_path / "k")
    run("trust", "add", tmp_path / "k.pub")
    run("sign", "aaaa", "--key", tmp_path / "k", "--cache-dir", store.root)
    (tmp_path / "trust").chmod(0o777)
    done = run("inspect", store.root, "aaaa")
    assert done.returncode == 0
    assert "warning: no key counts as trusted" in done.stderr
    assert "not trusted here" in done.stdout
    assert run("trust", "ls").returncode == 1


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "a\x1b]0;title\x07", "back\x08space", "\x9b2J", "right\u202eleft"]
)
def test_what_a_cache_holds_does_not_control_the_terminal(
    run: Run, publish: Callable[..., Path], toy: object, store: Store, text: str
) -> None:
    from dataclasses import replace

    from pwcc.cache.manifest import Manifest

    assert isinstance(toy, Manifest)
    publish("aaaa", model=replace(toy.model, args={"x": text, text: 1}))
    for argv in (("inspect", store.root), ("inspect", store.root, "aaaa")):
        done = run(*argv)
        assert done.returncode == 0
        assert all(line.isprintable() for line in done.stdout.splitlines()), done.stdout
        assert text not in done.stdout + done.stderr
