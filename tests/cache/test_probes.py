"""Whether a module could be imported is found out without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pwcc.cache.probes import module_present


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "probed_pkg").mkdir()
    (tmp_path / "probed_pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "probed_pkg" / "inner.py").write_text("raise RuntimeError('imported')")
    return tmp_path


def test_modules_on_the_path_are_present_and_stay_unimported(there: Path) -> None:
    assert module_present("probed_pkg", {})
    assert module_present("probed_pkg.inner", {})
    assert not module_present("probed_pkg.missing", {})
    assert not module_present("probed_missing.inner", {})
    assert not module_present("probed_pkg.inner.deeper", {})
    assert "probed_pkg" not in sys.modules


def test_a_module_that_appears_is_seen(there: Path) -> None:
    assert not module_present("probed_late", {})
    (there / "probed_late.py").write_text("")
    import importlib

    importlib.invalidate_caches()
    assert module_present("probed_late", {})


def test_loaded_and_blocked_modules() -> None:
    assert module_present("pwcc_no_such_module", {"pwcc_no_such_module": sys})
    assert not module_present("json", {"json": None})


def test_a_finder_that_raises_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            raise ValueError(name)

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert not module_present("pwcc_no_such_module", {})
    assert module_present("json", {})
