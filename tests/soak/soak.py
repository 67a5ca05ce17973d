"""A store under kill, race, collection and damage for a long time; every guarantee counted.

``SOAK_MINUTES=30 python tests/soak/soak.py [--out FILE]``. Three parts run in turns until the time is up:

1. writers, readers and a collector on one cache; writers are killed with SIGKILL at random moments;
2. one file of a cache damaged at random: ``verify`` must find it, ``--repair`` put it right, a compile heal it;
3. the real ``pwcc compile`` of a small model, killed at a random step, then run again and loaded
   (``--no-real`` leaves it out).

Ends with 1 if any guarantee was broken.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "benchmarks")]

from pwcc.cache import failpoints  # noqa: E402
from pwcc.cache.findings import Kind  # noqa: E402
from pwcc.cache.repair import repair  # noqa: E402
from pwcc.cache.store import Store  # noqa: E402
from pwcc.cache.verify import verify  # noqa: E402
from tests.cache.conftest import put_blobs  # noqa: E402

WRITERS, READERS = 4, 3
ROUND_S = 45.0
LATER_S = 10 * 86400.0
MODEL = """
import torch  # noqa: E402
class Plain(torch.nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))
    def example_inputs(self, tokens: int):
        return (torch.randn(tokens, 16),)
"""
REAL_POINTS = [point for point in failpoints.POINTS if point != "publish.quarantined"]


class Soak:
    """One soak: its random choices, what was counted, and what was broken."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.choose = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []

    def race(self, seconds: float) -> None:
        """Part 1."""
        root, log = self.folder / "race", self.folder / "race.log"
        Store.create(root)
        end = time.monotonic() + seconds
        roles = ["writer"] * WRITERS + ["reader"] * READERS + ["collector"]
        running = [(role, self._start(role, root, log)) for role in roles]
        try:
            while time.monotonic() < end:
                time.sleep(self.choose.uniform(0.05, 0.6))
                index = self.choose.randrange(len(running))
                role, process = running[index]
                if process.poll() is not None:
                    self.violations.append(f"{role} ended with {process.returncode}")
                else:
                    process.send_signal(signal.SIGKILL)  # any of them: a reader or collector may die as well
                    self.counts[f"{role}s killed"] += 1
                process.wait()
                running[index] = role, self._start(role, root, log)
        finally:
            for _, process in running:
                process.kill()
                process.wait()
        store = Store.create(root)  # sweeps what the dead left
        left = list((root / "v1/tmp").iterdir())
        if left:
            self.violations.append(f"{len(left)} leftovers of dead writers were not swept")
        found = verify(store, now=time.time() + LATER_S)
        self._expect(
            {finding.kind for finding in found.findings} <= {Kind.LEFTOVER},
            f"after a race: {found.findings[:3]}",
        )
        for name in range(3):
            store.publish(put_blobs(store, name=f"model{name}"))  # no dead process stands in the way
            with store.lock(f"model{name}", timeout_s=5):
                pass

    def _start(self, role: str, root: Path, log: Path) -> subprocess.Popen[bytes]:
        seed = str(self.choose.random())
        return subprocess.Popen([sys.executable, str(HERE / "roles.py"), role, str(root), str(log), seed])

    def read_log(self) -> None:
        log = self.folder / "race.log"
        for line in log.read_text().splitlines() if log.exists() else ():
            role, _, text = line.partition(" ")
            if text.startswith("violation"):
                self.violations.append(line[:300])
            elif text.startswith("collected"):
                _, entries, blobs = text.split()
                self.counts["collections"] += 1
                self.counts["entries collected"] += int(entries)
                self.counts["blobs collected"] += int(blobs)
            else:
                self.counts[f"{role}: {text}"] += 1

    def damage(self, seconds: float) -> None:
        """Part 2."""
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            number += 1
            store = Store.create(self.folder / f"damage{self.counts['damages']}")
            for name in range(2):
                store.publish(put_blobs(store, name=f"model{name}"))
            files = [
                path
                for part in ("entries", "blobs")
                for path in (store.root / "v1" / part).rglob("*")
                if path.is_file()
            ]
            path = self.choose.choice(sorted(files))
            self._hurt(path)
            found = verify(store, now=time.time())
            self._expect(
                found.mask & (Kind.ENTRY.bit | Kind.BLOB.bit) != 0, f"damage to {path.name} was not found"
            )
            repair(store, found)
            again = verify(store, now=time.time())
            self._expect(again.exit_code == 0, f"not repaired: {again.findings[:3]}")
            for name in range(2):
                store.publish(put_blobs(store, name=f"model{name}"))
            healed = verify(store, now=time.time())
            self._expect(healed.exit_code == 0 and healed.entries == 2, f"not healed: {healed.findings[:3]}")
            self.counts["damages"] += 1
            subprocess.run(["rm", "-rf", str(store.root)], check=True)

    def _hurt(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        way = self.choose.randrange(4)
        if way == 0:
            path.unlink()
        elif way == 1:
            path.write_bytes(data[: self.choose.randrange(len(data))])
        elif way == 2:
            path.write_bytes(bytes(len(data)))
        else:
            data[self.choose.randrange(len(data))] ^= 1 << self.choose.randrange(8)
            path.write_bytes(data)

    def real(self) -> None:
        """Part 3."""
        (self.folder / "soak_model.py").write_text(MODEL)
        root = self.folder / f"real{self.counts['real compiles']}"
        model = ["--model", f"{self.folder}/soak_model.py:Plain", "--device", "cpu"]
        argv = ["compile", *model, "--splitting-ops", "", "--cache-dir", str(root)]
        point = f"{self.choose.choice(REAL_POINTS)}:{self.choose.choice((1, 1, 2))}"
        killed = self._run(str(TESTS / "failpoint_main.py"), point, *argv)
        self._expect(killed in (0, -signal.SIGKILL), f"{point}: ended with {killed}")
        self.counts["real compiles killed"] += killed == -signal.SIGKILL
        if (root / "v1").exists():
            found = verify(Store.open(root), now=time.time() + LATER_S)
            self._expect({f.kind for f in found.findings} <= {Kind.LEFTOVER}, f"{point}: {found.findings[:3]}")
        self._expect(self._run("-m", "pwcc", *argv) == 0, f"{point}: no compile after it")
        self._expect(self._run("-m", "pwcc", "load", str(root), *model) == 0, f"{point}: no load after it")
        self._expect(not list((root / "v1/tmp").iterdir()), f"{point}: leftovers")
        self.counts["real compiles"] += 1
        subprocess.run(["rm", "-rf", str(root)], check=True)

    def _run(self, *argv: str) -> int:
        done = subprocess.run([sys.executable, *argv], check=False, capture_output=True, text=True)
        if done.returncode not in (0, -signal.SIGKILL):
            self.violations.append(done.stderr[-500:])
        return done.returncode

    def _expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.violations.append(otherwise)


def main() -> int:
    """Run until the time is up; write and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TESTS.parent / "benchmarks/results/soak.json")
    parser.add_argument("--no-real", action="store_true")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    given = parser.parse_args()
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    started = time.monotonic()
    end = started + minutes * 60
    with tempfile.TemporaryDirectory(prefix="pwcc-soak-") as folder:
        soak = Soak(Path(folder), given.seed)
        while time.monotonic() < end:
            soak.race(min(ROUND_S, max(1.0, end - time.monotonic())))
            soak.damage(min(ROUND_S / 3, max(0.0, end - time.monotonic())))
            if not given.no_real and time.monotonic() < end:
                soak.real()
            soak.read_log()
            (Path(folder) / "race.log").unlink(missing_ok=True)
    result = {
        "name": "soak",
        "minutes": round((time.monotonic() - started) / 60, 1),
        "seed": given.seed,
        "command": f"SOAK_MINUTES={minutes:g} python tests/soak/soak.py"
        + (" --no-real" if given.no_real else ""),
        "machine": importlib.import_module("results").machine_facts("cpu"),
        "counts": dict(sorted(soak.counts.items())),
        "violations": soak.violations[:50],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
