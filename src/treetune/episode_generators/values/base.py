"""What values are made of: where states lie, how often each is gone on from, what that earned, what it
says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treetune.config.registrable import Registrable
from treetune.episode_generators.base import GenerationContext
from treetune.episode_generators.metrics import mean
from treetune.inference.base import SamplingParams
from treetune.vocabulary import Problem, Segment, TokenIds, Trajectory, joined


@dataclass(frozen=True)
class Estimate:
    """What continuations of a state earned; how many were cut off, their sampled tokens in all, and how many
    could not be graded, and how many were set aside because they decided how many there are: neither are
    among the rewards."""

    rewards: tuple[float, ...]
    unfinished: int
    tokens: int
    unavailable: int = 0
    set_aside: int = 0

    @property
    def samples(self) -> int:
        """Continuations in all."""
        return len(self.rewards) + self.unavailable + self.set_aside

    @property
    def value(self) -> float | None:
        """None where no continuation could be graded: nobody knows what the state is worth."""
        return mean(self.rewards) if self.rewards else None


class Beginning(NamedTuple):
    """A state as whoever goes on from it needs it: what was asked, and what is there of the answer."""

    problem: Problem
    prompt_ids: TokenIds
    segments: tuple[Segment, ...]

    @property
    def token_ids(self) -> TokenIds:
        """Without the prompt's."""
        return joined([segment.token_ids for segment in self.segments])


class Budget:
    """Decides how often a state is gone on from."""

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        """How many continuations to sample next: in turn 0 of a state that nothing is known of, and again
        whenever those of the turn before are there. 0: it is known well enough. `rewards` waits for the
        grades of all so far.
        """
        raise NotImplementedError

    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        """Those that the estimate is made of: all, unless some were sampled to decide how many to ask for."""
        return rewards


@dataclass(frozen=True)
class FixedBudget(Budget):
    """The same number for every state: VinePPO's K (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    samples: int

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        return self.samples if turn == 0 else 0


class Steps(NamedTuple):
    """Steps of an answer as its training row has them: where each ends, what it and its beginning are
    worth, and the latter's standard error."""

    ends: tuple[int, ...]
    advantages: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float]


class StateRule(Registrable):
    """Where values are wanted in an answer, and how it is gone on with from there."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        """How many of the answer's tokens stand before each of its steps: there are its states, from 0 on."""
        raise NotImplementedError

    def laid_out(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> Steps:
        """Advantages and values of its steps, and the values' standard errors, by where steps end."""
        ends = (*tuple(self.step_starts(trajectory))[1:], trajectory.step_ends[-1])
        return Steps(ends, advantages, values, errors)

    def estimate(
        self,
        context: GenerationContext,
        beginnings: Sequence[Beginning],
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        """What continuations of each state earn. The seed of each derives from the state and `purpose`
        alone, whoever samples it."""
        raise NotImplementedError
