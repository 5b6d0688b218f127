"""True values in this process: both ways where the task says that something is decided, chance elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from annotated_types import Gt

from treetune.contracts import Finding
from treetune.rollouts.context import RolloutContext
from treetune.runtime.base import PolicyIteration
from treetune.seeds import derive_seed
from treetune_lab.analyzers.truth import Known, Place, TrueValues, mean_and_noise, whole_ids
from treetune_lab.decisions import KnowsDecisions

if TYPE_CHECKING:
    import numpy as np

    from treetune.runtime.session import Session

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

    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and (sampling.top_p < 1 or sampling.top_k != -1 or sampling.stop):
            yield Finding(
                "in_process samples whole distributions up to the end token, and the rollout has top_p, top_k"
                " or stop strings",
                "truth",
                "choose truth: {type: 'continuations'}",
            )

    def find(
        self, context: RolloutContext, session: Session, point: int, places: Sequence[Place]
    ) -> list[Known]:
        from treetune_lab.analyzers.sources import policy_at

        assert context.settings.sampling is not None
        steps = PolicySteps(policy_at(session, point), context.settings.sampling.temperature)
        return expanded(steps, context, places, self.samples)

    def described(self) -> str:
        return f"in_process {self.samples}"


class NextTokens(Protocol):
    """Answers which token comes next, for a batch that it remembers. Chances are float64 of shape [B, V]."""

    def begin(self, ids_BT: np.ndarray) -> np.ndarray: ...

    def go_on(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """The batch is then those of its rows, a row perhaps several times, each with a token behind it."""
        ...


class PolicySteps:
    """A causal language model as `NextTokens`."""

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature
        self._cache: Any = None

    def begin(self, ids_BT: np.ndarray) -> np.ndarray:
        self._cache = None
        return self._run(ids_BT)

    def go_on(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
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
        found: np.ndarray = chances_BV.cpu().numpy()
        return found


@dataclass
class _Way:
    """One continuation: of which place and sample, the row of the batch that it goes on from, its weight, its
    ids behind the place, and the whole answer's text so far, where somebody reads it on the way."""

    place: int
    sample: int
    row: int
    weight: float
    ids: list[int]
    text: str = ""


def expanded(
    steps: NextTokens, context: RolloutContext, places: Sequence[Place], samples: int
) -> list[Known]:
    """The value of each place, from `samples` continuations each. Chance comes from the place and the
    context's seed alone."""
    order = sorted(range(len(places)), key=lambda i: len(whole_ids(places[i])))
    found: dict[int, Known] = {}
    for _, alike in groupby(order, key=lambda i: len(whole_ids(places[i]))):
        numbers = list(alike)
        for start in range(0, len(numbers), max(1, ROWS // samples)):
            batch = numbers[start : start + max(1, ROWS // samples)]
            values = _Batch(steps, context, [places[i] for i in batch], samples).values()
            found |= zip(batch, values, strict=True)
    return [found[i] for i in range(len(places))]


class _Batch:
    """Places of one length, gone on from together."""

    def __init__(
        self, steps: NextTokens, context: RolloutContext, places: Sequence[Place], samples: int
    ) -> None:
        import numpy as np

        assert context.settings.sampling is not None
        self.steps, self.context, self.places = steps, context, places
        self.budgets = [
            context.settings.token_budget(one.prompt_ids, context.settings.sampling.max_tokens)
            - len(one.begun_ids)
            for one in places
        ]
        most = max(self.budgets)
        # One number decides a step of all ways of a sample: they are different ways, each by fair chance.
        self.chance = np.stack([self._generator(one).random((samples, most)) for one in places])
        self.earned = np.zeros((len(places), samples))
        self.ways = [
            _Way(place, sample, place, 1.0, [], self._text(place, []))
            for place in range(len(places))
            for sample in range(samples)
        ]

    def _generator(self, place: Place) -> np.random.Generator:
        import numpy as np

        ids = repr(place.begun_ids.tolist())
        return np.random.default_rng(derive_seed(self.context.seed, place.problem.id, ids, "expansion"))

    def _text(self, place: int, ids: Sequence[int]) -> str:
        begun: list[int] = self.places[place].begun_ids.tolist()
        return self.context.codec.decode([*begun, *ids])

    def _knowing(self, place: int) -> KnowsDecisions | None:
        task = self.context.task.of(self.places[place].problem)
        return task if isinstance(task, KnowsDecisions) else None

    def values(self) -> list[Known]:
        import numpy as np

        self.ways = [way for way in self.ways if not self._is_over(way)]
        if self.ways:
            chances_BV = self.steps.begin(np.stack([whole_ids(one) for one in self.places]))
        while self.ways:
            self.ways = [way for way in self._next(chances_BV) if not self._is_over(way)]
            if self.ways:
                rows, tokens = [way.row for way in self.ways], [way.ids[-1] for way in self.ways]
                chances_BV = self.steps.go_on(rows, tokens)
                for row, way in enumerate(self.ways):
                    way.row = row
        return [mean_and_noise(of_place.tolist()) for of_place in self.earned]

    def _next(self, chances_BV: np.ndarray) -> Iterator[_Way]:
        """A token further: chosen by chance, or the right one and by chance another."""
        import numpy as np

        own_WV = chances_BV[[way.row for way in self.ways]]
        right_W = [self._right(way) for way in self.ways]
        shares = np.ones(len(self.ways))
        for number, right in enumerate(right_W):
            if right is not None:
                shares[number] -= own_WV[number, right]
                own_WV[number, right] = 0.0
        sums_WV = own_WV.cumsum(1)
        drawn_W = np.array([self.chance[way.place, way.sample, len(way.ids)] for way in self.ways])
        tokens = (sums_WV[:, :-1] <= drawn_W[:, None] * sums_WV[:, -1:]).sum(1)
        for way, right, share, token in zip(
            self.ways, right_W, shares.tolist(), tokens.tolist(), strict=True
        ):
            if right is not None:
                yield self._child(way, right, way.weight * (1 - share))
            yield self._child(way, token, way.weight * share)

    def _child(self, way: _Way, token: int, weight: float) -> _Way:
        ids = [*way.ids, token]
        text = self._text(way.place, ids) if self._knowing(way.place) else ""
        return _Way(way.place, way.sample, way.row, weight, ids, text)

    def _right(self, way: _Way) -> int | None:
        problem, task = self.places[way.place].problem, self._knowing(way.place)
        right = None if task is None else task.decision(problem, way.text)
        if right is None:
            return None
        [token] = self.context.codec.encode(right)
        return int(token)

    def _is_over(self, way: _Way) -> bool:
        """Whether nothing can follow; what it earned is then noted."""
        problem, task = self.places[way.place].problem, self._knowing(way.place)
        if way.weight < LEAST_WEIGHT:
            return True
        reward = None if task is None else task.decided(problem, way.text)
        ended = bool(way.ids) and way.ids[-1] in self.context.codec.end_ids
        if reward is None and not ended and len(way.ids) < self.budgets[way.place]:
            return False
        if reward is None:
            reward = self._graded(way, ended)
        self.earned[way.place, way.sample] += way.weight * reward
        return True

    def _graded(self, way: _Way, ended: bool) -> float:
        if not ended and self.context.settings.unfinished_reward is not None:
            return self.context.settings.unfinished_reward
        text = self._text(way.place, way.ids)
        return self.context.grader.submit(text, self.places[way.place].problem).result().reward
