"""A run of any kind that ends anywhere goes on with the same command to the bits of an undisturbed one, and
asks for no answer twice."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.even_answers import EvenAnswers, OutOfOrder
from tests.support.small_run import (
    MODEL,
    TASK,
    TRAINER,
    FakeSettings,
    computed,
    directory_of,
    raises_after,
    samples_of,
    small,
    train,
)
from tests.support.unruly_environment import Unruly
from treetune.credit.literature.prime import Prime
from treetune.credit.no_credit import NoCredit
from treetune.credit.reward_models import RewardModelSettings
from treetune.credit.rloo import Rloo
from treetune.credit.states.by_tokens import EveryNTokens
from treetune.credit.trees import TreeCredit
from treetune.credit.values.critic import ControlVariate, CriticEstimator
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.environments.base import EnvironmentTask
from treetune.domains.mixture import Curriculum, Domain, Mixture
from treetune.domains.multi_turn import MultiTurn, TurnStates
from treetune.engine.settings import Engines
from treetune.exceptions import EngineError
from treetune.lab.trees.branching import AtStates, RandomStates
from treetune.lab.trees.rollout import TreeRollout
from treetune.lab.trees.turns import TurnTree
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.partial import PartialAnswers
from treetune.rollouts.selection import CorrectOnly, MixedGroups
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.until_mixed import UntilMixed
from treetune.runtime import generation
from treetune.runtime.base import (
    Checkpoints,
    ChooseCheckpoint,
    Evaluation,
    EvaluationSet,
    PolicyIteration,
    StopAfter,
)
from treetune.threads.format import TAGS
from treetune.threads.parallel_threads import ParallelThreads
from treetune.threads.shaping import Acceleration, Running
from treetune.trainer.core import PolicyTrainer
from treetune.trainer.reward_model import RewardModelTraining
from treetune.trainer.scoring import SHARE_AHEAD_METRIC as SCORED_AHEAD

CAPPED = replace(TRAINER, objective=ClippedPolicyGradient(importance_cap=2.0))
ANSWERS = SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0)
DOMAINS = {"long": Domain(task=TASK), "short": Domain(task=TASK, max_tokens=1)}
TAGGED = replace(MODEL, added_tokens=TAGS)
# None of these moods hangs, so a deadline only passes where the machine is busy.
UNRULY = Unruly(moods=("calm", "says a megabyte", "dies", "is closed"), deadline=60.0)
MIXED: dict[str, Any] = {
    "rollout": SingleTurn(samples=4, max_tokens=6, unfinished_reward=1.0),
    "trainer": replace(TRAINER, advantage_normalisation="whiten", normalise_by_domain=True),
    "iterations": 3,
    "problems_per_iteration": 12,
    "evaluation": Evaluation(
        sets=(EvaluationSet(split="test", samples=2, while_training=True),), every=1
    ),
}  # fmt: skip
RESTEM: dict[str, Any] = {
    "credit": NoCredit(),
    "selection": CorrectOnly(),
    "trainer": replace(
        TRAINER,
        objective=MaximumLikelihood(aggregation="sequence"),
        learning_rate=1e-2,
        epochs=2,
        minibatch_size=2,
    ),
    "restart": "every_iteration",
    "evaluation": Evaluation(sets=(EvaluationSet(split="validation", problems=3),)),
}
PARTIAL: dict[str, Any] = {
    "rollout": PartialAnswers(rollout=SingleTurn(samples=2, max_tokens=12), tokens_per_iteration=4),
    "trainer": CAPPED,
    "iterations": 4,
}
AHEAD: dict[str, Any] = {
    "overlap": "one_step",
    "credit": MonteCarlo(samples=2),
    "trainer": CAPPED,
    "iterations": 4,
}
ONCE = Checkpoints(every=3)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a budget of tokens": {
        "iterations": 50,
        "stop_after": StopAfter(sampled_tokens=1500),
        "credit": MonteCarlo(samples=2),
        "checkpoints": Checkpoints(every=2),
    },
    "answers and continuations at once": {"credit": MonteCarlo(samples=3), "iterations": 1},
    "rounds until groups are mixed": {
        "rollout": UntilMixed(rollout=ANSWERS, groups=5),
        "selection": MixedGroups(at_most=5),
        "evaluation": Evaluation(sets=(EvaluationSet(split="test", problems=3),)),
    },
    "a curriculum of domains": {
        "task": Mixture(domains=DOMAINS, weighting=Curriculum(rate=0.5, floor=0.05)),
        **MIXED,
    },
    "mixed problems preferred": {"task": Mixture(domains=DOMAINS, prefer_mixed=3.0), **MIXED},
    "answers without a verdict": {
        "task": replace(TASK, grader=OutOfOrder()),
        "rollout": SingleTurn(samples=3, max_tokens=12, unfinished_reward=None),
        "credit": Rloo(),
        "evaluation": Evaluation(
            every=1, sets=(EvaluationSet(split="test", samples=4, while_training=True),)
        ),
    },
    "trees": {
        "rollout": TreeRollout(
            samples=2,
            max_tokens=12,
            branching=AtStates(states=EveryNTokens(tokens=3), ways=(2, 2)),
            unfinished_reward=1.0,
        ),
        "credit": TreeCredit(),
    },
    "turns": {
        "engine": FakeSettings(alphabet=UNRULY.alphabet(), odds={"<pad>": 0.0, "<eos>": 0.0}),
        "task": EnvironmentTask(environment=UNRULY, train_size=4),
        "rollout": MultiTurn(
            samples=2, max_tokens=24, max_turns=4, turn_tokens=1, observation_characters=6
        ),
        "credit": MonteCarlo(samples=1, states=TurnStates()),
    },
    "trees of turns": {
        "engine": FakeSettings(alphabet=UNRULY.alphabet(), odds={"<pad>": 0.0, "<eos>": 0.0}),
        "task": EnvironmentTask(environment=UNRULY, train_size=4),
        "rollout": TurnTree(
            samples=2,
            max_tokens=24,
            max_turns=4,
            turn_tokens=1,
            observation_characters=6,
            branching=RandomStates(states=TurnStates(), draws=2),
        ),
        "credit": TreeCredit(advantage="intra_and_inter", weight="each"),
    },
    "threads with a memory": {
        "engine": FakeSettings(model=TAGGED, odds={"<Parallel>": 2.0, "<Thread>": 4.0, "</Thread>": 4.0}),
        "model": TAGGED,
        "task": replace(TASK, train_size=6, grader=EvenAnswers()),
        "rollout": ParallelThreads(samples=6, max_tokens=30, unfinished_reward=None, parallel=False),
        "shaping": (
            Acceleration(
                weight=0.5,
                clip=0.5,
                form="saved",
                reference=Running(decay=0.5),
                floor=-0.5,
                threads="written",
            ),
        ),
        "iterations": 3,
    },
    "a critic alone": {"credit": MonteCarlo(values=CriticEstimator()), "iterations": 3, "checkpoints": ONCE},
    "a critic beside continuations": {
        "credit": MonteCarlo(samples=2, values=ControlVariate()),
        "iterations": 3,
        "checkpoints": ONCE,
    },
    "a reward model that learns": {
        "credit": Prime(
            reward_model=RewardModelSettings(start=replace(MODEL, layers=2), learning_rate=1e-3)
        ),
        "iterations": 3,
        "checkpoints": Checkpoints(every=2),
    },
    "a reference that scores meanwhile": {
        "trainer": replace(
            TRAINER,
            objective=ClippedPolicyGradient(kl_coef=0.1),
            minibatch_size=4,
            reference_scores="while_sampling",
        )
    },
    "the best epoch": {**RESTEM, "choose_checkpoint": ChooseCheckpoint(set="validation", rule="best")},
    "the best of every third step": {
        **RESTEM,
        "choose_checkpoint": ChooseCheckpoint(set="validation", rule="best", every=3),
    },
    "partial answers": PARTIAL,
    "partial answers, an iteration ahead": {**PARTIAL, "overlap": "one_step"},
    "an iteration ahead": AHEAD,
    "an iteration ahead, few checkpoints": {**AHEAD, "checkpoints": ONCE},
}  # fmt: skip

Strike = int | tuple[Any, str, int]
"""The engine fails after so many requests; or a method does, after so many calls."""

STRIKES: list[tuple[str, list[Strike]]] = [
    ("plain", [6, (generation, "write_trajectories", 0), (generation, "write_episodes", 0)]),
    ("a budget of tokens", [17, 60]),
    ("answers and continuations at once", [3, 12]),
    ("rounds until groups are mixed", [6, (generation, "write_episodes", 0)]),
    ("a curriculum of domains", [5, 40, 60]),
    ("mixed problems preferred", [50]),
    ("answers without a verdict", [16]),
    ("trees", [1, 17, (generation, "write_trajectories", 1), (generation, "write_episodes", 1)]),
    ("turns", [30, 50]),
    ("trees of turns", [20]),
    (
        "threads with a memory",
        [
            (generation, "write_trajectories", 1),
            (generation, "write_record", 5),  # of rollout, credit and memory, in the second iteration
            (generation, "write_episodes", 1),
        ],
    ),
    ("a critic alone", [(MonteCarlo, "assign", 2)]),
    ("a critic beside continuations", [(MonteCarlo, "assign", 2)]),
    # In the third iteration, when the reward model has learned and the policy has not.
    ("a reward model that learns", [(RewardModelTraining, "rewards", 2)]),
    ("a reference that scores meanwhile", [6]),
    ("the best epoch", [3, 4, 8, 11]),
    ("the best of every third step", [8, 11]),
    ("partial answers", [(PolicyTrainer, "train", 2)]),
    ("partial answers, an iteration ahead", [(PolicyTrainer, "train", 2)]),
    ("an iteration ahead", [5, 55, (PolicyTrainer, "train", 1), (PolicyTrainer, "train", 3)]),
    ("an iteration ahead, few checkpoints", [(PolicyTrainer, "train", 2)]),
]
CASES = [(kind, strike) for kind, strikes in STRIKES for strike in strikes]


def experiment(kind: str, base: Path, fail_after: int | None = None) -> PolicyIteration:
    """With engines of its own."""
    config = small(base, **KINDS[kind])
    policy: Any = replace(config.engines.policy, fail_after=fail_after, engines=[])  # type: ignore[call-arg]
    return replace(config, engines=Engines(policy=policy))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PolicyIteration]:
    """Runs of each kind, made when they are asked for."""
    made: dict[str, PolicyIteration] = {}

    def run(kind: str) -> PolicyIteration:
        if kind not in made:
            made[kind] = experiment(kind, tmp_path_factory.mktemp("undisturbed"))
            train(made[kind])
        return made[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "strike"), CASES, ids=[f"{k}: {s if isinstance(s, int) else s[1:]}" for k, s in CASES]
)
def test_a_struck_run_goes_on_to_the_same_bits(
    kind: str,
    strike: Strike,
    undisturbed: Callable[[str], PolicyIteration],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = undisturbed(kind)
    struck = experiment(kind, tmp_path, strike if isinstance(strike, int) else None)
    with monkeypatch.context() as patch:
        if not isinstance(strike, int):
            owner, name, calls = strike
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(owner, name, raises_after(getattr(owner, name), calls, full))
        with pytest.raises((EngineError, OSError), match=r"told to fail here|No space left on device"):
            train(struck)
    assert not [one for one in threading.enumerate() if one.name == "lookahead"]
    again = experiment(kind, tmp_path)
    train(again)
    without = (SCORED_AHEAD,) if kind == "a reference that scores meanwhile" else ()
    assert computed(again, *without) == computed(whole, *without)
    assert [row["iteration"] for row in directory_of(again).read_metrics()] == list(
        range(len(directory_of(whole).read_metrics()))
    )
    if isinstance(strike, int) or strike[0] is generation:
        assert samples_of(struck, again) == samples_of(whole)
