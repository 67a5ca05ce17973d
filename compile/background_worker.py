"""Artifact: the process of a compile beside a server: one parcel on stdin, one line on stdout per entry."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

import torch

from pwcc.cache import strict
from pwcc.cache.errors import ModelError, PwccError
from pwcc.compile.api import precompile
from pwcc.compile.children import answers_channel, end_with, failure_to_json
from pwcc.compile.module_transfer import unpack
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.runtime.portable import Json


def main() -> int:
    """Compile what the parent asks for; its process id is the argument."""
    end_with(int(sys.argv[1]))
    with answers_channel() as answers:
        for answer in _answers(sys.stdin.buffer.read()):
            answers.write(strict.canonical(answer) + b"\n")
            answers.flush()
    return 0


def _answers(message: bytes) -> Iterator[dict[str, Json]]:
    try:
        parcel, device = unpack(message)
        take_over(parcel.modes)
        for sizes in parcel.stages:
            options = parcel.config.compile_options()
            report = precompile(
                parcel.module,
                device=device,
                inputs=parcel.inputs,
                sizes=sizes,
                **options,
            )
            yield {"entry": report.entry_key}
    except PwccError as error:
        yield failure_to_json(error)
    except Exception as error:  # noqa: BLE001 (told to the parent, which nobody may wait for)
        told = ModelError(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        yield failure_to_json(told)


def take_over(modes: Mapping[str, Json]) -> None:
    """Set this process's numeric modes to a parent's.

    Raises:
        ModelError: one of them cannot be set here; names it.
    """
    dtype = str(modes["default_dtype"]).removeprefix("torch.")
    torch.set_default_dtype(getattr(torch, dtype))
    if modes["deterministic"]:
        torch.use_deterministic_algorithms(True, warn_only=bool(modes.get("deterministic_warn_only")))
    precision = modes.get("fp32_precision.cuda.matmul")
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    here = numeric_state()
    differing = [name for name, value in modes.items() if here.get(name) != value]
    if differing:
        raise ModelError(
            "a process beside this one cannot take over its numeric modes: "
            + ", ".join(f"{name} is {modes[name]!r}" for name in differing[:3]),
            hint="first_call='wait' compiles in this process; or compile beforehand under these modes",
        )


if __name__ == "__main__":
    status = main()
    os._exit(status)  # not sys.exit: Inductor's own pool takes seconds to shut down
