"""The options that name a model, shared by the commands that build one; torch is imported when they do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pwcc.cache.errors import UsageError

if TYPE_CHECKING:
    import torch

    from pwcc.compile.input_forms import Spec
    from pwcc.compile.model_ref import BuiltModel

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="X",
        help="llama-tiny, llama-1b, llama-8b; package.module:attr; path/to/file.py:attr; "
        "a Hugging Face directory or hub id.",
    ),
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", metavar="KEY=VALUE", help="An argument of the model; repeat it. Overrides --args-file."
    ),
]
ArgsFileOption = Annotated[
    Path | None,
    typer.Option("--args-file", metavar="FILE", help="Arguments of the model as a .json or .toml table."),
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME:DTYPE[SIZES]",
        help="An input of forward, such as 'input_ids:int64[n]' (n: number of tokens), "
        "'memory:float32[m<=512,64]' (a size of its own) or 'causal=true' (a constant); repeat it.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N. Default: cuda where there is one, else cpu."
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Default dtype while the model is built.")
]
TagOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which part of a model with several this is; a load names the same."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of random weights and inputs.")]
EntryNameOption = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Take the entry of this name, no other.")
]


@dataclass(frozen=True, kw_only=True)
class ReadyModel:
    """A built model, what it is called with, and where."""

    built: BuiltModel
    specs: tuple[Spec, ...]
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How a model is built that an entry is loaded for: with weights, to be run."""

    arg: ArgOption = None
    args_file: ArgsFileOption = None
    inputs: InputOption = None
    weights: Annotated[
        Literal["random", "real"], typer.Option(help="Weights to bind; random needs no weight file.")
    ] = "random"
    device: DeviceOption = None
    dtype: DtypeOption = None
    seed: SeedOption = 0

    def build(self, model: str) -> ReadyModel:
        """Build the model of this name; raises what ``build_model`` does."""
        return build_model(
            model,
            arg=self.arg,
            args_file=self.args_file,
            inputs=self.inputs,
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
            seed=self.seed,
        )


def build_model(
    model: str,
    *,
    arg: list[str] | None,
    args_file: Path | None,
    inputs: list[str] | None,
    device: str | None,
    dtype: str | None,
    weights: Literal["none", "random", "real"],
    seed: int = 0,
) -> ReadyModel:
    """Build what the options name, given as the user wrote them.

    Raises:
        UsageError: a wrong name, argument, input declaration or device. ModelError: the model's own
            code failed.
    """
    from pwcc.compile.inputs import input_specs
    from pwcc.compile.model_ref import ModelRef, build, load_args_file, parse_args

    ref = ModelRef.parse(model)
    args = load_args_file(args_file) if args_file else {}
    args |= parse_args(arg or ())
    place = find_device(device)
    built = build(ref, args=args, device=place, dtype=dtype, weights=weights, seed=seed)
    specs = input_specs(built.module, declarations=inputs or (), example_inputs=built.example_inputs)
    return ReadyModel(built=built, specs=specs, device=place)


def find_device(name: str | None) -> torch.device:
    """Return the device of this name, or the default one: the GPU where there is one.

    Raises:
        UsageError: no such device here, or one that pwcc does not compile for.
    """
    import torch

    from pwcc.compile.target import target_of

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"expected a device such as cpu, cuda or cuda:1, got {name!r}") from None
    target_of(device)
    return device
