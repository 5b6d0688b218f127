"""Values where turns begin: an answer goes on there in a copy of its environment, or in one played again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from treetune.contracts import Experiment, Finding, Need, Turns
from treetune.episode_generators.base import GenerationContext
from treetune.episode_generators.turns.multi_turn import MultiTurn, Start
from treetune.episode_generators.values.base import Beginning, Estimate, StateRule, ValueEstimator
from treetune.inference.base import SamplingParams
from treetune.seeds import derive_seed
from treetune.vocabulary import Trajectory


@StateRule.register("turns")
@dataclass(frozen=True, kw_only=True)
class TurnStates(StateRule):
    """Where each of an answer's turns begins, behind what the environment said to the turn before.

    A value is what whole answers through the state earn, rewards of the turns before it included, so that a
    turn's advantage is its own reward and the difference that it made to all later ones. Continuations meet
    the environment's chances that their answer met, since its seed is the problem's: these don't depend on
    what the policy does, so that the gradient stays unbiased.
    """

    needs = (
        Need(
            Turns(),
            "it values the turns of answers",
            "choose the rollout 'multi_turn', or the states 'step_boundaries'",
        ),
    )

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        rollout = experiment.rollout.sampler
        if not isinstance(rollout, MultiTurn):
            return
        environment = rollout.environment or experiment.task.environment
        if environment is not None and environment.again == "never":
            yield Finding(
                f"it goes on with answers from their middle, and the environment {type(environment).__name__}"
                " can neither be copied nor played again (again = 'never')",
                "type",
                "choose a credit for whole answers, such as 'group', or another environment",
            )

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])

    def estimate(
        self,
        context: GenerationContext,
        beginnings: Sequence[Beginning],
        estimator: ValueEstimator,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        """A continuation may use the turns and tokens that its beginning left."""
        rollout = context.rollout
        assert isinstance(rollout, MultiTurn), "checked with the configuration"
        rollout = replace(
            rollout, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
        )
        answers: list[list[Trajectory]] = [[] for _ in beginnings]
        waiting, turn = list(range(len(beginnings))), 0
        while waiting:
            counts = {place: estimator.ask(turn, partial(_rewards, answers[place])) for place in waiting}
            owners = [place for place, count in counts.items() for _ in range(count)]
            starts = [
                _start(context, beginnings[place], len(answers[place]) + again, purpose)
                for place, count in counts.items()
                for again in range(count)
            ]
            for place, answer in zip(owners, rollout.answers(context, starts), strict=True):
                answers[place].append(answer)
            waiting, turn = [place for place in waiting if counts[place]], turn + 1
        return [_estimate(*of_state) for of_state in zip(beginnings, answers, strict=True)]


def _rewards(answers: Sequence[Trajectory]) -> list[float]:
    """Of those that could be graded."""
    return [answer.reward for answer in answers if answer.grade.is_known]


def _start(context: GenerationContext, beginning: Beginning, again: int, purpose: str) -> Start:
    """Going on from there. The seed derives from the state alone, whoever comes by it."""
    problem, prompt_ids, segments = beginning
    known = repr(tuple(beginning.token_ids.tolist()))
    seed = derive_seed(context.seed, context.iteration, problem.id, known, f"turns {purpose}")
    return Start(problem, prompt_ids, derive_seed(seed, again), segments)


def _estimate(beginning: Beginning, answers: Sequence[Trajectory]) -> Estimate:
    known = sum(len(segment.token_ids) for segment in beginning.segments if segment.origin == "sampled")
    sampled = [len(s.token_ids) for one in answers for s in one.segments if s.origin == "sampled"]
    rewards = tuple(_rewards(answers))
    return Estimate(
        rewards=rewards,
        unfinished=sum(one.unfinished for one in answers),
        tokens=sum(sampled) - known * len(answers),
        unavailable=len(answers) - len(rewards),
    )
