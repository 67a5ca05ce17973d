"""``pwcc env``: this host's facts, to read here or to ask elsewhere whether this host would hit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pwcc.cache.strict import Json
from pwcc.cache.switches import Switches
from pwcc.cli import output
from pwcc.cli.invocation import DebugOption, JsonOption
from pwcc.cli.model_options import DeviceOption, find_device
from pwcc.cli.policy_options import PolicyOptions, site_policy
from pwcc.cli.spread import spread
from pwcc.cli.table import facts

if TYPE_CHECKING:
    from pwcc.cache.host_record import HostRecord


@spread
def env(
    *,
    device: DeviceOption = None,
    environment: PolicyOptions,
    json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Print the facts of this host; explain --target reads them.

    They are all that a key or a requirement depends on; give --json for --target. The switches PWCC_DISABLE,
    PWCC_RECACHE and PWCC_FROZEN are shown, too; no key holds them.
    """
    policy = site_policy(environment)
    switches = Switches.read()

    from pwcc.compile.here import record_host
    from pwcc.compile.target import target_of

    record = record_host(target_of(find_device(device)), policy, os.environ)
    if json:
        shown: dict[str, Json] = dict(switches.to_json())
        output.data_json({**record.to_json(), "switches": shown})
    else:
        output.data([*record_lines(record), "", "switches, which no key holds", *switch_lines(switches)])


def switch_lines(switches: Switches) -> list[str]:
    """Return the switches of the environment as text."""
    return facts([(name, "on" if on else "off") for name, on in switches.to_json().items()])


def record_lines(record: HostRecord) -> list[str]:
    """Return a host record as text."""
    device = record.device.to_json()
    lines = facts(
        [
            ("pwcc", record.pwcc),
            ("python", record.python),
            ("torch", record.torch),
            ("device", " ".join(str(value) for value in device.values() if value)),
        ],
        indent="",
    )
    known = [
        (kind, " ".join(value) if isinstance(value, tuple) else value or "-")
        for kind, value in sorted(record.facts.items())
    ]
    groups = (
        ("facts that requirements are compared with", known),
        ("global numeric modes", [(name, str(v)) for name, v in sorted(record.numeric_state.items())]),
        ("environment variables that are factors", sorted(record.environment.items())),
    )
    for title, pairs in groups:
        lines += ["", title, *(facts(pairs) or ["  none"])]
    return lines
