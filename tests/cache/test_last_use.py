from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pwcc.cache import last_use
from pwcc.cache.ids import EntryKey
from pwcc.cache.store import Store

KEY = EntryKey("1" * 32)


def test_a_stamp_is_the_time_of_an_empty_file(store: Store) -> None:
    assert last_use.stamps(store) == {}
    assert last_use.stamp(store, KEY)
    os.utime(last_use.folder(store) / KEY, (5, 5))
    assert last_use.stamps(store) == {KEY: 5}
    assert last_use.stamp(store, KEY)
    assert last_use.stamps(store)[KEY] > time.time() - 60
    assert (last_use.folder(store) / KEY).read_bytes() == b""
    last_use.forget(store, KEY)
    assert last_use.stamps(store) == {}


def test_what_cannot_be_stamped_is_no_error(store: Store, tmp_path: Path) -> None:
    gone = Store(tmp_path / "gone")
    assert not last_use.stamp(gone, KEY)
    assert not gone.root.exists()
    last_use.folder(store).write_text("a file in its place")
    assert not last_use.stamp(store, KEY)
    assert last_use.stamps(store) == {}
    last_use.forget(store, KEY)


def test_a_link_is_not_followed(store: Store, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("x")
    os.utime(victim, (5, 5))
    last_use.folder(store).mkdir()
    (last_use.folder(store) / KEY).symlink_to(victim)
    assert not last_use.stamp(store, KEY)
    assert victim.stat().st_mtime == 5


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_stamps_are_asked_for(value: str | None, asked: bool) -> None:
    environ = {} if value is None else {last_use.VARIABLE: value}
    assert last_use.tracking(environ) is asked
