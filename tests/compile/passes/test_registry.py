"""The text of ``--passes``: what it names, in which order, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import fx

from pwcc.cache.errors import TraceError, UsageError
from pwcc.compile.passes import registry
from pwcc.compile.passes.base import GraphPass, PassContext, PassSpec
from pwcc.compile.passes.registry import DEFAULT, make, resolve


@dataclass(frozen=True)
class Own(GraphPass):
    """A user's pass."""

    name: ClassVar[str] = "own"
    factor: int = 2
    word: str = "a"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        return 0

    def __post_init__(self) -> None:
        if self.factor < 0:
            raise ValueError("factor must not be negative")


class Plain(Own):
    """No dataclass itself: its option would be in no key."""

    def __init__(self, depth: int = 1) -> None:
        object.__setattr__(self, "depth", depth)


@dataclass(frozen=True)
class Nameless(GraphPass):
    """A pass without a name."""

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        return 0


@dataclass(frozen=True)
class Requiring(Own):
    """A pass whose requirements are no tuple."""

    requires: ClassVar[Any] = None


@dataclass(frozen=True)
class Lost(Own):
    """A pass that names a file that is not there."""

    name: ClassVar[str] = "lost"

    @classmethod
    def files(cls) -> list[Path]:
        return [Path("/nonexistent/table.txt")]


@dataclass(frozen=True)
class Pair(Own):
    """A pass with an option that is no plain value."""

    name: ClassVar[str] = "pair"
    both: Any = (1, 2)


OWN = f"{__name__}:Own"


def names(specs: tuple[PassSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def test_names() -> None:
    assert names(resolve("default")) == list(DEFAULT)
    assert resolve("none") == resolve("") == resolve([]) == ()
    assert names(resolve("noop")) == ["noop"]
    assert names(resolve(["noop", "fix_functionalization"])) == names(resolve(" noop , fix_functionalization"))


def test_fields_are_read_as_values_and_kept() -> None:
    (spec,) = resolve(f"{OWN}(factor=3, word=b)")
    assert spec.config == {"factor": 3, "word": "b"}
    assert make(spec) == Own(3, "b")
    assert resolve([Own(3, "b")]) == (spec,)
    assert PassSpec.parse(spec.to_json(), "here") == spec


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("nop", "got 'nop'", "did you mean noop"),
        ("noop,noop", "'noop' twice", ""),
        ("noop,none", "'none' alone", ""),
        ("noop(a=1)", "no option 'a'", "it has none"),
        (f"{OWN}(other=1)", "no option 'other'", "factor, word"),
        (f"{OWN}(factor=-1)", "must not be negative", ""),
        ("fix_functionalization", "needs noop before it", "--passes noop,fix_functionalization"),
        (f"default,{OWN}", "must be the last", f"--passes noop,{OWN},fix_functionalization"),
        ("noop,,", "got ','", ""),
        ("no.such.module:Pass", "No module named", ""),
        ("json:loads", "derived from", ""),
        (f"{__name__}:Missing", "Missing", ""),
        (":Own", "got ':Own'", ""),
        ("..:Own", "got '..:Own'", ""),
        ("pwcc.compile.passes.base:GraphPass", "to be a frozen dataclass with a __call__", "dataclass"),
        (f"{__name__}:Plain", "Plain to be a frozen dataclass", "its fields are its options"),
        (f"{__name__}:Nameless", "Nameless has no name", ""),
        (f"{__name__}:Requiring", "requires to be a tuple of names, got None", ""),
        (f"{__name__}:Lost", "cannot read a file of the pass 'lost'", ""),
        (f"{OWN}(factor=Infinity)", "expected a plain value for own.factor, got inf", ""),
        (f"{OWN}(word=NaN)", "expected a plain value for own.word, got nan", ""),
        (f"{__name__}:Pair", "expected a plain value for pair.both, got (1, 2)", ""),
        ("noop,rms_norm_static_fp8(max_tokens=1.5)", "whole numbers", ""),
        ("noop,rms_norm_static_fp8(max_tokens=true)", "whole numbers", ""),
        ("noop,rms_norm_static_fp8(cpu=1)", "true or false for cpu", ""),
    ],
)
def test_what_is_refused(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(text)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("given", [None, 5, [None], b"noop"])
def test_passes_of_another_type_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="a sequence of names and passes"):
        resolve(given)


def test_an_object_whose_options_no_key_would_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="frozen dataclass"):
        resolve([Plain(depth=2)])


def test_a_class_without_a_file_is_refused() -> None:
    made: Any = type("Made", (Own,), {"__module__": "nowhere"})
    with pytest.raises(UsageError, match="no file"):
        made.source_digest()


PASS = """
from dataclasses import dataclass
from pathlib import Path
from pwcc.compile.passes.base import GraphPass

@dataclass(frozen=True)
class P(GraphPass):
    name = "p"

    def __call__(self, graph, context):
        return 0

    @classmethod
    def files(cls):
        return [Path(__file__).with_name("table.txt")]
"""


def test_the_digest_covers_the_files_of_the_pass_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, table, beside = (tmp_path / name for name in ("my_pass_p.py", "table.txt", "beside.py"))
    source.write_text(PASS)
    table.write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        (spec,) = resolve("my_pass_p:P")
        return spec.digest

    first = digest()
    beside.write_text("x = 1")
    assert digest() == first
    table.write_text("two")
    second = digest()
    assert second != first
    source.write_text(PASS + "# edited")
    assert digest() not in (first, second)
    source.write_text(PASS.replace("return 0", "return 1"))  # the process still runs what it imported
    with pytest.raises(TraceError, match=r"my_pass_p\.py was changed after .*: P\.__call__"):
        digest()


def test_every_builtin_pass_has_its_name_and_can_be_made() -> None:
    for name, path in registry.BUILTIN.items():
        before = list(dict.fromkeys(["noop"])) if name != "noop" else []
        spec = resolve(",".join([*before, name]))[-1]
        assert make(spec).name == name, path


def test_a_pass_whose_file_changed_is_not_run() -> None:
    (spec,) = resolve(OWN)
    other = PassSpec(spec.name, spec.config, resolve("noop")[0].digest)
    with pytest.raises(UsageError, match="changed"):
        make(other)
