"""Key: the passes that there are, those that are on by default, and the text of ``--passes`` as a list of them.

A list runs in the order in which it is written; what a pass requires must stand before it.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
from collections.abc import Sequence
from typing import Final

from pwcc.cache.errors import UsageError
from pwcc.compile.passes.base import GraphPass, PassSpec, Value

# name -> module and class; modules are imported when a pass of theirs is on
BUILTIN: Final[dict[str, str]] = {
    "noop": "pwcc.compile.passes.noop:NoopElimination",
    "fix_functionalization": "pwcc.compile.passes.fix_functionalization:FixFunctionalization",
    "attention_fp8": "pwcc.compile.passes.fusion_attention:AttentionStaticQuant",
    "rms_norm_static_fp8": "pwcc.compile.passes.fusion_norm:RMSNormStaticQuant",
    "rms_norm_dynamic_fp8": "pwcc.compile.passes.fusion_norm:RMSNormDynamicQuant",
    "silu_and_mul_static_fp8": "pwcc.compile.passes.fusion_gate:SiluMulStaticQuant",
    "silu_and_mul_dynamic_fp8": "pwcc.compile.passes.fusion_gate:SiluMulDynamicQuant",
}
DEFAULT: Final = ("noop", "fix_functionalization")
"""The passes of ``--passes default``, in order."""
DEFAULT_PASSES: Final = "default"
"""The passes of a compile that does not say which."""

Passes = str | Sequence[str | GraphPass]

_ITEM: Final = re.compile(r"\s*([\w.:]+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
_OPTION: Final = re.compile(r"\s*(\w+)\s*=\s*([^,=]+?)\s*(?:,|$)")


def resolve(passes: Passes) -> tuple[PassSpec, ...]:
    """Return the passes that are asked for, as the key holds them.

    Args:
        passes: names in the order in which they run, as one text with commas or a sequence. A name is one of
            the table's or ``module:Class``; ``default`` stands for the default passes; ``none`` alone for no
            pass at all. Fields follow in parentheses: ``name(max_tokens=512)``. A sequence may hold passes
            themselves too, of classes that can be imported.

    Raises:
        TraceError: the file of a user's pass was changed after its module was imported.
        UsageError: an unknown name, with those that come close; a pass that is named twice; one whose
            requirements do not stand before it; a field that the pass does not have.
    """
    if not isinstance(passes, Sequence) or not all(isinstance(one, str | GraphPass) for one in passes):
        raise UsageError(f"expected passes as one text or a sequence of names and passes, got {passes!r}")
    from pwcc.compile.traced_code import require_current  # which reads the key, which holds passes

    items = _items(passes) if isinstance(passes, str) else [i for p in passes for i in _parsed(p)]
    if [name for name, _ in items] == ["none"]:
        return ()
    specs: list[PassSpec] = []
    for name, config in items:
        if name == "none":
            raise UsageError("expected 'none' alone, got it beside other passes")
        wanted = [(one, {}) for one in DEFAULT] if name == "default" and not config else [(name, config)]
        for one, fields in wanted:
            made = _class_of(one).configured(fields)
            spec = PassSpec(one, made.config(), type(made).source_digest())
            if not is_builtin(spec):
                require_current(type(made).own_functions(), ())
            specs.append(spec)
    _check_order(specs)
    return tuple(specs)


def make(spec: PassSpec) -> GraphPass:
    """Return the pass of a spec, in this or a worker process.

    Raises:
        UsageError: it cannot be imported here, or its files are not those of the spec any more.
    """
    made = _class_of(spec.name).configured(spec.config)
    if type(made).source_digest() != spec.digest:
        raise UsageError(f"the files of pass {spec.name!r} changed while it was in use", hint="compile again")
    return made


def is_builtin(spec: PassSpec) -> bool:
    """Tell whether a pass is pwcc's own, so that every worker process can import it."""
    return spec.name in BUILTIN


def _parsed(item: str | GraphPass) -> list[tuple[str, dict[str, Value]]]:
    if isinstance(item, str):
        return _items(item)
    own = f"{type(item).__module__}:{type(item).__qualname__}"
    names = {path: name for name, path in BUILTIN.items()}
    return [(names.get(own, own), item.config())]


def _items(text: str) -> list[tuple[str, dict[str, Value]]]:
    found: list[tuple[str, dict[str, Value]]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _ITEM.match(text, at)
        if match is None:
            raise UsageError(
                f"expected passes such as noop,name(option=1), got {text[at:].strip()!r}",
                hint="'none' is no pass, 'default' the default ones",
            )
        found.append((match[1], _options(match[1], match[2] or "")))
        at = match.end()
    return found or [("none", {})]


def _options(name: str, text: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    at = 0
    while at < len(text.rstrip()):
        match = _OPTION.match(text, at)
        if match is None or match[1] in found:
            raise UsageError(f"expected {name}(option=value, ...), got {name}({text})")
        try:
            value = json.loads(match[2])
        except ValueError:
            value = match[2]  # a plain word
        found[match[1]] = value
        at = match.end()
    return found


def _class_of(name: str) -> type[GraphPass]:
    path = BUILTIN.get(name, name)
    module, _, attribute = path.partition(":")
    if not attribute or not all(module.split(".")):
        close = difflib.get_close_matches(name, [*BUILTIN, "none", "default"], n=3, cutoff=0.5)
        raise UsageError(
            f"expected a pass of {', '.join(BUILTIN)}, got {name!r}",
            hint=f"did you mean {', '.join(close)}?" if close else "a pass of your own is written module:Class",
        )
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot import the pass {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, GraphPass)):
        raise UsageError(f"expected {name!r} to be a class derived from pwcc.compile.passes.base.GraphPass")
    found.check_class()
    return found


def _check_order(specs: Sequence[PassSpec]) -> None:
    before: list[str] = []
    ended: str | None = None
    for spec in specs:
        kind = _class_of(spec.name)
        own = kind.name if spec.name in BUILTIN else spec.name
        if own in before:
            raise UsageError(f"expected each pass once, got {own!r} twice")
        missing = [name for name in kind.requires if name not in before]
        if ended is not None:
            raise UsageError(
                f"pass {ended!r} must be the last, got {own!r} after it",
                hint=f"--passes {','.join([*(name for name in before if name != ended), own, ended])}",
            )
        ended = own if kind.last else None
        if missing:
            raise UsageError(
                f"pass {own!r} needs {', '.join(missing)} before it",
                hint=f"--passes {','.join([*before, *missing, own])}",
            )
        before.append(own)
