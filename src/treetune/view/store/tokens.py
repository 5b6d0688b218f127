"""Reads an answer token by token, with ids, texts and numbers.

It also reads the answer's steps with their credit, and the credit that several methods give them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treetune.lab.analyzers.step_credit import Shown, make_step_credit
from treetune.objectives.base import Objective
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.storage import TOKENS, read_tokens
from treetune.runtime.analysis import ADVANTAGES, read_result
from treetune.runtime.directory import RESULT, ExperimentDirectory
from treetune.view.experiment import CREDITED_LOG
from treetune.view.store.answers import StoredAnswer
from treetune.view.store.columns import kl_of_tokens
from treetune.view.store.folders import stat_of
from treetune.view.store.index import read_batches
from treetune.vocabulary import Branch, Column, Episode, are_sampled

ADVANTAGE_OF_CREDIT = "advantage of credit"
"""The name of the stored advantages, if training computed other advantages from them. Then those are called
``advantage``; if training changed nothing, the stored ones are."""
KL_TO_REFERENCE = "KL to the reference"
"""The name of the numbers of `kl_of_tokens`."""


@dataclass(frozen=True)
class CreditedStep:
    """A step of an answer: its tokens ``[start, end)``, with their credit."""

    number: int
    """The number of the step, counted from 0."""
    start: int
    end: int
    value: Shown | None
    """The value of the state before the step, with its interval; None if credit has none."""
    advantage: Shown | None
    """The mean advantage of the step's tokens, with its interval; None without credit."""
    reward: float | None
    """The reward that the step earned, such as that of a turn; None if steps have no rewards."""
    merged: bool = False
    """Whether credit treats this step and the step before it as one, so it has no value between them."""


@dataclass(frozen=True)
class Tokens:
    """The response tokens of an answer, as columns with an entry for each token."""

    ids: np.ndarray
    texts: Sequence[str] | None
    """The text of each token; None if the experiment stored no texts of tokens."""
    sampled: np.ndarray
    """True for sampled tokens, and False for injected ones."""
    steps: Sequence[CreditedStep]
    """The steps of the answer. They are the only field without an entry for each token."""
    branches: Sequence[Branch]
    """The thread of each token; () outside of threads."""
    versions: Sequence[int | None]
    """The version of the policy that sampled each token; None if it is unknown, or for injected tokens."""
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Numbers that tokens can be coloured by, by name, such as "advantage". A token without a number has
    NaN."""

    @property
    def count(self) -> int:
        return len(self.ids)


def tokens_of(run: Path, answer: StoredAnswer, config: Mapping[str, Any]) -> Tokens | None:
    """Returns the tokens of an answer, with their advantages in training if these can be computed.

    Returns None for an answer of which only the text is stored, such as an answer of an evaluation.
    """
    trajectory, episode = answer.trajectory, answer.episode
    stored = trajectory if trajectory is not None else episode
    if stored is None:
        return None
    ids = stored.response_ids
    numbers = _advantages_of(answer, config)
    logprobs = _engine_logprobs(answer)
    if logprobs is not None:
        numbers["log-prob"] = logprobs
    numbers |= _trainer_numbers(answer)
    branches: list[Branch] = []
    versions: list[int | None] = []
    if trajectory is not None:
        sampled = are_sampled(trajectory.segments)
        for segment in trajectory.segments:
            branches += [segment.branch] * len(segment.token_ids)
            versions += [segment.policy_version] * len(segment.token_ids)
    else:
        assert episode is not None
        sampled = episode.trained
        branches, versions = [()] * len(ids), [None] * len(ids)
    # The steps that are shown are those of the training row, because credit may have merged steps of the
    # answer. If there is no training row, or if it has no steps, they are those of the answer itself.
    source_of_steps = episode if episode is not None else stored
    ends = source_of_steps.step_ends or stored.step_ends
    return Tokens(
        ids=ids,
        texts=texts_of(run, ids),
        sampled=sampled,
        steps=steps_of(
            len(source_of_steps.response_ids), ends, episode, rewards=source_of_steps.step_rewards
        ),
        branches=branches,
        versions=versions,
        numbers=numbers,
    )


def _advantages_of(answer: StoredAnswer, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the advantages of an answer's tokens, by name. Tokens that were not trained have NaN.

    If training normalised the advantages, the normalised ones are called "advantage", and the stored ones
    `ADVANTAGE_OF_CREDIT`. If training didn't change the stored advantages, or if the changed ones can't be
    computed, the stored ones are called "advantage". The result is empty if the answer has no advantages.
    """
    episode = answer.episode
    if episode is None or episode.advantages is None:
        return {}
    stored_advantages = np.where(episode.trained, episode.advantages, np.nan)
    moments = _normalisation_moments(answer, episode, config)
    if not moments:
        return {"advantage": stored_advantages}
    mean, deviation = moments[episode.domain]
    normalised = ((stored_advantages - mean) / deviation).astype(np.float32)  # float32 as in training
    return {"advantage": normalised, ADVANTAGE_OF_CREDIT: stored_advantages}


def _engine_logprobs(answer: StoredAnswer) -> np.ndarray | None:
    """Returns the engine's log-prob of each token, which is NaN for injected tokens.

    Returns None if no log-probs are stored.
    """
    trajectory, episode = answer.trajectory, answer.episode
    if trajectory is None:
        if episode is None or episode.behaviour_logprobs is None:
            return None
        return np.where(episode.trained, episode.behaviour_logprobs, np.nan)
    precisions = [segment.logprobs.dtype for segment in trajectory.segments if segment.logprobs is not None]
    if not precisions:
        return None
    logprobs_of_segments = []
    for segment in trajectory.segments:
        if segment.logprobs is not None:
            logprobs_of_segments.append(segment.logprobs)
        else:
            # NaN in float64 would turn the engine's float32 into float64 when they are concatenated, and
            # pages would show more digits than the engine computed.
            logprobs_of_segments.append(np.full(len(segment.token_ids), np.nan, precisions[0]))
    return np.concatenate(logprobs_of_segments)


def _trainer_numbers(answer: StoredAnswer) -> dict[str, np.ndarray]:
    """Returns the numbers that the trainer recorded for the answer's trained tokens, by name.

    Other tokens have NaN.
    """
    episode = answer.episode
    if episode is None:
        return {}
    # `answer.signals` has the trainer's numbers for each of `answer.episodes`. It is empty if none were
    # recorded, so `zip` isn't strict.
    signals = None
    for stored_episode, stored_signals in zip(answer.episodes, answer.signals, strict=False):
        if stored_episode is episode:
            signals = stored_signals
    numbers = {}
    attribute_by_name = {
        "entropy": "entropies",
        "gap": "gaps",
        "trainer's log-prob": "logprobs",
        "log-ratio": "log_ratios",
    }
    for name, attribute in attribute_by_name.items():
        values = getattr(signals, attribute, None)
        if values is not None:
            numbers[name] = np.full(len(episode.trained), np.nan, values.dtype)
            numbers[name][episode.trained] = values
    if signals is not None and signals.ref_logprobs is not None:
        numbers[KL_TO_REFERENCE] = np.full(len(episode.trained), np.nan)
        numbers[KL_TO_REFERENCE][episode.trained] = kl_of_tokens(signals.logprobs, signals.ref_logprobs)
    return numbers


def steps_of(
    length: int, ends: Sequence[int], episode: Episode | None, *, rewards: Sequence[float] = ()
) -> list[CreditedStep]:
    """Returns the steps of an answer with their credit.

    Args:
        length: The number of the answer's tokens.
        ends: The end of each step. Tokens after the last end are a step, too.
        episode: The training row with the credit; None if there is none.
        rewards: The reward of each step; empty if steps have no rewards.
    """
    if not ends or ends[-1] < length:
        ends = (*ends, length)
    credit = None
    if episode is not None and episode.advantages is not None:
        values = episode.step_values or None
        errors = episode.step_errors if values else None
        advantages = episode.advantages.tolist()
        credit = make_step_credit(ends, episode.reward, advantages, episode.step_ends, values, errors)
    return [
        CreditedStep(
            number=number,
            start=start,
            end=end,
            value=credit.values[number] if credit else None,
            advantage=credit.advantages[number] if credit else None,
            reward=rewards[number] if number < len(rewards) else None,
            # If credit has values, but no value before this step, it treated this step and the step before it
            # as one.
            merged=credit is not None and any(credit.values) and credit.values[number] is None,
        )
        for number, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True))
        if start < end or length == 0  # empty steps are left out, unless there are no tokens at all
    ]


# Texts of tokens


# Reads a file of token texts once. `stat` is only a part of the cache's key, so that a changed file is read
# again.
_read_tokens = functools.lru_cache(maxsize=2)(lambda path, stat: read_tokens(path))


def texts_of(run: Path, ids: np.ndarray) -> list[str] | None:
    """Returns the text of each token, which is empty for a special token.

    Returns None if the experiment stored no texts of tokens.
    """
    vocabulary = all_texts(run)
    return text_of_each(vocabulary, ids) if vocabulary else None


def text_of_each(vocabulary: Sequence[str], ids: np.ndarray) -> list[str]:
    """Returns the text of each id. `vocabulary` has the texts of all tokens; an id beyond it has an empty
    text."""
    return [vocabulary[token_id] if token_id < len(vocabulary) else "" for token_id in ids.tolist()]


def all_texts(run: Path) -> list[str] | None:
    """Returns the text of every token of the vocabulary.

    Returns None if the experiment stored no texts, or if their file is damaged, which the experiment's page
    reports.
    """
    path = run / TOKENS
    stat = stat_of(path)
    try:
        return None if stat is None else _read_tokens(path, stat)
    except ValueError:
        return None


# Advantages in training


def describe_credit_change(config: Mapping[str, Any]) -> str:
    """Returns a description of how training changes the stored advantages of credit.

    It is empty if training uses them as they are.
    """
    if config.get("type") == CREDITED_LOG:
        return "the log's trainer may have used other advantages"
    trainer = config.get("trainer")
    if not trainer:
        return "the training advantage is unknown: config.json can't be read"
    objective = trainer.get("objective") or {}
    kl_placement = objective.get("kl_placement") if has_kl_penalty(config) else None
    scope = "each domain's" if trainer.get("normalise_by_domain") else "the iteration's"
    descriptions = {
        "reward": "the KL penalty from each token on is subtracted from it",
        "whiten": f"it is whitened over {scope} trained tokens",
        "scale": f"it is divided by the standard deviation of {scope} trained tokens",
        "advantage": "the token's KL penalty is subtracted from it",
    }
    normalisation = trainer.get("advantage_normalisation")
    # In the order in which training makes the changes: a KL penalty on the reward is subtracted before the
    # normalisation, and a KL penalty on the advantage after it.
    changes = [kl_placement, normalisation] if kl_placement == "reward" else [normalisation, kl_placement]
    # Without a normalisation or a penalty, its entry in `changes` has no description.
    texts = [descriptions[change] for change in changes if change in descriptions]
    return f"in training {' and '.join(texts)}" if texts else ""


def _normalisation_moments(
    answer: StoredAnswer, episode: Episode, config: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Returns (mean, deviation) by domain, with which training normalises the advantages of an iteration.

    Training subtracts the mean and divides by the deviation (see `trainer.preparation`). With the
    normalisation "scale" it only divides, so the mean is 0.

    The result is empty if training doesn't normalise, and if it subtracts a KL penalty from advantages,
    because the penalty is not stored. It is also empty if the answer's domain has too few trained tokens.
    """
    trainer, path = config.get("trainer") or {}, answer.source.episodes
    normalisation = trainer.get("advantage_normalisation")
    if normalisation not in ("whiten", "scale") or has_kl_penalty(config) or path is None:
        return {}
    sums = _sums_by_domain(path, stat_of(path))
    moments = {}
    for domain in sums:
        # Training normalises each domain by itself, or all domains together.
        domains = [domain] if trainer.get("normalise_by_domain") else list(sums)
        count, total, sum_of_squares = np.sum([sums[name] for name in domains], axis=0)
        if count < 2:  # there is no deviation, so the domain is left out
            continue
        # The same formulas as in training, including its 1e-8.
        mean = total / count
        deviation = np.sqrt(max(0.0, sum_of_squares - count * mean**2) / (count - 1) + 1e-8)
        subtracted_mean = float(mean) if normalisation == "whiten" else 0.0
        moments[domain] = subtracted_mean, float(deviation)
    return moments if episode.domain in moments else {}


def has_kl_penalty(config: Mapping[str, Any]) -> bool:
    """Returns whether training subtracts a KL penalty from the advantages."""
    objective = (config.get("trainer") or {}).get("objective") or {}
    return objective.get("kl_placement", "loss") != "loss" and bool(objective.get("kl_coef"))


def _trained_advantages(path: Path) -> Iterator[tuple[str, Column]]:
    """Yields (domain, advantages of the trained tokens) for each training row that has advantages."""
    from treetune.rollouts.rows import rows_of

    batches = read_batches(path, ["advantages", "trained", "domain"])
    next(batches)  # the schema
    for batch, _ in batches:
        domains = batch["domain"].to_pylist() if "domain" in batch.schema.names else [""] * batch.num_rows
        advantages_of_rows, trained_of_rows = rows_of(batch["advantages"]), rows_of(batch["trained"])
        for domain, advantages, trained in zip(domains, advantages_of_rows, trained_of_rows, strict=True):
            if advantages is not None and trained is not None:
                yield domain, advantages[trained.astype(bool)].astype(float)


@functools.lru_cache(maxsize=64)
def _sums_by_domain(path: Path, stat: object) -> dict[str, tuple[int, float, float]]:
    """Returns (number of trained tokens, sum of their advantages, sum of the squares) by domain.

    `stat` is only a part of the cache's key, so that a changed file is read again.
    """
    sums: dict[str, tuple[int, float, float]] = {}
    for domain, advantages in _trained_advantages(path):
        count, total, sum_of_squares = sums.get(domain, (0, 0.0, 0.0))
        sums[domain] = (
            count + len(advantages),
            total + advantages.sum(),
            sum_of_squares + (advantages**2).sum(),
        )
    return sums


# From a step's value to its share in the gradient


@dataclass(frozen=True)
class TrainedStep:
    """The numbers of a step that lead from its value to its share in the gradient."""

    step: CreditedStep
    value_after: Shown | None
    """The value of the state after the step; None at the end of the answer."""
    advantage: float
    """The mean advantage of the step's trained tokens, before training changes it."""
    trained_advantage: float | None
    """The mean of the advantages that training used; None if it is unknown."""
    engine_ratio: float | None
    """The mean ratio of the trainer's probabilities to the engine's; None if it wasn't recorded."""
    ratio: float | None
    """The mean ratio of the policy's probabilities at the last optimiser step on these tokens to its
    probabilities before the iteration; None if it wasn't recorded."""
    clipped: int
    """The number of tokens that PPO clipped."""
    tokens: int
    """The number of trained tokens."""
    share: float | None
    """The weight of the step's tokens as a share of the weights of all trained tokens of the iteration (see
    `trained_steps`); None if it is unknown."""


def trained_steps(answer: StoredAnswer, tokens: Tokens, config: Mapping[str, Any]) -> list[TrainedStep]:
    """Returns the steps of an answer that has advantages, with their shares in the gradient.

    The gradient of the loss is a weighted sum of the gradients of the tokens' log-probs. While all importance
    ratios are 1, a token's weight in this sum is its absolute advantage, multiplied by a factor of the
    objective's aggregation. That factor is taken as if the iteration were a single minibatch, and factors
    that all tokens share are left out.

    A step's share is the sum of its trained tokens' weights, divided by the sum over all trained tokens of
    the iteration.
    """
    episode, path = answer.episode, answer.source.episodes
    assert episode is not None and episode.advantages is not None and path is not None
    objective = (config.get("trainer") or {}).get("objective") or {}
    objective_class = Objective.parts_by_name().get(str(objective.get("type")))
    default_aggregation = getattr(objective_class, "aggregation", "token")
    by_sequence = objective.get("aggregation", default_aggregation) == "sequence"
    # If training subtracted a KL penalty, its advantages are unknown, because the penalty isn't stored:
    # `advantages` are then those before the subtraction.
    has_training_advantages = not has_kl_penalty(config)
    advantages = tokens.numbers["advantage"]
    weight_of_all = 0.0  # 0 if it is unknown
    if has_training_advantages:
        moments = _normalisation_moments(answer, episode, config)
        # `_weight_of_all` is cached by its arguments, which must be hashable, so the moments become a tuple.
        weight_of_all = _weight_of_all(path, stat_of(path), tuple(moments.items()), by_sequence)
    # By sequence, the loss is a mean over answers of the mean over an answer's tokens.
    aggregation_weight = 1 / max(1, episode.trained.sum()) if by_sequence else 1.0
    unknown = np.full(len(episode.trained), np.nan)
    # "gap" is the trainer's log-prob minus the engine's. "log-ratio" is the log-prob at the last optimiser
    # step minus the log-prob before the first step.
    engine_ratios = np.exp(tokens.numbers.get("gap", unknown))
    ratios = np.exp(tokens.numbers.get("log-ratio", unknown))
    is_clipped = _is_clipped(ratios, advantages, objective)
    rows = []
    for step, next_step in zip(tokens.steps, [*tokens.steps[1:], None], strict=True):
        trained = np.flatnonzero(episode.trained[step.start : step.end]) + step.start
        share = trained_advantage = None
        if weight_of_all:
            share = aggregation_weight * float(np.abs(advantages[trained]).sum()) / weight_of_all
        if has_training_advantages and len(trained):
            trained_advantage = float(advantages[trained].mean())
        rows.append(
            TrainedStep(
                step=step,
                value_after=next_step.value if next_step is not None else None,
                advantage=float(episode.advantages[trained].mean()) if len(trained) else 0.0,
                trained_advantage=trained_advantage,
                engine_ratio=_finite_mean(engine_ratios[trained]),
                ratio=_finite_mean(ratios[trained]),
                clipped=int(is_clipped[trained].sum()),
                tokens=len(trained),
                share=share,
            )
        )
    return rows


def _is_clipped(ratios: np.ndarray, advantages: np.ndarray, objective: Mapping[str, Any]) -> np.ndarray:
    """Returns for each token whether PPO clips it, which makes its gradient 0.

    A token is clipped if its ratio has moved far enough in the direction of its advantage. The dual clip also
    clips a token of negative advantage whose ratio is far too large.
    """
    if objective.get("type") != "ppo":
        return np.zeros(len(advantages))
    names = ("clip_low", "clip_high", "dual_clip")
    # A bound that the configuration doesn't set has the default of the class.
    low, high, dual = (objective.get(name, getattr(ClippedPolicyGradient, name)) for name in names)
    has_risen, has_fallen = ratios > 1 + high, ratios < 1 - low
    largest_ratio = dual or np.inf  # without a dual clip, no ratio is far too large
    is_clipped_if_negative = (has_fallen | (ratios > largest_ratio)) & (advantages < 0)
    return np.where(advantages > 0, has_risen, is_clipped_if_negative)


def _finite_mean(values: np.ndarray) -> float | None:
    """Returns the mean of the finite values; None if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


@functools.lru_cache(maxsize=64)
def _weight_of_all(
    path: Path, stat: object, moments: Sequence[tuple[str, tuple[float, float]]], by_sequence: bool
) -> float:
    """Returns the sum of the weights of all trained tokens of an iteration (see `trained_steps`).

    `moments` has (domain, (mean, deviation)) for each domain, as in `_normalisation_moments`. `stat` is only
    a part of the cache's key, so that a changed file is read again.
    """
    moments_by_domain, total = dict(moments), 0.0
    for domain, advantages in _trained_advantages(path):
        # Without moments, training uses the advantages of credit as they are.
        mean, deviation = moments_by_domain.get(domain, (0.0, 1.0))
        weights = np.abs(advantages - mean) / deviation
        total += float(weights.mean() if by_sequence and len(weights) else weights.sum())
    return total


# Credit of several methods


@dataclass(frozen=True)
class MethodCredit:
    """The credit that a method gives the steps of an answer. ``parts.html`` draws it with the macro
    `credits`."""

    name: str
    cells: tuple[tuple[Shown | None, Shown | None], ...]
    """(value before the step, advantage) for each step; None if it is unknown."""
    analysis: str = ""
    """The name of the analysis that the credit is from."""
    cost: str = ""
    """A description of what the method samples for an answer, such as "4096 tokens an answer"."""

    @property
    def scale(self) -> float:
        """The absolute advantage from which the colour is full. It is the method's largest, because methods
        have different units."""
        sizes = [abs(advantage.value) for _, advantage in self.cells if advantage is not None]
        return max(sizes, default=0.0) or 1.0


def method_of(
    name: str, credit: Mapping[str, Any], cost: Mapping[str, float] | None, analysis_name: str = ""
) -> MethodCredit:
    """Returns a method's credit from a `StepCredit` as the credit microscope writes it (`StepCredit.plain`).

    `cost` has the cost of the method, and `analysis_name` is the name of the analysis.
    """
    cells = []
    for value, advantage in zip(credit["values"], credit["advantages"], strict=True):
        shown_value = None if value is None else Shown(**value)  # None: no value before the step
        cells.append((shown_value, Shown(**advantage)))
    cost_text = f"{cost['tokens_per_answer']:.0f} tokens an answer" if cost else ""
    return MethodCredit(name, tuple(cells), analysis_name, cost_text)


def credits_of(run: Path, answer: StoredAnswer) -> list[MethodCredit]:
    """Returns the credit of an iteration's answer from the analyses `replay` and `credit_microscope`.

    Analyses that can't be read are left out.
    """
    if answer.source.kind != "iteration":
        return []
    methods = list[MethodCredit]()
    directory = ExperimentDirectory(run)
    for folder in map(directory.analysis_folder, directory.analyses()):
        try:
            methods_of_microscope = list(_credits_of_microscope(folder, answer))
            # An analysis that isn't a credit microscope may be a replay.
            methods += methods_of_microscope or list(_credits_of_replay(folder, answer))
        except (OSError, ValueError, KeyError, TypeError):  # still being written, or from another version
            continue
    return methods


def fingerprint_of_credits(run: Path) -> list[object]:
    """Returns a list that changes whenever the results of analyses do."""
    directory = ExperimentDirectory(run)
    parts: list[object] = []
    for folder in map(directory.analysis_folder, directory.analyses()):
        for name in (RESULT, ADVANTAGES):
            parts.append((str(folder / name), stat_of(folder / name)))
    return parts


def _credits_of_microscope(folder: Path, answer: StoredAnswer) -> Iterable[MethodCredit]:
    """Yields the credit that each method of a credit microscope gave the answer.

    Yields nothing if the analysis in the folder isn't a credit microscope.
    """
    result = read_result(folder)
    if result.get("analyzer") != "credit_microscope":
        return
    number_from_0 = str(answer.source.number - 1)  # as the analysis counts iterations
    iteration = result["numbers"]["by_iteration"].get(number_from_0)
    if iteration is None:
        return
    for row in iteration["answers"]:
        if row["answer"] == answer.row["answer"]:
            for name, credit in row["credit"].items():
                yield method_of(name, credit, iteration["costs"].get(name), folder.name)


def _credits_of_replay(folder: Path, answer: StoredAnswer) -> Iterable[MethodCredit]:
    """Yields the credit of each variant of a replay of the answer's iteration.

    The variant "own" is the credit of the run, and "other" the credit that the replay assigned instead.
    Yields nothing if the analysis in the folder isn't a replay of this iteration.
    """
    path = folder / ADVANTAGES
    if not folder.name.startswith(f"replay-{answer.source.number:04d}") or not path.is_file():
        return

    def find_number(numbers: Sequence[float | None], step: int) -> Shown | None:
        """Returns the number of a step, which is shown without an interval; None if it is missing."""
        number = numbers[step] if step < len(numbers) else None
        return None if number is None else Shown(number)

    name_in_json = json.dumps(answer.row["answer"])
    with path.open() as file:
        for line in file:
            if name_in_json not in line:  # a quick test, because parsing every line would take long
                continue
            row = json.loads(line)
            if row["answer"] != answer.row["answer"]:
                continue
            for variant in row["advantages"]:
                values, advantages = row["values"].get(variant) or (), row["advantages"][variant] or ()
                steps = range(len(row["step_ends"]))
                cells = tuple((find_number(values, step), find_number(advantages, step)) for step in steps)
                yield MethodCredit(f"replay, {variant}", cells, folder.name)
            return  # each answer has only one line
