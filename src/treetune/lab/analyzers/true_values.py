"""States of a policy's answers and their true values, by continuations or expanded in this process."""

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
from treetune.credit.values.estimates import ProblemStates, estimate_states
from treetune.exceptions import NothingGraded
from treetune.lab.signposts import KnowsDecisions
from treetune.rollouts.context import RolloutContext
from treetune.runtime.base import PolicyIteration
from treetune.seeds import derive_seed, derived_random
from treetune.vocabulary import Problem, Segment, TokenIds, Trajectory, joined, token_array

if TYPE_CHECKING:
    import numpy as np

    from treetune.runtime.session import Session

AT_ONCE = 256
"""States that are valued before the next are begun: what an interruption costs at most."""


class StateIds(NamedTuple):
    """A state: what was asked, and the ids that are there of the answer."""

    problem: Problem
    prompt_ids: TokenIds
    begun_ids: TokenIds


class EstimatedValue(NamedTuple):
    """The value of a state, and its variance as an estimate of the true one."""

    value: float
    noise: float


class TrueValues(Registrable):
    """A way to find the true values of states."""

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        """Yields what is wrong with it in an experiment."""
        return ()

    def find(
        self, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
    ) -> list[EstimatedValue]:
        """Returns each state's value, by the weights after `point` iterations, which the engine holds."""
        raise NotImplementedError

    def described(self) -> str:
        """Returns all settings on which its values depend, as text."""
        raise NotImplementedError


@TrueValues.register("continuations")
@dataclass(frozen=True, kw_only=True)
class ByEngine(TrueValues):
    """The mean of `samples` continuations of each state by the engine, for models of any size. They share no
    seed with those of a method."""

    samples: Annotated[int, Gt(1)] = 512

    @override
    def find(
        self, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
    ) -> list[EstimatedValue]:

        return [mean_and_noise(one.rewards) for one in continue_states(context, states, self.samples, TRUTH)]

    @override
    def described(self) -> str:
        return f"continuations {self.samples} {self.samples}"


def mean_and_noise(rewards: Sequence[float]) -> EstimatedValue:
    """Returns the mean of rewards, and its variance."""
    mean = sum(rewards) / len(rewards)
    squares = sum((one - mean) ** 2 for one in rewards)
    return EstimatedValue(mean, squares / (len(rewards) - 1) / len(rewards))


def find_values_once(
    truth: TrueValues, context: RolloutContext, session: Session, point: int, states: Sequence[StateIds]
) -> list[EstimatedValue]:
    """Returns the true values of states; values that an earlier call found are read from ``truths`` of the
    experiment.

    They are stored by what they depend on: weights, task, sampling, settings, prompt and prefix. So another
    call with the same states samples nothing, and after an interruption it resumes.
    """
    keys = [_key(state) for state in states]
    state_by_key = dict(zip(keys, states, strict=True))
    file = session.directory.path / "truths" / f"{_setting(truth, context, session, point)}.jsonl"
    value_by_key = dict(_read(file))
    missing = [key for key in state_by_key if key not in value_by_key]
    file.parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(missing), AT_ONCE):
        batch = missing[start : start + AT_ONCE]
        values = truth.find(context, session, point, [state_by_key[key] for key in batch])
        with file.open("a") as out:
            for key, value in zip(batch, values, strict=True):
                # The line's end comes first: an interruption may have cut the last line short.
                out.write("\n" + json.dumps([key, *value]))
        value_by_key |= zip(batch, values, strict=True)
        context.log.progress(start + len(batch), len(missing))
    return [value_by_key[key] for key in keys]


def _read(file: Path) -> Iterator[tuple[str, EstimatedValue]]:
    """Yields the content of the file; a line that an interruption cut short counts as not written."""
    if not file.is_file():
        return
    for line in file.read_text().splitlines():
        try:
            key, value, noise = json.loads(line)
        except ValueError:
            continue
        yield key, EstimatedValue(value, noise)


def _key(state: StateIds) -> str:
    digest = hashlib.blake2b(repr((state.problem.id, state.problem.gold)).encode(), digest_size=12)
    for ids in (state.prompt_ids, state.begun_ids):
        digest.update(len(ids).to_bytes(4, "big") + ids.tobytes())
    return digest.hexdigest()


def _setting(truth: TrueValues, context: RolloutContext, session: Session, point: int) -> str:
    """Returns the name of a file from what all of its values have in common."""
    assert context.settings.sampling is not None
    settings = (
        repr(context.task),
        astuple(context.settings.sampling),
        context.settings.unfinished_reward,
        context.seed,
    )
    digest = hashlib.blake2b(repr((settings, truth.described())).encode(), digest_size=12)
    digest.update(weights_digest(session, point))
    return digest.hexdigest()


def weights_digest(session: Session, point: int) -> bytes:
    """Returns a digest of the policy after `point` iterations: the same for equal weights alone."""
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
    return joined([state.prompt_ids, state.begun_ids])


TRUTH, ESTIMATE = "analysis: truth", "analysis: estimate"
"""Purposes of continuations. Seeds derive from them: what judges shares none with what is judged, nor
with those that the run itself was credited by."""


@dataclass(frozen=True)
class ChosenState:
    """The state before step `step` (from 0: the prompt alone) of one of the policy's answers."""

    trajectory: Trajectory
    step: int

    @property
    def start(self) -> int:
        """The number of the answer's tokens that belong to the state."""
        return (0, *self.trajectory.step_ends)[self.step]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        return tuple(self.trajectory.response_ids[: self.start].tolist())

    @property
    def position(self) -> float:
        """The share of the answer's tokens that lies behind it, in [0, 1)."""
        return self.start / self.trajectory.step_ends[-1]

    @property
    def token_ids(self) -> TokenIds:
        return joined([self.trajectory.prompt_ids, self.trajectory.response_ids[: self.start]])


def choose_states(
    trajectories: Sequence[Trajectory], count: int, seed: int, point: int, *, prompts: bool = False
) -> list[ChosenState]:
    """Returns at most `count` different states between the steps of these answers, or their prompts.

    Drawn as often as the policy comes there: answers by chance, steps by chance, each distinct state
    once. The same for the same answers and `seed`.
    """
    states = [
        (i, step)
        for i, trajectory in enumerate(trajectories)
        for step in ([0] if prompts else range(1, len(trajectory.step_ends)))
    ]
    derived_random(seed, point, "prompts" if prompts else "states").shuffle(states)
    chosen: dict[tuple[str, tuple[int, ...]], ChosenState] = {}
    for i, step in states:
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
    """Returns what `samples` continuations of each (an answer to the problem, prefix ids) earn, sampled as
    the answers were. The prefix need not be the answer's own."""
    states = [StateIds(one.problem, one.prompt_ids, token_array(prefix)) for one, prefix in nodes]
    return continue_states(context, states, samples, purpose)


def continue_states(
    context: RolloutContext, states: Sequence[StateIds], samples: int, purpose: str
) -> list[Estimate]:
    """Returns what `samples` continuations of each state earn."""
    assert context.settings.sampling is not None, "the context is that of a rollout that samples"
    if not states:
        return []
    wanted = [
        ProblemStates(problem, prompt_ids, [[Segment(begun_ids)]], [(0, len(begun_ids))])
        for problem, prompt_ids, begun_ids in states
    ]
    plan = ContinuationPlan(FixedBudget(samples), context.settings.sampling, purpose)
    found, everyones = estimate_states(context, wanted, StepBoundaries(), plan)
    if lost := sum(estimate.earned.count(None) for estimate in everyones):
        raise NothingGraded(
            f"{lost} continuations could not be graded, and the analysis needs all of them: run it again when"
            " what grades them is there. What was sampled is kept"
        )
    return [estimate for [estimate] in found]


ROWS = 1024
"""Continuations at a time."""
LEAST_WEIGHT = 1e-6
"""A continuation that is less likely than this, given its state, is let go: it can't move a value further."""


@TrueValues.register("in_process")
@dataclass(frozen=True, kw_only=True)
class InProcess(TrueValues):
    """`samples` continuations of each state in plain PyTorch, all of a batch token by token: for models so
    small that a server's bookkeeping costs more than the model.

    Where the task knows what is decided (`KnowsDecisions`), a continuation takes both ways at such a
    place, each with its probability, and ends where the reward is certain. What is left to chance is what
    lies between, which hardly matters: few samples are as good as thousands. Unbiased.
    """

    samples: Annotated[int, Gt(1)] = 256

    @override
    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and (sampling.top_p < 1 or sampling.top_k != -1 or sampling.stop):
            yield Finding(
                "in_process samples whole distributions up to the end token, and the rollout has top_p, top_k"
                " or stop strings",
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
    def described(self) -> str:
        return f"in_process {self.samples}"


class NextTokens(Protocol):
    """Answers which token comes next, for a batch that it remembers. Chances are float64 of shape [B, V]."""

    def begin(self, ids_BT: np.ndarray) -> np.ndarray: ...

    def extend(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Replaces the batch by these of its rows, where a row may occur several times, each with one more
        token."""
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

        self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))
        return self._run(np.array(tokens)[:, None])

    def _run(self, ids_BT: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            ids = torch.from_numpy(ids_BT.astype("int64")).to(self._model.device)
            out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._cache = out.past_key_values
            chances_BV = (out.logits[:, -1].double() / self._temperature).softmax(-1)
        chances: np.ndarray = chances_BV.cpu().numpy()
        return chances


@dataclass
class _Path:
    """A continuation: its state and sample, the row of the batch that it goes on from, its weight, its ids
    behind the state, and the whole answer's text so far, where the task reads it on the way."""

    state: int
    sample: int
    row: int
    weight: float
    ids: list[int]
    text: str = ""


def expand_continuations(
    steps: NextTokens, context: RolloutContext, states: Sequence[StateIds], samples: int
) -> list[EstimatedValue]:
    """Returns the value of each state, from `samples` continuations each. Chance comes from the state and the
    context's seed alone."""
    order = sorted(range(len(states)), key=lambda i: len(whole_ids(states[i])))
    found: dict[int, EstimatedValue] = {}
    for _, alike in groupby(order, key=lambda i: len(whole_ids(states[i]))):
        numbers = list(alike)
        for start in range(0, len(numbers), max(1, ROWS // samples)):
            batch = numbers[start : start + max(1, ROWS // samples)]
            values = _StateBatch(steps, context, [states[i] for i in batch], samples).values()
            found |= zip(batch, values, strict=True)
    return [found[i] for i in range(len(states))]


class _StateBatch:
    """States of one length, continued together."""

    def __init__(
        self, steps: NextTokens, context: RolloutContext, states: Sequence[StateIds], samples: int
    ) -> None:
        import numpy as np

        assert context.settings.sampling is not None
        self.steps, self.context, self.states = steps, context, states
        self.budgets = [
            context.settings.token_budget(one.prompt_ids, context.settings.sampling.max_tokens)
            - len(one.begun_ids)
            for one in states
        ]
        most = max(self.budgets)
        # One number decides a step of all paths of a sample: they are different paths, each by fair chance.
        seeds = [
            derive_seed(context.seed, one.problem.id, repr(one.begun_ids.tolist()), "expansion")
            for one in states
        ]
        self.chance = np.stack([np.random.default_rng(seed).random((samples, most)) for seed in seeds])
        self.earned = np.zeros((len(states), samples))
        self.paths = [
            _Path(state, sample, state, 1.0, [], self._text(state, []))
            for state in range(len(states))
            for sample in range(samples)
        ]

    def _text(self, state: int, ids: Sequence[int]) -> str:
        begun: list[int] = self.states[state].begun_ids.tolist()
        return self.context.codec.decode([*begun, *ids])

    def _knowing(self, state: int) -> KnowsDecisions | None:
        task = self.context.task.of(self.states[state].problem)
        return task if isinstance(task, KnowsDecisions) else None

    def values(self) -> list[EstimatedValue]:
        import numpy as np

        self.paths = [path for path in self.paths if not self._is_over(path)]
        if self.paths:
            chances_BV = self.steps.begin(np.stack([whole_ids(one) for one in self.states]))
        while self.paths:
            self.paths = [path for path in self._next(chances_BV) if not self._is_over(path)]
            if self.paths:
                rows, tokens = [path.row for path in self.paths], [path.ids[-1] for path in self.paths]
                chances_BV = self.steps.extend(rows, tokens)
                for row, path in enumerate(self.paths):
                    path.row = row
        return [mean_and_noise(of_state.tolist()) for of_state in self.earned]

    def _next(self, chances_BV: np.ndarray) -> Iterator[_Path]:
        """Yields each path with one more token, W paths in all.

        A path at which nothing is decided gets a drawn token. At a decision it becomes two: one with the
        right token, and one with a token drawn from the others, each weighted by its probability.
        """
        import numpy as np

        chances_WV = chances_BV[[path.row for path in self.paths]]
        right_tokens = [self._right(path) for path in self.paths]  # None where nothing is decided
        drawn_shares_W = np.ones(len(self.paths))  # the probability of the tokens that are drawn from
        for number, right_token in enumerate(right_tokens):
            if right_token is not None:
                drawn_shares_W[number] -= chances_WV[number, right_token]
                chances_WV[number, right_token] = 0.0
        # Draws a token by inverting the cumulative sums, whose last column need not be 1.
        sums_WV = chances_WV.cumsum(1)
        uniform_W = np.array([self.chance[path.state, path.sample, len(path.ids)] for path in self.paths])
        tokens = (sums_WV[:, :-1] <= uniform_W[:, None] * sums_WV[:, -1:]).sum(1)
        for path, right_token, share, token in zip(
            self.paths, right_tokens, drawn_shares_W.tolist(), tokens.tolist(), strict=True
        ):
            if right_token is not None:
                yield self._child(path, right_token, path.weight * (1 - share))
            yield self._child(path, token, path.weight * share)

    def _child(self, path: _Path, token: int, weight: float) -> _Path:
        ids = [*path.ids, token]
        text = self._text(path.state, ids) if self._knowing(path.state) else ""
        return _Path(path.state, path.sample, path.row, weight, ids, text)

    def _right(self, path: _Path) -> int | None:
        problem, task = self.states[path.state].problem, self._knowing(path.state)
        right = None if task is None else task.decision(problem, path.text)
        if right is None:
            return None
        [token] = self.context.codec.encode(right)
        return int(token)

    def _is_over(self, path: _Path) -> bool:
        """Returns whether nothing can follow; its reward is then noted."""
        problem, task = self.states[path.state].problem, self._knowing(path.state)
        if path.weight < LEAST_WEIGHT:
            return True
        reward = None if task is None else task.decided(problem, path.text)
        ended = bool(path.ids) and path.ids[-1] in self.context.codec.end_ids
        if reward is None and not ended and len(path.ids) < self.budgets[path.state]:
            return False
        cut_off = self.context.settings.unfinished_reward
        if reward is None and not ended and cut_off is not None:
            reward = cut_off
        if reward is None:
            text = self._text(path.state, path.ids)
            reward = self.context.grader.submit(text, problem).result().reward
        self.earned[path.state, path.sample] += path.weight * reward
        return True
