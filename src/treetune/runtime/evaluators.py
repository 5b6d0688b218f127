"""Measuring all checkpoints of an experiment, however many processes do it, on however many machines."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Literal

from treetune.runtime.base import EvaluationSet
from treetune.runtime.claims import Claim, Claims
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.due import is_measured
from treetune.runtime.evaluation import evaluate
from treetune.runtime.sampler import Sampler
from treetune.runtime.weights_folder import CheckpointGone

FOLLOW_EVERY_S = 5.0

Verdict = Literal["ours", "another's", "measured"]


def unmeasured(directory: ExperimentDirectory, sets: tuple[EvaluationSet, ...]) -> list[int]:
    """Checkpoints that lack a summary of some set."""
    return [
        number
        for number in directory.checkpoints()
        if not all(is_measured(directory, number, one) for one in sets)
    ]


def follow(sampler: Sampler, claims: Claims, every_s: float = FOLLOW_EVERY_S) -> None:
    """Measures every set on every checkpoint that nobody else measures, until all are measured and
    the experiment, if it goes on, has ended. Collective.

    What another evaluator has claimed is waited for, and taken over if that evaluator dies. It lives
    while it shows signs of life, and what it does has deadlines of its own.
    """
    session, said = sampler.session, ""
    directory, sets = session.directory, session.config.evaluation.sets
    while True:
        going_on = session.ranks.from_first("is it running", directory.is_running())
        numbers = session.ranks.from_first("checkpoints", unmeasured(directory, sets))
        verdicts = {
            (number, one.label): measure_claimed(sampler, number, one, claims)
            for number in numbers
            for one in sets
        }
        if not numbers and not going_on:
            return
        others = [place for place, verdict in verdicts.items() if verdict == "another's"]
        if numbers and (not others or "ours" in verdicts.values()):
            continue
        if others:
            number, label = others[0]
            holder = claims.holder(_claims_of(directory, number, label))
            words = f"waiting for {holder}, which evaluates {label} after iteration {number}"
            if words != said:
                session.console.say(words)
            said = words
        time.sleep(every_s)


def measure_claimed(sampler: Sampler, number: int, chosen: EvaluationSet, claims: Claims) -> Verdict:
    """Measures one set on one checkpoint (0: the start weights), unless somebody else does. Collective."""
    session, directory = sampler.session, sampler.session.directory
    claim: Claim | None = None
    verdict: Verdict = "measured"
    if session.ranks.is_first and not is_measured(directory, number, chosen):
        claim = claims.take(_claims_of(directory, number, chosen.label))
        verdict = "ours" if claim else "another's"
    with contextlib.ExitStack() as stack:
        if claim is not None:
            stack.callback(claim.release)
            if is_measured(directory, number, chosen):  # by the one who had claimed it just before
                verdict = "measured"
        verdict = session.ranks.from_first("claim", verdict)
        if verdict == "ours":
            try:
                sampler.server.load_checkpoint(number)
            except CheckpointGone as gone:
                session.console.say(f"{gone}, before {chosen.label} was measured on it")
            else:
                evaluate(sampler, number, [chosen], claim)
    return verdict


def _claims_of(directory: ExperimentDirectory, number: int, label: str) -> Path:
    return directory.evaluation(number, label) / "claims"
