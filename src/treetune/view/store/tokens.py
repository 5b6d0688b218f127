"""An answer token by token: ids, texts, numbers that are known of each; its steps with their credit, and the
credit of several methods beside each other."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treetune.lab.analyzers.step_credit import Shown, step_credit
from treetune.objectives.base import Objective
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.storage import TOKENS, read_tokens
from treetune.runtime.analysis import read_result
from treetune.view.store.answers import StoredAnswer
from treetune.view.store.folders import stat_of
from treetune.view.store.index import walk
from treetune.vocabulary import Branch, Column, Episode, are_sampled

OF_CREDIT = "advantage of credit"
"""The advantage as it is stored, where ``advantage`` is what training made of it."""

MICROSCOPE, REPLAY = "result.json", "advantages.jsonl"
"""Files that analyses write into their folders."""


@dataclass(frozen=True)
class CreditedStep:
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


@dataclass(frozen=True)
class Tokens:
    """Columns of one entry per response token. `numbers` are those that can be shown and coloured by, by
    name; NaN where a token has none. `texts` are None where the experiment stored no texts of tokens."""

    ids: np.ndarray
    texts: Sequence[str] | None
    sampled: np.ndarray
    steps: Sequence[CreditedStep]
    branches: Sequence[Branch]
    versions: Sequence[int | None]
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.ids)


def tokens_of(run: Path, answer: StoredAnswer, config: Mapping[str, Any]) -> Tokens | None:
    """Returns tokens with the advantages that trained, as far as the run's `config` and what is stored say
    these. None for an answer of which only the text is stored, as evaluations'."""
    trajectory, episode = answer.trajectory, answer.episode
    source = trajectory if trajectory is not None else episode
    if source is None:
        return None
    ids, numbers = source.response_ids, dict[str, np.ndarray]()
    if episode is not None and episode.advantages is not None:
        given = np.where(episode.trained, episode.advantages, np.nan)
        numbers["advantage"] = given
        if moments := _moments(answer, episode, config):
            mean, deviation = moments[episode.domain]
            numbers |= {"advantage": ((given - mean) / deviation).astype(np.float32), OF_CREDIT: given}
    segments = trajectory.segments if trajectory is not None else ()
    precisions = [one.logprobs.dtype for one in segments if one.logprobs is not None]
    if precisions:  # the engine's, NaN for what was injected
        missing = (np.full(len(one.token_ids), np.nan, precisions[0]) for one in segments)
        pairs = zip(segments, missing, strict=True)
        numbers["log-prob"] = np.concatenate(
            [nan if one.logprobs is None else one.logprobs for one, nan in pairs]
        )
    elif trajectory is None and episode is not None and episode.behaviour_logprobs is not None:
        numbers["log-prob"] = np.where(episode.trained, episode.behaviour_logprobs, np.nan)
    if episode is not None:
        signals = dict(zip(map(id, answer.episodes), answer.signals, strict=False)).get(id(episode))
        kinds = ("entropies", "gaps", "logprobs", "log_ratios")
        for name, kind in zip(("entropy", "gap", "trainer's log-prob", "log-ratio"), kinds, strict=True):
            values = getattr(signals, kind, None)
            if values is not None:  # NaN for tokens that the trainer was not asked about
                numbers[name] = np.full(len(episode.trained), np.nan, values.dtype)
                numbers[name][episode.trained] = values
    by_token = [segment for segment in segments for _ in range(len(segment.token_ids))]
    if trajectory is not None:
        sampled = are_sampled(trajectory.segments)
    else:
        assert episode is not None
        sampled = episode.trained
    # Steps are those of credit where it has some, else the answer's.
    ends = (episode.step_ends if episode is not None else ()) or source.step_ends
    length = len((episode if episode is not None else source).response_ids)
    return Tokens(
        ids=ids,
        texts=texts_of(run, ids),
        sampled=sampled,
        steps=steps_of(length, ends, episode, earned=(episode or source).step_rewards),
        branches=[one.branch for one in by_token] or [()] * len(ids),
        versions=[one.policy_version for one in by_token] or [None] * len(ids),
        numbers=numbers,
    )


def steps_of(
    length: int, ends: Sequence[int], episode: Episode | None, *, earned: Sequence[float] = ()
) -> list[CreditedStep]:
    """Returns the steps of an answer of so many tokens, which end at `ends`; what is behind the last is a
    step too. The episode has an advantage for each token, and the values of the states before credit's own
    steps."""
    if not ends or ends[-1] < length:
        ends = (*ends, length)
    credit = None
    if episode is not None and episode.advantages is not None:
        known = episode.step_values or None
        errors = episode.step_errors if known else None
        advantages = episode.advantages.tolist()
        credit = step_credit(ends, episode.reward, advantages, episode.step_ends, known, errors)
    return [
        CreditedStep(
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


# Texts of tokens


_read_tokens = functools.lru_cache(maxsize=2)(lambda path, stat: read_tokens(path))


def texts_of(run: Path, ids: np.ndarray) -> list[str] | None:
    """Returns the text of each token, empty for a special one; None where the experiment stored no texts."""
    known = all_texts(run)
    return known and text_of_each(known, ids)


def text_of_each(known: Sequence[str], ids: np.ndarray) -> list[str]:
    return [known[one] if one < len(known) else "" for one in ids.tolist()]


def all_texts(run: Path) -> list[str] | None:
    """Returns the text of every token; None where the experiment stored none, or it is damaged, as its page
    says."""
    path = run / TOKENS
    stat = stat_of(path)
    try:
        return None if stat is None else _read_tokens(path, stat)
    except ValueError:
        return None


# Advantages in training


def made_of_credit(config: Mapping[str, Any]) -> str:
    """Describes what training makes of the advantages that credit gave and that are stored; empty where it
    takes them as they are."""
    trainer = config.get("trainer")
    if not trainer:
        return "nobody can tell what training made of it: config.json can't be read"
    objective = trainer.get("objective") or {}
    taken = objective.get("kl_placement") if penalised(config) else None
    over = "each domain's" if trainer.get("normalise_by_domain") else "the iteration's"
    made = {
        "reward": "the KL penalty from each token on is taken from it",
        "whiten": f"it is whitened over {over} trained tokens",
        "scale": f"it is divided by the standard deviation of {over} trained tokens",
        "advantage": "the token's KL penalty is taken from it",
    }
    steps = ("reward" if taken == "reward" else "", trainer.get("advantage_normalisation"), taken)
    words = " and ".join(made[step] for step in dict.fromkeys(steps) if step in made)
    return f"in training {words}" if words else ""


def _moments(
    answer: StoredAnswer, episode: Episode, config: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Returns by domain what `trainers.preparation` takes from each advantage and divides it by; nothing
    where it doesn't normalise, or where advantages have a KL penalty, which is not stored."""
    trainer, path = config.get("trainer") or {}, answer.source.episodes
    how = trainer.get("advantage_normalisation")
    if how not in ("whiten", "scale") or penalised(config) or path is None:
        return {}
    sums = _sums_by_domain(path, stat_of(path))
    moments = {}
    for domain in sums:
        count, total, squares = np.sum(
            [sums[one] for one in ([domain] if trainer.get("normalise_by_domain") else sums)], axis=0
        )
        if count >= 2:
            mean = total / count
            deviation = np.sqrt(max(0.0, squares - count * mean**2) / (count - 1) + 1e-8)
            moments[domain] = (float(mean) if how == "whiten" else 0.0), float(deviation)
    return moments if episode.domain in moments else {}


def penalised(config: Mapping[str, Any]) -> bool:
    """Returns whether training takes a KL penalty from advantages before they train."""
    objective = (config.get("trainer") or {}).get("objective") or {}
    return objective.get("kl_placement", "loss") != "loss" and bool(objective.get("kl_coef"))


def _trained_advantages(path: Path) -> Iterator[tuple[str, Column]]:
    """Yields the domain and the advantages of the trained tokens of each row that has some."""
    from treetune.rollouts.rows import rows_of

    walking = walk(path, ["advantages", "trained", "domain"])
    next(walking)
    for batch, _ in walking:
        domains = batch["domain"].to_pylist() if "domain" in batch.schema.names else [""] * batch.num_rows
        rows = rows_of(batch["advantages"]), rows_of(batch["trained"])
        for domain, row, trained in zip(domains, *rows, strict=True):
            if row is not None and trained is not None:
                yield domain, row[trained.astype(bool)].astype(float)


@functools.lru_cache(maxsize=64)
def _sums_by_domain(path: Path, stat: object) -> dict[str, tuple[int, float, float]]:
    """Returns how many trained tokens each domain has, the sum of their advantages, and that of the
    squares."""
    sums: dict[str, tuple[int, float, float]] = {}
    for domain, own in _trained_advantages(path):
        count, total, squares = sums.get(domain, (0, 0.0, 0.0))
        sums[domain] = count + len(own), total + own.sum(), squares + (own**2).sum()
    return sums


# From a step's value to its part in the gradient


@dataclass(frozen=True)
class TrainedStep:
    """What is known of a step on its way into the gradient: the value behind it (None at the end), its mean
    advantage as credit gave it and as it trains (None where that isn't known), the mean ratio of the
    trainer's probabilities to the engine's, and of the policy's where its tokens trained in last to those
    before the iteration, how many of its tokens PPO clipped there, how many are trained, and the share of the
    iteration's `weight` that these have."""

    step: CreditedStep
    behind: Shown | None
    given: float
    trained: float | None
    engine_ratio: float | None
    ratio: float | None
    clipped: int
    tokens: int
    share: float | None


def trained_steps(answer: StoredAnswer, tokens: Tokens, config: Mapping[str, Any]) -> list[TrainedStep]:
    """Returns the steps of an answer with advantages. A trained token's weight is the size of its advantage
    times what the objective's aggregation gives it, as if the iteration were one minibatch: the factor of
    the gradient of its log-prob where the ratio is 1."""
    episode, path = answer.episode, answer.source.episodes
    assert episode is not None and episode.advantages is not None and path is not None
    objective = (config.get("trainer") or {}).get("objective") or {}
    usual = getattr(Objective.registered().get(str(objective.get("type"))), "aggregation", "token")
    by_sequence = objective.get("aggregation", usual) == "sequence"
    moments, whole = _moments(answer, episode, config), 0.0
    if not penalised(config):
        whole = _weight_of_all(path, stat_of(path), tuple(moments.items()), by_sequence)
    trains, own_weight = (
        tokens.numbers["advantage"],
        1 / max(1, episode.trained.sum()) if by_sequence else 1.0,
    )
    unknown = np.full(len(episode.trained), np.nan)
    gaps, moved = (np.exp(tokens.numbers.get(name, unknown)) for name in ("gap", "log-ratio"))
    # PPO's: the gradient ends where a token has gone far enough in the direction of its advantage.
    clipped = np.zeros(len(trains))
    if objective.get("type") == "ppo":
        names = ("clip_low", "clip_high", "dual_clip")
        low, high, dual = (objective.get(name, getattr(ClippedPolicyGradient, name)) for name in names)
        down = (moved < 1 - low) | (moved > (dual or np.inf))
        clipped = np.where(trains > 0, moved > 1 + high, down & (trains < 0))
    rows = []
    for step, after in zip(tokens.steps, [*tokens.steps[1:], None], strict=True):
        own = np.flatnonzero(episode.trained[step.start : step.end]) + step.start
        engine_ratio, ratio = (
            float(known.mean()) if len(known := of[own][np.isfinite(of[own])]) else None
            for of in (gaps, moved)
        )
        rows.append(
            TrainedStep(
                step,
                after.value if after is not None else None,
                float(episode.advantages[own].mean()) if len(own) else 0.0,
                None if penalised(config) or not len(own) else float(trains[own].mean()),
                engine_ratio,
                ratio,
                int(clipped[own].sum()),
                len(own),
                own_weight * float(np.abs(trains[own]).sum()) / whole if whole else None,
            )
        )
    return rows


@functools.lru_cache(maxsize=64)
def _weight_of_all(
    path: Path, stat: object, moments: Sequence[tuple[str, tuple[float, float]]], by_sequence: bool
) -> float:
    """Returns the sum of the weights of all trained tokens of an iteration."""
    known, whole = dict(moments), 0.0
    for domain, advantages in _trained_advantages(path):
        mean, deviation = known.get(domain, (0.0, 1.0))
        own = np.abs(advantages - mean) / deviation
        whole += float(own.mean() if by_sequence and len(own) else own.sum())
    return whole


# Credit of several methods


@dataclass(frozen=True)
class MethodCredit:
    """The credit that one method gives the steps of an answer: for each step the value before it and its
    advantage, each with its 95 % interval where one is known. `found_by` names the analysis, and `cost` is
    what it sampled for an answer. Shown by `credits` in ``parts.html``."""

    name: str
    cells: tuple[tuple[Shown | None, Shown | None], ...]
    found_by: str = ""
    cost: str = ""

    @property
    def scale(self) -> float:
        """The advantage that is coloured fully: methods have units of their own."""
        sizes = [abs(advantage.value) for _, advantage in self.cells if advantage is not None]
        return max(sizes, default=0.0) or 1.0


def method_of(
    name: str, credit: Mapping[str, Any], cost: Mapping[str, float] | None, by: str = ""
) -> MethodCredit:
    """Reads what `StepCredit.plain` gave, as the credit microscope writes it."""
    pairs = zip(credit["values"], credit["advantages"], strict=True)
    cells = tuple((value and Shown(**value), Shown(**advantage)) for value, advantage in pairs)
    return MethodCredit(name, cells, by, f"{cost['tokens_per_answer']:.0f} tokens an answer" if cost else "")


def credits_of(run: Path, answer: StoredAnswer) -> list[MethodCredit]:
    """Returns the credit of an iteration's answer in all analyses: the run's own, `replay`'s, the
    microscope's. Those that can't be read are left out."""
    if answer.source.kind != "iteration":
        return []
    methods = list[MethodCredit]()
    for folder in sorted((run / "analyses").glob("*")):
        try:
            methods += [*_of_microscope(folder, answer)] or [*_of_replay(folder, answer)]
        except (OSError, ValueError, KeyError, TypeError):  # written just now, or by another version
            continue
    return methods


def mark_of_credits(run: Path) -> list[object]:
    """Returns another list as soon as analyses have found anything else."""
    files = [
        folder / name for folder in sorted((run / "analyses").glob("*")) for name in (MICROSCOPE, REPLAY)
    ]
    return [(str(path), stat_of(path)) for path in files]


def _of_microscope(folder: Path, answer: StoredAnswer) -> Iterable[MethodCredit]:
    if not (folder / MICROSCOPE).is_file():
        return
    result = read_result(folder)
    if result.get("analyzer") != "credit_microscope":
        return
    looked = result["numbers"]["by_iteration"].get(str(answer.source.number - 1))
    for row in looked["answers"] if looked else ():
        if row["answer"] == answer.row["answer"]:
            for name, credit in row["credit"].items():
                yield method_of(name, credit, looked["costs"].get(name), folder.name)


def _of_replay(folder: Path, answer: StoredAnswer) -> Iterable[MethodCredit]:
    path = folder / REPLAY
    if not folder.name.startswith(f"replay-{answer.source.number:04d}") or not path.is_file():
        return

    def shown(numbers: Sequence[float | None], step: int) -> Shown | None:
        number = numbers[step] if step < len(numbers) else None
        return None if number is None else Shown(number)

    name = json.dumps(answer.row["answer"])
    with path.open() as file:
        for line in file:
            if name in line and (row := json.loads(line))["answer"] == answer.row["answer"]:
                for variant in row["advantages"]:
                    values, advantages = row["values"].get(variant) or (), row["advantages"][variant] or ()
                    steps = range(len(row["step_ends"]))
                    cells = tuple((shown(values, step), shown(advantages, step)) for step in steps)
                    yield MethodCredit(f"replay, {variant}", cells, folder.name)
                return
