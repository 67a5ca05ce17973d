"""Store: the zoo's results, one JSON file, written whole after every stage."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

Result = dict[str, Any]


class Records:
    """Results by architecture and stage. Safe for the threads of one process; one process at a time writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.found: dict[str, dict[str, Result]] = (
            json.loads(path.read_text())["architectures"] if path.exists() else {}
        )

    def passed(self, name: str, stage: str) -> bool:
        """Tell whether a stage was run and passed."""
        return bool(self.found.get(name, {}).get(stage, {}).get("ok"))

    def missing(self, name: str, stages: Sequence[str], *, failed: bool) -> bool:
        """Tell whether a stage is still to be run; one that failed counts only if ``failed``."""
        done = self.found.get(name, {})
        broken = any(not result["ok"] for result in done.values())
        return failed if broken else any(stage not in done for stage in stages)

    def put(self, name: str, stage: str, result: Result) -> None:
        """Record a stage; later stages of an architecture that is run again are forgotten."""
        order = ("trace", "compile", "load")
        with self._lock:
            kept = {s: r for s, r in self.found.get(name, {}).items() if order.index(s) < order.index(stage)}
            self.found[name] = {**kept, stage: result}
            document = {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "architectures": dict(sorted(self.found.items())),
            }
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(document, indent=1) + "\n")
            fresh.replace(self._path)
