"""What each thread was worth: the values of half-written answers, by writing the rest anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Annotated

from annotated_types import Ge, Gt

from treetune.contracts import Advantages, Continuations, Experiment, Finding, Forks, Need, UseOfAdvantages
from treetune.episode_generators.base import UNUSED_REMEDY, Credit, GenerationContext
from treetune.episode_generators.credit.episodes import advantage_metrics, episode_of
from treetune.episode_generators.credit.monte_carlo import step_advantages
from treetune.episode_generators.credit.states import check_continuations
from treetune.episode_generators.metrics import mean, pooled
from treetune.episode_generators.threads.parallel_threads import Fixed, ParallelThreads, Start
from treetune.seeds import derive_seed
from treetune.vocabulary import Branch, Episode, Metrics, Segment, Trajectory

Known = tuple[tuple[Branch, tuple[int, ...]], ...]
"""The first samples of an answer, in its joined order."""


@Credit.register("monte_carlo_threads")
@dataclass(frozen=True, kw_only=True)
class MonteCarloThreads(Credit):
    """VinePPO's credit with an answer's samples as its steps: the main text up to a fork, each thread, the
    text from the join on (Kazemnejad et al., arXiv:2410.01679, section 4, on ThreadWeaver's answers).

    A state is the first i samples of an answer in its joined order. Its value is the mean reward of
    `samples` answers that have them as they are and everything else written anew: behind a thread's end,
    the threads after it and what follows the join. Threads don't see their siblings, so what a thread
    adds, V(with it) − V(without), compares it with what else would have been written in its place; and
    since no state before it depends on its text, the gradient stays unbiased. The advantages of an answer
    sum to reward − V(prompt).

    `max_states` bounds the estimated states of an answer, its prompt included: later ones are worth the
    reward that was observed, which gives the samples between them no advantage. A thread that was dropped
    is written anew with the rest: it is no part of the answer.
    """

    samples: Annotated[int, Gt(0)] = 9
    max_states: Annotated[int, Ge(1)] | None = None

    gives = (Advantages(before_training=True), Continuations())
    needs = (
        Need(
            Forks(),
            "it values the threads of answers",
            "choose the rollout 'parallel_threads' (with parallel true), or the credit 'monte_carlo'",
        ),
        Need(UseOfAdvantages(), "its continuations cost most of an iteration", UNUSED_REMEDY),
    )

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if (sampling := experiment.rollout.sampling) is not None:
            yield from check_continuations(self.samples, sampling.temperature, "$.rollout.temperature")

    def assign(
        self, context: GenerationContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Episode], Metrics]:
        rollout = context.rollout
        assert isinstance(rollout, ParallelThreads), "checked with the configuration"
        states: dict[tuple[str, Known], Start] = {}
        for trajectory in trajectories:
            for known in self._states(trajectory):
                states.setdefault((trajectory.problem.id, known), _start(context, trajectory, known))
        answers = iter(
            rollout.answers(
                context,
                [
                    Start(start.problem, start.prompt_ids, derive_seed(start.seed, again), start.fixed)
                    for start in states.values()
                    for again in range(self.samples)
                ],
            )
        )
        rewards = {state: [next(answers).reward for _ in range(self.samples)] for state in states}
        episodes = []
        for trajectory in trajectories:
            values = [mean(rewards[trajectory.problem.id, known]) for known in self._states(trajectory)]
            values += [trajectory.reward] * (len(_sampled(trajectory)) - len(values))
            episodes.append(_episode(context, trajectory, values))
        metrics = _value_metrics(context, self.samples, rewards.values())
        return episodes, metrics | advantage_metrics(context, episodes)

    def _states(self, trajectory: Trajectory) -> list[Known]:
        """What is known before each sample, up to `max_states` of them."""
        known = [(segment.branch, tuple(segment.token_ids.tolist())) for segment in _sampled(trajectory)]
        return [tuple(known[:count]) for count in range(len(known))][: self.max_states]


def _sampled(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if segment.origin == "sampled"]


def _start(context: GenerationContext, trajectory: Trajectory, known: Known) -> Start:
    """Writing the answer from there on. The seed derives from the state alone, whoever comes by it."""
    problem = trajectory.problem
    seed = derive_seed(context.seed, context.iteration, problem.id, repr(known), "thread value")
    return Start(problem, trajectory.prompt_ids, seed, _fixed(trajectory, len(known)))


def _fixed(trajectory: Trajectory, count: int) -> Fixed:
    """The first `count` samples, by the calls that they came from."""
    turns: Counter[Branch] = Counter()
    fixed = {}
    for segment in _sampled(trajectory)[:count]:
        fixed[segment.branch, turns[segment.branch]] = segment
        turns[segment.branch] += 1
    return fixed


def _episode(context: GenerationContext, trajectory: Trajectory, values: Sequence[float]) -> Episode:
    """Segments are steps where there are threads; an injected one has the value of the sample behind it."""
    advantages = step_advantages(values, trajectory.reward)
    if len(trajectory.segments) == 1:
        steps = len(trajectory.step_ends)
        return episode_of(context, trajectory, advantages * steps, list(values) * steps)
    of_segments, value_of = [], []
    place = 0
    for segment in trajectory.segments:
        sampled = segment.origin == "sampled"
        of_segments.append(advantages[place] if sampled else 0.0)
        value_of.append(values[place] if place < len(values) else trajectory.reward)
        place += sampled
    return episode_of(context, trajectory, of_segments, value_of)


def _value_metrics(context: GenerationContext, samples: int, rewards: Iterable[Sequence[float]]) -> Metrics:
    """As those of `monte_carlo`, over all ranks' states. Collective."""
    of_states = list(rewards)
    columns = pooled(
        context,
        "thread-values",
        {
            "mean": [mean(of_state) for of_state in of_states],
            "std": [pstdev(of_state) for of_state in of_states],
            "decided": [float(len(set(of_state)) == 1) for of_state in of_states],
        },
    )
    if not columns["mean"]:
        return {}
    return {
        "credit/value_states": float(len(columns["mean"])),
        "credit/value_samples": float(len(columns["mean"]) * samples),
        **{f"credit/value_{name}": mean(values) for name, values in columns.items()},
    }
