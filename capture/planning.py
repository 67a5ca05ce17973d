"""Graph: from what a user asks for and what an entry can do to a capture plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, get_args

from pwcc.cache.errors import UsageError
from pwcc.capture.modes import CaptureMode, GraphSupport, parse_mode, resolve_mode
from pwcc.capture.padding import PaddingTable, check_fixed_points
from pwcc.capture.plan import CapturePlan, Instantiate, OnFailure
from pwcc.capture.size_list import default_sizes, usable_sizes

if TYPE_CHECKING:
    from pwcc.cache.manifest import Manifest
    from pwcc.compile.compiled_model import CompiledModel


def plan_for(
    compiled: CompiledModel,
    *,
    mode: CaptureMode = CaptureMode.FULL_AND_PIECEWISE,
    sizes: Iterable[int] | None = None,
    max_num_seqs: int = 256,
    max_tokens: int | None = None,
    max_seq_len: int = 2048,
    waste_limit: float | None = None,
    pad_multiple: int = 1,
    instantiate: Instantiate = "eager",
    lazy_sizes: Iterable[int] = (),
    background: bool = False,
    on_failure: OnFailure = "fallback",
    attention: GraphSupport = "always",
) -> CapturePlan:
    """Return the plan for a loaded entry, sizes descending; ``notes`` say what differs from what was asked.

    Args:
        compiled: the loaded entry; its key, range, static sizes and splits are read.
        mode: see ``CaptureMode``.
        sizes: token counts; None for the default list and the entry's static sizes that lie below its end.
        max_num_seqs: the most sequences in a batch; decode graphs go this far.
        max_tokens: the most tokens in a batch; default: what the entry was compiled for.
        max_seq_len: the longest sequence, in tokens, that full graphs hold for. The default attention kernel
            reads this many keys a sequence at every replay, so choose no more than is served.
        waste_limit: the most that a batch may be padded by, as padded over true size; None for no bound.
        pad_multiple: every size is a multiple of it, for sequence parallelism.
        instantiate: when graphs are made executable, ``eager`` or ``lazy`` (at the first replay).
        lazy_sizes: sizes that are captured when a batch first needs them.
        background: capture on a side thread, size by size, while serving from the dynamic variant.
        on_failure: what a failed capture does, ``fallback`` or ``raise``.
        attention: in which batches the attention kernel may be captured.

    Raises:
        UsageError: sizes outside the entry's range, one that would make a static variant unreachable, or an
            option of another kind than listed.
    """
    manifest = compiled.manifest
    limit = manifest.max_tokens if max_tokens is None else max_tokens
    if not manifest.min_tokens <= limit <= manifest.max_tokens:
        raise UsageError(
            f"expected max_tokens within the entry's range, {manifest.min_tokens} to {manifest.max_tokens}, "
            f"got {limit}"
        )
    static = [size for size in manifest.sizes if size <= limit]
    splits = min((program.splits for program in manifest.programs), default=0)
    requested = mode if isinstance(mode, CaptureMode) else parse_mode(str(mode))
    if attention not in get_args(GraphSupport):
        raise UsageError(
            f"expected attention to be one of {', '.join(get_args(GraphSupport))}, got {attention!r}"
        )
    resolved, notes = resolve_mode(requested, splits=splits, attention=attention)
    chosen: tuple[int, ...] = ()
    if resolved is not CaptureMode.NONE:
        if sizes is None:
            listed = default_sizes(max_num_seqs=max_num_seqs, max_tokens=limit)
            sizes = {*listed, *(size for size in static if size <= listed[-1])}
            usable = usable_sizes(sizes, max_tokens=limit, multiple=pad_multiple)
            chosen = tuple(size for size in usable if manifest.serves(size))
        else:
            chosen = usable_sizes(sizes, max_tokens=limit, multiple=pad_multiple)
        require_served(manifest, chosen)
        reachable = [size for size in static if not size % pad_multiple]
        check_fixed_points(reachable, PaddingTable(chosen))
    unknown = sorted(set(lazy_sizes) - set(chosen)) if resolved is not CaptureMode.NONE else []
    if unknown:
        raise UsageError(f"expected lazy sizes among the sizes to capture, got {unknown}")
    return CapturePlan(
        entry_key=manifest.entry_key,
        mode=resolved,
        requested=requested,
        sizes=chosen,
        order=tuple(reversed(chosen)),
        max_num_seqs=max_num_seqs,
        max_tokens=limit,
        max_seq_len=max_seq_len,
        waste_limit=waste_limit,
        pad_multiple=pad_multiple,
        instantiate=instantiate,
        lazy_sizes=tuple(sorted(set(lazy_sizes) & set(chosen))),
        background=background,
        on_failure=on_failure,
        notes=notes,
    )


def require_served(manifest: Manifest, sizes: Sequence[int]) -> None:
    """Refuse sizes to capture that no variant of the entry answers, which ``--ranges`` with gaps leave.

    Raises:
        UsageError: the first of them, or that there is none to capture.
    """
    ranges = ", ".join(f"{low}-{high}" for low, high in manifest.ranges) or "none"
    static = ", ".join(map(str, manifest.sizes)) or "none"
    lost = next((size for size in sizes if not manifest.serves(size)), None)
    if lost is not None or not sizes:
        raise UsageError(
            f"expected sizes that the entry serves (ranges {ranges}; static sizes {static}), "
            + ("got none to capture" if lost is None else f"got {lost}"),
            hint="capture sizes within them, or compile with --ranges that hold this one",
        )
