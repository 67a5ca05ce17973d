"""A benchmark's result as a JSON file: one table, the figures behind it, and facts about the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One table of one benchmark on one machine; ``variant`` (``cpu``, ``h200``) tells two machines apart.

    ``data`` holds every single measurement behind the table.
    """

    name: str
    variant: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    command: str
    note: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the result lies."""
        return FOLDER / f"{self.name}.{self.variant}.json"

    def write(self, path: Path | None = None) -> Path:
        """Write the file, to ``path`` if given, and return its path; the same result gives the same bytes."""
        path = path or self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return path

    def text(self) -> str:
        """Return the table as plain text with aligned columns, and the note below."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in lines]
        return "\n".join([f"== {self.name} ({self.variant})", *rows, *([self.note] if self.note else [])])

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return what :meth:`write` wrote."""
        found = cls(**json.loads(path.read_text()))
        if any(len(row) != len(found.columns) for row in found.rows):
            raise ValueError(f"{path.name}: every row must have {len(found.columns)} cells")
        return found


def variant_of(device: str) -> str:
    """Return the short name of the machine that results carry: ``cpu``, or the GPU's model such as ``h200``."""
    if not device.startswith("cuda"):
        return device
    import torch

    return torch.cuda.get_device_name(device).split()[-1].lower()


def machine_facts(device: str) -> dict[str, str]:
    """Return what a reader must know to judge a figure: processor, cores, memory, versions, GPU, date."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    facts = {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{pages * page / 2**30:.0f} GiB",
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in ("torch", "triton", "pwcc"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.startswith("cuda"):
        import torch

        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return facts | {"date": time.strftime("%Y-%m-%d", time.gmtime())}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
