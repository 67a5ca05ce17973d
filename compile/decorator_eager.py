"""Artifact: calls of a decorated module that torch answers: eagerly, or by ``torch.compile`` as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pwcc.compile.call import eager_region
from pwcc.compile.runtime.hooks import is_hooked


def run_eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module as it is."""
    with eager_region():  # decorated modules in it are part of it
        return nn.Module.__call__(module, *args, **kwargs)


def run_stock(module: nn.Module) -> Callable[..., Any]:
    """Return torch.compile over the whole call, hooks and all."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return nn.Module.__call__(module, *args, **kwargs)

    return torch.compile(call)


def why_eager(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a call must run as torch runs it, in words; None where compiled code may answer it."""
    if module.training:
        return "in training mode it runs eagerly; call .eval() to have it compiled"
    if is_hooked(module):
        return "hooks around its forward run, and so it runs eagerly; remove them to have it compiled"
    if torch.is_grad_enabled():
        values = (*args, *kwargs.values(), *module.parameters())
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            return (
                "gradients are enabled and something requires them, so it runs eagerly; call it under "
                "torch.inference_mode() or torch.no_grad(), or use requires_grad_(False), to have it compiled"
            )
    return None
