"""Files that a model's code reads have names that hold in any checkout and home."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from pwcc.cache.anchors import Anchored, anchored, is_anchored, locate


def name(given: str, *, module_file: str | None = "/co/proj/pkg/model.py") -> Anchored:
    return anchored(given, cwd="/run/here", home="/home/me", module="pkg.model", module_file=module_file)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("conf/a.json", Anchored("cwd", "conf/a.json")),
        ("./a.json", Anchored("cwd", "a.json")),
        (".", Anchored("cwd", ".")),
        ("/co/proj/pkg/a.json", Anchored("module:pkg.model", "a.json")),
        ("/co/proj/pkg/data/a.json", Anchored("module:pkg.model", "data/a.json")),
        ("/co/proj/a.json", Anchored("module:pkg.model", "../a.json")),
        ("/co/proj", Anchored("module:pkg.model", "..")),
        ("/home/me/x/a.json", Anchored("home", "x/a.json")),
        ("/srv/a.json", Anchored("absolute", "/srv/a.json")),
    ],
)
def test_the_first_anchor_that_fits_names_a_file(given: str, wanted: Anchored) -> None:
    assert name(given) == wanted
    assert is_anchored(wanted.anchor, wanted.path)
    assert wanted.host_bound is (wanted.anchor == "absolute")


def test_a_module_at_the_top_of_a_disk_anchors_nothing_above_itself() -> None:
    assert name("/etc/a.json", module_file="/model.py") == Anchored("absolute", "/etc/a.json")
    found = name("/home/me/data/a.json", module_file="/home/me/proj/model.py")
    assert found == Anchored("home", "data/a.json")  # and not "two up from the module": that is the home


def test_another_checkout_finds_the_file_again(tmp_path: Path) -> None:
    module = types.ModuleType("pkg.model")
    module.__file__ = str(tmp_path / "elsewhere" / "pkg" / "model.py")
    found = locate("module:pkg.model", "../a.json", {"pkg.model": module})
    assert found == str(tmp_path / "elsewhere" / "a.json")
    assert locate("module:pkg.model", "a.json", {}) is None
    assert locate("cwd", "a.json", {}) == "a.json"


@pytest.mark.parametrize(
    ("anchor", "path"),
    [
        ("cwd", "../a"),
        ("cwd", "/etc/passwd"),
        ("home", "../../etc/passwd"),
        ("absolute", "etc/passwd"),
        ("absolute", "/a/../b"),
        ("module:", "a"),
        ("module:x", "../../../a"),
        ("module:x", "../../.."),
        ("cwd", ".."),
        ("module:x", "a/../../b"),
        ("elsewhere", "a"),
        ("cwd", ""),
        ("cwd", "a\0b"),
    ],
)
def test_a_path_that_leaves_its_anchor_is_refused(anchor: str, path: str) -> None:
    assert not is_anchored(anchor, path)
