"""Graph: the capture plan: what is captured, in which order, within which limits, and what it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, cast, get_args

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, UsageError
from pwcc.cache.ids import EntryKey
from pwcc.cache.strict import Fields, Json
from pwcc.capture.modes import CaptureMode
from pwcc.capture.padding import PaddingTable
from pwcc.compile.ops.forward_context import BatchDescriptor, RunMode

SCHEMA: Final = 1
MAX_SIZES: Final = 4096
MAX_LIMIT: Final = 2**31 - 1  # metadata is int32
MAX_BYTES: Final = 4 * 2**20  # three records per size at most

Instantiate = Literal["eager", "lazy"]
OnFailure = Literal["fallback", "raise"]


class GraphKey(NamedTuple):
    """What one recording is found by."""

    mode: RunMode
    batch: BatchDescriptor

    @classmethod
    def of(cls, mode: RunMode, batch: BatchDescriptor) -> GraphKey:
        """Return the key of what serves a batch: pieces do not see which kind it is, so one serves both."""
        uniform = batch.uniform_decode and mode is RunMode.FULL
        return cls(mode, batch if uniform == batch.uniform_decode else BatchDescriptor(batch.num_tokens))


@dataclass(frozen=True, slots=True)
class Measured:
    """What capturing one size in one mode took on the host that wrote the plan.

    ``bytes`` is device memory, ``graphs`` how many graphs, ``nodes`` their operations if they could be counted.
    """

    mode: RunMode
    size: int
    uniform_decode: bool
    seconds: float
    bytes: int
    graphs: int
    nodes: int | None

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "mode": self.mode.value,
            "size": self.size,
            "uniform_decode": self.uniform_decode,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "graphs": self.graphs,
            "nodes": self.nodes,
        }

    @classmethod
    def parse(cls, value: object, where: str) -> Measured:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        mode = fields.str_("mode")
        if mode not in RunMode.__members__ or mode == RunMode.NONE:
            fields.fail("mode", "PIECEWISE or FULL", mode)
        found = cls(
            RunMode(mode),
            fields.int_("size", low=1, high=2**31 - 1),
            fields.bool_("uniform_decode"),
            fields.float_("seconds"),
            fields.int_("bytes"),
            fields.int_("graphs", high=2**31),
            fields.opt_int("nodes", high=2**40),
        )
        fields.done()
        return found


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """What is captured for one entry. Build it with ``planning.plan_for``; it is immutable.

    ``sizes`` are token counts, ascending; ``order`` is the same sizes in the order of capture, by default the
    largest first, so that smaller graphs live in the memory of larger ones. ``requested`` is the mode that was
    asked for, ``mode`` what it became, ``notes`` why. ``max_seq_len`` is the longest sequence (in tokens) that
    full graphs hold for. ``waste_limit`` bounds padded over true size. ``pad_multiple`` divides every size.
    ``lazy_sizes`` are captured when first used; ``background`` captures on a side thread; ``instantiate``
    says when the driver makes a graph executable: at capture, or at its first replay. ``on_failure`` says what
    a failed capture does: ``fallback`` serves those batches by the next mode, ``raise`` ends with advice.
    ``measured`` is what an earlier capture took; it is a record, and changes nothing.
    """

    entry_key: EntryKey
    mode: CaptureMode
    requested: CaptureMode
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    max_num_seqs: int
    max_tokens: int
    max_seq_len: int
    waste_limit: float | None = None
    pad_multiple: int = 1
    instantiate: Instantiate = "eager"
    lazy_sizes: tuple[int, ...] = ()
    background: bool = False
    on_failure: OnFailure = "fallback"
    notes: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        for rule, holds in (
            ("sizes ascend, each once, from 1 to max_tokens", self._sizes_hold()),
            ("order holds the sizes, each once", sorted(self.order) == list(self.sizes)),
            ("lazy_sizes are sizes", set(self.lazy_sizes) <= set(self.sizes)),
            (f"limits are integers from 1 to {MAX_LIMIT}", self._limits_hold()),
            ("instantiate is one of eager, lazy", self.instantiate in get_args(Instantiate)),
            ("on_failure is one of fallback, raise", self.on_failure in get_args(OnFailure)),
            ("sizes exist unless the mode is NONE", bool(self.sizes) or self.mode is CaptureMode.NONE),
            ("waste_limit is at least 1", self.waste_limit is None or self.waste_limit >= 1),
            (
                "pad_multiple divides every size",
                self.pad_multiple >= 1 and not any(size % self.pad_multiple for size in self.sizes),
            ),
        ):
            if not holds:
                raise UsageError(f"expected a capture plan in which {rule}", hint="build it with plan_for(...)")

    def _sizes_hold(self) -> bool:
        ascending = list(self.sizes) == sorted(set(self.sizes))
        return ascending and (not self.sizes or (self.sizes[0] >= 1 and self.sizes[-1] <= self.max_tokens))

    def _limits_hold(self) -> bool:
        limits = (self.max_num_seqs, self.max_tokens, self.max_seq_len)
        return all(isinstance(limit, int) and 1 <= limit <= MAX_LIMIT for limit in limits)

    def table(self) -> PaddingTable:
        """Return the padding table of the sizes that the mode captures."""
        sizes = () if self.mode is CaptureMode.NONE else self.sizes
        return PaddingTable(sizes, waste_limit=self.waste_limit)

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Sizes that a decode batch of at most ``max_num_seqs`` sequences can be padded to."""
        last = next((size for size in self.sizes if size >= self.max_num_seqs), self.max_tokens)
        return tuple(size for size in self.sizes if size <= last)

    def graph_keys(self) -> Iterator[GraphKey]:
        """Yield every recording of the plan in the order of capture: per piece, mixed, decode."""
        if self.mode is CaptureMode.NONE:
            return
        routes = {self.mode.decode, self.mode.mixed}
        if RunMode.PIECEWISE in routes:
            yield from (GraphKey(RunMode.PIECEWISE, BatchDescriptor(size)) for size in self.order)
        if self.mode.mixed is RunMode.FULL:
            yield from (GraphKey(RunMode.FULL, BatchDescriptor(size)) for size in self.order)
        if self.mode.decode is RunMode.FULL:
            decode = set(self.decode_sizes)
            for size in self.order:
                if size in decode:
                    yield GraphKey(RunMode.FULL, BatchDescriptor(size, True))

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "schema": SCHEMA,
            "entry_key": self.entry_key,
            "mode": self.mode.value,
            "requested": self.requested.value,
            "sizes": list(self.sizes),
            "order": list(self.order),
            "max_num_seqs": self.max_num_seqs,
            "max_tokens": self.max_tokens,
            "max_seq_len": self.max_seq_len,
            "waste_limit": self.waste_limit,
            "pad_multiple": self.pad_multiple,
            "instantiate": self.instantiate,
            "lazy_sizes": list(self.lazy_sizes),
            "background": self.background,
            "on_failure": self.on_failure,
            "notes": list(self.notes),
            "measured": [row.to_json() for row in self.measured],
        }

    def to_bytes(self) -> bytes:
        """Serialise canonically."""
        return strict.canonical(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> CapturePlan:
        """Parse strictly.

        Raises:
            CorruptEntry: anything that :meth:`to_bytes` would not write.
        """
        fields = Fields(strict.loads(data, where=where, max_bytes=MAX_BYTES), where)
        schema = fields.int_("schema")
        if schema != SCHEMA:
            fields.fail("schema", str(SCHEMA), schema)
        count = {"low": 1, "high": MAX_LIMIT}
        waste = None if fields.take("waste_limit") is None else fields.float_("waste_limit")
        try:
            plan = cls(
                entry_key=EntryKey(fields.key("entry_key")),
                mode=CaptureMode(_one_of(fields, "mode", tuple(CaptureMode.__members__))),
                requested=CaptureMode(_one_of(fields, "requested", tuple(CaptureMode.__members__))),
                sizes=fields.list_("sizes", strict.as_int, max_items=MAX_SIZES),
                order=fields.list_("order", strict.as_int, max_items=MAX_SIZES),
                max_num_seqs=fields.int_("max_num_seqs", **count),
                max_tokens=fields.int_("max_tokens", **count),
                max_seq_len=fields.int_("max_seq_len", **count),
                waste_limit=waste,
                pad_multiple=fields.int_("pad_multiple", **count),
                instantiate=cast("Instantiate", _one_of(fields, "instantiate", get_args(Instantiate))),
                lazy_sizes=fields.list_("lazy_sizes", strict.as_int, max_items=MAX_SIZES),
                background=fields.bool_("background"),
                on_failure=cast("OnFailure", _one_of(fields, "on_failure", get_args(OnFailure))),
                notes=fields.list_("notes", strict.as_text, max_items=64),
                measured=fields.list_("measured", Measured.parse, max_items=3 * MAX_SIZES),
            )
        except UsageError as error:
            raise CorruptEntry(error.message, where=where) from None
        fields.done()
        return plan


def _one_of(fields: Fields, name: str, allowed: tuple[str, ...]) -> str:
    value = fields.str_(name)
    if value not in allowed:
        fields.fail(name, f"one of {', '.join(allowed)}", value)
    return value
