"""Artifact: the kernels that a process has loaded, each mapped from the very bytes that were hashed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pwcc.cache.errors import CorruptEntry
from pwcc.cache.ids import BlobDigest
from pwcc.cache.sealed import CppKernel, TritonKernel
from pwcc.compile.runtime.memory_file import memory_file
from pwcc.compile.torch_private import primitives

ReadBlob = Callable[[BlobDigest], bytes]
DATA_PTR_VARIABLE: Final = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


class KernelTable:
    """Loads each kernel once. Loaded code is never unloaded: programs hold raw function handles.

    Thread-safe. ``loaded`` counts the loads that were not answered from the table.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cpp: dict[BlobDigest, Callable[..., None]] = {}
        self._cuda: dict[tuple[BlobDigest, str, int], tuple[int, object]] = {}
        self.loaded = 0

    def cpp(self, kernel: CppKernel, read_blob: ReadBlob) -> Callable[..., None]:
        """Return the kernel's Python function.

        Raises:
            CorruptEntry: the blob is no extension module that exports ``kernel``.
        """
        with self._lock:
            found = self._cpp.get(kernel.blob)
            if found is None:
                found = self._cpp[kernel.blob] = _load_cpp(kernel, read_blob(kernel.blob))
                self.loaded += 1
            return found

    def triton(self, kernel: TritonKernel, read_blob: ReadBlob, device_index: int) -> int:
        """Return the kernel's function handle on a device.

        Raises:
            CorruptEntry: the driver refuses the cubin.
        """
        key = (kernel.blob, kernel.symbol, device_index)
        with self._lock:
            found = self._cuda.get(key)
            if found is None:
                found = self._cuda[key] = _load_cubin(kernel, read_blob(kernel.blob), device_index)
                self.loaded += 1
            return found[0]


def _load_cpp(kernel: CppKernel, data: bytes) -> Callable[..., None]:
    # "<anything>.kernel": the module initialiser is named after the last part, PyInit_kernel
    name = f"_pwcc_{kernel.blob[:16]}.kernel"
    with memory_file(data, kernel.name[:200]) as path, _data_ptr_variable():
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        try:
            if spec is None:
                raise ImportError("no module spec")
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except (ImportError, SystemError) as error:  # SystemError: PyInit_kernel gave no module
            raise CorruptEntry(
                f"expected a kernel that loads, got {error}",
                where=kernel.name,
                hint="compare what the entry requires with this host: pwcc inspect",
            ) from error
    function: Callable[..., None] = module.kernel
    return function


def _load_cubin(kernel: TritonKernel, data: bytes, device_index: int) -> tuple[int, object]:
    with memory_file(data, kernel.name[:200]) as path:
        try:
            return primitives.load_cubin(path, kernel.symbol, kernel.shared, device_index)
        except RuntimeError as error:
            raise CorruptEntry(f"expected a cubin that loads, got {error}", where=kernel.name) from error


@contextmanager
def _data_ptr_variable() -> Iterator[None]:
    """Set the one variable that a kernel's initialiser reads, for the time of the load."""
    before: Any = os.environ.get(DATA_PTR_VARIABLE)
    os.environ[DATA_PTR_VARIABLE] = str(primitives.tensor_data_ptr_address())
    try:
        yield
    finally:
        if before is None:
            del os.environ[DATA_PTR_VARIABLE]
        else:
            os.environ[DATA_PTR_VARIABLE] = before


TABLE: Final = KernelTable()  # one a process: a blob's code is mapped once however many models use it
