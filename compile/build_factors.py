"""Key: everything that goes into an entry, as named factors; read by one function on every side."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import pwcc
from pwcc.cache import host, observed, strict
from pwcc.cache.environment import environment_factors
from pwcc.cache.factors import Factor, FactorChange, FactorTree, diff
from pwcc.cache.ids import FactorDigest, factor_digest
from pwcc.cache.observed import ObservedInput
from pwcc.cache.policy import TABLES_ONLY, Policy
from pwcc.cache.sources import SourceRecord, record_code, record_file, source_factors
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.passes.base import PassSpec
from pwcc.compile.runtime.predicates import Predicate
from pwcc.compile.target import Target, torch_build
from pwcc.compile.torch_private.inductor import config_changes

# Code of ours whose content is a factor, so that an edited checkout of pwcc never serves entries of its former
# self: all of compile/ but what only finds, loads, runs, checks or shows entries, and what is covered otherwise
# (models are traced sources; a pass that is on brings its own files).
_NOT_IN_ENTRIES = frozenset(
    """
    api.py audit.py background.py background_worker.py call.py candidates.py check.py children.py
    compiled_model.py decode_check.py decompiled.py decorator.py decorator_dims.py decorator_eager.py
    decorator_phase.py decorator_state.py differences.py dump.py dump_index.py eager_run.py eligibility.py
    explain.py frozen.py graph_text.py here.py hf.py hf_buffers.py hf_checks.py hf_opaque.py hf_sparse.py hit.py
    levels.py levels_once.py load.py models ops passes precompile.py reader.py receipt.py refusals.py report.py
    runtime turns.py verify_hit.py verify_numbers.py worker.py workers.py
    """.split()  # noqa: SIM905 (a table)
)
_IN_ENTRIES_TOO = (
    "ops/attention_quant.py",
    "ops/custom_ops.py",
    "ops/decode_kernel.py",
    "ops/fused",
    "ops/layer_kernels.py",
    "ops/layers.py",
    "passes/base.py",
    "passes/manager.py",
    "runtime/expressions.py",
    "runtime/samples.py",
)

# Factors that only a trace tells. A hit is found without them: the live model is checked against the
# entry's predicates instead, which say the same.
TRACED = ("build observed", "model tree", "predicates", "programs")


@dataclass(frozen=True)
class BuildOptions:
    """What the user chose that changes the entry; capture options are not among them."""

    sizes: tuple[int, ...]
    max_tokens: int
    splitting_ops: tuple[str, ...]
    autotune: bool
    cpu_baseline: str | None
    inputs: tuple[str, ...]
    profile: str | None
    tag: str | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    passes: tuple[PassSpec, ...] = ()
    custom_ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildFactors:
    """The factors known before a trace: all groups but the sources."""

    environment: Mapping[str, object]
    configuration: Mapping[str, object]
    compiler: Mapping[str, object]

    def matches(self, recorded: FactorTree) -> bool:
        """Tell whether an entry's recorded factors are these."""
        return not self.changes(recorded)

    def changes(self, recorded: FactorTree) -> list[FactorChange]:
        """Return how an entry's recorded factors differ from these; sources are checked on their own."""
        own = FactorTree.of(
            environment=self.environment, configuration=self.configuration, compiler=self.compiler
        )
        kept = FactorTree(
            environment=tuple(f for f in recorded.environment if not observed.is_observed_factor(f.name)),
            configuration=_without_trace(recorded.configuration),
            compiler=recorded.compiler,
        )
        return diff(kept, own)

    def tree(
        self,
        records: Sequence[SourceRecord],
        traced: Mapping[str, object],
        inputs: Sequence[ObservedInput] = (),
    ) -> FactorTree:
        """Return the entry's whole factor tree; ``traced`` holds the factors of ``TRACED``."""
        seen = observed.factors(inputs)
        return FactorTree.of(
            environment={**self.environment, **seen["environment"]},
            configuration={**self.configuration, **{name: traced[name] for name in TRACED}},
            sources={**source_factors(records), **seen["sources"]},
            compiler=self.compiler,
        )


def _without_trace(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    return tuple(factor for factor in factors if factor.name not in TRACED)


def build_factors(
    options: BuildOptions,
    target: Target,
    identity: str,
    args: Mapping[str, object],
    policy: Policy = TABLES_ONLY,
) -> BuildFactors:
    """Read the factors of a compile in this process, now. Takes milliseconds; imports no compiler."""
    return BuildFactors(
        environment=dict(policy.factors(os.environ)),
        configuration={
            "model": identity,
            "model arguments": portable_args(args),
            "options": asdict(options),
            "environment policy": policy.to_json(),
        },
        compiler=compiler_factors(target),
    )


def compiler_factors(target: Target) -> dict[str, object]:
    """Return the facts of torch, compilers, device and global modes that change compiled code."""
    cpu = target.device.type == "cpu"
    return {
        "pwcc": pwcc.__version__,
        "pwcc code": own_code_digest(),
        "torch": torch_build(),
        "triton": _version("triton"),
        "device": target.factors(),
        "python": host.python_abi() if cpu else sys.implementation.name,
        "c++ compiler": _cxx_version() if cpu else None,
        "cpu capability": torch.backends.cpu.get_cpu_capability() if cpu else None,
        "numeric state": numeric_state(),
        "config changes": config_changes(),
    }


@functools.cache
def own_code_digest() -> str:
    """Return a digest of pwcc's own compiling code."""
    root = Path(__file__).parent
    files = own_code(root)
    parts = [f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() for path in files]
    return factor_digest(b"\0".join(parts))


def own_code(root: Path) -> list[Path]:
    """Return the files below ``root``, the folder ``compile/``, that decide what is in an entry, in order."""
    found = [path for path in root.iterdir() if path.name not in _NOT_IN_ENTRIES]
    found += [root / name for name in _IN_ENTRIES_TOO]
    files = (file for path in found for file in (path.rglob("*.py") if path.is_dir() else [path]))
    return sorted(file for file in files if file.suffix == ".py")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cxx_version() -> str | None:
    """Return the first line of the C++ compiler's version, or None without a compiler."""
    path = shutil.which(os.environ.get("CXX") or "g++")
    return None if path is None else _first_line_of_version(path)


@functools.cache
def _first_line_of_version(path: str) -> str | None:
    ran = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return ran.stdout.splitlines()[0] if ran.stdout else None


def portable_args(args: Mapping[str, object]) -> dict[str, strict.Json]:
    """Return model arguments as JSON; what has no JSON form is named by its type and text digest."""

    def convert(value: object) -> strict.Json:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        if isinstance(value, Mapping):
            return {str(key): convert(item) for key, item in value.items()}
        if isinstance(value, (torch.dtype, torch.device)):
            return str(value)
        return f"{type(value).__module__}.{type(value).__qualname__}"

    return {str(key): convert(value) for key, value in args.items()}


def sealing_options(
    options: BuildOptions, target: Target, tuned: bool
) -> tuple[dict[str, object], str, tuple[str, ...]]:
    """Return Inductor's options for a piece, the compiler's ``-march``, and the CPU flags a host needs."""
    from pwcc.compile.sealing.profile import cpu_profile, cpu_target, cuda_profile

    if target.device.type != "cpu":
        return cuda_profile(autotune=tuned), "native", ()
    baseline = options.cpu_baseline or "native"
    chosen = cpu_target(baseline)  # type: ignore[arg-type]
    return cpu_profile(baseline), chosen.march, chosen.cpu_flags  # type: ignore[arg-type]


def source_records(
    codes: Iterable[types.CodeType], modules: Iterable[types.ModuleType] = (), files: Iterable[str] = ()
) -> tuple[SourceRecord, ...]:
    """Return one record per traced file, one per code object without a file, one per file of ``modules``.

    ``files`` are further Python files of loaded modules, as those that registered operators.

    torch's own files are covered by its version and git hash, Python's by its version.
    """
    names = module_names()
    found: dict[str, SourceRecord] = {}
    for code in codes:
        filename = code.co_filename
        real = os.path.realpath(filename)
        if is_covered(real) or filename.startswith("<frozen"):
            continue
        if Path(real).is_file():
            if real not in found:
                found[real] = record_file(names.get(real, Path(real).stem), Path(filename))
        elif not is_generated(code):
            record = record_code(owner_of_code(code) or "__main__", code)
            found[f"{record.module}:{record.path}:{record.digest}"] = record
    for module in modules:
        file = getattr(module, "__file__", None)
        real = os.path.realpath(file) if file else ""
        if not file or not Path(file).is_absolute():  # torch.ops and the like are modules without a file
            continue
        if real.endswith(".py") and Path(real).is_file() and real not in found and not is_covered(real):
            found[real] = record_file(names.get(real, module.__name__), Path(file))
    for name in files:
        real = os.path.realpath(name)
        if Path(real).is_file() and real not in found and not is_covered(real):
            found[real] = record_file(names.get(real, Path(real).stem), Path(name))
    return tuple(sorted(found.values()))


def is_covered(real: str) -> bool:
    """Tell whether a file is torch's, or the standard library's and no installed package's."""
    if real.startswith(str(Path(torch.__file__).resolve().parent) + os.sep):
        return True
    library = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
    return real.startswith(library) and "site-packages" not in real.removeprefix(library)


def named_modules(predicates: Iterable[Predicate]) -> list[types.ModuleType]:
    """Return the modules of every class, function and enum that predicates identify by name only.

    What such a name stands for is decided in its module's file and, for a class, in those of its bases
    and its metaclass, none of which the trace need have entered.
    """
    found: dict[str, types.ModuleType] = {}
    for name in {text for predicate in predicates for text in _names_in(predicate.rule.value)}:
        module = sys.modules.get(name.partition(":")[0])
        if module is None:
            continue
        found[module.__name__] = module
        thing: object = module
        for part in name.partition(":")[2].split("."):
            thing = getattr(thing, part, None)
        if isinstance(thing, type):
            bases: list[type] = [*thing.__mro__, *type(thing).mro(type(thing))]
            for base in bases:
                other = sys.modules.get(base.__module__)
                if other is not None:
                    found[other.__name__] = other
    return [found[name] for name in sorted(found)]


def _names_in(value: object) -> Iterator[str]:
    if isinstance(value, str) and ":" in value:
        yield value
    elif isinstance(value, list):
        if len(value) > 1 and value[0] in ("function", "module") and isinstance(value[1], str):
            yield f"{value[1]}:"
        for item in value:
            yield from _names_in(item)


def module_names() -> dict[str, str]:
    """Return the loaded modules' names by the real path of their files; a script's own name only at last."""
    names: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name not in ("__main__", "__mp_main__"):  # the latter is a spawned child's name for it
            names.setdefault(os.path.realpath(file), name)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main:
        names.setdefault(os.path.realpath(main), "__main__")
    return names


def is_generated(code: types.CodeType) -> bool:
    """Tell whether the standard library generated a function from a class that is a source itself."""
    if code.co_filename != "<string>":
        return False
    named_tuple = code.co_varnames[:1] == ("_cls",) and code.co_names == ("_tuple_new",)
    return named_tuple or code.co_qualname.startswith("__create_fn__.")


def owner_of_code(code: types.CodeType) -> str | None:
    """Return the loaded module whose namespace holds a code object."""
    from pwcc.cache.code_digest import find_code

    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        if namespace and any(found is code for found in find_code(namespace, code.co_qualname)):
            return name
    return None


def piece_factors(target: Target) -> FactorDigest:
    """Return the digest of what decides a piece's compiled form beside its graph, variant and options."""
    tree = FactorTree.of(environment=environment_factors(os.environ), compiler=compiler_factors(target))
    return tree.digest()
