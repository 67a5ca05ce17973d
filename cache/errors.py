"""Errors of every noun: what a user must act on, as one tree.

::

    PwccError                      exit 1
    ├── UsageError                 exit 2   a wrong argument, unknown model, bad size
    ├── CacheMiss                  exit 3   no entry may serve this model here; carries every candidate's reason
    │   └── HostMismatch           exit 4   an entry matches, but this host lacks something it requires
    ├── StoreError                 exit 1   the directory or a file in it is not what it must be
    │   ├── NotAStore                       not a pwcc cache directory
    │   ├── CorruptEntry                    manifest or blob fails its digest, schema or bounds
    │   └── NewerFormat                     written by a newer pwcc: intact, but not readable by this one
    ├── FactorError                exit 1   a value that cannot be part of a key, by factor name
    ├── ModelError                 exit 1   the model could not be built, or its factory raised
    ├── TraceError                 exit 1   graph break or failed trace, with the user's file and line
    ├── SpecializationError        exit 1   the trace holds for fewer sizes than asked, with its source line
    ├── UnsealableError            exit 1   a construct that cannot be sealed, by name
    ├── PieceCompileError          exit 1   Inductor failed on a piece; names piece, op and source line
    ├── NumericsError              exit 1   a sealed piece disagrees with eager beyond tolerance
    └── CallError                  exit 1   a call the artifact must not answer
        ├── SizeError                       a size outside the compiled range
        ├── GuardViolation                  a recorded shape predicate fails for these sizes
        └── ArgumentError                   arity, None-ness, dtype, device, layout or scalar differs
"""

from __future__ import annotations

from collections.abc import Sequence


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


class NewerFormat(StoreError):
    """A newer pwcc wrote this entry or store: it is intact, but this version cannot read it."""


class FactorError(PwccError):
    """A value that has no stable form, so it cannot be part of a key."""


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
    """The compiled piece holds a construct that cannot be sealed."""


class PieceCompileError(PwccError):
    """Inductor failed on a piece."""


class NumericsError(PwccError):
    """A sealed piece disagrees with eager beyond its tolerance."""


class CallError(PwccError):
    """A call that the artifact must not answer."""


class SizeError(CallError):
    """A size outside the compiled range."""


class GuardViolation(CallError):
    """A recorded shape predicate fails for the sizes of this call."""


class ArgumentError(CallError):
    """Arity, None-ness, dtype, device, layout or a scalar differs from what was compiled."""
