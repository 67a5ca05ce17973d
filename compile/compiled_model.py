"""Artifact: a loaded entry, callable like the module it was compiled from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pwcc.cache.errors import ArgumentError, CacheMiss, PwccError, SizeError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.compile.eligibility import changed_code
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.ops.paged_attention import paged_attention
from pwcc.compile.runtime.calling import Binder, CallingConvention
from pwcc.compile.runtime.held import Replaced, bind_weights, named_tensors
from pwcc.compile.runtime.piece import LoadedPiece
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.runtime.targets import resolve_target

if TYPE_CHECKING:
    from pwcc.compile.check import CheckReport
    from pwcc.compile.ops.forward_context import AttentionKernel
    from pwcc.compile.receipt import LoadReceipt

Run = Callable[[Sequence[torch.Tensor], tuple[int, ...]], tuple[Any, ...]]
Bind = Callable[..., Run]


@dataclass
class LoadedVariant:
    """One compiled range or size: the unique pieces' callables, and the program bound over them."""

    low: int
    high: int
    static: bool
    pieces: tuple[LoadedPiece, ...]
    run: Run | None = None


@dataclass
class LoadedProgram:
    """One trace's program: how to call it, how to bind it, and its variants."""

    low: int
    high: int
    calling: CallingConvention
    bind: Bind
    variants: tuple[LoadedVariant, ...]
    binder: Binder
    output: Callable[[Sequence[object], Sequence[object], Sequence[object]], object]
    weights: list[torch.Tensor] = field(default_factory=list)
    by_size: dict[int, Run] = field(default_factory=dict)

    def variant(self, size: int) -> LoadedVariant:
        """Return what serves a size: the static variant, else the tightest range that holds it."""
        fitting = [v for v in self.variants if v.low <= size <= v.high and v.run is not None]
        if not fitting:
            raise SizeError(f"size {size} is outside the compiled variants of [{self.low}, {self.high}]")
        return min(fitting, key=lambda v: (not v.static, v.high - v.low))

    def select(self, size: int) -> Run:
        """Return the program bound for a size; see :meth:`variant`."""
        run = self.variant(size).run
        if run is None:  # not reachable: filtered above
            raise SizeError(f"no program is bound for size {size}")
        self.by_size[size] = run
        return run


class CompiledModel:
    """A model whose pieces are sealed machine code, bound to the live module's weights.

    Call it like the module. Inference only: it runs without gradients, and refuses arguments that
    require them. Sizes with a static variant use it, others the dynamic variant; sizes outside the
    range, violated shape predicates and arguments of another dtype, device or layout raise
    :class:`pwcc.cache.errors.CallError`. It never traces or compiles. Not safe to call from several
    threads while :meth:`rebind` runs; otherwise calls share no state.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        manifest: Manifest,
        programs: Sequence[LoadedProgram],
        read_blob: Callable[[BlobDigest], bytes],
        attention_kernel: AttentionKernel | None = None,
        hold: object = None,
    ) -> None:
        self._model = model
        self._device = device
        self._programs = tuple(programs)
        self._cuda = device.type == "cuda"
        self._numeric = numeric_state()
        self._autocast = torch.is_autocast_enabled(device.type)
        self._without_grad = any(item.kind == "mode" and item.name == "grad" for item in manifest.observed)
        self.manifest = manifest
        self.read_blob = read_blob
        self.attention_kernel = attention_kernel or paged_attention
        self._hold = hold  # marks the entry as in use for as long as this model lives
        self._receipt: LoadReceipt | None = None
        self._replaced = Replaced()
        self._bindings = 0
        self.rebind()

    @property
    def receipt(self) -> LoadReceipt:
        """What loading did and took."""
        if self._receipt is None:
            raise AttributeError("the receipt is written when load returns")
        return self._receipt

    @property
    def device(self) -> torch.device:
        """The device that the weights lie on."""
        return self._device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that have a static variant, ascending."""
        return self.manifest.sizes

    @property
    def programs(self) -> tuple[LoadedProgram, ...]:
        """The loaded programs, for capture and inspection."""
        return self._programs

    @property
    def bindings(self) -> int:
        """How often weights were bound; what was captured holds for one binding."""
        return self._bindings

    @property
    def stale(self) -> bool:
        """Whether a bound tensor is gone from the process, so that the next call binds again."""
        return self._replaced.noticed

    def live_weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the module holds now, by name; walks the whole module."""
        return dict(named_tensors(self._model))

    def program_at(self, size: int) -> LoadedProgram:
        """Return the program that answers a token count.

        Raises:
            SizeError: it is outside the compiled range.
        """
        for program in self._programs:
            if program.low <= size <= program.high:
                return program
        low, high = min(p.low for p in self._programs), max(p.high for p in self._programs)
        raise SizeError(f"size {size} is outside the compiled range [{low}, {high}]")

    def rebind(self) -> None:
        """Bind the weights that the module holds now, after the checks of a load.

        Call it after ``param.data = ...``, ``model.to(...)``, ``load_state_dict(assign=True)`` or any other
        change that replaces tensors; values written in place are seen without it. A call rebinds by
        itself when a tensor it was bound to is gone from the process, as usual after ``assign=True``, but
        a tensor that something else still refers to cannot be noticed.

        Raises:
            CacheMiss: a tensor's name, dtype, shape, layout or device is not what was compiled, or something
                else of the model, its code or the numeric modes is not what the code was compiled for. The
                old binding stays.
        """
        held = dict(named_tensors(self._model))
        bound = [bind_weights(held, program.calling.weights, self._device) for program in self._programs]
        if self._receipt is not None:  # the first binding follows the same checks in load
            self._require_unchanged()
        self._bindings += 1
        names = {weight.names[0] for program in self._programs for weight in program.calling.weights}
        self._replaced.watch(held[name] for name in names)
        for program, weights in zip(self._programs, bound, strict=True):
            program.weights = weights
            program.binder.bound(weights)
            program.by_size = {}
            for variant in program.variants:
                calls = [piece.call for piece in variant.pieces]
                variant.run = program.bind(calls, resolve_target, constant(self._device), weights)

    def _require_unchanged(self) -> None:
        reasons = [
            f"{name}: loaded with {self._numeric.get(name)!r}, now {value!r}"
            for name, value in numeric_state().items()
            if value != self._numeric.get(name)
        ]
        predicates = PredicateSet.from_json(self.read_blob(self.manifest.predicates))
        reasons += changed_code(self._model, self.manifest)
        reasons += [str(violation) for violation in predicates.check(self._model, limit=3)]
        if reasons:
            raise CacheMiss(
                "the model is no longer what was compiled",
                reasons=reasons[:3],
                hint="load again; an entry for the changed model may have to be compiled",
            )

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the model; returns what ``forward`` returns.

        Raises:
            CallError: see the class. What torch raises while a piece runs, such as out of memory, comes as it
                is, with a note that names the entry.
        """
        program, tensors, sizes = self.bind(args, kwargs)
        try:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    outputs = self._run(program, tensors, sizes)
            else:
                outputs = self._run(program, tensors, sizes)
        except Exception as error:
            self.name_in(error)
            raise
        return program.output(outputs, tensors, program.weights)

    def name_in(self, error: Exception) -> None:
        """Add a note that names the entry to an error that came up while it ran; pwcc's own say enough."""
        note = f"while running pwcc entry {self.manifest.entry_key} ({self.manifest.model.identity})"
        if not isinstance(error, PwccError) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[LoadedProgram, list[torch.Tensor], tuple[int, ...]]:
        """Check one call as :meth:`__call__` does, and run nothing.

        Returns the program that answers it, its tensor arguments in signature order, and its sizes.
        """
        if self._replaced.noticed:
            self.rebind()
        if torch.is_autocast_enabled(self._device.type) is not self._autocast:
            raise ArgumentError(
                f"autocast is {'off' if self._autocast else 'on'} for {self._device.type}, "
                "unlike when the entry was loaded",
                hint="call outside the autocast region, or load inside one like it",
            )
        program = self._programs[0]
        if len(self._programs) > 1:
            program = self._program_for(args, kwargs)
        tensors, sizes = program.binder.bind(args, kwargs)
        if torch.is_grad_enabled():
            if self._without_grad:
                raise ArgumentError(
                    "the model branches on the grad mode, and was compiled for calls without gradients",
                    hint="call under torch.no_grad() or torch.inference_mode()",
                )
            for tensor in tensors:
                if tensor.requires_grad:
                    raise ArgumentError(
                        "an argument requires gradients; compiled pieces are for inference only",
                        hint="call under torch.no_grad(), or detach it",
                    )
        return program, tensors, sizes

    def _run(
        self, program: LoadedProgram, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]
    ) -> tuple[Any, ...]:
        size = sizes[0] if sizes else program.low
        run = program.by_size.get(size)
        if run is None:
            run = program.select(size)
        if self._cuda and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return run(tensors, sizes)
        return run(tensors, sizes)

    def _program_for(self, args: Sequence[object], kwargs: Mapping[str, object]) -> LoadedProgram:
        first = self._programs[0].calling
        symbol = next((p.calling.symbols[0] for p in self._programs if p.calling.symbols), None)
        if symbol is None:
            return self._programs[0]
        name = first.parameters[symbol.parameter].name
        tensor = (
            kwargs[name] if name in kwargs else args[symbol.parameter] if symbol.parameter < len(args) else None
        )
        if not isinstance(tensor, torch.Tensor) or tensor.dim() <= symbol.dim:
            return self._programs[0]  # its binder gives the error
        size = tensor.shape[symbol.dim]
        for program in self._programs:
            if program.low <= size <= program.high:
                return program
        low, high = min(p.low for p in self._programs), max(p.high for p in self._programs)
        raise SizeError(
            f"size {size} of {name!r} (dimension {symbol.dim}) is outside the compiled range [{low}, {high}]",
            hint="compile with a larger --max-tokens, or split the batch",
        )

    def check(self, inputs_for: Callable[[int], Sequence[torch.Tensor]] | None = None) -> CheckReport:
        """Re-run the recorded numerics check of every sealed piece on this host.

        With ``inputs_for(num_tokens)`` the whole model is also compared with eager at every static size
        and two sizes of the dynamic range. Needs memory for float32 copies of one piece's weights.
        """
        from pwcc.compile.check import check

        return check(self, self._model, inputs_for)


def constant(device: torch.device) -> Callable[[str, str], object]:
    """Return the look-up of ``stitch.py``'s constants on ``device``."""

    def find(kind: str, text: str) -> object:
        if kind == "float":
            return float(text)
        if kind == "device":
            return device if text == device.type else torch.device(text)
        return getattr(torch, text)

    return find
