"""Key: autocast regions of a graph, as what holds at each operation instead of where they begin and end.

A region may span a splitting operation, or hold operations that another order moves: every piece enters
the regions that its operations lie in, and a splitting operation runs inside its own. What is in force
around the whole call (the model is compiled inside ``torch.autocast``) is one more region.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pwcc.cache.errors import UnsealableError
from pwcc.compile.conditions import source_line
from pwcc.compile.runtime.arguments import encode_constant

CONTEXT = "torch.amp.autocast_mode.autocast"


@dataclass(frozen=True, order=True)
class Region:
    """Autocast of one device type: the dtype's name, and whether it is on."""

    device: str
    dtype: str
    enabled: bool

    @property
    def arguments(self) -> list[object]:
        """Arguments of ``torch.autocast``, encoded. Casts are not cached: a piece's weights may change."""
        return [self.device, encode_constant(getattr(torch, self.dtype)), self.enabled, False]


State = tuple[Region, ...]
"""The innermost region of each device type, ordered; empty where nothing is cast."""


@dataclass(frozen=True)
class Regions:
    """What holds at each node of a graph, and around the whole of it."""

    at: Mapping[fx.Node, State]
    ambient: State

    @classmethod
    def of(cls, graph: fx.Graph, devices: Collection[str]) -> Regions:
        """Read the regions of a graph whose tensors lie on ``devices`` (types); others cast nothing.

        Raises:
            UnsealableError: a region that ends without having begun.
        """
        ambient = {device: _ambient(device) for device in sorted(devices) if torch.is_autocast_enabled(device)}
        open_: list[tuple[fx.Node, Region]] = []
        at: dict[fx.Node, State] = {}
        for node in graph.nodes:
            if is_enter(node):
                open_.append((node, _region(node.args)))
            elif is_exit(node):
                if not open_ or open_[-1][0] is not node.args[0]:
                    raise UnsealableError("an autocast region ends before it begins", where=source_line(node))
                open_.pop()
            else:
                at[node] = _state(ambient, [region for _, region in open_], devices)
        return cls(at, tuple(ambient.values()))

    def around(self, node: fx.Node) -> State:
        """Return what a call outside every piece must enter, beyond what its caller is in."""
        return () if self.at[node] == self.ambient else self.at[node]


def is_enter(node: fx.Node) -> bool:
    """Tell whether a node begins an autocast region."""
    return getattr(node.target, "__name__", "") == "_enter_autocast"


def is_exit(node: fx.Node) -> bool:
    """Tell whether a node ends an autocast region."""
    return getattr(node.target, "__name__", "") == "_exit_autocast"


def _ambient(device: str) -> Region:
    return Region(device, _name(torch.get_autocast_dtype(device)), True)


def _region(arguments: Sequence[object]) -> Region:
    device, dtype, enabled = str(arguments[0]), arguments[1], bool(arguments[2])
    kind = torch.device(device).type
    return Region(kind, _name(dtype if dtype is not None else torch.get_autocast_dtype(kind)), enabled)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _state(ambient: Mapping[str, Region], open_: Sequence[Region], devices: Collection[str]) -> State:
    innermost = {**ambient, **{region.device: region for region in open_ if region.device in devices}}
    return tuple(sorted(r for r in innermost.values() if r.enabled or r.device in ambient))
