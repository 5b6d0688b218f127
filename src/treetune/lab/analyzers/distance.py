"""The distance of a policy from its start: of its weights, and of its answers (KL)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt
from typing_extensions import override

from treetune.credit.episodes import scoring_row
from treetune.lab.analyzers.figures import (
    Bootstrap,
    iteration_axis,
    legend_below,
    mean_of,
    panels,
    points_with_bars,
    style_of,
)
from treetune.lab.analyzers.points import Chosen, OfCheckpoints
from treetune.objectives.base import KlEstimator, kl_estimate
from treetune.runtime.analysis import Analyzer, Findings
from treetune.tasks.base import Split
from treetune.tree import answers_of
from treetune.vocabulary import CORRECT_SCORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from treetune.runtime.sampler import Sampler
    from treetune.runtime.session import Session
    from treetune.vocabulary import Trajectory

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@Analyzer.register("weight_distance")
@dataclass(frozen=True, kw_only=True)
class WeightDistance(OfCheckpoints):
    """The L2 norm of the policy's weights less the start weights', absolute and over the norm of the
    start weights, in all and by group: embeddings, every layer, the head, and the rest (norms).
    """

    checkpoints: Chosen = "all"

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.models.policy_files import read_policy

        parameters, _ = sampler.session.model.weights()
        start = {name: weight.detach().cpu() for name, weight in parameters.items()}
        numbers = {}
        for point in points:
            folder = sampler.session.directory.checkpoint(point) / "policy"
            trusted = getattr(sampler.session.config.model, "trust_remote_code", False)
            weights = read_policy(folder, trust_remote_code=trusted)[0] if point else start
            numbers[str(point)] = distances(weights, start)
        return Findings({"by_checkpoint": numbers})

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (along, groups) = panels(
            ["Distance to the start weights, relative", "… of the last checkpoint, by group"]
        )
        names = list(
            dict.fromkeys(
                name
                for result in results.values()
                for numbers in result["numbers"]["by_checkpoint"].values()
                for name in numbers["groups"]
            )
        )
        for i, (label, result) in enumerate(results.items()):
            style = style_of(i)
            by_point = result["numbers"]["by_checkpoint"]
            values = [numbers["all"]["relative"] for numbers in by_point.values()]
            along.plot([int(point) for point in by_point], values, label=label, markersize=4.5, **style)
            last = list(by_point.values())[-1]["groups"]
            places = [names.index(name) for name in last]
            groups.plot(places, [g["relative"] for g in last.values()], linestyle="none", **style)
        iteration_axis(along)
        groups.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        for axes in (along, groups):
            axes.set_ylim(bottom=0)
        legend_below(figure, along)
        return figure


def group_of(name: str) -> str:
    """Returns the part of the model that a weight belongs to, by its name: ``layer 11``, ``embeddings``, …"""
    layer = _LAYER.search(name)
    if layer:
        return f"layer {layer[1]}"
    if "embed" in name or "wte" in name or "wpe" in name:
        return "embeddings"
    return "head" if "head" in name else "rest"


def distances(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Any]:
    """``all`` and ``groups``, each with ``absolute`` and ``relative`` (None for weights that were 0).

    Raises ValueError if the two are not of one model.
    """
    if weights.keys() != start.keys():
        different = sorted(weights.keys() ^ start.keys())
        raise ValueError(f"the checkpoint and the start weights differ in: {', '.join(different[:3])}")
    squares: dict[str, tuple[float, float]] = {}
    for name, unmoved in start.items():  # in the order of the model
        before = unmoved.detach().double()
        moved = float((weights[name].detach().double() - before).square().sum())
        group = group_of(name)
        far, size = squares.get(group, (0.0, 0.0))
        squares[group] = (far + moved, size + float(before.square().sum()))
    whole = (math.fsum(far for far, _ in squares.values()), math.fsum(size for _, size in squares.values()))
    return {"all": _distance(*whole), "groups": {name: _distance(*both) for name, both in squares.items()}}


def _distance(far: float, size: float) -> dict[str, float | None]:
    return {"absolute": math.sqrt(far), "relative": math.sqrt(far / size) if size else None}


ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k3")


@Analyzer.register("kl_to_reference")
@dataclass(frozen=True, kw_only=True)
class KlToReference(OfCheckpoints):
    """KL(policy ‖ start) of whole answers along the checkpoints, beside what the answers earn.

    Every checkpoint answers the same `problems` of `split`, `samples` times each, sampled as in
    training; log-probs are the trainer's models', at the temperature of the sampling. An answer's
    KL is the sum over its tokens of k1 = log p − log p_start or of k3 = exp(−k1) − 1 + k1, both
    unbiased for the KL of whole answers where all of the distribution is sampled (with top_p or top_k
    they are those of a policy that the log-probs don't describe to the end). ``accuracy`` is the share of
    correct answers, ``reward`` the mean of what they earn; the two differ where a wrong or an unfinished
    answer earns something.
    """

    checkpoints: Chosen = "all"
    split: Split = "validation"
    problems: Annotated[int, Gt(0)] = 128
    samples: Annotated[int, Gt(0)] = 4

    needs_engine = True

    @override
    def analyse(self, sampler: Sampler, points: Sequence[int], work: Path) -> Findings:
        from treetune.lab.analyzers.stored import context_at, rollout_that_samples
        from treetune.rollouts.single_turn import sample_answers

        session = sampler.session
        problems = list(session.config.task.problems(self.split))[: self.problems]
        rollout = rollout_that_samples(session.config)
        assert rollout.sampling is not None
        rows: list[dict[str, Any]] = []
        for point in points:
            sampler.server.load_checkpoint(point)
            with sampler.phase(f"answers after iteration {point}", "answers") as show:
                context = context_at(sampler, point, work, self.seed, "kl", show)
                trees = sample_answers(
                    context,
                    problems,
                    samples=self.samples,
                    sampling=rollout.sampling,
                    unfinished_reward=rollout.unfinished_reward,
                    purpose="analysis: kl",
                )
            # Rewards are held against distances: without one, an answer says nothing of the two.
            rows += self._rows(session, point, [one for one in answers_of(trees) if one.grade.is_known])
        sampling = rollout.sampling
        exact = sampling.top_p == 1.0 and sampling.top_k < 1
        return Findings({"whole_distribution_sampled": exact, **self.summarise(rows)}, rows)

    def _rows(self, session: Session, point: int, answers: Sequence[Trajectory]) -> list[dict[str, Any]]:
        from treetune.lab.analyzers.stored import StoredModels, rollout_that_samples
        from treetune.trainer.tokens import Sequences

        sampling = rollout_that_samples(session.config).sampling
        assert sampling is not None
        # At temperature 0, what the untempered policy gives.
        models = StoredModels(session, point, sampling.temperature or 1.0)
        sequences = Sequences.of([scoring_row(answer) for answer in answers])
        policy_N, start_N = models.policy_logprobs(sequences), models.ref_logprobs(sequences)
        kl = answer_kl(policy_N, start_N, sequences.starts)
        return [
            {
                "checkpoint": point,
                "problem": answer.problem.id,
                "answer": answer.id,
                "reward": answer.reward,
                "tokens": len(answer.response_ids),
                "text": answer.text,
                **{name: values[i] for name, values in kl.items()},
            }
            for i, answer in enumerate(answers)
        ]

    @override
    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        numbers: dict[str, dict[str, Any]] = {}
        for point in sorted({row["checkpoint"] for row in rows}):
            own = [row for row in rows if row["checkpoint"] == point]
            bootstrap = Bootstrap([row["problem"] for row in own], self.seed)
            numbers[str(point)] = {
                "answers": len(own),
                "accuracy": bootstrap(mean_of([float(row["reward"] >= CORRECT_SCORE) for row in own])),
                "reward": bootstrap(mean_of([row["reward"] for row in own])),
                **{str(name): bootstrap(mean_of([row[name] for row in own])) for name in ESTIMATORS},
                "k1_per_token": math.fsum(row["k1"] for row in own) / sum(row["tokens"] for row in own),
            }
        return {"by_checkpoint": numbers}

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (along, gain) = panels(
            ["KL of an answer to the start, in nats", "Mean reward against KL (k1)"]
        )
        for i, (label, result) in enumerate(results.items()):
            style = style_of(i)
            by_point = result["numbers"]["by_checkpoint"]
            numbers = list(by_point.values())
            for name, stroke in zip(ESTIMATORS, ("-", ":"), strict=True):
                points_with_bars(
                    along, [int(point) for point in by_point], [n[name] for n in numbers],
                    linestyle=stroke, label=f"{label}, {name}", **style,
                )  # fmt: skip
            points_with_bars(
                gain, [n["k1"]["value"] for n in numbers], [n["reward"] for n in numbers], **style
            )
        iteration_axis(along)
        gain.set_xlabel("nats per answer", fontsize=8)
        legend_below(figure, along)
        return figure


def answer_kl(policy_N: Tensor, start_N: Tensor, starts: Sequence[int]) -> dict[str, list[float]]:
    """Each answer's KL by each estimator; answer i has the tokens ``starts[i]:starts[i + 1]``."""
    found: dict[str, list[float]] = {}
    for name in ESTIMATORS:
        tokens_N = kl_estimate(policy_N.double(), start_N.double(), name)
        found[name] = [float(tokens_N[a:b].sum()) for a, b in itertools.pairwise(starts)]
    return found
