"""Artifact: the state of one decorated module: what serves its calls now, and how that came about.

::

    NEW --first call--> EAGER       level 0, or enabled_if said no: as it is, for life
                        SERVING     compiled code is there (levels 1 to 3)
                        COMPILING   level 3, nothing in the cache: eager serves, a process compiles
    COMPILING --> FILLING --> SERVING    FILLING: the dynamic variant serves, static ones compile
    COMPILING, FILLING --> FAILED        what served goes on serving; ``error`` says why
    any of them --.to(), .half()--> NEW

What serves is one attribute, ``run``; it is replaced at once, so a call sees the old or the new.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from pwcc.cache.errors import ArgumentError, CacheMiss
from pwcc.cache.switches import DISABLE, Switches
from pwcc.compile.call import OPTIONS, STATE, is_inside
from pwcc.compile.decorator_dims import FirstCall, dynamic_dims
from pwcc.compile.decorator_eager import run_eagerly, run_stock, why_eager
from pwcc.compile.decorator_phase import CompileState, Phase
from pwcc.compile.levels import CompileConfig, CompileLevel, current_config, in_force
from pwcc.compile.ranges import held_apart

if TYPE_CHECKING:
    from pwcc.compile.background import Background
    from pwcc.compile.compiled_model import CompiledModel

logger = logging.getLogger("pwcc")


class ModuleState:
    """The state of one module. Copied or pickled it is new: a copy loads for itself. Safe between threads."""

    def __init__(self, *, enabled: bool, context: CompileConfig | None, owner: int = 0) -> None:
        self.owner = owner
        self.run: Callable[..., Any] | None = None
        self._enabled = enabled
        self._context = context
        self._phase = Phase.NEW if enabled else Phase.EAGER
        self._level: CompileLevel | None = None
        self._error: Exception | None = None
        self._refusal: Exception | None = None
        self._compiled: CompiledModel | None = None
        self._first: FirstCall | None = None
        self._behind: Background | None = None
        self._any_call = False  # level 1: the compiled callable takes hooks, modes and gradients itself
        self._said: set[str] = set()
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Callable[..., ModuleState], tuple[bool, CompileConfig | None]]:
        return _fresh, (self._enabled, self._context)

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleState:
        return _fresh(self._enabled, self._context)

    def for_module(self, module: nn.Module) -> ModuleState:
        """Return this state for a module that it came to by copying: its own from now on, or one like it."""
        state = self if self.owner == 0 else _fresh(self._enabled, self._context)
        state.owner = id(module)
        return state

    def snapshot(self) -> CompileState:
        """Return where the module stands now; does not wait for a first call that compiles."""
        compiled = self._compiled
        return CompileState(
            self._phase,
            self._level,
            None if compiled is None else str(compiled.manifest.entry_key),
            () if compiled is None else tuple(compiled.sizes),
            self._error,
            self.run is not None,
        )

    def forget(self) -> None:
        """Give up what is loaded; the next call loads for what the module is then. A compile behind ends."""
        with self._lock:
            if self._behind is not None:
                self._behind.stop()
            enabled = self._enabled
            self.run, self._compiled, self._first, self._behind = None, None, None, None
            self._error, self._refusal, self._any_call = None, None, False
            self._phase = Phase.NEW if enabled else Phase.EAGER

    # What call.dispatch asks

    def answer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that is not plainly for compiled code: the first one, an eager one, a stock one."""
        if self._phase is Phase.EAGER or is_inside():
            return nn.Module.__call__(module, *args, **kwargs)
        run = self.run
        if self._any_call and run is not None:
            return run(*args, **kwargs)
        reason = why_eager(module, args, kwargs)
        if reason is not None and not (self._phase is Phase.NEW and self._is_stock(module)):
            self._say_once(reason, module)
            return run_eagerly(module, args, kwargs)
        if run is None:
            with self._lock:
                if self._phase is Phase.NEW:
                    self._begin(module, args, kwargs)
                run = self.run
        if run is None:
            if self._level is CompileLevel.NO_COMPILATION:  # found out just now
                return nn.Module.__call__(module, *args, **kwargs)
            if self._refusal is not None:
                raise self._refusal.with_traceback(None)
            if self._first is not None:
                self._first.require_same_nones(args, kwargs)
            return run_eagerly(module, args, kwargs)
        try:
            return run(*args, **kwargs)
        except (ArgumentError, CacheMiss) as error:
            return self.explain(module, args, kwargs, error)

    def explain(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: ArgumentError | CacheMiss
    ) -> Any:
        """Load again where the module's weights changed form; else say None-ness first, then the error."""
        if isinstance(error, CacheMiss) and self._compiled is not None:
            self.forget()
            return self.answer(module, args, kwargs)
        if self._first is not None:
            self._first.require_same_nones(args, kwargs)
        raise error

    # The first call

    def _config(self, module: nn.Module) -> tuple[CompileConfig, Switches]:
        switches = Switches.read()
        argument: CompileConfig = getattr(type(module), OPTIONS).config
        config = current_config(argument, self._context)
        if switches.disable and CompileLevel.of(config.level or 0) > CompileLevel.DYNAMO_AS_IS:
            self._say_once(f"{DISABLE} is on: torch.compile as it is, no cache", module)
        return in_force(config, switches), switches

    def _is_stock(self, module: nn.Module) -> bool:
        return CompileLevel.of(self._config(module)[0].level or 0) <= CompileLevel.DYNAMO_AS_IS

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config, switches = self._config(module)
        self._level = CompileLevel.of(config.level or 0)
        if self._level is CompileLevel.NO_COMPILATION:
            self._phase = Phase.EAGER
        elif self._level is CompileLevel.DYNAMO_AS_IS:
            self.run, self._phase, self._any_call = run_stock(module), Phase.SERVING, True
        else:
            decoration = getattr(type(module), OPTIONS)
            dims = dynamic_dims(module.forward, decoration.dynamic_arg_dims)
            first = FirstCall.of(module, dims, args, kwargs)
            if self._level is CompileLevel.DYNAMO_ONCE:
                from pwcc.compile.levels_once import trace_once

                self.run, self._phase = trace_once(module, first.specs, config), Phase.SERVING
            else:
                self._piecewise(module, first, config, switches)
            self._first = first

    def _piecewise(
        self, module: nn.Module, first: FirstCall, config: CompileConfig, switches: Switches
    ) -> None:
        from pwcc.compile.background import Background, Task
        from pwcc.compile.load import load

        sizes, ranges = tuple(config.sizes or ()), tuple(config.ranges or ())
        compiled: CompiledModel | None = None
        if not switches.recache:
            try:
                compiled = load(module, **config.load_options())
            except CacheMiss:
                if config.mode == "load":
                    raise
            else:
                too_small = compiled.manifest.max_tokens < (config.max_tokens or 0)
                if config.mode == "load-or-compile" and too_small:
                    compiled = None
        if compiled is None and config.first_call == "wait":
            from pwcc.compile.api import precompile

            try:
                report = precompile(module, inputs=first.specs, **config.compile_options())
            except Exception as error:
                self._error = self._refusal = error  # later calls say the same, and compile nothing
                self._phase = Phase.FAILED
                raise
            compiled = load(module, entry=report.entry_key, **config.load_options())
        if compiled is not None:
            self._swap(compiled)
            self._phase = Phase.SERVING
            lacks_ranges = not held_apart(ranges, compiled.ranges, compiled.sizes)
            if config.mode == "load" or (set(sizes) <= set(compiled.sizes) and not lacks_ranges):
                return
        else:
            lacks_ranges = True
        stages = ([()] if lacks_ranges else []) + ([sizes] if sizes else [])
        self._phase = Phase.COMPILING if compiled is None else Phase.FILLING
        self._behind = Background(
            module,
            Task(first.specs, tuple(stages), config),
            on_entry=self._on_entry,
            on_end=self._on_end,
        )
        self._behind.start()

    # What a compile beside this process reports, in its thread

    def _swap(self, compiled: CompiledModel) -> None:
        self._compiled = compiled
        self.run = compiled

    def _on_entry(self, behind: Background, compiled: CompiledModel) -> None:
        with self._lock:
            if self._behind is behind:  # else: forgotten meanwhile
                self._swap(compiled)
                self._phase = Phase.FILLING

    def _on_end(self, behind: Background, error: Exception | None) -> None:
        with self._lock:
            if self._behind is not behind:
                return
            self._behind, self._error = None, error
            self._phase = Phase.SERVING if error is None else Phase.FAILED
        if error is not None:
            served = "eager" if self.run is None else "the dynamic variant"
            logger.error("the compile behind a decorated module failed, %s goes on serving: %s", served, error)

    def rebind(self) -> None:
        """Bind the weights that the module holds now, if an entry serves it."""
        if self._compiled is not None:
            self._compiled.rebind()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no compile goes on behind the module."""
        behind = self._behind
        if behind is not None:
            behind.join(timeout_s)

    def _say_once(self, reason: str, module: nn.Module) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("%s: %s", type(module).__qualname__, reason)


def compile_state(module: nn.Module) -> CompileState:
    """Return where a decorated module stands: ``module.compile_state``, with its type.

    Raises:
        TypeError: the module's class is not decorated.
    """
    if not hasattr(type(module), OPTIONS):
        raise TypeError(f"{type(module).__qualname__} is not decorated with pwcc.support_compile")
    state: ModuleState | None = module.__dict__.get(STATE)
    if state is None or state.owner != id(module):
        attached: ModuleState = getattr(type(module), OPTIONS).attach(module)
        return attached.snapshot()
    return state.snapshot()


def rebind(module: nn.Module) -> None:
    """Take in weights of a decorated module that ``param.data = ...`` replaced, which cannot be noticed.

    Raises:
        CacheMiss: they are not what was compiled; see ``CompiledModel.rebind``. TypeError: not decorated.
    """
    compile_state(module)
    state: ModuleState = module.__dict__[STATE]
    state.rebind()


def wait_for_compile(module: nn.Module, timeout_s: float | None = None) -> CompileState:
    """Wait until no compile goes on behind a decorated module, and return where it then stands.

    For servers that prefer to be late to being slow, and for tests. Returns also after ``timeout_s``.

    Raises:
        PwccError: the compile failed: its own error. TypeError: the module's class is not decorated.
    """
    compile_state(module)
    state: ModuleState = module.__dict__[STATE]
    state.wait(timeout_s)
    found = state.snapshot()
    if found.error is not None:
        raise found.error
    return found


def _fresh(enabled: bool, context: CompileConfig | None) -> ModuleState:
    return ModuleState(enabled=enabled, context=context)
