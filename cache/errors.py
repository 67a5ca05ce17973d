"""Errors of every noun: what a user must act on, as one tree.

::

    PwccError                      exit 1
    ├── UsageError                 exit 2   a wrong argument, unknown model, bad size
    │   └── CacheDisabled                   PWCC_DISABLE is on, and this needs a cache
    ├── CacheMiss                  exit 3   no entry may serve this model here; carries every candidate's reason
    │   └── HostMismatch           exit 4   an entry matches, but this host lacks something it requires
    ├── StoreError                 exit 1   the directory or a file in it is not what it must be
    │   ├── NotAStore                       not a pwcc cache directory
    │   ├── CorruptEntry                    manifest or blob fails its digest, schema or bounds
    │   │   └── MissingBlob                 a blob that something names is not there (any more)
    │   ├── UntrustedStore                  others could have written it, and nobody named it as trusted
    │   ├── LockTimeout                     another process compiles the same for longer than one would wait
    │   ├── UntrustedEntry                  a signature by a trusted key is required, and there is none
    │   ├── EntryKept                       an entry is pinned or in use, so it is not removed
    │   └── NewerFormat                     written by a newer pwcc: intact, but not readable by this one
    ├── SigningUnavailable         exit 1   a signature is needed, and `cryptography` is not installed
    ├── FactorError                exit 1   a value that cannot be part of a key, by factor name
    ├── KeyChanged                 exit 1   what enters the key changed while compiling, by name
    ├── ModelError                 exit 1   the model could not be built, or its factory raised
    ├── TraceError                 exit 1   graph break or failed trace, with the user's file and line
    ├── SpecializationError        exit 1   the trace holds for fewer sizes than asked, with its source line
    ├── UnsealableError            exit 1   a construct that cannot be sealed, by name
    ├── PieceCompileError          exit 1   Inductor failed on a piece; names piece, op and source line
    ├── NumericsError              exit 1   a sealed piece disagrees with eager beyond tolerance
    ├── CaptureError               exit 1   graphs could not be captured, or must not be replayed
    │   ├── MovedInputError                 a captured input lies elsewhere now; names it
    │   ├── CaptureLockedError              a capture that the plan does not hold, after the plan was done
    │   └── CaptureMemoryError              the graphs do not fit; says which sizes do
    └── CallError                  exit 1   a call the artifact must not answer
        ├── SizeError                       a size outside the compiled range
        ├── GuardViolation                  a recorded shape predicate fails for these sizes
        └── ArgumentError                   None-ness, dtype, device, layout, structure or scalar differs
            └── WrongCall                   arity or names: Python refuses the call, too (also a TypeError)
"""

from __future__ import annotations

from collections.abc import Sequence


def install(extra: str) -> str:
    """Return the hint of an error for want of an optional package: which extra of pwcc brings it."""
    return f"install pwcc with its extra {extra!r}: in a checkout, pip install '.[{extra}]'"


class PwccError(Exception):
    """Base of all expected failures.

    ``message`` says what was expected and what came; ``where`` names the file, entry or line;
    ``hint`` says what to do next. ``str()`` joins the three in that order, one per line.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)


class UsageError(PwccError):
    """A wrong argument, unknown model or impossible size."""

    exit_code = 2


class CacheDisabled(UsageError):
    """``PWCC_DISABLE`` turned the cache off, and what was asked for needs one."""


class CacheMiss(PwccError):
    """No entry may serve this model on this host; ``reasons`` holds one line per candidate."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        reasons: Sequence[str] = (),
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.reasons = tuple(reasons)

    def __str__(self) -> str:
        head, *rest = super().__str__().split("\n")
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons), *rest])


class HostMismatch(CacheMiss):
    """An entry matches the model, but this host does not meet one of its requirements."""

    exit_code = 4


class StoreError(PwccError):
    """The directory, or a file in it, is not what it must be."""


class NotAStore(StoreError):
    """The path is not a pwcc cache directory."""


class CorruptEntry(StoreError):
    """A manifest or blob fails its digest, schema or bounds."""


class UntrustedEntry(StoreError):
    """A signature by a trusted key is required, and the entry has none that is valid."""


class MissingBlob(CorruptEntry):
    """A blob that a manifest or record names is not there, or was removed meanwhile."""


class UntrustedStore(StoreError):
    """Somebody other than the user and root could have written the directory, which holds code."""


class LockTimeout(StoreError):
    """Another process held a lock for longer than the caller would wait."""


class EntryKept(StoreError):
    """An entry was to be removed, and somebody pinned it or uses it."""


class NewerFormat(StoreError):
    """A newer pwcc wrote this entry or store: it is intact, but this version cannot read it."""


class SigningUnavailable(PwccError):
    """A signature is to be made or verified, and the package ``cryptography`` is not installed."""


class FactorError(PwccError):
    """A value that has no stable form, so it cannot be part of a key."""


class KeyChanged(PwccError):
    """What a compile was asked for, or what it runs under, changed after its key was computed."""


class ModelError(PwccError):
    """The model could not be built."""


class TraceError(PwccError):
    """Dynamo could not trace the model into one graph.

    ``data_dependent`` tells that the code asked for the value of a size, so that another size mode may do.
    """

    data_dependent = False


class SpecializationError(PwccError):
    """The trace holds for fewer sizes than were asked for."""


class UnsealableError(PwccError):
    """The compiled piece holds a construct that cannot be sealed; ``graph`` is the traced graph's text."""

    graph: str | None = None


class PieceCompileError(PwccError):
    """Inductor failed on a piece."""


class NumericsError(PwccError):
    """A sealed piece disagrees with eager beyond its tolerance."""


class CaptureError(PwccError):
    """Graphs could not be captured, or what was captured must not be replayed."""


class MovedInputError(CaptureError):
    """A graph would read an address at which its input no longer lies; the message names the input."""


class CaptureLockedError(CaptureError):
    """A graph outside the plan was to be captured after the plan was done."""


class CaptureMemoryError(CaptureError):
    """The graphs need more memory than there is; the hint says which sizes fit."""


class CallError(PwccError):
    """A call that the artifact must not answer."""


class SizeError(CallError):
    """A size outside the compiled range."""


class GuardViolation(CallError):
    """A recorded shape predicate fails for the sizes of this call."""


class ArgumentError(CallError):
    """None-ness, dtype, device, layout, structure or a scalar differs from what was compiled."""


class WrongCall(ArgumentError, TypeError):
    """Arguments missing, unknown, given twice or too many: what ``forward`` itself refuses by TypeError."""
