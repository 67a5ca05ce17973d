"""Key: what one compile saw of its model's inputs, from the recording of the build to the entry's records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pwcc.cache import observed
from pwcc.cache.errors import TraceError
from pwcc.cache.observed import ObservedInput
from pwcc.cache.sources import SourceRecord
from pwcc.compile import build_factors, observed_inputs
from pwcc.compile.code_scan import Found, scan
from pwcc.compile.eager_run import watch_forward
from pwcc.compile.kernel_launches import kernel_codes
from pwcc.compile.observation import Observation
from pwcc.compile.observed_guards import added_predicates, shadow_predicates, without_environment
from pwcc.compile.operator_globals import functions_of, reads_of
from pwcc.compile.request import Request
from pwcc.compile.runtime.predicates import Predicate
from pwcc.compile.secrets import Secrets
from pwcc.compile.torch_private import operators
from pwcc.compile.traced_code import TracedCode, require_current
from pwcc.compile.tracing import Traced


@dataclass(frozen=True)
class Evidence:
    """What an entry records: inputs, sources, and predicates without those that inputs replace."""

    inputs: tuple[ObservedInput, ...]
    sources: tuple[SourceRecord, ...]
    predicates: tuple[Predicate, ...]
    warnings: tuple[str, ...]


class Witness:
    """Gathers what one model reads, over the traces of one compile.

    Args:
        model: the live model.
        request: what the compile was asked for.
        observation: the recording of the model's construction, None for a model that was built elsewhere.
    """

    def __init__(self, model: nn.Module, request: Request, observation: Observation | None) -> None:
        self._model = model
        self._request = request
        self._seen = Observation()
        if observation is not None:
            self._seen.merge(observation)
        self._found = Found()
        self._ran = False
        self._environ: dict[str, str] = {}

    def watch(self, traced: Sequence[Traced]) -> None:
        """Scan what was traced and run the model once; refuse what no record can stand for.

        Raises:
            TraceError: a computed name, a look through the whole environment, a source that was changed
                after it was imported; each with its line.
            UnsealableError: a secret of the environment is a constant of the graph, or a default.
        """
        code = TracedCode(code for item in traced for code in item.trace.traced_code)
        self._environ = dict(os.environ)
        if not self._ran:
            own = {type(module).__module__.partition(".")[0] for module in self._model.modules()}
            self._seen.merge(
                watch_forward(self._model, self._request, own=own - {"torch", "pwcc"}, namespaces=code.modules)
            )
            self._ran = True
        self._found = scan(code.own())
        observed_inputs.require_followed(self._seen, self._found, self._request.policy)
        read = [*self._seen.environment, *self._found.variables]
        secrets = Secrets(read)
        secrets.require_none_in([item.trace.graph_module.graph for item in traced])
        secrets.require_none_among(p.value for item in traced for p in item.trace.calling.parameters)
        require_current(code.functions(), ())

    def testify(self, traced: Sequence[Traced], predicates: Sequence[Predicate], salt: str) -> Evidence:
        """Return the entry's records, ``salt`` being its lookup key.

        Raises:
            TraceError: a source, or a variable that the model reads, was changed while it was compiled.
        """
        code = TracedCode(code for item in traced for code in item.trace.traced_code)
        self._found = scan(code.own())
        kept, guarded = without_environment(predicates, self._model, traced[0].trace.global_scope)
        kept += added_predicates(self._model, self._found)
        read = [*self._seen.environment, *self._found.variables, *guarded]
        kept = Secrets(read).hide(kept, salt)
        own = [owned for owned, _ in code.own()]
        kept += shadow_predicates(kept, self._model, traced[0].trace.global_scope, own)
        behind = operators.behind(
            {name for item in traced for name in operators.names_in(item.trace.graph_module.graph)}
        )
        folded = reads_of(behind)
        kept += folded.constants
        sources = build_factors.source_records(
            [
                *(c for item in traced for c in item.trace.traced_code),
                *code.related(self._model),
                *behind.codes,
                *(c for item in traced for c in kernel_codes(item.trace.graph_module.graph)),
            ],
            build_factors.named_modules(kept),
            (*behind.files, *folded.files),
        )
        require_current([*code.functions(), *functions_of(behind)], sources)
        made = observed_inputs.make_records(
            self._seen,
            self._found,
            guarded,
            salt=salt,
            policy=self._request.policy,
            own_modules={record.module for record in sources},
        )
        for item in made.records:
            if item.kind == "environment" and os.environ.get(item.name) != self._environ.get(item.name):
                raise TraceError(
                    f"the environment variable {item.name} was changed while the model was compiled",
                    where=item.where,
                    hint="compile again, and leave it alone meanwhile",
                )
        inputs = [*made.records, *observed_inputs.functions(code.functions())]
        if behind.compiled:
            inputs += observed_inputs.libraries()
        return Evidence(
            tuple(sorted(inputs, key=observed.sort_key)),
            sources,
            tuple(kept),
            made.warnings,
        )
