"""Key: one host's facts as a JSON document, to ask elsewhere whether that host would hit.

``pwcc env --json`` writes it, ``pwcc explain --target FILE`` reads it. It comes from another machine, so it is
parsed as strictly as anything in a cache. It names no host, user or path; environment values are as a
key holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pwcc.cache import strict
from pwcc.cache.errors import CorruptEntry, NewerFormat, UsageError
from pwcc.cache.policy import SiteEnvironment
from pwcc.cache.requirements import KINDS
from pwcc.cache.strict import Fields, Json, as_json, as_name, as_str, as_text

SCHEMA: Final = 1
MAX_BYTES: Final = 1024 * 1024

Fact = str | tuple[str, ...] | None


@dataclass(frozen=True)
class DeviceFacts:
    """A device class as a lookup key holds it; see ``Target.factors``."""

    type: str
    name: str | None
    capability: str | None
    cuda: str | None
    machine: str | None

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, equal to the key's factors."""
        return {
            "type": self.type,
            "name": self.name,
            "capability": self.capability,
            "cuda": self.cuda,
            "machine": self.machine,
        }

    @classmethod
    def parse(cls, value: object, where: str) -> DeviceFacts:
        """Return what :meth:`to_json` wrote; raise CorruptEntry otherwise."""
        fields = Fields(value, where)
        found = cls(
            fields.item("type", as_name),
            *(fields.opt_item(name, as_text) for name in ("name", "capability", "cuda", "machine")),
        )
        if found.type not in ("cpu", "cuda"):
            fields.fail("type", "cpu or cuda", found.type)
        fields.done()
        return found


@dataclass(frozen=True, kw_only=True)
class HostRecord:
    """The facts. ``facts`` are by requirement kind; ``numeric_state`` and ``environment`` as a key has them."""

    pwcc: str
    python: str
    torch: str
    device: DeviceFacts
    facts: Mapping[str, Fact]
    numeric_state: Mapping[str, Json]
    environment: Mapping[str, str]
    site: SiteEnvironment

    def to_json(self) -> dict[str, Json]:
        """Return the document: ``schema`` first."""
        facts: dict[str, Json] = {
            kind: list(fact) if isinstance(fact, tuple) else fact for kind, fact in self.facts.items()
        }
        return {
            "schema": SCHEMA,
            "pwcc": self.pwcc,
            "python": self.python,
            "torch": self.torch,
            "device": self.device.to_json(),
            "facts": facts,
            "numeric_state": dict(self.numeric_state),
            "environment": dict(self.environment),
            "site_environment": self.site.to_json(),
        }

    @classmethod
    def parse(cls, value: object, where: str) -> HostRecord:
        """Return the record in ``value``, as ``strict.loads`` returned it.

        Raises:
            NewerFormat: a newer pwcc wrote it. CorruptEntry: it is no such document.
        """
        fields = Fields(value, where)
        schema = fields.int_("schema", low=1)
        if schema > SCHEMA:
            raise NewerFormat(f"expected a host record of schema {SCHEMA}, got {schema}", where=where)
        found = cls(
            pwcc=fields.item("pwcc", as_text),
            python=fields.item("python", as_text),
            torch=fields.item("torch", as_text),
            device=fields.item("device", DeviceFacts.parse),
            facts=fields.mapping("facts", _as_fact, max_items=100),
            numeric_state=fields.mapping("numeric_state", as_json, max_items=1_000),
            environment=fields.mapping("environment", as_str, max_items=10_000),
            site=fields.item("site_environment", SiteEnvironment.parse),
        )
        if isinstance(value, dict) and "switches" in value:  # shown by `pwcc env`, no facts of a host
            fields.mapping("switches", as_json, max_items=100)
        unknown = sorted(set(found.facts) - set(KINDS))
        if unknown:
            fields.fail("facts", "facts that this pwcc knows", unknown)
        for name in (*found.numeric_state, *found.environment):
            as_text(name, where)
        fields.done()
        return found


def _as_fact(value: object, where: str) -> Fact:
    if value is None:
        return None
    if isinstance(value, list) and len(value) <= 1_000:
        return tuple(as_text(item, where) for item in value)
    return as_text(value, where)


def read_host_record(path: Path) -> HostRecord:
    """Return the record in a file.

    Raises:
        UsageError: no such file, or it is no host record; the message says where it is wrong.
    """
    try:
        data = strict.read_bounded(path, max_bytes=MAX_BYTES)
        return HostRecord.parse(strict.loads(data, where=path.name), path.name)
    except OSError as error:
        raise UsageError(f"reading failed: {error.strerror}", where=str(path)) from None
    except (CorruptEntry, NewerFormat) as error:
        hint = "write it on the other host: pwcc env --json > host.json"
        raise UsageError(
            f"no host record: {error.message}", where=error.where or str(path), hint=hint
        ) from None
