"""Serve the Key noun: what the user names as a model, and the module and portable identity it becomes."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from torch import nn

from pwcc.cache.errors import PwccError, UsageError
from pwcc.compile.model_args import convert_args, dtype_named, load_args_file, parse_args, unknown_name
from pwcc.compile.models.llama import PRESET_DTYPES, PRESETS, Llama, LlamaConfig
from pwcc.compile.observation import Observation
from pwcc.compile.observing import Recorder, remember_import
from pwcc.compile.user_code import failed_in_user_code, import_file, import_module, importable
from pwcc.compile.weights import materialize, move_real, parameters_on_meta

__all__ = [
    "BuiltModel",
    "ModelKind",
    "ModelRef",
    "Weights",
    "build",
    "load_args_file",
    "materialize",
    "parse_args",
]

FORMS = (
    f"a built-in name ({', '.join(PRESETS)}), package.module:attr, path/to/file.py:attr, "
    "a Hugging Face directory with config.json, or a hub id such as org/name"
)

Weights = Literal["none", "random", "real"]
"""``none``: parameters on the meta device. ``random``: seeded. ``real``: what the code or directory gives."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelKind(enum.Enum):
    """How a model is found."""

    BUILTIN = "builtin"
    MODULE = "module"
    FILE = "file"
    HF_DIRECTORY = "hf-directory"
    HF_HUB = "hf-hub"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as the user named it; ``location`` is a name, dotted module, path or hub id."""

    kind: ModelKind
    location: str
    attr: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Resolve ``text`` to one of the accepted forms. Touches the file system, imports nothing.

        Raise ``UsageError`` for anything else, with the accepted forms and close built-in names.
        """
        if text in PRESETS:
            return cls(ModelKind.BUILTIN, text)
        head, colon, attr = text.rpartition(":")
        if colon and head.endswith(".py"):
            if not Path(head).is_file():
                raise UsageError(f"no such file: {head!r}", hint="expected path/to/file.py:attr")
            return cls(ModelKind.FILE, head, _checked_attr(attr, text))
        if text.endswith(".py"):
            raise UsageError(
                f"{text!r} names a file but nothing in it", hint=f"say {text}:attr, a module, class or factory"
            )
        if text and Path(text).is_dir():
            if not (Path(text) / "config.json").is_file():
                raise UsageError(f"the directory {text!r} has no config.json", hint=f"expected {FORMS}")
            return cls(ModelKind.HF_DIRECTORY, text)
        if colon and _DOTTED.fullmatch(head):
            return cls(ModelKind.MODULE, head, _checked_attr(attr, text))
        if _HUB_ID.fullmatch(text):
            return cls(ModelKind.HF_HUB, text)
        error = unknown_name(f"unknown model {text!r}", text, list(PRESETS))
        raise UsageError(error.message, hint=f"{error.hint} Otherwise: {FORMS}")


def _checked_attr(attr: str, text: str) -> str:
    if not _DOTTED.fullmatch(attr):
        raise UsageError(f"expected an attribute name after the colon, got {text!r}")
    return attr


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model ready to trace: in eval mode, no parameter requiring gradients.

    ``identity`` and ``config`` hold no path, user or host: equal on every machine. ``args`` are the
    arguments as given, converted to the types of what they are for. ``example_inputs(num_tokens)``, where
    the model's author wrote one, returns a tuple or dict of tensors. ``observation`` is what was seen of the
    construction, from the import of its module on.
    """

    module: nn.Module
    identity: str
    args: Mapping[str, object]
    config: Mapping[str, object] = field(default_factory=dict)
    example_inputs: Callable[[int], object] | None = None
    weights: Weights = "real"
    observation: Observation = field(default_factory=Observation)


def build(
    ref: ModelRef,
    *,
    args: Mapping[str, object] | None = None,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    weights: Weights = "none",
    seed: int = 0,
) -> BuiltModel:
    """Build the model ``ref`` names.

    With ``weights="none"`` parameters are on the meta device while buffers and tensor attributes are real
    and on ``device``; ``materialize`` fills them later. ``dtype`` is torch's default dtype while the
    model is built (built-in models have their own otherwise). A module instance keeps the weights it has,
    whatever ``weights`` says. Raise ``UsageError`` for bad names and arguments, ``ModelError`` with the
    user's file and line if their code fails.
    """
    given = dict(args or {})
    chosen = dtype_named(dtype) if dtype is not None else None
    if chosen is not None and not chosen.is_floating_point:
        raise UsageError(f"expected a floating-point dtype for the model, got {dtype!r}")
    if ref.kind is ModelKind.BUILTIN and weights == "real":
        weights = "random"  # built-in models have no other weights
    with Recorder(_own_packages(ref)) as recorder:
        maker = _find(ref, given, chosen, weights)
        imports = remember_import(maker.home, recorder.seen)
        module = _construct(maker, weights, chosen or maker.dtype)
    recorder.seen.merge(imports)
    if maker.is_instance and chosen is not None:
        module.to(chosen)
    if weights == "random" and not maker.is_instance:
        materialize(module, device=device, seed=seed)
    else:
        move_real(module, torch.device(device))
    module.eval().requires_grad_(False)
    examples = maker.example_inputs or getattr(module, "example_inputs", None)
    return BuiltModel(
        module=module,
        identity=maker.identity,
        args=maker.args,
        config=maker.config,
        example_inputs=examples if callable(examples) else None,
        weights="real" if maker.is_instance else weights,
        observation=recorder.seen,
    )


def _own_packages(ref: ModelRef) -> frozenset[str]:
    return frozenset({ref.location.partition(".")[0]} if ref.kind is ModelKind.MODULE else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """A found model, not yet built; ``what`` names it in messages."""

    make: Callable[[], object]
    what: str
    identity: str
    args: Mapping[str, object]
    config: Mapping[str, object] = field(default_factory=dict)
    example_inputs: object = None
    import_directory: Path | None = None
    dtype: torch.dtype | None = None
    is_instance: bool = False
    home: ModuleType | None = None


def _find(ref: ModelRef, args: Mapping[str, object], dtype: torch.dtype | None, weights: Weights) -> _Maker:
    match ref.kind:
        case ModelKind.BUILTIN:
            return _builtin(ref, args)
        case ModelKind.MODULE:
            directory = Path.cwd()
            module = import_module(ref.location, directory=directory)
            identity = f"{ref.location}:{ref.attr}"
        case ModelKind.FILE:
            path = Path(ref.location)
            directory = path.resolve().parent
            module = import_file(path)
            identity = f"file:{path.name}:{ref.attr}"
        case ModelKind.HF_DIRECTORY | ModelKind.HF_HUB:
            return _hugging_face(ref, args, dtype, weights)
    found: object = module
    for name in (ref.attr or "").split("."):
        if not hasattr(found, name):
            public = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            raise unknown_name(f"{ref.location} has no attribute {ref.attr!r}", name, public)
        found = getattr(found, name)
    if isinstance(found, nn.Module):
        if args:
            raise UsageError(f"{ref.attr} is a module instance, it takes no arguments (got {', '.join(args)})")
        instance = found
        return _Maker(
            make=lambda: instance,
            what=identity,
            identity=identity,
            args={},
            example_inputs=getattr(module, "example_inputs", None),
            is_instance=True,
            home=module,
        )
    if not callable(found) or (inspect.isclass(found) and not issubclass(found, nn.Module)):
        raise UsageError(
            f"{identity} is a {found.__name__ if inspect.isclass(found) else type(found).__name__}, "
            "expected an nn.Module class, an instance, or a factory that returns one"
        )
    converted = convert_args(found, args, what=identity)
    factory = found
    return _Maker(
        make=lambda: factory(**converted),
        what=identity,
        identity=identity,
        args=converted,
        example_inputs=getattr(module, "example_inputs", None),
        import_directory=directory,
        home=module,
    )


def _builtin(ref: ModelRef, args: Mapping[str, object]) -> _Maker:
    identity = f"builtin:{ref.location}"
    converted = convert_args(LlamaConfig, args, what=ref.location)
    try:
        config = replace(PRESETS[ref.location], **converted)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"{ref.location}: {error}") from error
    return _Maker(
        make=lambda: Llama(config),
        what=identity,
        identity=identity,
        args=converted,
        config=asdict(config),
        dtype=PRESET_DTYPES[ref.location],
    )


def _hugging_face(
    ref: ModelRef, args: Mapping[str, object], dtype: torch.dtype | None, weights: Weights
) -> _Maker:
    from pwcc.compile import hf

    config = hf.load_config(ref.location, args)
    source = ref.location if weights == "real" else None
    return _Maker(
        make=lambda: hf.HFDecoder(hf.build_causal_lm(config, dtype=dtype, weights_from=source)),
        what=ref.location,
        identity=f"hf:{hf.architecture_of(config)}",
        args=dict(args),
        config=hf.portable_config(config),
    )


def _construct(maker: _Maker, weights: Weights, dtype: torch.dtype | None) -> nn.Module:
    """Run the maker under what building needs; an exception of the user's code becomes a ``ModelError``."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        if maker.import_directory is not None:
            stack.enter_context(importable(maker.import_directory))
        if weights != "real" and not maker.is_instance:
            stack.enter_context(parameters_on_meta())
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            module = maker.make()
        except PwccError:
            raise
        except Exception as error:
            failure = failed_in_user_code(f"building {maker.what} failed", error)
            if weights != "real":
                failure.hint = "if it needs its parameters' values while it is built, pass --weights real"
            raise failure from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{maker.what} returned a {type(module).__name__}, expected a torch.nn.Module")
    return module
