"""Key: watch what a model's code reads while it is built and run: variables, files, module probes.

What counts, by who asks (see ``callers.py``):

- *environment*: reads by the model's own code always; reads by an installed package that the model's code
  calls, unless the declared table excludes the name; reads by a package while it is itself imported, by
  torch, Triton, pwcc, and by the standard library on its own account do not.
- *files, directories, existence*: what the model's own code opens, lists or asks for, itself or through
  other code; not what the import system or torch opens (weights).
- *modules*: imports and ``find_spec`` by the model's own code.

While a recorder is active, methods of ``os.environ``'s class, ``os.stat``, ``builtins.__import__``,
``importlib.util.find_spec`` and ``importlib.import_module`` are wrapped; afterwards they are what they were,
also where a module that was imported meanwhile took one of them by name. Reads of every thread count.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Collection
from types import FrameType, ModuleType, TracebackType
from typing import Final, cast

from pwcc.cache.environment import exclusion
from pwcc.compile.audit import listen, unlisten
from pwcc.compile.callers import Owner, is_importing, owner_of, owner_of_frame
from pwcc.compile.observation import Observation, Reader
from pwcc.compile.patches import unwatch, was_loaded, watch

# Through these the model's code reads on its own account; any other module of Python's reads on its own.
_ENV_THROUGH: Final = frozenset({"os", "collections.abc", "_collections_abc", "collections", "string"})
_STAT_THROUGH: Final = frozenset(
    {"os", "genericpath", "posixpath", "pathlib", "pathlib._local", "pathlib._abc"}
)
# These open files that say nothing of the model: source lines for messages, the system's tables.
_FILE_OWN_ACCOUNT: Final = frozenset(
    {"linecache", "tokenize", "inspect", "traceback", "warnings", "mimetypes", "platform", "ctypes", "zoneinfo"}
    | {"locale", "gettext", "ssl", "sysconfig", "_sysconfigdata", "multiprocessing", "logging", "site"}
    | {"tempfile", "subprocess", "unittest", "uuid", "random"}
)
_KERNEL: Final = ("/proc/", "/sys/", "/dev/")
_WEIGHTS: Final = (".safetensors", ".pt", ".pth", ".ckpt", ".gguf")  # their values are bound at load
_PYTHON: Final = (".py", ".pyc", ".pyi", ".so", ".pyd")
MAX_FRAMES: Final = 400
REMEMBERED: Final = "__pwcc_observed__"


class Recorder:
    """Records in :attr:`seen` what the model's code reads, while it is entered.

    Args:
        own: top-level packages that are the model's own code wherever they are installed.
    """

    def __init__(self, own: Collection[str] = ()) -> None:
        self.seen = Observation()
        self._own = frozenset(own)
        self._written: set[str] = set()
        self._surveying: set[object] = set()

    def __enter__(self) -> Recorder:
        listen(self)
        watch(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unwatch(self)
        unlisten(self)

    def variable(self, key: object, frame: FrameType | None) -> None:
        """Note a read of a variable."""
        name = os.fsdecode(key) if isinstance(key, (str, bytes)) else None
        reader = None if name is None else _past(frame, _ENV_THROUGH)
        if name is None or reader is None or reader.f_code in self._surveying:
            return
        owner = owner_of_frame(reader, self._own)
        counts = owner is Owner.OWN or (
            owner is Owner.INSTALLED and exclusion(name) is None and not _at_import(reader, self._own)
        )
        if counts:
            self.seen.environment.setdefault(name, _reader(reader))
            self._sites(reader)

    def variable_written(self, key: object, changed: bool, frame: FrameType | None) -> None:
        """Note that a variable gets another value."""
        if isinstance(key, (str, bytes)) and changed and frame is not None:
            name = os.fsdecode(key)
            if name in self.seen.environment:
                self.seen.rewritten.setdefault(name, _reader(frame).where)

    def survey(self, frame: FrameType | None) -> None:
        """Note that code looks through the whole environment."""
        reader = _past(frame, _ENV_THROUGH)
        if reader is None:
            return
        owner = owner_of_frame(reader, self._own)
        if owner is Owner.OWN:
            where = _reader(reader).where
            self.seen.iterated.setdefault(where, where)
            self._sites(reader)
        elif owner is Owner.INSTALLED and not _at_import(reader, self._own):
            self._surveying.add(reader.f_code)
            self.seen.surveyed_by.add(str(reader.f_globals.get("__name__")).partition(".")[0])

    def asked(self, path: object, frame: FrameType | None) -> None:
        """Note that code asks whether a path exists."""
        reader = _past(frame, _STAT_THROUGH)
        if reader is not None and owner_of_frame(reader, self._own) is Owner.OWN:
            with contextlib.suppress(OSError):
                self._place("path", path, reader)

    def probed(self, name: str, frame: FrameType | None) -> None:
        """Note that code asks whether a module exists."""
        reader = _past(frame, ("importlib", "importlib.util"))
        if reader is not None and owner_of_frame(reader, self._own) is Owner.OWN:
            self._module(name, reader)

    def imported(self, name: str, namespace: object, frame: FrameType | None) -> None:
        """Note an ``import`` statement."""
        if frame is None or not isinstance(namespace, dict):
            return
        home = str(namespace.get("__name__"))
        if owner_of(home, frame.f_code.co_filename, self._own) is Owner.OWN:
            self._module(name.partition(".")[0], frame)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note an audit event. Must not raise: an exception would stop the audited operation."""
        with contextlib.suppress(OSError):  # no working directory any more
            self._event(event, arguments)

    def _event(self, event: str, arguments: tuple[object, ...]) -> None:
        path = arguments[0] if arguments else None
        if event == "open":
            flags = arguments[2] if len(arguments) > 2 else 0
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                if isinstance(path, (str, bytes)) and flags & (os.O_CREAT | os.O_TRUNC):
                    self._written.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
                return
        elif event not in ("os.listdir", "os.scandir"):
            return
        reader = _on_behalf(sys._getframe(3), path, self._own)
        if reader is not None:
            self._place("file" if event == "open" else "directory", "." if path is None else path, reader)

    def _module(self, name: str, frame: FrameType) -> None:
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("torch", "pwcc", "__main__", "__future__"):
            self.seen.modules.setdefault(name, _reader(frame))
            self._sites(frame)

    def _place(self, kind: str, path: object, frame: FrameType) -> None:
        try:
            given = os.fsdecode(cast("str", path))
        except TypeError:  # an open descriptor
            return
        cwd = os.getcwd()  # noqa: PTH109
        whole = os.path.normpath(os.path.join(cwd, given))  # noqa: PTH118
        if whole in self._written or "\0" in given or not given:
            return
        if whole.startswith(_KERNEL):
            self.seen.unkeyed.add(whole)
        elif not (kind == "file" and whole.endswith(_WEIGHTS)):
            self.seen.places.setdefault((kind, given), (_reader(frame), cwd))

    def _sites(self, frame: FrameType) -> None:
        found: FrameType | None = frame
        for _ in range(MAX_FRAMES):
            if found is None:
                return
            if owner_of_frame(found, self._own) in (Owner.OWN, Owner.INSTALLED):
                self.seen.sites.add((found.f_code, found.f_lineno))
            found = found.f_back


def remember_import(module: ModuleType | None, seen: Observation) -> Observation:
    """Keep what was seen while a module was imported, on the module; return what was seen at its first import.

    A module is imported once per process. One that was imported while nothing watched makes what is
    returned incomplete.

    Args:
        module: the model's module, None where pwcc itself builds the model.
        seen: what a recorder saw that was active while the module was imported, or asked for again.
    """
    if module is None:
        return Observation()
    known = vars(module).get(REMEMBERED)
    if isinstance(known, Observation):
        return known
    kept = copy.deepcopy(seen)
    kept.complete = not was_loaded(module)
    module.__dict__[REMEMBERED] = kept
    return kept


def _reader(frame: FrameType) -> Reader:
    line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119
    file, name = frame.f_globals.get("__file__"), frame.f_globals.get("__name__")
    whole = os.path.abspath(file) if isinstance(file, str) else None  # noqa: PTH100
    return Reader(line, name if isinstance(name, str) else "", whole)


def _past(frame: FrameType | None, modules: Collection[str]) -> FrameType | None:
    """Return the first frame from ``frame`` outwards that runs none of ``modules``."""
    while frame is not None and (
        frame.f_globals.get("__name__") in modules or frame.f_code.co_name == "expandvars"
    ):
        frame = frame.f_back
    return frame


def _at_import(frame: FrameType, own: Collection[str]) -> bool:
    """Tell whether an installed package's code runs because that package is being imported."""
    found: FrameType | None = frame
    for _ in range(MAX_FRAMES):
        if found is None:
            return False
        if is_importing(found):
            return True
        if owner_of_frame(found, own) in (Owner.OWN, Owner.TOOLING):
            return False
        found = found.f_back
    return False


def _on_behalf(frame: FrameType | None, path: object, own: Collection[str]) -> FrameType | None:
    """Return the model's own frame on whose behalf a file is opened, if it is on its behalf."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        name = frame.f_globals.get("__name__")
        home = name if isinstance(name, str) else ""
        owner = owner_of_frame(frame, own)
        if owner is Owner.OWN:
            return frame
        if owner is Owner.TOOLING or is_importing(frame):
            return None
        if owner is Owner.STDLIB and home.partition(".")[0] in _FILE_OWN_ACCOUNT:
            return None
        if home.startswith("importlib") and isinstance(path, str) and path.endswith(_PYTHON):
            return None
        frame = frame.f_back
    return None
