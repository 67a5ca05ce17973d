"""A small project of a user's: a model whose code is spread over files, with everything that a key must see."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

FILES: Mapping[str, str] = {
    "keyed_model.py": """
import json
import logging
import time
import uuid
from pathlib import Path

import keyed_consts
import torch
import torch.nn.functional as F
from farther.outer import shifted
from keyed_base import Base
from keyed_deco import doubled
from torch import nn

ACTS = {"silu": F.silu, "relu": F.relu}
UNUSED = 3


def unrelated():
    return UNUSED


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Tiny(Base):
    def __init__(self, size=8, eps=1e-5, heads=2, theta=1e4, act="silu", windows=(1.0, 2.0), tied=False):
        super().__init__()
        self.norm = Norm(size, eps)
        self.up = nn.Linear(size, size, bias=False)
        self.down = nn.Linear(size, size, bias=False)
        if tied:
            self.down.weight = self.up.weight
        self.drop = nn.Dropout(0.1)
        self.heads, self.theta, self.act, self.windows = heads, theta, act, list(windows)
        self.gain = json.loads(Path(__file__).with_name("settings.json").read_text())["gain"]
        self.run_id, self.started = uuid.uuid4().hex, time.time()
        self.log = logging.getLogger("keyed")

    @doubled
    def mixed(self, x):
        return x.view(x.shape[0], self.heads, -1).softmax(-1).view(x.shape)

    def forward(self, x):
        y = ACTS[self.act](self.up(self.norm(x)))
        for window in self.windows:
            y = y + window
        y = self.mixed(y) * keyed_consts.SCALE + shifted(y) / self.theta
        return self.drop(self.finish(self.down(y))) * self.gain


def factory(**options):
    return Tiny(**options)
""",
    "keyed_base.py": """
from torch import nn


class Base(nn.Module):
    def finish(self, x):
        return x + 0.5
""",
    "keyed_deco.py": """
import functools


def doubled(function):
    @functools.wraps(function)
    def call(self, x):
        return function(self, x) * 2.0

    return call
""",
    "keyed_consts.py": "SCALE = 0.25\n",
    "farther/__init__.py": "",
    "farther/outer.py": "from farther.inner import shift\n\n\ndef shifted(x):\n    return shift(x)\n",
    "farther/inner.py": "def shift(x):\n    return x + 3.0\n",
    "settings.json": '{"gain": 1.5}\n',
    "keyed_unrelated.py": "NOTHING = 1\n",
}

MODULES = ("keyed_model", "keyed_base", "keyed_deco", "keyed_consts", "keyed_unrelated", "farther")
INPUT = "x:float32[n,8]"


def write(root: Path) -> Path:
    """Write the project into a directory that does not exist and return its model file."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
    return root / "keyed_model.py"


def edit(root: Path, name: str, old: str, new: str) -> None:
    """Replace one text in one file; it must be there."""
    path = root / name
    text = path.read_text()
    assert text.count(old) == 1, (name, old)
    path.write_text(text.replace(old, new))


def forget() -> None:
    """Drop the project's modules, so that the next import reads the files again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in MODULES:
            del sys.modules[name]


@contextlib.contextmanager
def imported(root: Path) -> Iterator[ModuleType]:
    """Import the project's model module as a server does that has the project on its path."""
    forget()
    importlib.invalidate_caches()
    sys.path.insert(0, str(root))
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield importlib.import_module("keyed_model")
    finally:
        sys.dont_write_bytecode = before
        sys.path.remove(str(root))
        forget()
