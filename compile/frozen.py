"""Key: what a compile was asked for must not change until it is published, under whose key it would lie.

A plugin, a callback or another thread can change a list that was handed over, a variable, an option of
Inductor or a numeric mode while pieces compile. The key was computed before; code made afterwards would
be stored under it. So the key is computed again from what is in force before anything is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn

from pwcc.cache.errors import KeyChanged
from pwcc.cache.factors import FactorTree, diff
from pwcc.cache.ids import FactorDigest, LookupKey
from pwcc.compile.build_factors import BuildFactors, portable_args
from pwcc.compile.load import lookup
from pwcc.compile.ranges import canonical
from pwcc.compile.request import Request
from pwcc.compile.torch_private.inductor import NO_LINE_INFO

MAX_NAMED = 5


@dataclass(frozen=True)
class Frozen:
    """The request and factors of one compile as they were when its key was computed."""

    model: nn.Module
    request: Request
    build: BuildFactors
    key: LookupKey
    tree_digest: FactorDigest
    measure: Callable[[], BuildFactors]
    """Reads the factors as ``build`` was read."""
    thread: int = field(default_factory=threading.get_ident)
    """Where they were read: autocast, default device and function modes are each thread's own."""

    def verify(self) -> None:
        """Compare what is in force now with what was hashed; some milliseconds, nothing is imported.

        In another thread than the first, modes are left out: the next call in that one compares them.

        Raises:
            KeyChanged: names every option, factor or part of the model that changed.
        """
        changed = [*self._given(), *self._factors()]
        if not changed:
            key, tree_digest = lookup(self.model, self.request.target, self.request.options.tag)
            if tree_digest != self.tree_digest:
                changed = ["model tree: parameters, buffers or modules were replaced"]
            elif key != self.key and self._is_home():
                changed = ["lookup key: the signature of forward"]
        if changed:
            more = f" (and {len(changed) - MAX_NAMED} more)" if len(changed) > MAX_NAMED else ""
            raise KeyChanged(
                f"changed while compiling, after the key was computed: {'; '.join(changed[:MAX_NAMED])}{more}",
                hint="nothing was published; let plugins and callbacks finish before the compile starts",
            )

    def _given(self) -> Iterator[str]:
        """Compare the caller's own lists with the copies that are used."""
        given, options = self.request.given, self.request.options
        cuts = tuple(given.splitting_ops)
        if cuts != options.splitting_ops:
            yield f"splitting_ops: {_listed(options.splitting_ops, cuts)}"
        sizes = tuple(sorted(set(given.sizes)))
        if sizes != options.sizes:
            yield f"sizes: {_listed(options.sizes, sizes)}"
        ranges = canonical(given.ranges, options.max_tokens)
        if ranges != options.ranges:
            yield f"ranges: {_listed(options.ranges, ranges)}"
        args = portable_args(given.args or {})
        if args != self.build.configuration["model arguments"]:
            yield "model arguments: the mapping that was given"

    def _factors(self) -> Iterator[str]:
        for change in diff(_tree(self.build), _tree(self.measure())):
            own = change.path == f"environment/{NO_LINE_INFO}"  # set by pwcc while pieces compile
            if not own and (self._is_home() or not change.path.startswith("compiler/numeric state")):
                yield str(change)

    def _is_home(self) -> bool:
        return threading.get_ident() == self.thread


def _tree(build: BuildFactors) -> FactorTree:
    return FactorTree.of(
        environment=build.environment, configuration=build.configuration, compiler=build.compiler
    )


def _listed(before: tuple[object, ...], after: tuple[object, ...]) -> str:
    """Say what was added to a list and what was removed."""
    added = [f"added {item}" for item in after if item not in before]
    removed = [f"removed {item}" for item in before if item not in after]
    return ", ".join([*added, *removed]) or "another order"
