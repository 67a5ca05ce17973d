"""Key: a module sent to a process of one's own, without its weights: only the pipe between the two holds it.

Parameters travel as their form and arrive on the meta device; buffers and tensor attributes travel with their
values, which a trace may read. Objects that are one stay one, so ties stay. The module's classes are imported
there by name, so they must lie in a module that can be imported.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load as load_values
from safetensors.torch import save as save_values
from torch import nn

from pwcc.cache.errors import ModelError
from pwcc.compile.input_forms import Spec
from pwcc.compile.levels import CompileConfig
from pwcc.compile.runtime.portable import Json


@dataclass(frozen=True)
class Parcel:
    """A module and what is to be compiled of it. ``modes`` are the numeric modes that calls run under."""

    module: nn.Module
    inputs: tuple[Spec, ...]
    stages: tuple[tuple[int, ...], ...]
    config: CompileConfig
    modes: Mapping[str, Json]


@dataclass(frozen=True)
class _Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    kind: str


class _Pickler(pickle.Pickler):
    """Takes tensors out of what it writes: forms of parameters, values of others."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.forms: list[_Form] = []
        self.values: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[int, torch.Tensor]] = {}  # keeps them, so that no id comes back

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._known:
            number = len(self.forms)
            self._known[id(obj)] = (number, obj)
            kind = type(obj).__name__
            if type(obj) not in (torch.Tensor, nn.Parameter, nn.Buffer) or obj.layout is not torch.strided:
                raise ModelError(f"a tensor of type {kind} cannot be sent to another process")
            self.forms.append(
                _Form(
                    tuple(obj.shape), tuple(obj.stride()), obj.dtype, str(obj.device), obj.requires_grad, kind
                )
            )
            if kind != "Parameter" and not obj.is_meta:
                self.values[str(number)] = obj.detach().to("cpu").contiguous().clone()
        return self._known[id(obj)][0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, forms: list[_Form], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._forms = forms
        self._values = values
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if pid not in self._made:
            form, value = self._forms[pid], self._values.get(str(pid))
            device = "meta" if value is None else form.device
            tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)
            if value is not None:
                tensor.copy_(value)
            if form.kind == "Parameter":
                tensor = nn.Parameter(tensor, requires_grad=form.requires_grad)
            elif form.kind == "Buffer":
                tensor = nn.Buffer(tensor)
            self._made[pid] = tensor
        return self._made[pid]


def pack(parcel: Parcel) -> bytes:
    """Return a parcel as bytes for :func:`unpack` in a child process.

    Raises:
        ModelError: something of the module cannot be pickled, or its class cannot be imported elsewhere.
    """
    home = type(parcel.module).__module__
    if home == "__main__":
        raise ModelError(
            f"{type(parcel.module).__qualname__} is defined in the program's main file, which no other process "
            "can import",
            hint="move the class to a module; or first_call='wait' compiles in this process; or pwcc compile",
        )
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(parcel)
    except ModelError:
        raise
    except Exception as error:  # pickling runs the user's own methods
        raise ModelError(
            f"the module cannot be sent to another process: {type(error).__name__}: {error}",
            hint="first_call='wait' compiles in this process; or compile beforehand: pwcc.precompile",
        ) from error
    devices = [str(held.device) for held in (*parcel.module.parameters(), *parcel.module.buffers())]
    head = (list(sys.path), pickler.forms, next(iter(devices), "cpu"))
    return pickle.dumps((head, save_values(pickler.values), file.getvalue()))


def unpack(data: bytes) -> tuple[Parcel, str]:
    """Return what the parent process packed, and the device of its module.

    Only for bytes from the parent: pickles run code.
    """
    (path, forms, device), values, body = pickle.loads(data)  # noqa: S301 (the parent's own pipe)
    sys.path[:] = path
    parcel: Parcel = _Unpickler(io.BytesIO(body), forms, load_values(values)).load()
    return parcel, device
