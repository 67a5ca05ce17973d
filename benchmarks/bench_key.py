"""The key check of a warm host, step by step, and how the check of sources grows with their number.

python benchmarks/bench_key.py [--quick] [--repeat 20]

The model is the 8B reference on the meta device, traced here and not compiled: its tree, sources and
predicates are those that its entry would hold. Scale is shown on synthetic trees of files, beside one loop
that only reads and hashes the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lab
import xxhash

from pwcc.cache import sources
from pwcc.cache.policy import TABLES_ONLY, Policy, SiteEnvironment
from pwcc.cache.requirements import Requirement, unmet
from pwcc.compile.build_factors import named_modules, source_records
from pwcc.compile.inputs import input_specs
from pwcc.compile.load import lookup
from pwcc.compile.model_ref import BuiltModel, ModelRef, build
from pwcc.compile.model_tree import model_tree
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.predicates import collect
from pwcc.compile.request import make_request
from pwcc.compile.runtime.predicates import PredicateSet
from pwcc.compile.signature import signature_facts
from pwcc.compile.target import base_requirements, host_facts, target_of
from pwcc.compile.tracing import trace_all

BUDGET_MS = 30.0
FILES = (50, 500, 5000)
FILE_BYTES = 16 * 1024  # the median file of transformers' models has about this
VARIABLES = 200  # of the environment, a tenth of them factors


def main() -> None:
    """Measure, and write the results."""
    given = lab.options(__doc__ or "", repeat=20).parse_args()
    if given.device != "cpu":
        print("bench_key: the key check reads no device; nothing to do")
        return
    repeat = 3 if given.quick else given.repeat
    with tempfile.TemporaryDirectory(prefix="pwcc-bench-") as folder:
        root = Path(folder)
        steps(given, repeat)
        scale(given, root, repeat, FILES[:2] if given.quick else FILES)


def timed(call: Callable[[], object], repeat: int) -> list[float]:
    """Return milliseconds of ``repeat`` calls; one more before them warms caches."""
    call()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1000)
    return taken


def steps(given: argparse.Namespace, repeat: int) -> None:
    """Time each step of the check, for the 8B reference."""
    target = target_of("cpu")
    reference = build(ModelRef.parse("llama-8b"), weights="none")
    model = reference.module
    records, predicates = traced(reference)
    environ = environment()
    site = SiteEnvironment.record(Policy.of(include=["MYAPP_*"]), environ)
    # What a CPU entry's kernels need besides: reading these facts of the host is the dear part.
    needed = (*base_requirements(target), Requirement("cpu_flags", ("fpu",)), Requirement("glibc", "2.17"))

    def must_hold(name: str, found: object) -> None:
        if found:
            raise SystemExit(f"{name}: nothing was changed, yet {found}")

    def check_sources() -> None:
        must_hold("sources", sources.check(records, sys.modules, sys.path))

    def check_predicates() -> None:
        must_hold("predicates", PredicateSet.from_json(predicates).check(model))

    measured = {
        "lookup key": timed(lambda: lookup(model, target), repeat),
        "- model tree": timed(lambda: model_tree(model).digest(), repeat),
        "- numeric modes": timed(numeric_state, repeat),
        "- signature": timed(lambda: signature_facts(model), repeat),
        f"site policy, {len(environ)} variables": timed(lambda: site.changes(environ), repeat),
        f"sources, {len(records)} traced files": timed(check_sources, repeat),
        "predicates, read and checked": timed(check_predicates, repeat),
        "requirements": timed(lambda: must_hold("host", unmet(needed, host_facts(target))), repeat),
    }
    steps = [values for name, values in measured.items() if not name.startswith("-")]
    measured["whole check"] = [sum(values) for values in zip(*steps, strict=True)]
    environment_name = f"environment factors, {len(environ)} variables (compile only)"
    measured[environment_name] = timed(lambda: TABLES_ONLY.factors(environ), repeat)
    rows = [
        (
            name,
            f"{min(values):.3f}",
            f"{statistics.median(values):.3f}",
            f"{BUDGET_MS:.0f}" if name == "whole check" else "",
        )
        for name, values in measured.items()
    ]
    lab.publish(
        given,
        "key-check",
        ("step", "best ms", "median ms", "budget ms"),
        rows,
        note=f"llama-8b on meta tensors, one warm process, {repeat} times each. Sources and predicates are of "
        "its own trace; it was not compiled, so its requirements are those of any CPU entry.",
        data={"milliseconds": measured, "predicates": len(PredicateSet.from_json(predicates))},
    )


def traced(reference: BuiltModel) -> tuple[tuple[sources.SourceRecord, ...], bytes]:
    """Trace the reference once and return what an entry of it would check: its sources and predicates."""
    request = make_request(
        reference.module,
        specs=input_specs(reference.module, example_inputs=reference.example_inputs),
        sizes=(),
        max_tokens=8192,
        device="cpu",
        identity=reference.identity,
        args=reference.args,
        splitting_ops=("pwcc::attention",),
        autotune=False,
        cpu_baseline="native",
        profile=None,
        build_observed=True,
    )
    items = trace_all(reference.module, request)
    found = [
        predicate
        for item in items
        for predicate in collect(
            item.trace.guards,
            model=reference.module,
            local_scope=item.trace.local_scope,
            global_scope=item.trace.global_scope,
        ).predicates
    ]
    codes = [code for item in items for code in item.trace.traced_code]
    return source_records(codes, named_modules(found)), PredicateSet.of(found).to_json()


def environment() -> dict[str, str]:
    """An environment as a container has it: mostly variables that are no factor."""
    names = [f"SERVICE_{i}_PORT_80_TCP_ADDR" for i in range(VARIABLES * 9 // 10)]
    names += [f"TORCHINDUCTOR_SETTING_{i}" for i in range(VARIABLES // 10)]
    return {**os.environ, **{name: f"value-{name}" for name in names}, "MYAPP_MODE": "fast"}


def scale(given: argparse.Namespace, root: Path, repeat: int, counts: tuple[int, ...]) -> None:
    """Time the check of a synthetic package beside a loop that reads and hashes the same files."""
    rows, data = [], {}
    for count in counts:
        folder = root / f"tree{count}"
        files = package(folder, count)
        records = [sources.record_file(f"bench{count}.m{index}", path) for index, path in enumerate(files)]
        with on_path(folder):
            importlib.import_module(f"bench{count}")
            if sources.check(records, sys.modules, sys.path):
                raise SystemExit("nothing was changed, yet a source is")
            # In turns, so that a busy spell of the machine hits both alike.
            check, loop = [], []
            for _ in range(repeat):
                check += timed(lambda records=records: sources.check(records, sys.modules, sys.path), 1)
                loop += timed(lambda files=files: hash_all(files), 1)
        size = count * FILE_BYTES / 1e6
        rows.append(
            (
                f"{count:,}",
                f"{size:.0f}",
                f"{statistics.median(check):.2f}",
                f"{statistics.median(loop):.2f}",
                lab.times(lab.ratio(statistics.median(check), statistics.median(loop))),
            )
        )
        data[str(count)] = {"check_ms": check, "loop_ms": loop}
    lab.publish(
        given,
        "key-sources",
        ("files", "MB", "check ms", "read + XXH3 ms", "ratio"),
        rows,
        note=f"Medians of {repeat}, warm page cache, in turns. {FILE_BYTES // 1024} KiB a file, one package; "
        "the loop opens, reads and hashes the same files and looks nothing up.",
        data=data,
        first=False,
    )


def package(folder: Path, count: int) -> list[Path]:
    """Write a package of ``count`` files and return them."""
    base = folder / f"bench{count}"
    base.mkdir(parents=True)
    (base / "__init__.py").write_text("")
    line = b"# a line of a source file, as long as lines are in most of them: eighty bytes...\n"
    files = []
    for index in range(count):
        path = base / f"m{index}.py"
        path.write_bytes((b"# %d\n" % index + line * (FILE_BYTES // len(line) + 1))[:FILE_BYTES])
        files.append(path)
    return files


def hash_all(files: list[Path]) -> None:
    """Read and hash files: what any check of contents must do."""
    for path in files:
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123  as the check does it
            xxhash.xxh3_128_hexdigest(stream.readall())


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Make a folder importable for a while."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


if __name__ == "__main__":
    main()
