from __future__ import annotations

from pathlib import Path

import pytest

from pwcc.cache.errors import UsageError
from pwcc.cache.policy import Policy
from pwcc.cache.site_config import MAX_CONFIG_BYTES, find_config, read_config


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_include_and_exclude(tmp_path: Path) -> None:
    path = write(tmp_path / "pwcc.toml", '[environment]\ninclude = ["MYAPP_*"]\nexclude = ["OMP_*"]\n')
    assert read_config(path) == Policy.of(include=["MYAPP_*"], exclude=["OMP_*"])
    assert read_config(write(tmp_path / "empty.toml", "")) == Policy()
    assert read_config(write(tmp_path / "half.toml", "[environment]\n")) == Policy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[environment", "expected TOML"),
        ("[env]\n", "unknown key env"),
        ("[environment]\nincluded = []\n", "unknown key environment.included"),
        ("environment = 1\n", r"expected a table \[environment\]"),
        ('[environment]\ninclude = "A"\n', "environment.include: expected a list of names"),
        ("[environment]\nexclude = [1]\n", "environment.exclude: expected a list of names"),
        ('[environment]\ninclude = ["*"]\n', "matches every variable"),
        ('[environment]\ninclude = ["A"]\nexclude = ["A"]\n', "both included and excluded"),
        ("#" * (MAX_CONFIG_BYTES + 1), "at most"),
    ],
)
def test_a_bad_file_is_one_clear_error_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "pwcc.toml", text)
    with pytest.raises(UsageError, match=said) as caught:
        read_config(path)
    assert caught.value.where == str(path)


def test_not_text_and_not_readable(tmp_path: Path) -> None:
    path = tmp_path / "pwcc.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="expected TOML"):
        read_config(path)
    with pytest.raises(UsageError, match="reading failed"):
        read_config(tmp_path)


def test_the_first_file_found_is_used(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert find_config(None, (first, second)) is None
    later = write(second / "pwcc.toml", "")
    assert find_config(None, (first, second)) == later
    sooner = write(first / "pwcc.toml", "")
    assert find_config(None, (first, second)) == sooner
    named = write(tmp_path / "other.toml", "")
    assert find_config(named, (first, second)) == named
    with pytest.raises(UsageError, match="no such file"):
        find_config(tmp_path / "absent.toml", (first, second))
