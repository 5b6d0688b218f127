"""Toy languages whose policies are tables, so that values, advantages and gradients are known exactly.

An answer is a Markov chain. Its state is called a status: a number, 0 at the beginning, that each token may
change. The last status decides whether the answer is correct. Example: in the language "first of 8", the
first token moves from status 0 to 1 with probability 0.25 and to 2 otherwise; the seven other tokens keep the
status, and answers that end in 1 are correct.

A token writes the status that it moves to. It does so in one of several wordings, which have no meaning, as
the same step of a proof can be written in different words:

    token id  =  1 + status · W + wording        (W wordings at most; 0 is the end token)

Example: with W = 3, status 2 is written by the tokens 7, 8 and 9.

The arena samples answers from these languages, assigns credit to them, and compares the resulting gradients
with the exact one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from treetune.credit.base import TokenCredit
from treetune.engine.base import Engine
from treetune.engine.requests import Completion, Deferred, OnResult, Request, SamplingParams, ScoreRequest
from treetune.rollouts.context import AnswerSettings, RolloutContext, ShapingMemory
from treetune.rollouts.model_scores import Critic, Distributions, GroupDivergences, ModelScores
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import (
    Column,
    Episode,
    Grade,
    Problem,
    TextCodec,
    Trajectory,
    logprob_array,
    token_array,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

END_TOKEN = 0


@dataclass(frozen=True, eq=False)
class Language:
    """A language with a policy.

    Names end with shapes: T positions in an answer, S statuses, O options at each position and status (the
    statuses that may follow), N answers. At each position and status, the policy has a logit for each option
    and one for each wording.
    """

    after_TSO: NDArray[np.intp]
    """The status after the token, for each option."""
    chances_TSO: NDArray[np.float64]
    """The probability of each option; 0 where a status has fewer options than others."""
    wordings_TS: NDArray[np.intp]
    """The number of wordings of the token, by the status before it. All are equally likely."""
    correct_S: NDArray[np.bool_]
    """Whether an answer that ends in a status is correct."""
    step: int = 1
    """The number of tokens in a step."""

    @property
    def length(self) -> int:
        """The number of tokens in an answer, without the end token."""
        return len(self.after_TSO)

    @cached_property
    def step_ends(self) -> tuple[int, ...]:
        """The ends of an answer's steps. The end token, which is certain, belongs to the last step."""
        ends = range(self.step, self.length + 1, self.step)
        return (*ends[:-1], self.length + 1)

    @cached_property
    def values_TS(self) -> NDArray[np.float64]:
        """The probability of a correct answer before each token and after the last, by status.

        A status is the state of an answer, as a number. An option (O) is a status that may follow.
        """
        # Backwards from the end: a value is the mean of the values after the token.
        rows = [self.correct_S.astype(float)]
        for after_SO, chances_SO in zip(self.after_TSO[::-1], self.chances_TSO[::-1], strict=True):
            rows.append((chances_SO * rows[-1][after_SO]).sum(1))
        return np.array(rows[::-1])

    @cached_property
    def most_wordings(self) -> int:
        """W, the largest number of wordings of any token."""
        return int(self.wordings_TS.max())

    def statuses(self, token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.intp]:
        """Returns the status before each token of an answer, and after the last.

        The answer may be unfinished; an end token is ignored."""
        ids = np.asarray(token_ids)[: self.length]
        ids = ids[ids != END_TOKEN]
        # The inverse of token id = 1 + status · W + wording: the quotient is the status that a token writes,
        # and the remainder its wording.
        statuses_after_tokens = (ids - 1) // self.most_wordings
        return np.concatenate([[0], statuses_after_tokens]).astype(np.intp)

    def log_probabilities(self, status_NT: NDArray[np.intp]) -> NDArray[np.float64]:
        """Returns the log-probability of each token of some answers, without the end token.

        Args:
            status_NT: the status before each token of an answer, and after the last: T + 1 columns.
        """
        positions_T = np.arange(self.length)
        before_NT, after_NT = status_NT[:, :-1], status_NT[:, 1:]
        is_taken_NTO = self.after_TSO[positions_T, before_NT] == after_NT[:, :, None]
        # An option is a status that may follow. Options that only pad the array have probability 0.
        chances_NT = (is_taken_NTO * self.chances_TSO[positions_T, before_NT]).sum(2)
        # All wordings of a token (ids that move to the same status) are equally likely.
        return np.log(chances_NT / self.wordings_TS[positions_T, before_NT])

    def sample(self, begun: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        """Returns a completion of each answer that was begun.

        A completion depends only on the answer's beginning and on the answer's seed.
        """
        status_N = np.array([self.statuses(ids)[-1] for ids in begun])
        start_N = np.array([len(ids) for ids in begun])
        seed_N = np.array(seeds, np.uint64)
        ids_NT: NDArray[np.int32] = np.zeros((len(begun), self.length + 1), np.int32)  # 0 is the end token
        logprobs_NT = np.zeros(ids_NT.shape)
        # All answers are extended position by position, each from the end of its beginning on.
        for position in range(int(start_N.min(initial=self.length)), self.length):
            active = np.flatnonzero(start_N <= position)
            status_before = status_N[active]
            chances_AO = self.chances_TSO[position][status_before]
            # Each position has two random numbers: that with the even counter draws the option (the next
            # status), and that with the odd counter draws the wording (one of the ids for this status).
            option = _draw_options(chances_AO, _uniform(seed_N[active], 2 * position))
            status_after = self.after_TSO[position][status_before, option]
            wordings = self.wordings_TS[position][status_before]
            wording = (wordings * _uniform(seed_N[active], 2 * position + 1)).astype(int)
            status_N[active] = status_after
            ids_NT[active, position] = 1 + status_after * self.most_wordings + wording  # the id of the token
            logprobs_NT[active, position] = np.log(
                self.chances_TSO[position][status_before, option] / wordings
            )
        completions = []
        for ids_T, logprobs_T, start in zip(ids_NT, logprobs_NT, start_N, strict=True):
            completion = Completion(ids_T[start:], logprobs_T[start:], finish_reason="stop", policy_version=0)
            completions.append(completion)
        return completions

    @cached_property
    def gold_id(self) -> int:
        """The token that writes the first of the statuses in which an answer is correct, in its first
        wording."""
        return 1 + int(np.flatnonzero(self.correct_S)[0]) * self.most_wordings

    def score(self, begun: Sequence[int], text: Sequence[int], will_be_correct: bool = False) -> Completion:
        """Returns a text as a completion, with the log-prob of each of its tokens.

        A token that the policy never samples at its place has the log-prob −9999, as in vLLM.

        Args:
            begun: The beginning of an answer.
            text: The tokens after the beginning.
            will_be_correct: Whether the policy is told that the answer will be correct. By Bayes' rule, a
                token's probability is then multiplied by V(s_{t+1}) / V(s_t), where V is the probability of
                a correct answer.
        """
        ids = [*begun, *text]
        logprobs = []
        for position in range(len(begun), len(ids)):
            chance = self._chance(ids[:position], ids[position])
            if chance > 0 and will_be_correct and position < self.length:
                status_before, status_after = self.statuses(ids[: position + 1])[-2:]
                value = self.values_TS[position, status_before]
                # From a state of value 0 on, no answer is correct. Bayes' rule would divide by 0 there, so
                # the probability stays as it is.
                if value > 0:
                    chance *= self.values_TS[position + 1, status_after] / value
            logprobs.append(math.log(chance) if chance > 0 else -9999.0)
        return Completion(
            token_array(text), logprob_array(logprobs), finish_reason="length", policy_version=0
        )

    def _chance(self, begun: Sequence[int], token_id: int) -> float:
        """Returns the probability of a token after the beginning of an answer."""
        position = len(begun)
        # The end token is certain after the last position, and impossible before.
        is_after_last, is_end_token = position >= self.length, token_id == END_TOKEN
        if is_after_last or is_end_token:
            return float(is_after_last and is_end_token)
        before = self.statuses(begun)[-1]
        # A status may be written by several ids, its wordings. W is the largest number of wordings, and
        # token id = 1 + (status after the token) · W + wording.
        after, wording = divmod(token_id - 1, self.most_wordings)
        wordings = self.wordings_TS[position, before]
        is_option_O = self.after_TSO[position, before] == after
        chance_of_status = self.chances_TSO[position, before][is_option_O].sum()
        return float(chance_of_status / wordings) if wording < wordings else 0.0

    def distributions(self, rows: Sequence[Episode]) -> list[tuple[Column, Column]]:
        """Returns for each row Σ π² and the entropy in nats of each token's distribution, end token
        included."""
        chances_TSO, wordings_TS = self.chances_TSO, self.wordings_TS
        # A token stands for an option (the next status) and a wording (one of W ids for this status). If the
        # option has the probability p, each of its wordings has p / W, so their share in Σ π² is p² / W.
        squares_TS = (chances_TSO**2).sum(2) / wordings_TS
        logs_TSO = np.log(np.where(chances_TSO > 0, chances_TSO, 1))  # 0 log 0 is 0
        entropy_TS = np.log(wordings_TS) - (chances_TSO * logs_TSO).sum(2)
        positions = np.arange(self.length)
        columns = []
        for row in rows:
            statuses = self.statuses(row.response_ids)[:-1]
            # The end token has the probability 1, and so Σ π² = 1 and the entropy 0.
            squares = np.append(squares_TS[positions, statuses], 1.0)
            entropies = np.append(entropy_TS[positions, statuses], 0.0)
            columns.append((squares, entropies))
        return columns

    def divergences(self, rows: Sequence[Episode]) -> list[Column]:
        """Returns for each row the Jensen-Shannon divergence of each token's distribution, in nats.

        The distribution is compared with the mean of the distributions that all rows of the same problem have
        at this position. The divergence is 0 at the end token, which is certain.
        """
        statuses_NT = np.array([self.statuses(row.response_ids)[: self.length] for row in rows])
        indices_by_problem: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            indices_by_problem.setdefault(row.group, []).append(index)
        divergences_NT = np.zeros((len(rows), self.length + 1))
        for position in range(self.length):
            chances_SV = self._token_chances(position)
            for indices in indices_by_problem.values():
                chances_GV = chances_SV[statuses_NT[indices, position]]  # G: the rows of the problem
                mean_V = chances_GV.mean(0)
                entropies_G = _entropy(chances_GV)
                divergences_G = _entropy((chances_GV + mean_V) / 2) - (entropies_G + _entropy(mean_V)) / 2
                # Rounding gives tiny numbers for equal distributions.
                divergences_NT[indices, position] = np.where(divergences_G > 1e-12, divergences_G, 0)
        return list(divergences_NT)

    def _token_chances(self, position: int) -> NDArray[np.float64]:
        """Returns the probability of each token at a position, by the status before it.

        A token moves to one of S statuses, in one of W wordings: equally likely ids for the same status. The
        array has a row for each status before the token, and a column for each of the S · W tokens. Tokens
        are in the order of their ids, without the end token."""
        after_SO, chances_SO = self.after_TSO[position], self.chances_TSO[position]
        wordings_S = self.wordings_TS[position]
        chances_SSW = np.zeros((len(after_SO), len(self.correct_S), self.most_wordings))
        for before, (after_O, chances_O) in enumerate(zip(after_SO, chances_SO, strict=True)):
            wordings = wordings_S[before]
            for after, chance in zip(after_O, chances_O, strict=True):
                chances_SSW[before, after, :wordings] += chance / wordings
        return chances_SSW.reshape(len(after_SO), -1)

    def gradients(
        self, answers: Sequence[Trajectory], episodes: Sequence[Episode], groups: Sequence[int]
    ) -> NDArray[np.float32]:
        """Returns the policy gradient of each group of answers.

        It is the mean over the group's answers of Σ advantage × ∇ log-prob over trained tokens. The gradient
        of a softmax' log-probability by its logits is 1 for what was chosen, minus the probabilities.

        Args:
            groups: the number of answers in each group; the answers are in the order of the groups.

        Returns:
            An array of shape [groups, parameters]. The parameters are logits. At each position and status, an
            option (the next status) has a logit, and so has a wording (one of the ids for this status).
        """
        n_groups = len(groups)
        group_N: NDArray[np.intp] = np.repeat(np.arange(n_groups), groups)
        # The statuses before each token and after the last one, [answers, length + 1].
        statuses = np.stack([self.statuses(answer.response_ids) for answer in answers])
        ids_NT = np.stack([answer.response_ids[: self.length] for answer in answers])
        # A token id is 1 + (status after the token) · W + wording, where W is the largest number of wordings.
        wording_NT = (ids_NT - 1) % self.most_wordings
        weights_NT = np.stack([(episode.advantages * episode.trained)[: self.length] for episode in episodes])
        weights_NT = weights_NT / np.array(groups)[group_N][:, None]
        columns = []
        n_statuses, n_options = self.after_TSO.shape[1:]
        for position in range(self.length):
            status_before, status_after = statuses[:, position], statuses[:, position + 1]
            weight_N1 = weights_NT[:, position, None]
            chances_NO = self.chances_TSO[position][status_before]
            # The gradient of log softmax by the logits: 1 for the option that was taken, minus the
            # probability of each option. The gradient by the wordings' logits has the same form, with equal
            # probabilities. Options with probability 0 only pad the array.
            is_taken_NO = (self.after_TSO[position][status_before] == status_after[:, None]) & (
                chances_NO > 0
            )
            gradient_of_options = np.zeros((n_groups, n_statuses, n_options))
            np.add.at(gradient_of_options, (group_N, status_before), weight_N1 * (is_taken_NO - chances_NO))
            n_wordings_N1 = self.wordings_TS[position][status_before][:, None]
            wordings_1W = np.arange(self.most_wordings)[None, :]
            is_written_NW = wordings_1W == wording_NT[:, position, None]
            chances_NW = (wordings_1W < n_wordings_N1) / n_wordings_N1
            gradient_of_wordings = np.zeros((n_groups, n_statuses, self.most_wordings))
            np.add.at(
                gradient_of_wordings, (group_N, status_before), weight_N1 * (is_written_NW - chances_NW)
            )
            columns += [gradient_of_options.reshape(n_groups, -1), gradient_of_wordings.reshape(n_groups, -1)]
        return np.concatenate(columns, 1).astype(np.float32)


def _draw_options(chances_NO: NDArray[np.float64], uniform_N: NDArray[np.float64]) -> NDArray[np.intp]:
    """Returns an option for each row, by inverting the cumulative sums of its probabilities."""
    options = (uniform_N[:, None] >= chances_NO.cumsum(1)).sum(1)
    last_options = (chances_NO > 0).sum(1) - 1  # rounding can leave the last sum a little below 1
    return np.minimum(options, last_options)


def _uniform(seeds: NDArray[np.uint64], counter: int) -> NDArray[np.float64]:
    """Returns a random number in [0, 1) for each seed. It depends only on the seed and the counter.

    The number is output number `counter`, counted from 0, of the generator splitmix64 with this seed (Steele
    et al., "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        mixed = seeds + np.uint64(counter + 1) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    # A float holds the upper 53 of the 64 bits exactly.
    return (mixed >> np.uint64(11)).astype(float) / 2.0**53


# The languages


def make_language(
    length: int,
    statuses: int,
    chances: Callable[[int, int], Mapping[int, float]],
    wordings: Callable[[int, int], int],
    correct: Sequence[int],
    step: int = 1,
) -> Language:
    """Returns a language from functions of position and status. Answers begin in status 0.

    A language is a toy task whose answer is a Markov chain. A status is the chain's state. A wording is one
    of several tokens that move to the same status.

    Args:
        length: the number of tokens in an answer.
        statuses: the number of statuses.
        chances: ``chances(position, status)`` are the probabilities of the statuses after the token:
            ``{1: 0.25, 2: 0.75}``.
        wordings: ``wordings(position, status)`` is the number of the token's wordings.
        correct: the statuses in which an answer is correct.
        step: the number of tokens in a step.
    """
    options_at: dict[tuple[int, int], dict[int, float]] = {}  # the key is a position and a status
    for position in range(length):
        for status in range(statuses):
            possible = {after: chance for after, chance in chances(position, status).items() if chance}
            options_at[position, status] = possible
    most_options = max(len(options) for options in options_at.values())
    after_TSO: NDArray[np.intp] = np.zeros((length, statuses, most_options), np.intp)
    chances_TSO = np.zeros((length, statuses, most_options))
    wordings_TS: NDArray[np.intp] = np.zeros((length, statuses), np.intp)
    for (position, status), options in options_at.items():
        after_TSO[position, status, : len(options)] = list(options)
        chances_TSO[position, status, : len(options)] = list(options.values())
        wordings_TS[position, status] = wordings(position, status)
    is_correct_S = np.isin(np.arange(statuses), correct)
    return Language(after_TSO, chances_TSO, wordings_TS, is_correct_S, step)


def decision(length: int, deciding: int, success: float = 0.25) -> Language:
    """Returns a language in which the token at the position `deciding` decides whether the answer is correct.

    Every other token has two wordings: two ids that move to the same status, so that nothing depends on which
    of them is sampled. Statuses: 0 before the decision, 1 after the right one, 2 after a wrong one.
    """

    def chances(position: int, status: int) -> Mapping[int, float]:
        if position == deciding and status == 0:
            return {1: success, 2: 1 - success}
        return {status: 1.0}

    def wordings(position: int, status: int) -> int:
        return 1 if position == deciding else 2

    return make_language(length, 3, chances, wordings, correct=[1])


def uneven(length: int, success: float = 0.25) -> Language:
    """Returns a language in which the middle token decides whether the answer is correct.

    A status is the answer's state: 0 before the decision, 1 after the right one, 2 after a wrong one. Every
    other token keeps the status. At position i, it is one of i + 1 ids that mean the same (its wordings), all
    equally likely. So the probability of a token says little about its effect.
    """

    def chances(position: int, status: int) -> Mapping[int, float]:
        if position == length // 2 and status == 0:
            return {1: success, 2: 1 - success}
        return {status: 1.0}

    def wordings(position: int, status: int) -> int:
        return 1 if position == length // 2 else position + 1

    return make_language(length, 3, chances, wordings, correct=[1])


def every_choice(length: int, success: float = 0.25) -> Language:
    """Returns a language in which every choice must be right.

    Statuses: 0 while all choices are right, 1 after a wrong one. The tokens after a wrong choice decide
    nothing. Each of them is one of two ids that mean the same (its wordings).
    """
    chance_of_right = success ** (1 / length)

    def chances(position: int, status: int) -> Mapping[int, float]:
        return {1: 1.0} if status == 1 else {0: chance_of_right, 1: 1 - chance_of_right}

    def wordings(position: int, status: int) -> int:
        return 2 if status == 1 else 1

    return make_language(length, 2, chances, wordings, correct=[0])


def majority(length: int, success: float = 0.25) -> Language:
    """Returns a language in which more than half of the choices must be right. The status counts the right
    choices."""

    def language_with(right: float) -> Language:
        def chances(position: int, status: int) -> Mapping[int, float]:
            # The status is the number of right choices. After `position` tokens it is at most `position`.
            # Higher statuses can't be reached yet. They get one option, since the table needs an option for
            # every status.
            return {status + 1: right, status: 1 - right} if status <= position else {status: 1.0}

        def wordings(position: int, status: int) -> int:
            return 1  # a single token moves to each status

        correct = range(length // 2 + 1, length + 1)
        return make_language(length, length + 1, chances, wordings, correct)

    # Bisection: the chance of a right choice at which a share of `success` answers is correct. Fifty halvings
    # are nearly as exact as a float.
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if language_with(middle).values_TS[0, 0] < success:
            low = middle
        else:
            high = middle
    return language_with(low)


def luck(length: int, good: float = 0.6, bad: float = 0.1, success: float = 0.25) -> Language:
    """Returns a language in which the first token decides how likely the last one is to be correct.

    The last token is correct with the probability `good` after a good first token, and `bad` after a bad one.
    Statuses: 0 before the first token, 1 after a good one, 2 after a bad one; 3 correct and 4 wrong at the
    end.
    """
    # The chance of a good first token at which a share of `success` answers is correct.
    good_chance = (success - bad) / (good - bad)

    def chances(position: int, status: int) -> Mapping[int, float]:
        if position == 0 and status == 0:
            return {1: good_chance, 2: 1 - good_chance}
        # Status 1 follows a good first token, status 2 a bad one.
        if position == length - 1 and status in (1, 2):
            chance_of_right = good if status == 1 else bad
            return {3: chance_of_right, 4: 1 - chance_of_right}  # 3: correct, 4: wrong
        return {status: 1.0}

    def wordings(position: int, status: int) -> int:
        return 1 if position in (0, length - 1) else 2

    return make_language(length, 5, chances, wordings, correct=[3])


def wordy(
    steps: int, statuses: int, chances: Callable[[int, int], Mapping[int, float]], correct: Sequence[int]
) -> Language:
    """Returns a language with steps of three tokens, each in one of four wordings.

    Only the first token of a step changes the status, by ``chances(step, status)``.
    """

    def chances_of_token(position: int, status: int) -> Mapping[int, float]:
        return chances(position // 3, status) if position % 3 == 0 else {status: 1.0}

    def wordings(position: int, status: int) -> int:
        return 4

    return make_language(3 * steps, statuses, chances_of_token, wordings, correct, step=3)


def slips(steps: int = 12, wrong: float = 0.11, repaired: float = 0.0) -> Language:
    """Returns a language in which each step may go wrong.

    Every later step repairs this with the chance `repaired`. Statuses: 0 while all is right, 1 after a wrong
    step.
    """

    def chances(step: int, status: int) -> Mapping[int, float]:
        return {0: repaired, 1: 1 - repaired} if status == 1 else {0: 1 - wrong, 1: wrong}

    return wordy(steps, 2, chances, correct=[0])


def fork(
    steps: int = 12, good_route: float = 0.5, good_fails: float = 0.025, bad_fails: float = 0.3
) -> Language:
    """Returns a language in which one step chooses a good or a bad route, on which later steps may fail.

    The step after a third of the answer takes the good route with the probability `good_route`. Each later
    step fails with the probability `good_fails` on the good route, and `bad_fails` on the bad one. Statuses:
    0 before the choice, 1 on the good route, 2 on the bad one, 3 failed.
    """

    def chances(step: int, status: int) -> Mapping[int, float]:
        if status == 0:  # before the choice of a route
            return {1: good_route, 2: 1 - good_route} if step == steps // 3 else {0: 1.0}
        if status == 3:  # failed
            return {3: 1.0}
        failure = good_fails if status == 1 else bad_fails  # on the good route (1) or on the bad one (2)
        return {status: 1 - failure, 3: failure}

    return wordy(steps, 4, chances, correct=[1, 2])


def walk(steps: int = 12, up: float = 0.44, levels: int = 7) -> Language:
    """Returns a language in which every step moves a level up or down, from the middle level on.

    A step beyond the lowest or the highest level stays there. An answer that ends above the middle level is
    correct.
    """
    middle = levels // 2
    # Answers begin in status 0, which must be the middle level.
    level_of_status = [middle, *(level for level in range(levels) if level != middle)]

    def chances(step: int, status: int) -> Mapping[int, float]:
        level = level_of_status[status]
        below = level_of_status.index(max(level - 1, 0))
        above = level_of_status.index(min(level + 1, levels - 1))
        return {above: up, below: 1 - up}

    correct = [status for status, level in enumerate(level_of_status) if level > middle]
    return wordy(steps, levels, chances, correct)


CHOICE_LANGUAGES: Mapping[str, Callable[[int, float], Language]] = {
    "first": lambda length, success: decision(length, 0, success),
    "middle": lambda length, success: decision(length, length // 2, success),
    "last": lambda length, success: decision(length, length - 1, success),
    "uneven": uneven,
    "luck": lambda length, success: luck(length, success=success),
    "majority": majority,
    "all": every_choice,
}
"""For each thing that may decide an answer, a function that returns such a language. Its arguments are the
number of choices and the chance of a correct answer: ``CHOICE_LANGUAGES["first"](8, 0.25)`` is "first of
8"."""
WORDY_LANGUAGES: Mapping[str, Callable[[], Language]] = {
    "slips": slips,
    "repair": partial(slips, wrong=0.16, repaired=0.11),
    "fork": fork,
    "walk": walk,
}
"""For each name of a language with steps of several tokens, a function that returns the language."""
LANGUAGES = (
    *("first of 2", "first of 8", "first of 32"),
    *("middle of 8", "middle of 32"),
    *("last of 2", "last of 8", "last of 32"),
    *("majority of 9", "majority of 33", "luck of 16", "all of 8", "first of 8 at 5 %"),
    *WORDY_LANGUAGES,
)
"""The languages of the arena. They don't change, so that scores can be compared with earlier ones."""


def language_of(name: str) -> Language:
    """Returns a language, a small artificial task, by its name: ``slips``, ``first of 8``, or ``last of 12 at
    5 %``.

    In a language of N choices a quarter of the answers is correct, unless the name has a percentage. Raises
    ValueError for another name.
    """
    if name in WORDY_LANGUAGES:
        return WORDY_LANGUAGES[name]()
    match = re.fullmatch(r"(\w+) of ([1-9]\d?)(?: at ([1-9]\d?) %)?", name)
    if match is None or match[1] not in CHOICE_LANGUAGES:
        raise ValueError(
            f"there is no language {name!r}: choose one of {', '.join(WORDY_LANGUAGES)}, or 'WHAT of N'"
            f" or 'WHAT of N at P %', where WHAT is one of {', '.join(CHOICE_LANGUAGES)} and N the number of"
            " choices"
        )
    make_choice_language, length, percent = CHOICE_LANGUAGES[match[1]], int(match[2]), int(match[3] or 25)
    return make_choice_language(length, percent / 100)


# Task, grader and engine of a language


@dataclass(frozen=True, kw_only=True)
class LastStatus(Grader):
    """Grades an answer by its last status."""

    isolation = "inline"

    @override
    def grade(self, response: str, problem: Problem) -> Grade:
        language: Language = problem.data["language"]
        # The response is token ids with spaces between them; the last one writes the last status.
        status = (int(response.rsplit(" ", 1)[-1]) - 1) // language.most_wordings
        return Grade(float(language.correct_S[status]), "ok")


@dataclass(frozen=True, kw_only=True)
class LanguageTask(Task):
    """A task with `count` problems that differ only in their ids. The answers to each problem are another
    sample from the language."""

    language: Language
    count: int
    grader: Grader = field(default_factory=LastStatus)

    @override
    def step_boundaries(self, response: str) -> list[int]:
        """Returns the positions in the response at which steps begin, and its end.

        The response is a text in which each word is a token id.
        """
        if not response:
            return [0]
        tokens = response.split(" ")
        boundaries = [0]
        for start in range(self.language.step, len(tokens), self.language.step):
            boundaries.append(len(" ".join(tokens[:start])))
        return [*boundaries, len(response)]

    @override
    def problems(self, split: Split) -> list[Problem]:
        data = {"language": self.language}
        gold = str(self.language.gold_id)
        return [Problem(id=f"{number:05d}", prompt="1", gold=gold, data=data) for number in range(self.count)]


PRIVILEGED_TOKEN = -1
"""The first of the three tokens of a prompt that tells the policy that the answer will be correct."""


class TableEngine(Engine):
    """Samples from a language's table. Every prompt is a single token, or begins with `PRIVILEGED_TOKEN`."""

    version = 0
    scores = True

    def __init__(self, language: Language) -> None:
        self._language = language
        self.tokens = 0

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        # Requests are sampled in rounds: those that `on_result` returns are the next round.
        this_round = [request for request in requests if isinstance(request, Request)]
        # A `Deferred` stands for requests that depend on something still unknown.
        assert len(this_round) == len(requests), "no request of the arena waits for something else"
        # The ids of a request are a prompt of a single token and the beginning of an answer, which may be
        # empty. A prompt of three tokens also says that the answer is correct. Only a `ScoreRequest` has one.
        while this_round:
            begun: list[list[int]] = []
            seeds: list[int] = []
            for request in this_round:
                if isinstance(request, ScoreRequest):
                    continue
                begun += [request.prompt_ids[1:].tolist()] * request.n
                seeds += [request.seed + number for number in range(request.n)]
            completions = iter(self._language.sample(begun, seeds))
            next_round: list[Request | Deferred] = []
            for request in this_round:
                if isinstance(request, ScoreRequest):
                    is_privileged = request.prompt_ids[0] == PRIVILEGED_TOKEN
                    begun_ids = request.prompt_ids[3 if is_privileged else 1 :]
                    text_ids = request.text_ids.tolist()
                    samples = [self._language.score(begun_ids.tolist(), text_ids, is_privileged)]
                else:
                    samples = [next(completions) for _ in range(request.n)]
                    self.tokens += sum(len(sample.token_ids) for sample in samples)
                results.append(samples)
                if on_result is not None:
                    # Requests are numbered through all rounds, in the order of `results`.
                    next_round += on_result(len(results) - 1, samples) or ()
            # As in the first round, no request waits for something else.
            this_round = [request for request in next_round if isinstance(request, Request)]
        return results


def context_of(language: Language, problems: int, seed: int) -> RolloutContext:
    """Returns a context in which rollouts and credit work on problems of a language."""
    task = LanguageTask(language=language, count=problems)
    return RolloutContext(
        task=task,
        engine=TableEngine(language),
        grader=GraderPool(task.grader),
        codec=TextCodec(
            encode=lambda text: [int(number) for number in text.split()],
            decode=lambda ids: " ".join(str(token_id) for token_id in ids if token_id != END_TOKEN),
            eos_id=END_TOKEN,
        ),
        seed=seed,
        iteration=0,
        # The context is longer than any answer needs. The budget of tokens includes the end token.
        settings=AnswerSettings(context_length=4096, sampling=SamplingParams(max_tokens=language.length + 1)),
        model_scores=ModelScores(
            distributions=Distributions(language.distributions),
            group_divergences=GroupDivergences(language.divergences),
        ),
        shaping_memory=ShapingMemory(),
    )


def with_critic(context: RolloutContext, critic: Critic) -> RolloutContext:
    """Returns the context with a critic for the credit."""
    return replace(context, model_scores=replace(context.model_scores, critic=critic))


def _entropy(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the entropy of distributions along the last axis, in nats."""
    logs = np.log(np.where(chances > 0, chances, 1))  # 0 log 0 is 0
    entropy: NDArray[np.float64] = -(chances * logs).sum(-1)
    return entropy


@dataclass(frozen=True, kw_only=True)
class TrueAdvantages(TokenCredit):
    """Gives each token its exact advantage, the change of the probability of a correct answer,
    V(s_{t+1}) − V(s_t), at no cost. It is an upper bound: no credit method knows these values."""

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        language: Language = answers[0].problem.data["language"]
        positions = np.arange(language.length + 1)
        rows = []
        for answer in answers:
            values_T = language.values_TS[positions, language.statuses(answer.response_ids)]
            # The end token is certain, so its advantage is 0.
            rows.append([*np.diff(values_T).tolist(), 0.0])
        return rows
