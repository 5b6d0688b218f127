"""Measures the distance of a policy from its start: that of its weights, and that of its answers (KL)."""

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

from treetune.credit.episodes import make_scoring_row
from treetune.lab.analyzers.figures import (
    Bootstrap,
    draw_legend_below,
    draw_points_with_bars,
    label_iteration_axis,
    make_panels,
    mean_of,
    style_of,
)
from treetune.lab.analyzers.points import OfCheckpoints, PointChoice
from treetune.objectives.base import KlEstimator, kl_estimate
from treetune.runtime.analysis import Analyzer, Findings
from treetune.tasks.base import Split
from treetune.tree import answers_of
from treetune.vocabulary import CORRECT_SCORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from treetune.runtime.resources import RunResources
    from treetune.runtime.session import Session
    from treetune.vocabulary import Trajectory

# The number of the layer in the name of a weight, such as 11 in "model.layers.11.mlp.up_proj.weight".
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@Analyzer.register("weight_distance")
@dataclass(frozen=True, kw_only=True)
class WeightDistance(OfCheckpoints):
    """Measures the L2 distance of the policy's weights to the start weights, over all weights and by group.

    Each distance is given in absolute terms, and relative to the norm of the start weights. The groups are
    the embeddings, every layer, the head, and the rest (norms).
    """

    checkpoints: PointChoice = "all"

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        from treetune.models.policy_files import read_policy

        session = resources.session
        parameters, _ = session.model.load_weights()
        start = {name: weight.detach().cpu() for name, weight in parameters.items()}
        # Only pretrained models have this setting.
        trust_remote_code = getattr(session.config.model, "trust_remote_code", False)
        numbers = {}
        for point in points:
            weights: Mapping[str, Tensor] = start
            if point:  # the start weights (0) are in no checkpoint
                folder = session.directory.checkpoint_folder(point) / "policy"
                weights, _ = read_policy(folder, trust_remote_code=trust_remote_code)
            numbers[str(point)] = measure_distances(weights, start)
        return Findings({"by_checkpoint": numbers})

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (distance_panel, group_panel) = make_panels(
            ["Relative distance to the start weights", "… of the last checkpoint, by group"]
        )
        group_names: dict[str, None] = {}  # a dictionary as an ordered set
        for result in results.values():
            for numbers in result["numbers"]["by_checkpoint"].values():
                group_names |= dict.fromkeys(numbers["groups"])
        names = list(group_names)
        for i, (label, result) in enumerate(results.items()):
            style = style_of(i)
            by_point = result["numbers"]["by_checkpoint"]
            values = [numbers["all"]["relative"] for numbers in by_point.values()]
            iterations = [int(point) for point in by_point]
            distance_panel.plot(iterations, values, label=label, markersize=4.5, **style)
            last_checkpoint = list(by_point.values())[-1]
            groups = last_checkpoint["groups"]
            positions = [names.index(name) for name in groups]
            relative = [distance["relative"] for distance in groups.values()]
            group_panel.plot(positions, relative, linestyle="none", **style)
        label_iteration_axis(distance_panel)
        group_panel.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        for panel in (distance_panel, group_panel):
            panel.set_ylim(bottom=0)
        draw_legend_below(figure, [distance_panel])
        return figure


def group_of(name: str) -> str:
    """Returns the part of the model that a weight belongs to, by its name: ``layer 11``, ``embeddings``, …"""
    layer = _LAYER.search(name)
    if layer:
        return f"layer {layer[1]}"
    # GPT-2 calls its embeddings of tokens and positions wte and wpe.
    if "embed" in name or "wte" in name or "wpe" in name:
        return "embeddings"
    return "head" if "head" in name else "rest"


def measure_distances(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the distance to the start of all weights together and of each group.

    Example: `{"all": {"absolute": 0.41, "relative": 0.002}, "groups": {"layer 0": {…}, "head": {…}}}`.
    `relative` is None for a group whose start weights are all 0. Raises ValueError for weights of different
    models.
    """
    if weights.keys() != start.keys():
        different = sorted(weights.keys() ^ start.keys())
        raise ValueError(f"the checkpoint and the start weights differ in: {', '.join(different[:3])}")
    # Squared norms by group, in the order of the model: of the change of the weights, and of their start.
    squared_changes: dict[str, float] = {}
    squared_starts: dict[str, float] = {}
    for name, start_weight in start.items():
        start_numbers = start_weight.detach().double()
        change = weights[name].detach().double() - start_numbers
        group = group_of(name)
        squared_changes[group] = squared_changes.get(group, 0.0) + float(change.square().sum())
        squared_starts[group] = squared_starts.get(group, 0.0) + float(start_numbers.square().sum())
    distance_by_group = {}
    for group, squared_change in squared_changes.items():
        distance_by_group[group] = _distance(squared_change, squared_starts[group])
    return {
        "all": _distance(math.fsum(squared_changes.values()), math.fsum(squared_starts.values())),
        "groups": distance_by_group,
    }


def _distance(squared_change: float, squared_size: float) -> dict[str, float | None]:
    relative = math.sqrt(squared_change / squared_size) if squared_size else None
    return {"absolute": math.sqrt(squared_change), "relative": relative}


KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k3")


@Analyzer.register("kl_to_reference")
@dataclass(frozen=True, kw_only=True)
class KlToReference(OfCheckpoints):
    """Estimates KL(policy ‖ start) of whole answers for each checkpoint, and shows it with their rewards.

    Every checkpoint answers the first `problems` problems of `split`, each `samples` times, sampled as in
    training.
    Log-probs are those of the trainer's models at the sampling temperature. An answer's KL is the sum over
    its tokens of k1 = log p − log p_start or of k3 = exp(−k1) − 1 + k1. Both are unbiased estimates of the KL
    of whole answers if the whole distribution is sampled; with top_p or top_k they are not, because the
    log-probs are those of the distribution before it is cut. ``accuracy`` is the share of correct answers and
    ``reward`` their mean reward, which differ where wrong or unfinished answers have a reward.
    """

    checkpoints: PointChoice = "all"
    split: Split = "validation"
    problems: Annotated[int, Gt(0)] = 128
    samples: Annotated[int, Gt(0)] = 4

    needs_engine = True

    @override
    def analyse(self, resources: RunResources, points: Sequence[int], work: Path) -> Findings:
        from treetune.lab.analyzers.stored import context_at, rollout_that_samples
        from treetune.rollouts.single_turn import sample_answers

        session = resources.session
        problems = list(session.config.task.problems(self.split))[: self.problems]
        rollout = rollout_that_samples(session.config)
        assert rollout.sampling is not None
        rows: list[dict[str, Any]] = []
        for point in points:
            resources.server.load_checkpoint(point)
            with resources.phase(f"answers after iteration {point}", "answers") as show:
                context = context_at(resources, point, work, self.seed, "kl", show)
                trees = sample_answers(
                    context,
                    problems,
                    samples=self.samples,
                    sampling=rollout.sampling,
                    unfinished_reward=rollout.unfinished_reward,
                    purpose="analysis: kl",
                )
            # Rewards are compared with distances. An answer that could not be graded has no reward, so it is
            # left out.
            graded = [answer for answer in answers_of(trees) if answer.grade.is_known]
            rows += self._rows(session, point, graded)
        sampling = rollout.sampling
        is_whole = sampling.top_p == 1.0 and sampling.top_k < 1  # −1: there is no top_k
        return Findings({"whole_distribution_sampled": is_whole, **self.summarise(rows)}, rows)

    def _rows(self, session: Session, point: int, answers: Sequence[Trajectory]) -> list[dict[str, Any]]:
        from treetune.lab.analyzers.stored import StoredModels, rollout_that_samples
        from treetune.trainer.tokens import Sequences

        sampling = rollout_that_samples(session.config).sampling
        assert sampling is not None
        # Greedy answers (temperature 0) are scored at temperature 1.
        models = StoredModels(session, point, sampling.temperature or 1.0)
        sequences = Sequences.of([make_scoring_row(answer) for answer in answers])
        # Log-probs of the checkpoint and of the start weights, for each token of all answers.
        policy_N, start_N = models.policy_logprobs(sequences), models.ref_logprobs(sequences)
        kl = answer_kl(policy_N, start_N, sequences.starts)
        rows = []
        for i, answer in enumerate(answers):
            row = {
                "checkpoint": point,
                "problem": answer.problem.id,
                "answer": answer.id,
                "reward": answer.reward,
                "tokens": len(answer.response_ids),
                "text": answer.text,
            }
            row |= {estimator: values[i] for estimator, values in kl.items()}
            rows.append(row)
        return rows

    @override
    def summarise(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        numbers: dict[str, dict[str, Any]] = {}
        for point in sorted({row["checkpoint"] for row in rows}):
            rows_there = [row for row in rows if row["checkpoint"] == point]
            bootstrap = Bootstrap([row["problem"] for row in rows_there], self.seed)
            correct = [float(row["reward"] >= CORRECT_SCORE) for row in rows_there]
            tokens = sum(row["tokens"] for row in rows_there)
            estimates: dict[str, Any] = {}
            for name in KL_ESTIMATORS:
                estimates[name] = bootstrap(mean_of([row[name] for row in rows_there]))
            numbers[str(point)] = {
                "answers": len(rows_there),
                "accuracy": bootstrap(mean_of(correct)),
                "reward": bootstrap(mean_of([row["reward"] for row in rows_there])),
                **estimates,
                "k1_per_token": math.fsum(row["k1"] for row in rows_there) / tokens,
            }
        return {"by_checkpoint": numbers}

    @staticmethod
    @override
    def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
        figure, (kl_panel, reward_panel) = make_panels(
            ["KL of an answer to the start, in nats", "Mean reward against KL (k1)"]
        )
        for i, (label, result) in enumerate(results.items()):
            style = style_of(i)
            by_point = result["numbers"]["by_checkpoint"]
            numbers = list(by_point.values())
            iterations = [int(point) for point in by_point]
            for name, line_style in zip(KL_ESTIMATORS, ("-", ":"), strict=True):
                estimates = [of_point[name] for of_point in numbers]
                line = style | {"linestyle": line_style, "label": f"{label}, {name}"}
                draw_points_with_bars(kl_panel, iterations, estimates, **line)
            distances_k1 = [of_point["k1"]["value"] for of_point in numbers]
            rewards = [of_point["reward"] for of_point in numbers]
            draw_points_with_bars(reward_panel, distances_k1, rewards, **style)
        label_iteration_axis(kl_panel)
        reward_panel.set_xlabel("nats per answer", fontsize=8)
        draw_legend_below(figure, [kl_panel])
        return figure


def answer_kl(policy_N: Tensor, start_N: Tensor, starts: Sequence[int]) -> dict[str, list[float]]:
    """Returns the KL of each answer, by estimator. Answer i has the tokens ``starts[i]:starts[i + 1]``."""
    kl_by_estimator: dict[str, list[float]] = {}
    for name in KL_ESTIMATORS:
        kl_N = kl_estimate(policy_N.double(), start_N.double(), name)
        kl_by_estimator[name] = [float(kl_N[start:end].sum()) for start, end in itertools.pairwise(starts)]
    return kl_by_estimator
