"""Key: the device class and torch build that code is made for, read the same way by compile and load."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pwcc.cache import host, strict
from pwcc.cache.errors import UsageError
from pwcc.cache.manifest import DeviceSummary
from pwcc.cache.requirements import Requirement
from pwcc.compile.torch_private import cuda


@dataclass(frozen=True)
class Target:
    """A device class: what of a device decides whether code made for it runs and is tuned for it."""

    device: torch.device
    name: str | None
    capability: str | None
    cuda: str | None

    @property
    def summary(self) -> DeviceSummary:
        """The part that a manifest shows."""
        return DeviceSummary(type=self.device.type, name=self.name, capability=self.capability)

    def factors(self) -> dict[str, object]:
        """The part that a key holds: no index, no driver."""
        return {
            "type": self.device.type,
            "name": self.name,
            "capability": self.capability,
            "cuda": self.cuda,
            "machine": platform.machine() if self.device.type == "cpu" else None,
        }


def target_of(device: torch.device | str) -> Target:
    """Describe a device of this process.

    Raises:
        UsageError: the device is neither ``cpu`` nor ``cuda``, or torch does not see it.
    """
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return Target(torch.device("cpu"), None, None, None)
    if wanted.type != "cuda":
        raise UsageError(f"expected a cpu or cuda device, got {wanted}")
    if not torch.cuda.is_available():
        raise UsageError(f"expected a CUDA device for {wanted}, but torch sees none", hint="use --device cpu")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise UsageError(f"expected a CUDA device below {torch.cuda.device_count()}, got {wanted}")
    major, minor = torch.cuda.get_device_capability(index)
    return Target(
        torch.device("cuda", index), torch.cuda.get_device_name(index), f"{major}.{minor}", torch.version.cuda
    )


def parse_device(name: torch.device | str) -> torch.device:
    """Return the device that a caller names; raise UsageError where torch knows none of that name."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f"expected a device such as cpu, cuda or cuda:1, got {name!r}") from None


def device_of(model: nn.Module) -> torch.device:
    """Return the one device that a model's tensors lie on.

    Raises:
        UsageError: they lie on several, on the meta device, or there is none.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        found = ", ".join(sorted(str(device) for device in devices)) or "none"
        raise UsageError(
            f"expected a model whose tensors are all on one device, got {found}",
            hint="move or materialise the model first; sharding one model over devices is not supported",
        )
    return next(iter(devices))


def torch_build() -> str:
    """Return torch's version and git hash: a sealed piece calls private helpers of that very build."""
    return f"{torch.__version__} {torch.version.git_version}"


class HostView(Mapping[str, object]):
    """This host's facts by requirement kind; each is read when it is asked for.

    Scanning the C++ runtime and /proc costs 2 to 3 ms, which only CPU entries need.
    """

    def __init__(self, target: Target) -> None:
        self._now: dict[str, Callable[[], object]] = {
            "torch": torch_build,
            "machine": platform.machine,
            "os": lambda: sys.platform,
            "byte_order": lambda: sys.byteorder,
            "python_abi": host.python_abi,
            "cuda_capability": lambda: target.capability,
            "cuda_device_name": lambda: target.name,
            "cuda_version": lambda: cuda.driver_version() if target.device.type == "cuda" else None,
        }

    @functools.cached_property
    def _scanned(self) -> dict[str, object]:
        return host.read_host().facts()

    def __getitem__(self, kind: str) -> object:
        read = self._now.get(kind)
        return self._scanned[kind] if read is None else read()

    def __iter__(self) -> Iterator[str]:
        yield from {**self._scanned, **self._now}

    def __len__(self) -> int:
        return len({**self._scanned, **self._now})


def host_facts(target: Target) -> HostView:
    """Return this host's facts by requirement kind."""
    return HostView(target)


def base_requirements(target: Target) -> tuple[Requirement, ...]:
    """Return what every entry for ``target`` requires of a host, beside what its kernels need."""
    facts = host.read_host()
    common = (
        Requirement("machine", facts.machine),
        Requirement("os", facts.os),
        Requirement("byte_order", facts.byte_order),
        Requirement("torch", torch_build()),
    )
    if target.device.type == "cpu":
        return (*common, Requirement("python_abi", facts.python_abi))
    return (
        *common,
        Requirement("cuda_capability", target.capability or ""),
        Requirement("cuda_version", target.cuda or ""),
    )


def check_tag(tag: str | None) -> str | None:
    """Return a tag as it is: None, or a plain name of letters, digits and ``_.-``, at most 128.

    Raises:
        UsageError: anything else.
    """
    if tag is not None and not strict.NAME_PATTERN.fullmatch(tag):
        raise UsageError(
            f"expected a tag of letters, digits and '_.-', got {tag[:80]!r}", hint="name the part: encoder"
        )
    return tag


def lookup_factors(
    tree_digest: str,
    target: Target,
    numeric: Mapping[str, object],
    signature: list[list[str]],
    tag: str | None = None,
) -> dict[str, object]:
    """Return what a serving host knows without a compiler: the lookup key's factors.

    A ``tag`` names one part of a model that has several; parts with different tags share no entry.
    """
    return {
        **({} if tag is None else {"tag": tag}),
        "model tree": tree_digest,
        "arguments": signature,
        "torch": torch_build(),
        "device": target.factors(),
        "numeric state": dict(numeric),
    }
