"""The environment policy, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

from pwcc.cache.environment import EXCLUDED, READ, matches
from pwcc.cache.policy import Policy
from pwcc.cache.strict import Json
from pwcc.cli.table import facts


def policy_json(policy: Policy, environ: Mapping[str, str]) -> dict[str, Json]:
    """Return the whole policy: the site's patterns, the two tables, and the variables of ``environ`` by it."""
    here = {name: policy.decide(name) for name in sorted(environ)}
    return {
        "site": policy.to_json(),
        "read": [{"pattern": item.glob, "reason": item.reason} for item in READ],
        "excluded": [{"pattern": item.glob, "reason": item.reason} for item in EXCLUDED],
        "here": {
            name: {"factor": factor, "pattern": pattern, "reason": reason}
            for name, (factor, pattern, reason) in here.items()
            if factor or (pattern and matches(READ, name))
        },
    }


def policy_lines(policy: Policy, environ: Mapping[str, str]) -> list[str]:
    """Return the policy as text: what decides first comes first."""
    here = [(name, policy.decide(name)) for name in sorted(environ)]
    values = policy.factors(environ)
    groups = (
        ("excluded by this site", [(glob, "") for glob in policy.exclude]),
        ("included by this site", [(glob, "") for glob in policy.include]),
        ("left out, with the reason", [(item.glob, item.reason) for item in EXCLUDED]),
        ("read, with what reads it", [(item.glob, item.reason) for item in READ]),
        ("set here and a factor", list(values.items())),
        (
            "set here and left out",
            [
                (name, f"{glob}: {reason}")
                for name, (factor, glob, reason) in here
                if glob and not factor and matches(READ, name)
            ],
        ),
    )
    lines = ["In this order, the first match decides. A name that matches nothing is a factor only if the"]
    lines += ["model's own code is seen to read it."]
    for title, pairs in groups:
        lines += ["", title, *(facts(pairs) or ["  none"])]
    return lines
