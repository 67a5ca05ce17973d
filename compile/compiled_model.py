"""Artifact: a loaded entry, callable like the module it was compiled from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from pwcc.cache.errors import ArgumentError, CacheMiss, PwccError, SizeError, UsageError
from pwcc.cache.ids import BlobDigest
from pwcc.cache.manifest import Manifest
from pwcc.compile.eligibility import changed_code
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.ops.paged_attention import paged_attention
from pwcc.compile.runtime.binding import Binder
from pwcc.compile.runtime.calling import TOKENS, CallingConvention
from pwcc.compile.runtime.held import Replaced, bind_weights, named_tensors
from pwcc.compile.runtime.output import Output
from pwcc.compile.runtime.piece import LoadedPiece
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.runtime.targets import resolve_target
from pwcc.compile.torch_private.untraced import untraced

if TYPE_CHECKING:
    from pwcc.compile.check import CheckReport
    from pwcc.compile.input_values import Call
    from pwcc.compile.ops.forward_context import AttentionKernel
    from pwcc.compile.receipt import LoadReceipt

_LOG = logging.getLogger("pwcc")
Run = Callable[[Sequence[torch.Tensor], tuple[int, ...]], tuple[Any, ...]]
Bind = Callable[..., Run]

_autocast, _grad_mode = torch.is_autocast_enabled, torch.is_grad_enabled  # each call asks both


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
    output: Output
    weights: list[torch.Tensor] = field(default_factory=list)
    by_size: dict[int, Run] = field(default_factory=dict)

    def variant(self, size: int) -> LoadedVariant:
        """Return what serves a size: the static variant, else the tightest range, else the lower one."""
        fitting = [v for v in self.variants if v.low <= size <= v.high and v.run is not None]
        if not fitting:
            ranges = ", ".join(f"{v.low}-{v.high}" for v in self.variants if not v.static) or "none"
            static = ", ".join(str(v.low) for v in self.variants if v.static) or "none"
            raise SizeError(
                f"size {size} has no compiled variant: it lies in none of the ranges {ranges}, "
                f"static sizes are {static}",
                hint="pad the batch to a size that is served, or compile with --ranges that hold this size",
            )
        return min(fitting, key=lambda v: (not v.static, v.high - v.low, v.low))

    def tokens(self, sizes: Sequence[int]) -> int:
        """Return the token count among the sizes of a call, which come in the order of the symbols."""
        symbols = self.calling.symbols
        return sizes[0] if symbols and symbols[0].name == TOKENS else self.low

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
    require them. Sizes with a static variant use it, others the tightest range that holds them; sizes in no
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
        self._only = self._programs[0] if len(self._programs) == 1 else None
        self._kind = device.type
        self._by_size: dict[int, LoadedProgram] = {}
        self._tokens = next((s for p in programs for s in p.calling.symbols if s.name == TOKENS), None)
        self._cuda = device.type == "cuda"
        self._numeric = numeric_state()
        self._autocast = torch.is_autocast_enabled(device.type)
        self._autocast_dtype = torch.get_autocast_dtype(device.type)
        self._without_grad = any(item.kind == "mode" and item.name == "grad" for item in manifest.observed)
        self.manifest = manifest
        self.read_blob = read_blob
        self.attention_kernel = attention_kernel or paged_attention
        self._hold = hold  # marks the entry as in use for as long as this model lives
        self._receipt: LoadReceipt | None = None
        self._replaced = Replaced()
        self._bindings = 0
        self._trainable: str | None = None
        self.rebind()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``: the programs of a copy would keep these weights."""
        raise UsageError(
            "a loaded model cannot be copied or pickled: its programs are bound to the weights of one module",
            hint="copy the module and call pwcc.load for the copy",
        )

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
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Inclusive ranges of sizes that a variant serves, ascending; a static one's begins where it ends."""
        return tuple(sorted({(v.low, v.high) for program in self._programs for v in program.variants}))

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
        return self._program_of(size, "")

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
        if self._bindings == 1:
            self._trainable = next((name for name in sorted(names) if held[name].requires_grad), None)
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

    @untraced("a loaded pwcc model is compiled already")
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
        return program.output(outputs, tensors, program.weights, sizes)

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
        if _autocast(self._kind) is not self._autocast:
            raise ArgumentError(
                f"autocast is {'off' if self._autocast else 'on'} for {self._device.type}, "
                "unlike when the entry was loaded",
                hint="call outside the autocast region, or load inside one like it",
            )
        if self._autocast and torch.get_autocast_dtype(self._kind) is not self._autocast_dtype:
            raise ArgumentError(
                f"autocast is to {torch.get_autocast_dtype(self._kind)}, "
                f"and was to {self._autocast_dtype} when the entry was loaded",
                hint="call inside an autocast region of the same dtype",
            )
        program = self._only or self._program_for(args, kwargs)
        tensors, sizes = program.binder.bind(args, kwargs)
        if _grad_mode():
            if self._trainable is not None:
                self._say_without_gradients(self._trainable)
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

    def _say_without_gradients(self, name: str) -> None:
        """Say once that results of a call in grad mode carry no gradients, although a weight asks for them."""
        self._trainable = None
        _LOG.warning(
            "%r requires gradients and grad mode is on, but compiled pieces are for inference only: "
            "results carry no gradients (entry %s); call under torch.no_grad(), or model.requires_grad_(False)",
            name,
            self.manifest.entry_key,
        )

    def _run(
        self, program: LoadedProgram, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]
    ) -> tuple[Any, ...]:
        size = program.tokens(sizes)
        run = program.by_size.get(size)
        if run is None:
            run = program.select(size)
        if self._cuda and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return run(tensors, sizes)
        return run(tensors, sizes)

    def _program_for(self, args: Sequence[object], kwargs: Mapping[str, object]) -> LoadedProgram:
        """Return the program for the token count of a call; the first where its binder says what is wrong."""
        symbol = self._tokens
        if symbol is None:
            return self._programs[0]
        tensor = self._programs[0].binder.leaf(args, kwargs, symbol.parameter)
        if not isinstance(tensor, torch.Tensor) or tensor.dim() <= symbol.dim:
            return self._programs[0]
        size = tensor.shape[symbol.dim]
        program = self._by_size.get(size)
        if program is None:
            name = self._programs[0].calling.parameters[symbol.parameter].name
            program = self._by_size[size] = self._program_of(size, f" of {name!r} (dimension {symbol.dim})")
        return program

    def _program_of(self, size: int, what: str) -> LoadedProgram:
        """Return the program for a token count; ``what`` says in an error whose size it is."""
        for program in self._programs:
            if program.low <= size <= program.high:
                return program
        low, high = min(p.low for p in self._programs), max(p.high for p in self._programs)
        raise SizeError(
            f"size {size}{what} is outside the compiled range [{low}, {high}]",
            hint="compile with a larger --max-tokens, or split the batch",
        )

    def check(self, inputs_for: Callable[[int], Sequence[torch.Tensor] | Call] | None = None) -> CheckReport:
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
        if kind == "complex":
            return complex(text)
        if kind == "device":
            return device if text == device.type else torch.device(text)
        return getattr(torch, text)

    return find
