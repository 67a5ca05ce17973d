"""Artifact: hooks that run around every module of a process, which compiled code cannot run."""

from __future__ import annotations

from torch.nn.modules import module

_GLOBAL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def global_hooks() -> list[str]:
    """Return the names of torch's registries of global module hooks that are not empty."""
    return [name for name in _GLOBAL if getattr(module, name, None)]
