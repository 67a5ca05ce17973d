"""What a model's code reads while it is built is seen, by who reads it; nothing stays wrapped."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pwcc.compile.model_ref import ModelRef, build
from pwcc.compile.observation import Observation
from pwcc.compile.observing import Recorder

Run = Callable[..., Observation]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run text as a module of the model's own, or of an installed package, and return what was seen."""

    def call(text: str, *, installed: bool = False, **names: object) -> Observation:
        folder = tmp_path / "site-packages" if installed else tmp_path
        folder.mkdir(exist_ok=True)
        path = folder / "observed_toy.py"
        path.write_text(textwrap.dedent(text))
        namespace = {"__name__": "observed_toy", "__file__": str(path), **names}
        code = compile(path.read_text(), str(path), "exec")
        with Recorder() as recorder:
            exec(code, namespace)
        return recorder.seen

    return call


@pytest.mark.parametrize(
    "text",
    [
        "os.environ['TOY_A'] if 'TOY_A' in os.environ else None",
        "os.environ.get('TOY_A')",
        "os.environ.get('TOY_A', 'x')",
        "os.getenv('TOY_A')",
        "'TOY_A' in os.environ",
        "'TOY_A' not in environ",
        "getenv(b'TOY_A'.decode())",
        "environ.get(''.join(['TOY', '_A']))",
        "os.environ.setdefault('TOY_A', 'x')",
        "os.path.expandvars('$TOY_A/x') if os.environ.get('TOY_A') else None",
        "os.environb.get(b'TOY_A')",
        "ChainMap(os.environ, {}).get('TOY_A')",
    ],
)
@pytest.mark.parametrize("value", [None, "1"])
def test_every_way_to_read_a_variable_is_seen(
    run: Run, monkeypatch: pytest.MonkeyPatch, text: str, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("TOY_A", raising=False)
    else:
        monkeypatch.setenv("TOY_A", value)
    seen = run(f"import os\nfrom os import environ, getenv\nfrom collections import ChainMap\n{text}\n")
    assert list(seen.environment) == ["TOY_A"]
    assert seen.environment["TOY_A"].where == "observed_toy.py:4"
    monkeypatch.delenv("TOY_A", raising=False)


def test_excluded_names_count_when_the_models_own_code_reads_them(run: Run) -> None:
    text = "import os\nos.environ.get('RANK'), os.environ.get('HF_HOME'), os.environ.get('TOY')"
    assert set(run(text).environment) == {"RANK", "HF_HOME", "TOY"}
    assert set(run(text, installed=True).environment) == {"RANK", "TOY"}  # a location is none of its business


def test_what_python_reads_on_its_own_account_does_not_count(run: Run) -> None:
    seen = run(
        """
        import os, shutil, tempfile, logging
        os.path.expanduser("~"), shutil.which("ls"), tempfile.gettempdir(), logging.getLogger("x")
        """
    )
    assert seen.environment == {}
    assert seen.places == {}


def test_an_installed_package_counts_when_it_is_called_not_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "observed_third.py").write_text(
        "import os\nAT_IMPORT = os.environ.get('THIRD_IMPORT')\n"
        "def called():\n    return os.environ.get('THIRD_CALL'), os.environ.get('THIRD_HOME')\n"
    )
    (tmp_path / "observed_user.py").write_text("import observed_third\nobserved_third.called()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with Recorder() as recorder:
        importlib.import_module("observed_user")
    assert set(recorder.seen.environment) == {"THIRD_CALL"}
    with Recorder({"observed_third"}) as recorder:  # the model itself comes from that package
        sys.modules.pop("observed_third")
        sys.modules.pop("observed_user")
        importlib.import_module("observed_user")
    assert set(recorder.seen.environment) == {"THIRD_CALL", "THIRD_HOME", "THIRD_IMPORT"}


@pytest.mark.parametrize(
    "text",
    ["dict(os.environ)", "len(os.environ)", "[k for k in os.environ]", "os.environ.copy()", "{**os.environ}"],
)
def test_a_look_through_the_whole_environment_is_seen(run: Run, text: str) -> None:
    seen = run(f"import os\n{text}\n")
    assert list(seen.iterated) == ["observed_toy.py:2"]
    seen = run(f"import os\ndef look():\n    {text}\nlook()\n", installed=True)
    assert seen.iterated == {}
    assert seen.environment == {}
    assert seen.surveyed_by == {"observed_toy"}


def test_a_dotenv_file_is_a_file_and_its_variables_are_variables(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOY_ACT", raising=False)
    (tmp_path / ".env").write_text("TOY_ACT=gelu\n")
    seen = run(
        """
        import os
        from pathlib import Path
        for line in (Path(__file__).parent / ".env").read_text().splitlines():
            name, _, value = line.partition("=")
            if name not in os.environ:
                os.environ[name] = value
        ACT = os.environ["TOY_ACT"]
        """
    )
    assert os.environ.pop("TOY_ACT") == "gelu"
    assert set(seen.environment) == {"TOY_ACT"}
    assert ("file", str(tmp_path / ".env")) in seen.places
    assert seen.rewritten == {}  # it was not there: nothing was read that is gone now


def test_a_variable_that_is_read_and_then_replaced_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_A", "1")
    seen = run("import os\nA = os.environ['TOY_A']\nos.environ['TOY_A'] = '2'\n")
    assert seen.rewritten == {"TOY_A": "observed_toy.py:3"}


def test_files_that_the_code_opens_are_seen_and_others_are_not(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json", "c.txt", "w.safetensors"):
        (tmp_path / name).write_text("1")
    (tmp_path / "observed_helper.py").write_text("X = 1")
    seen = run(
        """
        import os, sys
        from pathlib import Path
        sys.path.insert(0, os.path.dirname(__file__))
        open("a.json").close(), Path("b.json").read_text(), Path("c.txt").open().close()
        open("w.safetensors").close()
        try:
            open("missing.json")
        except FileNotFoundError:
            pass
        Path("made.txt").write_text("x")
        Path("made.txt").read_text()
        open("/proc/self/status").close()
        os.path.exists("maybe"), Path("b.json").exists(), os.listdir("."), sorted(Path(".").glob("*.json"))
        import observed_helper
        sys.path.pop(0)
        """
    )
    sys.modules.pop("observed_helper", None)
    read = {(kind, given) for kind, given in seen.places}
    assert {given for kind, given in read if kind == "file"} == {"a.json", "b.json", "c.txt", "missing.json"}
    assert ("path", "maybe") in read
    assert {kind for kind, given in read if given == "."} >= {"directory"}
    assert seen.unkeyed == {"/proc/self/status"}


def test_a_file_that_a_library_opens_for_the_code_is_seen(run: Run, tmp_path: Path) -> None:
    import configparser

    (tmp_path / "a.ini").write_text("[a]\nb = 1\n")
    seen = run(
        "import configparser\nconfigparser.ConfigParser().read(PATH)\n", PATH=str(tmp_path / "a.ini"), json=json
    )
    assert configparser.__name__ == "configparser"
    assert list(seen.places) == [("file", str(tmp_path / "a.ini"))]


def test_probes_of_modules_are_seen_present_absent_and_loaded(run: Run) -> None:
    seen = run(
        """
        import importlib, importlib.util
        from importlib.util import find_spec
        importlib.util.find_spec("toy_absent_a"), find_spec("pytest")
        try:
            import toy_absent_b.inner
        except ImportError:
            pass
        try:
            importlib.import_module("toy_absent_c")
        except ImportError:
            pass
        import pytest as _loaded, json as _stdlib
        """
    )
    assert set(seen.modules) == {"toy_absent_a", "toy_absent_b", "toy_absent_c", "pytest"}


def test_everything_is_as_it_was_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(os.environ)
    before = (kind.__getitem__, kind.__iter__, os.stat, builtins.__import__, importlib.util.find_spec)
    (tmp_path / "observed_taker.py").write_text(
        "from importlib.util import find_spec\nfrom os import stat\nfrom importlib import import_module\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    taker: Any = None
    with contextlib.suppress(ValueError), Recorder(), Recorder():
        assert kind.__getitem__ is not before[0]
        taker = importlib.import_module("observed_taker")
        raise ValueError("on purpose")
    assert before == (kind.__getitem__, kind.__iter__, os.stat, builtins.__import__, importlib.util.find_spec)
    assert (taker.find_spec, taker.stat) == (importlib.util.find_spec, os.stat)
    assert taker.import_module is importlib.import_module


FACTORY = """
import os
from torch import nn

AT_IMPORT = os.environ.get("TOY_IMPORT")


def factory(width: int = 4) -> nn.Module:
    os.environ.get("TOY_FACTORY")
    return nn.Linear(width, width)
"""


def test_a_build_is_observed_from_the_import_on_also_the_second_time(tmp_path: Path) -> None:
    path = tmp_path / "observed_factory.py"
    path.write_text(FACTORY)
    for _ in range(2):
        built = build(ModelRef.parse(f"{path}:factory"))
        assert set(built.observation.environment) == {"TOY_IMPORT", "TOY_FACTORY"}
        assert built.observation.complete


def test_a_module_that_was_imported_before_makes_the_build_unobserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "observed_early.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    early = importlib.import_module("observed_early")
    assert isinstance(early, types.ModuleType)
    built = build(ModelRef.parse("observed_early:factory"))
    assert set(built.observation.environment) == {"TOY_FACTORY"}
    assert not built.observation.complete


def test_a_built_in_model_is_observed_and_reads_nothing() -> None:
    seen = build(ModelRef.parse("llama-tiny"), args={"layers": 1}).observation
    assert seen == Observation()
