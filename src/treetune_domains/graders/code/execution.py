"""Runs an answer's code in a sandbox: on inputs, or against tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treetune.tasks.graders.base import Unavailable
from treetune_domains.sandbox import inside
from treetune_domains.sandbox.base import Limits, Sandbox, SandboxUnavailable

_REPORT_KIB = 64
"""What our own part of a report may take beside what a program printed."""


@dataclass(frozen=True)
class Case:
    """How a program went on one input: its exit status, whether it was stopped at its time, what it printed
    (cut where it is more than the limit), and the end of what it printed as errors."""

    exit: int
    stopped: bool
    printed: str
    errors: str


@dataclass(frozen=True)
class Report:
    """How an answer's code went against tests: of each that was begun whether it passed, or the value that a
    call gave; `count` is None where they could not be begun. `message` is of the first that failed."""

    count: int | None
    tests: tuple[Mapping[str, Any], ...]
    message: str | None


def run_cases(
    sandbox: Sandbox, code: str, inputs: Sequence[str], *, limits: Limits, seconds: float, stop_early: bool
) -> list[Case]:
    """The program on each input, for `seconds` each and for `limits.seconds` in all; as many cases as it came
    to. With `stop_early` none after one on which it failed. Raises Unavailable."""
    most = limits.output_kib * 1024
    call = f"\nrun({code!r}, {list(inputs)!r}, {seconds!r}, {most}, {stop_early})"
    report_kib = (limits.output_kib + 4) * len(inputs) + _REPORT_KIB
    text = _run(sandbox, inside.source("cases") + call, "", replace(limits, output_kib=report_kib))
    found: list[Case] = []
    while text and len(found) < len(inputs):
        line, _, text = text.partition("\n")
        try:
            status, stopped, printed, errors = map(int, line.split())
        except ValueError:
            break
        found.append(Case(status, bool(stopped), text[:printed], text[printed : printed + errors]))
        text = text[printed + errors :]
    return found


def run_tests(
    sandbox: Sandbox, prefix: str, code: str, order: Mapping[str, Any], *, limits: Limits, seconds: float
) -> Report:
    """The tests of an `order` (see `sandbox.inside.tests`) against the code. Raises Unavailable."""
    # The tests come on standard input, which is read when the answer's process has been forked and lost it.
    call = f"\nmain({prefix!r}, {code!r}, {seconds!r})"
    text = _run(sandbox, inside.bundle("tests", "peers") + call, json.dumps(order), limits)
    count: int | None = None
    tests: list[Mapping[str, Any]] = []
    for line in text.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            break  # cut at the deadline
        if "tests" in told:
            count = int(told["tests"])
        else:
            tests.append(told)
    message = next((str(one["message"]) for one in tests if "message" in one), None)
    return Report(count, tuple(tests[: count or 0]), message)


def _run(sandbox: Sandbox, code: str, stdin: str, limits: Limits) -> str:
    try:
        return sandbox.run(code, stdin=stdin, limits=limits).stdout
    except SandboxUnavailable as error:
        raise Unavailable(str(error)) from error
