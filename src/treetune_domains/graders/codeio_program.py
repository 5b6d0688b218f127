"""What a program gives on some inputs, found by running it in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from treetune.tasks.graders.base import Unavailable
from treetune_domains.sandbox.base import Limits, Sandbox, SandboxUnavailable

MARK = "@@ output of the call: "
"""Before a line with what a call gave. What else the program prints is not looked at."""

_CALLS = """
if True:
    import json as _json, sys as _sys
    for _given in _json.loads(_sys.stdin.read()):
        try:
            if isinstance(_given, dict):
                _found = {entry}(**_given)
            else:
                _found = {entry}(*_given) if isinstance(_given, list) else {entry}(_given)
            _told = {{"value": _json.loads(_json.dumps(_found))}}
        except Exception as _error:
            _told = {{"error": repr(_error)[:200]}}
        print("\\n" + {mark!r} + _json.dumps(_told), flush=True)
"""


def outputs_of(
    sandbox: Sandbox, program: str, entry: str, inputs: Sequence[Any], limits: Limits
) -> list[Any | None]:
    """For each input what ``entry`` of the program returns for it, as JSON has it: ``[value]``, or None where
    the call raises, returns what JSON doesn't have, or isn't done within the limits.

    An object is given as named arguments, a list as arguments in their order. Raises Unavailable where the
    sandbox isn't there.
    """
    calls = _CALLS.format(entry=entry, mark=MARK)
    try:
        outcome = sandbox.run(f"{program}\n{calls}", stdin=json.dumps(list(inputs)), limits=limits)
    except SandboxUnavailable as error:
        raise Unavailable(str(error)) from error
    told = [
        json.loads(line.removeprefix(MARK)) for line in outcome.stdout.split("\n") if line.startswith(MARK)
    ]
    found: list[Any | None] = [[one["value"]] if "value" in one else None for one in told]
    return [*found, *[None] * len(inputs)][: len(inputs)]
