"""The steps of an answer with what is known of each, for those who show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetune_lab.analyzers.step_credit import Shown, step_credit


@dataclass(frozen=True)
class Step:
    """Tokens ``[start, end)``; the value before them and their advantage, each with its interval, and what
    they earned by themselves, as far as that is known. Where `merged`, credit knows no value before it, and
    treats it and the step before as one."""

    number: int
    start: int
    end: int
    value: Shown | None
    advantage: Shown | None
    earned: float | None
    merged: bool = False


def made_of_credit(config: Mapping[str, Any]) -> str:
    """What training makes of the advantages that credit gave and that are stored, in words; empty where it
    takes them as they are."""
    trainer = config.get("trainer")
    if not trainer:
        return "nobody can tell what training made of it: config.json can't be read"
    objective = trainer.get("objective") or {}
    penalised = objective.get("kl_placement") if objective.get("kl_coef") != 0 else None
    over = "each domain's" if trainer.get("normalise_by_domain") else "the iteration's"
    made = {
        "reward": "the KL penalty from each token on is taken from it",
        "whiten": f"it is whitened over {over} trained tokens",
        "scale": f"it is divided by the standard deviation of {over} trained tokens",
        "advantage": "the token's KL penalty is taken from it",
    }
    steps = ("reward" if penalised == "reward" else "", trainer.get("advantage_normalisation"), penalised)
    found = " and ".join(made[step] for step in dict.fromkeys(steps) if step in made)
    return f"in training {found}" if found else ""


def steps_of(
    length: int,
    ends: Sequence[int],
    *,
    earned: Sequence[float] = (),
    advantages: Sequence[float] | None = None,
    reward: float = 0.0,
    own_ends: Sequence[int] = (),
    values: Sequence[float] | None = None,
    errors: Sequence[float] | None = None,
) -> list[Step]:
    """Of an answer of so many tokens whose steps end at `ends`; what is behind the last is a step too.

    The others are of its training row: an advantage for each token, and the values of the states before
    credit's own steps, which end at `own_ends`, with their standard errors.
    """
    if not ends or ends[-1] < length:
        ends = (*ends, length)
    credit = None
    if advantages is not None:
        known = values or None
        credit = step_credit(ends, reward, advantages, own_ends, known, errors if known else None)
    return [
        Step(
            number=number,
            start=start,
            end=end,
            value=credit.values[number] if credit else None,
            advantage=credit.advantages[number] if credit else None,
            earned=earned[number] if number < len(earned) else None,
            merged=credit is not None and any(credit.values) and credit.values[number] is None,
        )
        for number, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True))
        if start < end or length == 0
    ]
