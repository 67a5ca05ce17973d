"""Graph: what the dispatcher decided, counted, as JSON and as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pwcc.cache.strict import Json
from pwcc.capture.dispatch import Dispatch, Fall
from pwcc.compile.ops.forward_context import RunMode

Labels = dict[str, str]


class GraphStats:
    """Counters since the runner was made. Cheap enough to keep always: three dictionary additions a call.

    ``hits[mode, size]`` counts calls by mode and padded size (size 0 in mode NONE, whose sizes are unbounded);
    ``falls[reason]`` those that ran with less than the plan has for them; ``tokens`` and ``padding`` count
    true and padding tokens; ``captures`` and ``failures`` recordings made and given up.
    """

    def __init__(self) -> None:
        self.hits: Counter[tuple[RunMode, int]] = Counter()
        self.falls: Counter[Fall] = Counter()
        self.tokens = 0
        self.padding = 0
        self.captures = 0
        self.failures = 0

    def count(self, dispatch: Dispatch, num_tokens: int) -> None:
        """Count one call of ``num_tokens`` true tokens."""
        self.tokens += num_tokens
        if dispatch.mode is RunMode.NONE:
            self.hits[dispatch.mode, 0] += 1
        else:
            size = dispatch.batch.num_tokens
            self.hits[dispatch.mode, size] += 1
            self.padding += size - num_tokens
        if dispatch.fall is not None:
            self.falls[dispatch.fall] += 1

    @property
    def by_mode(self) -> dict[RunMode, int]:
        """Calls by mode."""
        found = dict.fromkeys(RunMode, 0)
        for (mode, _), count in self.hits.items():
            found[mode] += count
        return found

    def to_json(self) -> dict[str, Json]:
        """Return the counters as JSON."""
        return {
            "hits": [
                {"mode": mode.value, "size": size, "count": count}
                for (mode, size), count in sorted(self.hits.items())
            ],
            "falls": {reason.value: self.falls[reason] for reason in Fall},
            "tokens": self.tokens,
            "padding_tokens": self.padding,
            "captures": self.captures,
            "failures": self.failures,
        }

    def prometheus(self) -> str:
        """Return the counters in Prometheus' text format, version 0.0.4."""
        hits = [
            ({"mode": mode.value, "size": str(size)}, count)
            for (mode, size), count in sorted(self.hits.items())
        ]
        falls = [({"reason": reason.value}, self.falls[reason]) for reason in Fall]
        families: list[tuple[str, str, Iterable[tuple[Labels, int]]]] = [
            ("graph_calls_total", "Calls by mode and padded size; size 0 is the dynamic variant.", hits),
            ("graph_falls_total", "Calls that ran with less than the plan has for them, by reason.", falls),
            ("graph_tokens_total", "True tokens.", [({}, self.tokens)]),
            ("graph_padding_tokens_total", "Padding tokens.", [({}, self.padding)]),
            ("graph_captures_total", "Recordings made.", [({}, self.captures)]),
            ("graph_capture_failures_total", "Recordings given up.", [({}, self.failures)]),
        ]
        lines: list[str] = []
        for name, text, samples in families:
            lines += [f"# HELP pwcc_{name} {text}", f"# TYPE pwcc_{name} counter"]
            for labels, value in samples:
                inner = ",".join(f'{key}="{label}"' for key, label in labels.items())
                lines.append(f"pwcc_{name}{{{inner}}} {value}" if inner else f"pwcc_{name} {value}")
        return "\n".join(lines) + "\n"
