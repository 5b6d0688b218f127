"""The arena: compares credit methods on the same answers of toy languages with exact gradients."""

from __future__ import annotations

import gc
import importlib
import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treetune.cli.command import say
from treetune.config.build import build
from treetune.config.errors import ConfigIssue
from treetune.config.imports import import_parts
from treetune.config.jsonnet import load
from treetune.credit.base import Credit
from treetune.credit.rloo import Rloo
from treetune.credit.values.base import ValueEstimator
from treetune.exceptions import ConfigError
from treetune.lab.analyzers.figures import make_panels, save_figure
from treetune.lab.arena.gain import (
    TABLE_COLUMNS,
    TRAINING_COST_RATIOS,
    TRUE_ADVANTAGES,
    Gradients,
    at_ratio,
    best_at,
    draw_gain,
    gain_table,
    half_width,
    markdown_table,
    measure_gain,
    with_interval,
)
from treetune.lab.arena.languages import (
    CHOICE_LANGUAGES,
    LANGUAGES,
    Language,
    TrueAdvantages,
    context_of,
    language_of,
    with_critic,
)
from treetune.lab.arena.signals import HINDSIGHT_RATIO, LOG_PROBABILITY, HindsightRatio, LogProbability
from treetune.lab.arena.steps import step_measures, step_sums
from treetune.lab.arena.steps_page import write_steps_page
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.model_scores import Critic
from treetune.rollouts.single_turn import SingleTurn
from treetune.seeds import derive_seed
from treetune.store.files import write_json
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANSWERS_PER_PROBLEM = 8
"""The number of answers to each problem."""
PROBLEMS_AT_ONCE = 125
"""The number of problems whose answers get credit before the precision of the gain is tested again."""
CRITIC_PROBLEMS = 32
"""The number of problems from whose answers the critic learns."""


class ScoredMethod(NamedTuple):
    """A credit method, and the rollout that samples its answers."""

    credit: Credit
    rollout: Rollout | None = None
    """None: the method gives credit to the answers that all such methods share."""


def shipped_methods() -> dict[str, ScoredMethod]:
    """Returns the methods of configs/lib/arena.libsonnet, and those that are only in code, by their names.

    Those that are only in code read the tables of a language, which have its exact values and probabilities.
    """
    methods = {
        TRUE_ADVANTAGES: ScoredMethod(TrueAdvantages()),
        HINDSIGHT_RATIO: ScoredMethod(HindsightRatio()),
        LOG_PROBABILITY: ScoredMethod(LogProbability()),
    }
    for name, parts in load(["lib/arena.libsonnet"]).data["methods"].items():
        rollout = build(Rollout, parts["rollout"]) if "rollout" in parts else None
        methods[name] = ScoredMethod(build(Credit, parts["credit"]), rollout)
    return methods


def methods_of(module: str) -> dict[str, ScoredMethod]:
    """Returns the credit methods and value estimators that a module registers, with their defaults.

    A value estimator is used in the credit `monte_carlo` with three continuations of each state. Raises
    ConfigError for a module that can't be imported, and for one that registers neither a credit method nor a
    value estimator.
    """
    # A failed import has the same messages as one that a configuration asks for.
    import_parts({"imports": [module]})
    module_name = importlib.import_module(module).__name__  # as its parts have it in `part.__module__`
    methods = {}
    # `part` is a class of this module, or of any other module that has been imported.
    for name, part in [*Credit.parts_by_name().items(), *ValueEstimator.parts_by_name().items()]:
        is_of_module = part.__module__ == module_name or part.__module__.startswith(f"{module_name}.")
        if not is_of_module:
            continue
        if issubclass(part, Credit):
            settings: dict[str, Any] = {"type": name}
        else:
            settings = {"type": "monte_carlo", "samples": 3, "values": {"type": name}}
        methods[name] = ScoredMethod(build(Credit, settings))
    if not methods:
        remedy = "register a class in it: @Credit.register('name') or @ValueEstimator.register('name')"
        raise ConfigError([ConfigIssue(f"{module} registers no credit or value estimator", remedy=remedy)])
    return methods


def score_methods(
    language: Language,
    methods: Mapping[str, ScoredMethod],
    seed: int = 1,
    most_problems: int = 2000,
    precision: float = 0.1,
    seconds: float = math.inf,
) -> dict[str, dict[str, Any]]:
    """Returns the scores of each method on a language, a small artificial task. The main score is the gain.

    A method assigns credit to more and more problems until half the width of its gain's interval is below
    `precision` times the gain, or until it has `most_problems` problems, or has used `seconds` of CPU time.
    Raises ValueError for advantages that are not finite, and for a method that declares itself unbiased but
    isn't.
    """
    comparison = _Comparison.begin(language, seed, most_problems)
    with _manual_garbage_collection():
        return {
            name: comparison.score_method(name, method, precision, seconds)
            for name, method in methods.items()
        }


@dataclass(frozen=True)
class _Comparison:
    """The answers and gradients with which all methods of a language are compared."""

    language: Language
    seed: int
    context: RolloutContext
    shared_trees: Sequence[Tree]
    """The answers to which all methods without a rollout give credit."""
    reference_ND: Gradients
    """The gradient of each problem with RLOO. The gain is the variance of these gradients, divided by that of
    the method's gradients."""
    true_ND: Gradients
    """The gradient of each problem with true advantages."""

    @classmethod
    def begin(cls, language: Language, seed: int, most_problems: int) -> _Comparison:
        critic = fitted_critic(language, derive_seed(seed, "critic"))
        context = with_critic(context_of(language, most_problems, seed), critic)
        rollout = SingleTurn(samples=ANSWERS_PER_PROBLEM, max_tokens=language.length + 1)
        shared_trees, _ = rollout.run(context, context.task.problems("train"))
        reference_ND, _ = gradients_of(language, context, ScoredMethod(Rloo()), shared_trees)
        true_ND, _ = gradients_of(language, context, ScoredMethod(TrueAdvantages()), shared_trees)
        return cls(language, seed, context, shared_trees, reference_ND, true_ND)

    def score_method(
        self, name: str, method: ScoredMethod, precision: float, seconds: float
    ) -> dict[str, Any]:
        """Returns a method's scores; see `score_methods`."""
        language = self.language
        began = time.process_time()
        # `TrueAdvantages` declares nothing, but its gradient is the true one.
        unbiased = name == TRUE_ADVANTAGES or method.credit.is_unbiased(self.context)
        # Gradients and measures of steps, in blocks of `PROBLEMS_AT_ONCE` problems. The score is computed
        # anew after each block, from all blocks so far.
        blocks, blocks_of_steps, tokens = [], [], 0
        for start in range(0, len(self.shared_trees), PROBLEMS_AT_ONCE):
            trees = self.shared_trees[start : start + PROBLEMS_AT_ONCE]
            credited = assign_credit(self.context, method, trees)
            tokens += credited.tokens
            block_ND = language.gradients(credited.answers, credited.episodes, credited.groups)
            if not np.isfinite(block_ND).all():
                raise ValueError(f"{name} gives advantages that are not finite: look for a division by zero")
            blocks.append(block_ND)
            blocks_of_steps.append(step_sums(language, credited.answers, credited.episodes, credited.groups))

            credit_ND = np.concatenate(blocks)
            # An answer has one more token than a language is long: the end token.
            cost = tokens / len(credit_ND) / (ANSWERS_PER_PROBLEM * (language.length + 1))
            score = measure_gain(self.reference_ND, self.true_ND, credit_ND, cost, unbiased, self.seed)
            score["seconds"] = time.process_time() - began
            score |= step_measures(blocks_of_steps, self.seed)
            gc.collect()
            if half_width(score) < precision or score["seconds"] > seconds:
                break
        if unbiased and _is_biased(credit_ND, self.true_ND[: len(credit_ND)]):
            raise ValueError(
                f"{name} declares itself unbiased, but its mean gradient isn't the policy gradient"
            )
        return score


@contextmanager
def _manual_garbage_collection() -> Iterator[None]:
    """Turns off automatic collections in the block: among millions of answers they would take a third of the
    time."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def _is_biased(credit_ND: Any, true_ND: Any) -> bool:
    """Returns whether the mean gradient of a credit method significantly differs from the true one.

    Problems are independent. So without a bias, the inner product of two problems' differences has mean 0,
    and the products of different pairs are uncorrelated. The variance of their sum is then about the sum of
    their squares. Unbiased methods were seen to reach five standard deviations; twelve count as a bias.
    """
    differences_ND = credit_ND - true_ND
    products_NN = differences_ND @ differences_ND.T
    products_of_pairs = products_NN[np.triu_indices(len(products_NN), k=1)]
    standard_deviation = np.linalg.norm(products_of_pairs)
    return bool(products_of_pairs.sum() > 12 * standard_deviation)


class AssignedCredit(NamedTuple):
    """The answers to some problems, and the credit that a method gave them."""

    answers: list[Trajectory]
    """The answer of each episode."""
    episodes: list[Episode]
    groups: list[int]
    """The number of answers to each problem."""
    tokens: int
    """The number of tokens sampled for answers and credit."""


def assign_credit(context: RolloutContext, method: ScoredMethod, shared: Sequence[Tree]) -> AssignedCredit:
    """Returns answers to some problems, with the credit that a method gives them.

    A method with a rollout samples its own answers to the problems of `shared`. A method without one gives
    credit to the answers of `shared`.
    """
    trees = shared
    if method.rollout is not None:
        trees, _ = method.rollout.run(context, [tree.problem for tree in shared])
    episodes, metrics = method.credit.assign(context, trees)
    answer_by_id = {answer.id: answer for answer in answers_of(trees)}
    answer_tokens = 0
    for tree in trees:
        answer_tokens += sum(len(node.segment.token_ids) for node in tree.nodes)
    return AssignedCredit(
        answers=[answer_by_id[episode.trajectory] for episode in episodes],
        episodes=episodes,
        groups=[len(tree.leaves) for tree in trees],
        tokens=answer_tokens + int(metrics.get("credit/value_tokens", 0)),
    )


def gradients_of(
    language: Language, context: RolloutContext, method: ScoredMethod, shared: Sequence[Tree]
) -> tuple[Any, int]:
    """Returns a method's gradient of each problem, [problems, parameters], and the number of sampled tokens.

    `shared` has the answers to which methods without a rollout give credit.
    """
    credited = assign_credit(context, method, shared)
    return language.gradients(credited.answers, credited.episodes, credited.groups), credited.tokens


def fitted_critic(language: Language, seed: int) -> Critic:
    """Returns a critic whose values are mean rewards of the answers to `CRITIC_PROBLEMS` problems.

    The state of an answer is a number, its status, which each token may change. The value of a state is the
    mean reward of the answers that had the same status after the same number of tokens. One correct and one
    wrong answer are added to each count, so that a state without answers is worth one half."""
    context = context_of(language, CRITIC_PROBLEMS, seed)
    trees, _ = SingleTurn(samples=ANSWERS_PER_PROBLEM, max_tokens=language.length + 1).run(
        context, context.task.problems("train")
    )
    positions = np.arange(language.length + 1)
    # By number of tokens and status: the sum of rewards, and the number of answers, two of which are added.
    rewards_TS = np.ones_like(language.values_TS)
    visits_TS = np.full_like(language.values_TS, 2.0)
    for answer in answers_of(trees):
        statuses = language.statuses(answer.response_ids)
        rewards_TS[positions, statuses] += answer.reward
        visits_TS[positions, statuses] += 1

    def values(answers: Sequence[Trajectory]) -> list[Column]:
        values_TS = rewards_TS / visits_TS
        return [values_TS[positions, language.statuses(answer.response_ids)] for answer in answers]

    return Critic(values)


# Pages


def summarise_scores(
    scores_by_language: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Returns the geometric means of each method's measures over all languages.

    The measures are the gain per answer ("gain"), the gain per token ("token"), the gain at each ρ ("0.25",
    …) and the cost ("cost"). ρ is the cost of training a token, divided by that of sampling one. The method
    with the largest gain per token comes first.

    Methods that were not scored in every language are left out. A gain that could not be measured counts as
    1e-6, as a geometric mean needs positive numbers."""
    means_by_method = {}
    first, *others = scores_by_language.values()
    for name in first:
        if not all(name in scores for scores in others):
            continue
        scores_of_method = [scores[name] for scores in scores_by_language.values()]
        gains = [max(score["gain"]["value"] or 0.0, 1e-6) for score in scores_of_method]
        costs = [score["cost"] for score in scores_of_method]
        means = {
            "gain": geometric_mean(gains),
            "token": geometric_mean([gain / cost for gain, cost in zip(gains, costs, strict=True)]),
        }
        for rho in TRAINING_COST_RATIOS:
            gains_at_rho = [at_ratio(gain, cost, rho) for gain, cost in zip(gains, costs, strict=True)]
            means[f"{rho:g}"] = geometric_mean(gains_at_rho)
        means["cost"] = geometric_mean(costs)
        means_by_method[name] = means
    return dict(sorted(means_by_method.items(), key=lambda item: -item[1]["token"]))


def summary_table(scores_by_language: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns the result of `summarise_scores` as a table in Markdown, as lines."""
    keys = ("gain", "cost", "token", *(f"{rho:g}" for rho in TRAINING_COST_RATIOS))
    rows = []
    for name, means in summarise_scores(scores_by_language).items():
        rows.append([name, *(f"{means[key]:.2f}" for key in keys)])
    return markdown_table(TABLE_COLUMNS, rows)


def rank_correlation(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Returns Spearman's rank correlation of the gains per token in two sets of scores.

    Each set has the scores of methods by language and method. The correlation is over all pairs of a language
    and a method that have a gain in both sets. It is NaN for fewer than two such pairs."""
    from scipy.stats import spearmanr

    pairs = []
    for language, scores_of_language in first.items():
        for name, score in scores_of_language.items():
            if name not in second.get(language, ()):
                continue
            gain_in_first = score["gain_per_token"]["value"]
            gain_in_second = second[language][name]["gain_per_token"]["value"]
            if gain_in_first is not None and gain_in_second is not None:
                pairs.append((gain_in_first, gain_in_second))
    if len(pairs) < 2:
        return math.nan
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def draw_map(scores_by_language: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure | None:
    """Draws the best method for each language in which a quarter of the answers is correct.

    A language is a small artificial task. In ``first of 8``, an answer makes eight choices, and the first one
    decides whether the answer is correct. Only languages with such names have a place on the map. Returns
    None where there is no such language.

    The map has a panel for each ρ, the cost of training a token divided by that of sampling one. The columns
    of a panel are numbers of choices, and its rows are what decides: the first choice, the last, the
    majority."""
    # The language of each cell, by what decides in it and by half the number of its choices. If two languages
    # have the same cell, such as ``first of 8`` and ``first of 9``, the first one stays.
    cells: dict[tuple[str, int], str] = {}
    for language, scores_of_language in scores_by_language.items():
        shape, separator, choices = language.partition(" of ")
        has_gain = any(score["gain"]["value"] for score in scores_of_language.values())
        # A name with a percentage has another share of correct answers than a quarter.
        if separator and "%" not in language and has_gain:
            # A majority has an odd number of choices; halved, 9 is in the column of 8.
            cells.setdefault((shape, int(choices) // 2), language)
    if not cells:
        return None
    halves = sorted({half for _, half in cells})
    shapes_with_cells = {shape for shape, _ in cells}
    shapes = [shape for shape in CHOICE_LANGUAGES if shape in shapes_with_cells]
    figure, axes = make_panels([f"ρ = {rho:g}" for rho in TRAINING_COST_RATIOS], rows=2)
    figure.set_size_inches(2 + 2.6 * len(halves), 1.2 + 1.1 * len(shapes))
    for panel, rho in zip(axes, TRAINING_COST_RATIOS, strict=True):
        log_gains = np.full((len(shapes), len(halves)), np.nan)
        for (shape, half), language in cells.items():  # `shape` is what decides, such as "first"
            best, gain_of_best = best_at(scores_by_language[language], rho)
            row, column = shapes.index(shape), halves.index(half)
            log_gains[row, column] = math.log2(gain_of_best)
            best_in_lines = best.replace(", ", "\n")
            label = f"{best_in_lines}\n{gain_of_best:.1f} ×"
            panel.text(column, row, label, ha="center", va="center", fontsize=6.5)
        panel.imshow(log_gains, cmap="Greens", vmin=0, vmax=6, aspect="auto")  # from 1 × to 64 ×
        panel.set_xticks(range(len(halves)), [f"{2 * half}" for half in halves])
        panel.set_yticks(range(len(shapes)), shapes)
        panel.set_xlabel("choices of an answer", fontsize=8)
        panel.grid(visible=False)
    return figure


def write_page(
    folder: Path, scores_by_language: Mapping[str, Any], command: str, not_recommended: Sequence[str]
) -> None:
    """Writes arena.md, the page with the scores, and its figures.

    One figure, the map, shows the best method for each language (`draw_map`). It leaves out the methods that
    are `not_recommended`: their critics or exact values cost tokens that aren't counted.
    """
    lines = ["# Arena: what a credit method gains", "", f"    {command}", "", PAGE_PREFACE, ""]
    lines += ["## All languages (geometric means)", "", *summary_table(scores_by_language), ""]
    lines += ["![gain over cost](arena.png)", ""]
    scores_on_map = {}
    for language, scores_of_language in scores_by_language.items():
        scores_on_map[language] = {
            name: score for name, score in scores_of_language.items() if name not in not_recommended
        }
    figure = draw_map(scores_on_map)
    if figure is not None:
        save_figure(figure, folder, "arena_map")
        lines += [
            "## Which credit for which task",
            "",
            MAP_CAPTION,
            "",
            "![which credit where](arena_map.png)",
            "",
        ]
    for language, scores_of_language in scores_by_language.items():
        lines += [f"## {language}", "", *gain_table(scores_of_language), ""]
    (folder / "arena.md").write_text("\n".join(lines))
    save_figure(draw_gain(scores_by_language), folder, "arena")


PAGE_PREFACE = """\
Which credit method gives the least noisy gradient for its cost? A method gets eight answers to
each problem of a small artificial task, called a language, whose exact gradient is known. *Gain per answer*:
gradient variance of RLOO, divided by that of the method; RLOO is 1, higher is better. *Cost*: tokens sampled
by rollout and credit, divided by RLOO's. *Gain per token*: gain per answer divided by cost. *At ρ*: gain
divided by the cost of sampling and training together, if training a token costs as much as sampling ρ tokens
(about 0.25 on a small CPU, 3 to 4 on a GPU with two epochs and a reference). *Bias*: share of the mean
gradient's squared length that is orthogonal to the true gradient; 0 is unbiased. Intervals are 95 %
bootstraps over problems. *True advantages* are computed from exact values, at no cost; an optimal baseline
can be slightly better. The *critic* was trained on the answers to 32 problems; its cost does not include
them. Figures omit gains below 0.05."""
MAP_CAPTION = """\
Each cell has the method with the largest gain at equal cost, compared with RLOO with eight answers.
Critics and true advantages are left out, since training the critic and knowing the values cost nothing
here."""


def _methods_to_score(modules: Sequence[str], names: Sequence[str] | None) -> dict[str, ScoredMethod]:
    """Returns the methods of the modules, or all shipped methods where there are no modules.

    With `names`, only the methods with these names are returned. Raises ValueError for an unknown name."""
    methods: dict[str, ScoredMethod] = {}
    for module in modules:
        methods |= methods_of(module)
    if not modules:
        methods = shipped_methods()
    if not names:
        return methods
    unknown = [name for name in names if name not in methods]
    if unknown:
        raise ValueError(f"there is no method {unknown[0]!r}: choose one of {', '.join(methods)}")
    return {name: methods[name] for name in names}


def _read_scores(scores_file: Path, seed: int, most_problems: int) -> dict[str, Any]:
    """Returns stored scores by language. Raises ValueError where they were made with other settings, or by an
    earlier version."""
    stored = json.loads(scores_file.read_text())
    if (stored["seed"], stored["problems"]) != (seed, most_problems):
        raise ValueError(
            f"{scores_file} has the scores of --seed {stored['seed']} --problems {stored['problems']}:"
            " give these, or another folder"
        )
    scores_by_language: dict[str, Any] = stored["scores"]
    for scores_of_language in scores_by_language.values():
        if not all("decisive" in score for score in scores_of_language.values()):
            raise ValueError(
                f"{scores_file} was written by an earlier version, which did not measure single steps: give"
                " another folder as --output"
            )
    return scores_by_language


def run_arena(
    modules: Sequence[str],
    names: Sequence[str] | None,
    languages: Sequence[str] | None,
    output: Path | None,
    seed: int,
    most_problems: int,
    against: Path | None,
) -> None:
    """Scores credit methods on languages (small artificial tasks), prints the scores and writes them down.

    Args:
        modules: The modules whose methods are scored. Without modules, the shipped methods are scored.
        names: Only these methods are scored. None or empty: all of them.
        languages: The names of the languages. None or empty: all of them.
        output: The folder of the pages and of arena.json, which keeps the scores. Shipped methods that have a
            score there are not scored again. Methods of modules are, since modules change.
        seed: The seed of the answers.
        most_problems: The largest number of problems of a language.
        against: An arena.json, such as that of another seed. The gains are compared with those in it.

    Raises:
        ValueError: A language is unknown, there are fewer than two problems, or `output` has scores of
            another seed or number of problems.
    """
    if most_problems < 2:
        raise ValueError(f"--problems is {most_problems}: at least 2 are needed to estimate noise")
    scores_to_compare = None if against is None else json.loads(against.read_text())["scores"]
    language_by_name = {name: language_of(name) for name in languages or LANGUAGES}
    methods = _methods_to_score(modules, names)
    scores_file = None if output is None else output / "arena.json"
    scores_by_language: dict[str, Any] = {}
    if scores_file is not None and scores_file.is_file():
        scores_by_language = _read_scores(scores_file, seed, most_problems)
    for language_name, language in language_by_name.items():
        scores_of_language = scores_by_language.setdefault(language_name, {})
        methods_to_score = {
            name: method for name, method in methods.items() if modules or name not in scores_of_language
        }
        # `seconds` of CPU time, for each method.
        scores_of_language |= score_methods(language, methods_to_score, seed, most_problems, seconds=5.0)
        for name in methods:
            _print_score(language_name, name, scores_of_language[name])
        if scores_file is not None:  # after each language, so that a kill loses the scores of only one
            scores_file.parent.mkdir(parents=True, exist_ok=True)
            write_json(scores_file, {"seed": seed, "problems": most_problems, "scores": scores_by_language})
    say("\n".join(summary_table(scores_by_language)))
    if scores_to_compare is not None:
        correlation = rank_correlation(scores_by_language, scores_to_compare)
        say(f"rank correlation of the gains per token with those of {against}: {correlation:.3f}")
    if output is not None:
        command = ["treetune arena", *modules, f"--seed {seed}", f"--problems {most_problems}"]
        if names:
            command.append(f"--methods {shlex.join(names)}")
        if list(scores_by_language) != list(LANGUAGES):
            command.append(f"--languages {shlex.join(scores_by_language)}")
        _write_pages(output, scores_by_language, " ".join(command), methods)


def _print_score(language_name: str, name: str, score: Mapping[str, Any]) -> None:
    numbers = f"gain {with_interval(score['gain']):24} cost {score['cost']:7.2f}"
    say(f"{language_name:16} {name:30} {numbers}  per token {with_interval(score['gain_per_token'])}")
    say(f"{'':47} finds the decisive step {with_interval(score['decisive'])}")


def _write_pages(
    output: Path, scores_by_language: dict[str, Any], command: str, methods: Mapping[str, ScoredMethod]
) -> None:
    # These methods use a critic or exact values, whose cost in tokens is not counted.
    with_critic = [name for name, method in methods.items() if method.credit.needs_critic]
    not_recommended = [TRUE_ADVANTAGES, HINDSIGHT_RATIO, *with_critic]
    write_page(output, scores_by_language, command, not_recommended)
    write_steps_page(output, scores_by_language, command)
