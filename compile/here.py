"""Key: what an entry is compared with: a live model on this host, or on a host that a record describes."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

import pwcc
from pwcc.cache.factors import FactorTree, lookup_key
from pwcc.cache.host_record import DeviceFacts, Fact, HostRecord
from pwcc.cache.ids import FactorDigest, LookupKey
from pwcc.cache.policy import Policy, SiteEnvironment
from pwcc.cache.requirements import KINDS
from pwcc.cache.strict import Json
from pwcc.compile.model_tree import ModelTree, identity, model_tree
from pwcc.compile.numeric_state import numeric_state
from pwcc.compile.signature import signature_facts
from pwcc.compile.target import Target, check_tag, host_facts, lookup_factors, torch_build


@dataclass(frozen=True)
class Here:
    """A model, and the facts of the host that would serve it. ``record`` is set for another host."""

    model: nn.Module
    target: Target
    torch: str
    device: Mapping[str, Json]
    numeric: Mapping[str, Json]
    facts: Mapping[str, object]
    tag: str | None = None
    record: HostRecord | None = None

    @classmethod
    def now(cls, model: nn.Module, target: Target, *, tag: str | None = None) -> Here:
        """Return this process's view: its torch, device and modes, read now."""
        return cls(
            model=model,
            target=target,
            torch=torch_build(),
            device=cast("Mapping[str, Json]", target.factors()),
            numeric=numeric_state(),
            facts=host_facts(target),
            tag=check_tag(tag),
        )

    def on(self, record: HostRecord) -> Here:
        """Return the view of the host that ``record`` describes: same model and code, its facts."""
        device = record.device
        return replace(
            self,
            target=Target(torch.device(device.type), device.name, device.capability, device.cuda),
            torch=record.torch,
            device=device.to_json(),
            numeric=record.numeric_state,
            facts=record.facts,
            record=record,
        )

    @functools.cached_property
    def tree(self) -> ModelTree:
        """The model's rows."""
        return model_tree(self.model)

    @functools.cached_property
    def tree_digest(self) -> FactorDigest:
        """The digest of the model's rows."""
        return self.tree.digest()

    @functools.cached_property
    def signature(self) -> list[list[str]]:
        """The parameters of ``forward`` and their defaults."""
        return signature_facts(self.model)

    def lookup_factors(self) -> dict[str, object]:
        """Return the lookup key's factors; equal to a load's, with this view's facts."""
        factors = lookup_factors(self.tree_digest, self.target, self.numeric, self.signature, self.tag)
        return {**factors, "torch": self.torch, "device": dict(self.device)}

    @functools.cached_property
    def lookup_key(self) -> LookupKey:
        """The lookup key of the model here."""
        return lookup_key(FactorTree.of(configuration=self.lookup_factors()))

    @property
    def device_label(self) -> str:
        """The device as a listing shows it."""
        kind, name = str(self.device["type"]), self.device["name"]
        return kind if name is None else f"{kind} ({name})"

    @property
    def root(self) -> str:
        """The class of the root module."""
        return identity(self.model)


def record_host(target: Target, policy: Policy, environ: Mapping[str, str]) -> HostRecord:
    """Return this host's facts, for ``pwcc env``. Starts no process, imports no compiler."""
    facts: dict[str, Fact] = {}
    now = host_facts(target)
    for kind in KINDS:
        value = now[kind]
        facts[kind] = (
            value if value is None or isinstance(value, str) else tuple(sorted(cast("frozenset[str]", value)))
        )
    device = target.factors()
    return HostRecord(
        pwcc=pwcc.__version__,
        python=platform.python_version(),
        torch=torch_build(),
        device=DeviceFacts(**cast("dict[str, str]", device)),
        facts=facts,
        numeric_state=numeric_state(),
        environment=policy.factors(environ),
        site=SiteEnvironment.record(policy, environ),
    )
