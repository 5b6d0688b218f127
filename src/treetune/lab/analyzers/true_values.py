"""Chooses states of a policy's answers, and finds their true values by many continuations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

from annotated_types import Gt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Finding
from treetune.credit.states.base import ContinuationPlan, Estimate, FixedBudget
from treetune.credit.states.one_line import StepBoundaries
from treetune.credit.values.estimates import ProblemStates, StateOfPath, estimate_states
from treetune.exceptions import NothingGraded
from treetune.lab.signposts import KnowsDecisions
from treetune.rollouts.context import RolloutContext
from treetune.runtime.base import PolicyIteration
from treetune.seeds import derive_seed, derived_random
from treetune.tasks.mixed import task_of
from treetune.vocabulary import Problem, Segment, TokenIds, Trajectory, concatenate, token_array

if TYPE_CHECKING:
    import numpy as np

    from treetune.runtime.session import Session

STATES_AT_ONCE = 256
"""The number of states whose values are found before they are stored; an interruption loses at most these."""


class StateIds(NamedTuple):
    """A state: a problem's prompt and the beginning of an answer to it."""

    problem: Problem
    prompt_ids: TokenIds
    begun_ids: TokenIds
    """The ids of the answer so far."""


class EstimatedValue(NamedTuple):
    """The estimated value of a state, and the variance of the estimate."""

    value: float
    noise: float


class TrueValues(Registrable):
    """A way to find the true values of states."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        """Yields a finding for each reason why this way can't be used in an experiment."""
        return ()

    def find(
        self, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
    ) -> list[EstimatedValue]:
        """Returns each state's value under the weights after `point` iterations, which the engine holds."""
        raise NotImplementedError

    def describe_settings(self) -> str:
        """Returns a text with all settings on which the values depend. The name of the file in which values
        are stored derives from it."""
        raise NotImplementedError


@TrueValues.register("continuations")
@dataclass(frozen=True, kw_only=True)
class ByEngine(TrueValues):
    """Takes the mean reward of `samples` continuations of each state by the engine, for models of any size.

    The seeds of these continuations differ from those of any credit method. So the errors of the true values
    are independent of the errors of the method's values."""

    samples: Annotated[int, Gt(1)] = 512
    """The number of continuations of each state."""

    @override
    def find(
        self, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
    ) -> list[EstimatedValue]:
        estimates = continue_states(context, states, self.samples, TRUTH_PURPOSE)
        return [mean_and_noise(estimate.rewards) for estimate in estimates]

    @override
    def describe_settings(self) -> str:
        return f"continuations {self.samples} {self.samples}"


def mean_and_noise(rewards: Sequence[float]) -> EstimatedValue:
    """Returns the mean of rewards, and the variance of the mean."""
    count = len(rewards)
    mean = sum(rewards) / count
    squares = sum((reward - mean) ** 2 for reward in rewards)
    return EstimatedValue(mean, squares / (count - 1) / count)


def find_values_once(
    truth: TrueValues, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
) -> list[EstimatedValue]:
    """Returns the true values of states, and stores them in the experiment's folder ``truths``.

    Values are stored under a hash of everything on which they depend: the weights, the task, the sampling,
    the reward of unfinished answers, the context's seed, the settings of `truth`, the prompt and the answer
    so far. Another call with the same states only reads them, and an interrupted call resumes.
    """
    keys = [_hash_of_state(state) for state in states]
    state_by_key = dict(zip(keys, states, strict=True))
    file = (
        session.directory.path / "truths" / f"{_file_name_of_settings(truth, context, session, point)}.jsonl"
    )
    value_by_key = dict(_stored_values(file))
    keys_without_value = [key for key in state_by_key if key not in value_by_key]
    file.parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(keys_without_value), STATES_AT_ONCE):
        batch = keys_without_value[start : start + STATES_AT_ONCE]
        values = truth.find(context, session, point, [state_by_key[key] for key in batch])
        with file.open("a") as out:
            for key, value in zip(batch, values, strict=True):
                # The line break comes first, because an interruption may have cut off the previous line.
                out.write("\n" + json.dumps([key, *value]))
        value_by_key |= zip(batch, values, strict=True)
        context.log.progress(start + len(batch), len(keys_without_value))
    return [value_by_key[key] for key in keys]


def _stored_values(file: Path) -> Iterator[tuple[str, EstimatedValue]]:
    """Yields the keys and values in a file, without a line that an interruption cut off."""
    if not file.is_file():
        return
    for line in file.read_text().splitlines():
        try:
            key, value, noise = json.loads(line)
        except ValueError:
            continue
        yield key, EstimatedValue(value, noise)


def _hash_of_state(state: StateIds) -> str:
    """Returns a hash of a state, under which its value is stored."""
    digest = hashlib.blake2b(repr((state.problem.id, state.problem.gold)).encode(), digest_size=12)
    for ids in (state.prompt_ids, state.begun_ids):
        digest.update(len(ids).to_bytes(4, "big") + ids.tobytes())
    return digest.hexdigest()


def _file_name_of_settings(truth: TrueValues, context: RolloutContext, session: Session, point: int) -> str:
    """Returns the name of the file of values: a hash of the weights and settings that they all depend on."""
    assert context.settings.sampling is not None
    settings = (
        repr(context.task),
        astuple(context.settings.sampling),
        context.settings.unfinished_reward,
        context.seed,
    )
    digest = hashlib.blake2b(repr((settings, truth.describe_settings())).encode(), digest_size=12)
    digest.update(weights_digest(session, point))
    return digest.hexdigest()


def weights_digest(session: Session, point: int) -> bytes:
    """Returns a hash of the policy's weights after `point` iterations."""
    import torch

    from treetune.lab.analyzers.stored import policy_at

    weights: Mapping[str, object] = policy_at(session, point).state_dict()
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        assert isinstance(tensor, torch.Tensor)
        digest.update(name.encode() + str(tensor.dtype).encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def whole_ids(state: StateIds) -> TokenIds:
    """Returns the tokens of the prompt and of the answer so far."""
    return concatenate([state.prompt_ids, state.begun_ids])


TRUTH_PURPOSE, ESTIMATE_PURPOSE = "analysis: truth", "analysis: estimate"
"""The purposes of an analysis's continuations, from which their seeds derive. Because the purposes differ,
estimates are independent of the true values with which they are compared, and both are independent of the
run's own continuations."""


@dataclass(frozen=True)
class ChosenState:
    """A state of one of the policy's answers: the state before one of the answer's steps."""

    trajectory: Trajectory
    step: int
    """The step after the state, counted from 0; the state before step 0 is the prompt."""

    @property
    def start(self) -> int:
        """The number of the answer's tokens that belong to the state."""
        return (0, *self.trajectory.step_ends)[self.step]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The answer's tokens that belong to the state, without the prompt."""
        return tuple(self.trajectory.response_ids[: self.start].tolist())

    @property
    def position(self) -> float:
        """The share of the answer's tokens that belong to the state, in [0, 1)."""
        return self.start / self.trajectory.step_ends[-1]

    @property
    def token_ids(self) -> TokenIds:
        """All tokens of the state: those of the prompt, and the answer's tokens that belong to the state."""
        return concatenate([self.trajectory.prompt_ids, self.trajectory.response_ids[: self.start]])


def choose_states(
    trajectories: Sequence[Trajectory], count: int, seed: int, point: int, *, prompts: bool = False
) -> list[ChosenState]:
    """Returns at most `count` different states between the steps of answers, drawn at random.

    The answers are from the policy after `point` iterations; `point` also enters the seed of the draw. With
    `prompts`, the states are the prompts instead. All steps of all answers are equally likely, so a state is
    drawn in proportion to how often the policy reaches it. A state that is drawn again is skipped. Equal
    answers, seeds and points give equal states.
    """
    candidates: list[tuple[int, int]] = []  # an answer's position, and a step
    for i, trajectory in enumerate(trajectories):
        # The state before step 0 is the prompt.
        steps = range(1) if prompts else range(1, len(trajectory.step_ends))
        candidates += [(i, step) for step in steps]
    derived_random(seed, point, "prompts" if prompts else "states").shuffle(candidates)
    chosen: dict[tuple[str, tuple[int, ...]], ChosenState] = {}
    for i, step in candidates:
        if len(chosen) == count:
            break
        state = ChosenState(trajectories[i], step)
        chosen.setdefault((state.trajectory.problem.id, state.prefix_ids), state)
    return list(chosen.values())


def continue_prefixes(
    context: RolloutContext,
    nodes: Sequence[tuple[Trajectory, tuple[int, ...]]],
    samples: int,
    purpose: str,
) -> list[Estimate]:
    """Returns the rewards of `samples` continuations of each node.

    A node is an answer and the token ids of a prefix. Only the problem and its prompt are taken from the
    answer. So the prefix may end in a step that this answer doesn't have. The seeds of the continuations
    depend on `purpose`, so that two purposes never share a continuation."""
    states = [
        StateIds(answer.problem, answer.prompt_ids, token_array(prefix_ids)) for answer, prefix_ids in nodes
    ]
    return continue_states(context, states, samples, purpose)


def continue_states(
    context: RolloutContext, states: Sequence[StateIds], samples: int, purpose: str
) -> list[Estimate]:
    """Returns the rewards of `samples` continuations of each state.

    The seeds of the continuations depend on `purpose`, so that two purposes never share a continuation.
    Raises NothingGraded where a continuation could not be graded.
    """
    assert context.settings.sampling is not None, "the context is that of a rollout that samples"
    if not states:
        return []
    # Each state is treated as a separate problem with a single path, the answer so far. The state is the end
    # of this path.
    problem_states = []
    for state in states:
        end_of_path = StateOfPath(path=0, length=len(state.begun_ids))
        path = [Segment(state.begun_ids)]
        problem_states.append(ProblemStates(state.problem, state.prompt_ids, [path], [end_of_path]))
    plan = ContinuationPlan(FixedBudget(samples), context.settings.sampling, purpose)
    # Of the rule `StepBoundaries`, only its way to continue states is used: the states are already chosen.
    estimates_by_problem, all_estimates = estimate_states(context, problem_states, StepBoundaries(), plan)
    ungraded = sum(estimate.all_rewards.count(None) for estimate in all_estimates)
    if ungraded:
        raise NothingGraded(
            f"{ungraded} continuations could not be graded, and the analysis needs all of them: run it again"
            " when the grader is available. What was sampled is kept"
        )
    return [estimate for [estimate] in estimates_by_problem]  # a problem has a single state here


CONTINUATIONS_AT_ONCE = 1024
"""The number of continuations in a batch."""
LEAST_WEIGHT = 1e-6
"""Continuations with a smaller weight are dropped, because they can't change a value noticeably."""


@TrueValues.register("in_process")
@dataclass(frozen=True, kw_only=True)
class InProcess(TrueValues):
    """Takes the mean reward of `samples` continuations of each state, sampled in plain PyTorch. This is fast
    for models that are so small that a server would cost more time than the model.

    Where the task knows which tokens decide the reward (`KnowsDecisions`), a continuation takes both the
    right and a wrong token there, each with its probability, and ends where the reward is certain. Then only
    tokens that hardly matter are sampled, so a few samples are as precise as thousands. The values are
    unbiased.
    """

    samples: Annotated[int, Gt(1)] = 256
    """The number of continuations of each state."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and (sampling.top_p < 1 or sampling.top_k != -1 or sampling.stop):
            yield Finding(
                "in_process samples from whole distributions up to the end token, but the rollout has top_p,"
                " top_k or stop strings",
                "truth",
                "choose truth: {type: 'continuations'}",
            )

    @override
    def find(
        self, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
    ) -> list[EstimatedValue]:
        from treetune.lab.analyzers.stored import policy_at

        assert context.settings.sampling is not None
        steps = PolicySteps(policy_at(session, point), context.settings.sampling.temperature)
        return expand_continuations(steps, context, states, self.samples)

    @override
    def describe_settings(self) -> str:
        return f"in_process {self.samples}"


class NextTokens(Protocol):
    """Keeps a batch of sequences, and computes the probabilities of the next token of each.

    Probabilities are float64 of shape [batch, vocabulary].
    """

    def begin(self, ids_BT: np.ndarray) -> np.ndarray:
        """Starts a new batch of sequences, and returns the probabilities of their next tokens."""
        ...

    def extend(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Replaces the batch by the given rows of it, each extended by a token, and returns the probabilities
        of their next tokens. A row may occur several times."""
        ...


class PolicySteps:
    """A causal language model as `NextTokens`."""

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature
        self._cache: Any = None

    def begin(self, ids_BT: np.ndarray) -> np.ndarray:
        self._cache = None
        return self._run(ids_BT)

    def extend(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        import numpy as np
        import torch

        # Keeps the cached keys and values of these rows, so that the model computes only the new tokens.
        self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))
        return self._run(np.array(tokens)[:, None])

    def _run(self, ids_BT: np.ndarray) -> np.ndarray:
        """Returns the probabilities of the next token of each sequence.

        `ids_BT` has the last tokens of each sequence: those that the cache of keys and values lacks."""
        import torch

        with torch.no_grad():
            ids = torch.from_numpy(ids_BT.astype("int64")).to(self._model.device)
            out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._cache = out.past_key_values
            probabilities_BV = (out.logits[:, -1].double() / self._temperature).softmax(-1)
        as_numpy: np.ndarray = probabilities_BV.cpu().numpy()
        return as_numpy


@dataclass
class _Path:
    """A continuation of a state. At each decision it becomes two, so a sample may have many paths."""

    state: int
    """The number of the state in the `_StateBatch`."""
    sample: int
    """The number of the sample of this state, from 0."""
    row: int
    """The path's row in the batch of `NextTokens`."""
    weight: float
    """The probability of the decisions on the path."""
    ids: list[int]
    """The tokens after the state."""
    text: str = ""
    """The text of the whole answer so far; empty where the task doesn't read it."""


def expand_continuations(
    steps: NextTokens, context: RolloutContext, states: Sequence[StateIds], samples: int
) -> list[EstimatedValue]:
    """Returns the value of each state, estimated from `samples` continuations.

    Random numbers derive from the state and the context's seed, so a value doesn't depend on the batch in
    which the state is continued.
    """
    lengths = [len(whole_ids(state)) for state in states]
    order = sorted(range(len(states)), key=lambda i: lengths[i])
    batch_size = max(1, CONTINUATIONS_AT_ONCE // samples)
    values: dict[int, EstimatedValue] = {}
    for _, same_length in groupby(order, key=lambda i: lengths[i]):  # batches have no padding
        positions = list(same_length)
        for start in range(0, len(positions), batch_size):
            batch = positions[start : start + batch_size]
            values_of_batch = _StateBatch(
                steps, context, [states[i] for i in batch], samples
            ).estimate_values()
            values |= zip(batch, values_of_batch, strict=True)
    return [values[i] for i in range(len(states))]


class _StateBatch:
    """States of the same length, which are continued together."""

    def __init__(
        self, steps: NextTokens, context: RolloutContext, states: Sequence[StateIds], samples: int
    ) -> None:
        import numpy as np

        assert context.settings.sampling is not None
        self.steps, self.context, self.states = steps, context, states
        self.budgets = []  # the most tokens that may follow each state
        for state in states:
            budget = context.settings.token_budget(state.prompt_ids, context.settings.sampling.max_tokens)
            self.budgets.append(budget - len(state.begun_ids))
        # A random number for each state, sample and position. At a decision, a sample becomes two paths
        # (`_Path`), which share these numbers. So the paths aren't independent, but the sample's reward, a
        # weighted sum of theirs, has no bias: the expectation of a sum doesn't depend on independence.
        uniform = []
        for state in states:
            begun = repr(state.begun_ids.tolist())
            seed = derive_seed(context.seed, state.problem.id, begun, "expansion")
            uniform.append(np.random.default_rng(seed).random((samples, max(self.budgets))))
        self.uniform = np.stack(uniform)
        # The reward of each sample of each state so far: the sum of the rewards of its paths that have ended,
        # each times the path's weight.
        self.rewards = np.zeros((len(states), samples))
        self.paths = []
        for state_number in range(len(states)):
            text = self._decode_answer(state_number, [])
            # At first the model's batch has one row for each state, which all samples of the state share.
            row = state_number
            for sample in range(samples):
                self.paths.append(_Path(state_number, sample, row, weight=1.0, ids=[], text=text))

    def _decode_answer(self, state: int, ids: Sequence[int]) -> str:
        begun: list[int] = self.states[state].begun_ids.tolist()
        return self.context.codec.decode([*begun, *ids])

    def _task_with_decisions(self, state: int) -> KnowsDecisions | None:
        """Returns the task of a state's problem, or None if the task doesn't know which tokens decide the
        reward."""
        task = task_of(self.context.task, self.states[state].problem)
        return task if isinstance(task, KnowsDecisions) else None

    def estimate_values(self) -> list[EstimatedValue]:
        """Extends all paths token by token until each is over, and returns the value of each state."""
        import numpy as np

        self.paths = [path for path in self.paths if not self._grade_if_over(path)]
        if self.paths:
            # A row for each sequence in the model's batch, and a column for each token of the vocabulary.
            probabilities_BV = self.steps.begin(np.stack([whole_ids(state) for state in self.states]))
        while self.paths:
            extended = self._extend_paths(probabilities_BV)
            self.paths = [path for path in extended if not self._grade_if_over(path)]
            if self.paths:
                rows, tokens = [path.row for path in self.paths], [path.ids[-1] for path in self.paths]
                probabilities_BV = self.steps.extend(rows, tokens)
                # The batch now has a row for each path that goes on, in this order.
                for row, path in enumerate(self.paths):
                    path.row = row
        return [mean_and_noise(rewards_of_state.tolist()) for rewards_of_state in self.rewards]

    def _extend_paths(self, probabilities_BV: np.ndarray) -> Iterator[_Path]:
        """Yields each path with one more token. In the names of arrays, W stands for the paths to extend.

        A path at which nothing is decided gets a drawn token. At a decision it becomes two paths: one with
        the right token, and one with a token drawn from the others. The weight of each is multiplied by the
        probability of its token, or of all the tokens that it was drawn from.
        """
        import numpy as np

        probabilities_WV = probabilities_BV[[path.row for path in self.paths]]
        right_tokens = [self._right_token(path) for path in self.paths]  # None where nothing is decided
        # The probability of the tokens that are drawn from: those of the whole vocabulary, or at a decision
        # all but the right one.
        drawn_from_W = np.ones(len(self.paths))
        for number, right_token in enumerate(right_tokens):
            if right_token is not None:
                drawn_from_W[number] -= probabilities_WV[number, right_token]
                probabilities_WV[number, right_token] = 0.0
        # Draws the first token whose cumulative sum is above a random share of the total. The total is below
        # 1 at a decision.
        sums_WV = probabilities_WV.cumsum(1)
        totals_W = sums_WV[:, -1]
        uniform_W = np.array([self.uniform[path.state, path.sample, len(path.ids)] for path in self.paths])
        thresholds_W = uniform_W * totals_W
        tokens = (sums_WV[:, :-1] <= thresholds_W[:, None]).sum(1)
        for path, right_token, drawn_from, token in zip(
            self.paths, right_tokens, drawn_from_W.tolist(), tokens.tolist(), strict=True
        ):
            if right_token is not None:
                yield self._extend_path(path, right_token, path.weight * (1 - drawn_from))
            yield self._extend_path(path, token, path.weight * drawn_from)

    def _extend_path(self, path: _Path, token: int, weight: float) -> _Path:
        ids = [*path.ids, token]
        text = self._decode_answer(path.state, ids) if self._task_with_decisions(path.state) else ""
        return _Path(path.state, path.sample, path.row, weight, ids, text)

    def _right_token(self, path: _Path) -> int | None:
        """Returns the right next token where the path is at a decision, else None.

        At a decision, the next token is one of those that decide the reward. Some tasks know their decisions
        (`KnowsDecisions`).
        """
        problem, task = self.states[path.state].problem, self._task_with_decisions(path.state)
        right = None if task is None else task.decision(problem, path.text)
        if right is None:
            return None
        [token] = self.context.codec.encode(right)
        return int(token)

    def _grade_if_over(self, path: _Path) -> bool:
        """Returns whether the path ends here. If it does, adds its reward to that of its sample.

        A path ends at an end token, and where the budget of tokens is used up. It also ends where the task
        already knows the reward, and where its weight is too small to change a value noticeably.
        """
        if path.weight < LEAST_WEIGHT:
            return True  # dropped without a reward
        problem = self.states[path.state].problem
        # The reward, if no later token can change it. Without a task that knows its decisions, this is
        # unknown until the path has ended.
        task = self._task_with_decisions(path.state)
        reward = None if task is None else task.decided_reward(problem, path.text)
        ended = bool(path.ids) and path.ids[-1] in self.context.codec.end_ids
        if reward is None and not ended:
            if len(path.ids) < self.budgets[path.state]:
                return False
            # The budget cut the path off. Its reward is `unfinished_reward`, as in training. If that is None,
            # the unfinished path is graded below.
            reward = self.context.settings.unfinished_reward
        if reward is None:
            text = self._decode_answer(path.state, path.ids)
            reward = self.context.grader.submit(text, problem).result().reward
        self.rewards[path.state, path.sample] += path.weight * reward
        return True
