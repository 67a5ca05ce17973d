"""A benchmark's result as a JSON file: one table, how it was made, and facts about the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One table of one benchmark on one machine; ``variant`` (``cpu``, ``h200``) tells two machines apart."""

    name: str
    variant: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    command: str
    note: str = ""
    machine: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the result lies."""
        return FOLDER / f"{self.name}.{self.variant}.json"

    def write(self) -> Path:
        """Write the file and return its path; the same result gives the same bytes."""
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return self.path

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return what :meth:`write` wrote."""
        found = cls(**json.loads(path.read_text()))
        if any(len(row) != len(found.columns) for row in found.rows):
            raise ValueError(f"{path.name}: every row must have {len(found.columns)} cells")
        return found


def machine_facts(device: str) -> dict[str, str]:
    """Return what a reader must know to judge a figure: processor, cores, memory, versions, and the GPU."""
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
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
