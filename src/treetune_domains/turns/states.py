"""Values where turns begin: an answer goes on there in a copy of its environment, or in one played again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from treetune.contracts import Experiment, Finding, Need, Turns
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.single_turn import for_fixed_problems
from treetune.rollouts.values.base import Beginning, StateRule
from treetune.rollouts.values.whole_answers import WholeAnswers
from treetune.seeds import derive_seed
from treetune.vocabulary import Trajectory
from treetune_domains.environments.base import environment_of
from treetune_domains.turns.multi_turn import MultiTurn, Start


@StateRule.register("turns")
@dataclass(frozen=True, kw_only=True)
class TurnStates(WholeAnswers[Start]):
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
        rollout = for_fixed_problems(experiment.rollout)
        if not isinstance(rollout, MultiTurn) or not experiment.credit.needs_engine:
            return
        environment = rollout.environment or environment_of(experiment.task)
        if environment is not None and environment.again == "never":
            yield Finding(
                f"it goes on with answers from their middle, and the environment {type(environment).__name__}"
                " can neither be copied nor played again (again = 'never')",
                "type",
                "choose a credit for whole answers, such as 'group', or another environment; one in which the"
                " same seed and actions make the same observations may say again = 'replay'",
            )

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])

    def writer(self, context: RolloutContext, sampling: SamplingParams) -> MultiTurn:
        rollout = context.get(Rollout)
        assert isinstance(rollout, MultiTurn), "checked with the configuration"
        return replace(rollout, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)

    def start(self, context: RolloutContext, beginning: Beginning, again: int, purpose: str) -> Start:
        """Going on from there. The seed derives from the state alone, whoever comes by it."""
        problem, prompt_ids, segments = beginning
        known = repr(tuple(beginning.token_ids.tolist()))
        seed = derive_seed(context.seed, context.iteration, problem.id, known, f"turns {purpose}")
        return Start(problem, prompt_ids, derive_seed(seed, again), segments)
