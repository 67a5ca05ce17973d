"""Key: what a model's code may ask its process for, that tracing folds: a table of functions, and their values.

Each is read again on the serving host, through the modules that are loaded there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Final

from pwcc.cache.ids import factor_digest

AUTOCAST_TYPES: Final = "torch.get_autocast_dtype"
STATES: Final[Mapping[str, tuple[tuple[object, ...], ...]]] = {
    "torch.distributed.is_initialized": ((),),
    "torch.distributed.is_available": ((),),
    "torch.distributed.is_torchelastic_launched": ((),),
    "torch.distributed.get_rank": ((),),
    "torch.distributed.get_world_size": ((),),
    "torch.distributed.get_backend": ((),),
    AUTOCAST_TYPES: (("cpu",), ("cuda",)),
    "torch.get_autocast_cpu_dtype": ((),),
    "torch.get_autocast_gpu_dtype": ((),),
    "torch.is_autocast_cache_enabled": ((),),
    "torch.get_num_threads": ((),),
    "torch.get_num_interop_threads": ((),),
    "torch.is_anomaly_enabled": ((),),
    "torch.cuda.is_available": ((),),
    "torch.cuda.device_count": ((),),
    "torch.backends.mkldnn.is_available": ((),),
    "sys.getrecursionlimit": ((),),
    "sys.getswitchinterval": ((),),
    "os.cpu_count": ((),),
    "os.getcwd": ((),),
    "os.uname": ((),),
    "platform.node": ((),),
    "platform.machine": ((),),
    "platform.system": ((),),
    "platform.release": ((),),
    "platform.version": ((),),
    "platform.platform": ((),),
    "platform.processor": ((),),
    "platform.python_version": ((),),
    "platform.uname": ((),),
    "socket.gethostname": ((),),
    "getpass.getuser": ((),),
}
"""Functions by dotted name, each with the arguments it is asked with."""
VOLATILE: Final = (
    "os.getpid",
    "os.getppid",
    "torch.initial_seed",
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.perf_counter",
    "uuid.uuid4",
    "builtins.hash",
)
"""Functions whose values are another in every process: no record can stand for them."""


_SMALL: Final = ("platform", "socket", "getpass")


def lookup(name: str, modules: Mapping[str, object]) -> object:
    """Return the function of this dotted name, or None if its module is not loaded or lacks it."""
    home, _, attribute = name.rpartition(".")
    return getattr(modules.get(home), attribute, None)


def _loaded(name: str, modules: Mapping[str, object]) -> object:
    """Return the function of this dotted name; Python's own small modules are imported for it."""
    home = name.rpartition(".")[0]
    if home in _SMALL and home not in modules:
        importlib.import_module(home)
        return lookup(name, sys.modules)
    return lookup(name, modules)


def state_value(name: str, salt: str, modules: Mapping[str, object]) -> str | None:
    """Return what an entry keeps of a function's value: numbers in the clear, the rest as a salted digest.

    What torch says is plain too. None if the function is not there; the name of the error if
    it raises. A name that is not in :data:`STATES` gives None: an entry from elsewhere calls nothing else.
    """
    function = _loaded(name, modules)
    if name not in STATES or not callable(function):
        return None
    return " ".join(_value(name, function, arguments, salt) for arguments in STATES[name])


def _value(name: str, function: Callable[..., object], arguments: tuple[object, ...], salt: str) -> str:
    try:
        found = function(*arguments)
    except Exception as error:  # noqa: BLE001  # that it raises is what the code sees
        return type(error).__name__
    text = repr(found)
    if name.startswith("torch.") or isinstance(found, (bool, int, float)):
        return text
    return f"digest:{factor_digest(os.fsencode(f'pwcc state 1{chr(0)}{salt}{chr(0)}{name}{chr(0)}{text}'))}"
