"""Serve the Artifact noun: models without weights, and cheap weights where a kernel must run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from pwcc.cache.errors import ModelError

_INITIALISERS = frozenset(
    [
        "normal_",
        "uniform_",
        "zero_",
        "fill_",
        "ones_",
        "zeros_",
        "constant_",
        "trunc_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "exponential_",
        "bernoulli_",
        "random_",
    ]
)


class _SkipMetaInitialisers(TorchFunctionMode):
    """Leave out initialisers of meta tensors: they do nothing there, and some import Dynamo to do it."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = kwargs or {}
        tensor = args[0] if args else given.get("tensor")
        if isinstance(tensor, Tensor) and tensor.is_meta and getattr(func, "__name__", "") in _INITIALISERS:
            return tensor
        return func(*args, **given)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter registered in the block on the meta device; buffers and attributes stay real.

    Unlike ``torch.device("meta")`` it keeps the values that a constructor computes (rotary frequencies,
    masks), which no weight file would restore. A parameter's CPU memory is never touched, only reserved for
    a moment, and initialisers that run after registration do nothing. Ties are kept.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps originals, so no id comes back

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if id(parameter) not in replaced:
            shell = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            _copy_marks(parameter, shell)
            replaced[id(parameter)] = (parameter, shell)
        return replaced[id(parameter)][1]

    # The stub says the hook returns None; the documented contract is None or the parameter to use instead.
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with _SkipMetaInitialisers():
            yield
    finally:
        handle.remove()


def materialize(module: nn.Module, *, device: torch.device | str, seed: int) -> None:
    """Give ``module``'s meta parameters random values on ``device``, in place, and move the rest there.

    Tied parameters stay tied. Parameters that already have values keep them. Raise ``ModelError`` for a
    buffer without a value: only the module's own code could say what belongs there.
    """
    target = torch.device(device)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name!r} has no value: it was built on the meta device",
                hint="build the model without torch.device('meta'); pwcc leaves out the parameters by itself",
            )
    shells = [(name, parameter) for name, parameter in module.named_parameters() if parameter.is_meta]
    filled: dict[int, nn.Parameter] = {}
    for name, shell in shells:
        value = nn.Parameter(_empty(shell, target), requires_grad=shell.requires_grad)
        _copy_marks(shell, value)
        _fill(name, value, seed)
        filled[id(shell)] = value
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in filled:
                owner._parameters[name] = filled[id(parameter)]
    module.to(target)


def _empty(shell: Tensor, device: torch.device) -> Tensor:
    """Allocate what a meta tensor describes; ``empty_like`` would import sympy and Dynamo for it."""
    return torch.empty_strided(shell.shape, shell.stride(), dtype=shell.dtype, device=device)


def move_real(module: nn.Module, device: torch.device) -> None:
    """Move ``module`` to ``device`` in place, except what is on the meta device; ties stay."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)  # type: ignore[no-untyped-call]


def fill_random(module: nn.Module, *, seed: int) -> None:
    """Overwrite every parameter in place, deterministically per (name, seed, device type)."""
    for name, parameter in module.named_parameters():
        _fill(name, parameter, seed)


def _copy_marks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Keep attributes that a framework left on a parameter, such as "already initialised"."""
    for name, value in vars(source).items():
        setattr(target, name, value)


@torch.no_grad()
def _fill(name: str, parameter: Tensor, seed: int) -> None:
    if not parameter.is_floating_point():
        parameter.zero_()
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=parameter.device)
    generator.manual_seed(int.from_bytes(digest[:7], "little"))
    # No generator draws 8-bit floats; drawn wider, they are rounded like quantised weights.
    drawn = parameter if parameter.element_size() > 1 else torch.empty_like(parameter, dtype=torch.float32)
    if parameter.dim() >= 2:
        # Variance 1 / fan-in keeps the activations of a pre-norm network O(1) at any width.
        fan_in = parameter[0].numel()
        drawn.normal_(0.0, fan_in**-0.5, generator=generator)
    else:
        # Norm scales near 1, not equal to it: a kernel that forgot one would otherwise pass every check.
        drawn.normal_(0.0, 0.02, generator=generator)
        if name.rpartition(".")[2] == "weight":
            drawn.add_(1.0)
    if drawn is not parameter:
        parameter.copy_(drawn)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give ``module``'s meta parameters uninitialised memory on ``device``, in place; ties stay.

    For a trace, which reads no values: on a CPU the pages are never touched, so a model of any size costs
    address space only; on a GPU the memory is taken.
    """
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
                _copy_marks(parameter, value)
                made[id(parameter)] = value
            owner._parameters[name] = made[id(parameter)]
