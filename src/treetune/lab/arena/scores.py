"""The arena: every credit on the same answers of the same frozen languages, against the truth."""

from __future__ import annotations

import gc
import importlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treetune.cli.command import say
from treetune.config.build import build
from treetune.config.errors import ConfigIssue
from treetune.config.imports import import_parts
from treetune.config.jsonnet import load
from treetune.exceptions import ConfigError
from treetune.lab.analyzers.figures import panels, save
from treetune.lab.arena.gain import (
    CEILING,
    COLUMNS,
    RATIOS,
    at_ratio,
    best_at,
    draw_gain,
    gain,
    gain_table,
    half_width,
    markdown,
    with_interval,
)
from treetune.lab.arena.languages import CHOICES, LANGUAGES, Language, TrueAdvantages, context_of, language_of
from treetune.rollouts.base import Credit, Critic, Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import Rloo
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.valuation import ValueEstimator
from treetune.seeds import derive_seed
from treetune.store.files import write_json
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANSWERS = 8
AT_ONCE = 125
"""Problems that are credited before it is asked whether the gain is known well enough."""
CRITIC_PROBLEMS = 32
"""Problems whose answers the critic has learnt from."""


class ScoredMethod(NamedTuple):
    """A credit, and the rollout that makes its answers; None: the eight that all methods share."""

    credit: Credit
    rollout: Rollout | None = None


def shipped_methods() -> dict[str, ScoredMethod]:
    """Returns the methods of configs/lib/arena.libsonnet by their names."""
    methods = {CEILING: ScoredMethod(TrueAdvantages())}
    for name, parts in load(["lib/arena.libsonnet"]).data["methods"].items():
        rollout = build(Rollout, parts["rollout"]) if "rollout" in parts else None
        methods[name] = ScoredMethod(build(Credit, parts["credit"]), rollout)
    return methods


def methods_of(module: str) -> dict[str, ScoredMethod]:
    """Returns the credits, and the value estimators with three samples a state, that a module registers, with
    their defaults. Raises ConfigError where it can't be imported or registers none."""
    import_parts({"imports": [module]})
    own = importlib.import_module(module).__name__
    methods = {}
    for name, part in [*Credit.registered().items(), *ValueEstimator.registered().items()]:
        if f"{part.__module__}.".startswith(f"{own}."):
            of_values = {"type": "monte_carlo", "samples": 3, "values": {"type": name}}
            credit = {"type": name} if issubclass(part, Credit) else of_values
            methods[name] = ScoredMethod(build(Credit, credit))
    if not methods:
        remedy = "register a class in it: @Credit.register('name') or @ValueEstimator.register('name')"
        raise ConfigError([ConfigIssue(f"{module} registers no credit or value estimator", remedy=remedy)])
    return methods


def scores(
    language: Language,
    methods: Mapping[str, ScoredMethod],
    seed: int = 1,
    most: int = 2000,
    precision: float = 0.1,
    seconds: float = math.inf,
) -> dict[str, dict[str, Any]]:
    """Returns the gain of each method on a language.

    A method is credited with problem after problem until half of its gain's interval is below `precision`
    times the gain, or there are `most` problems, or it took so many `seconds` of a CPU. Raises ValueError for
    advantages that are no numbers, and for one that calls itself unbiased and isn't.
    """
    critic = fitted_critic(language, derive_seed(seed, "critic"))
    context = context_of(language, most, seed).with_services(critic)
    shared, _ = SingleTurn(samples=ANSWERS, max_tokens=language.length + 1).run(
        context, context.task.problems("train")
    )
    reference, true = (
        gradients_of(language, context, ScoredMethod(one), shared)[0] for one in (Rloo(), TrueAdvantages())
    )
    found = {}
    collects = gc.isenabled()
    gc.disable()  # looking for circles among millions of answers, at any time, takes a third of the time
    for name, method in methods.items():
        begun, rows, tokens = time.process_time(), [], 0
        for start in range(0, most, AT_ONCE):
            own, sampled = gradients_of(language, context, method, shared[start : start + AT_ONCE])
            if not np.isfinite(own).all():
                raise ValueError(f"{name} gives advantages that are no numbers: look for a division by zero")
            rows.append(own)
            tokens += sampled
            done = np.concatenate(rows)
            cost = tokens / len(done) / (ANSWERS * (language.length + 1))
            unbiased = name == CEILING or method.credit.is_unbiased(context)
            found[name] = gain(reference, true, done, cost, unbiased, seed)
            found[name]["seconds"] = time.process_time() - begun
            gc.collect()
            if half_width(found[name]) < precision or found[name]["seconds"] > seconds:
                break
        if unbiased:
            off_ND = done - true[: len(done)]
            products_NN = off_ND @ off_ND.T
            np.fill_diagonal(products_NN, 0)
            # Without a bias these add up to 0, give or take √2 times their norm; 5 times that was met.
            if products_NN.sum() > 12 * 2**0.5 * np.linalg.norm(products_NN):
                raise ValueError(f"{name} calls itself unbiased; its mean gradient isn't the policy gradient")
    if collects:
        gc.enable()
    return found


def gradients_of(
    language: Language, context: RolloutContext, method: ScoredMethod, shared: Sequence[Tree]
) -> tuple[Any, int]:
    """Returns a method's gradients of the problems of `shared`, [problems, parameters], and the tokens that
    its rollout and credit sampled."""
    trees = shared
    if method.rollout is not None:
        trees, _ = method.rollout.run(context, [one.problem for one in shared])
    episodes, metrics = method.credit.assign(context, trees)
    leaf_of = {one.id: one for one in answers_of(trees)}
    gradients = language.gradients(
        [leaf_of[one.trajectory] for one in episodes], episodes, [len(one.leaves) for one in trees]
    )
    sampled = sum(len(node.segment.token_ids) for one in trees for node in one.nodes)
    return gradients, sampled + int(metrics.get("credit/value_tokens", 0))


def fitted_critic(language: Language, seed: int) -> Critic:
    """Returns a critic that says of a state the mean reward of the few answers that it has learnt from and
    that went through the same status there; one half where there were none."""
    context = context_of(language, CRITIC_PROBLEMS, seed)
    trees, _ = SingleTurn(samples=ANSWERS, max_tokens=language.length + 1).run(
        context, context.task.problems("train")
    )
    places = np.arange(language.length + 1)
    wins_TS, visits_TS = np.ones_like(language.values_TS), np.full_like(language.values_TS, 2.0)
    for one in answers_of(trees):
        statuses = language.statuses(one.response_ids)
        wins_TS[places, statuses] += one.reward
        visits_TS[places, statuses] += 1

    def values(answers: Sequence[Trajectory]) -> list[Column]:
        table = wins_TS / visits_TS
        return [table[places, language.statuses(one.response_ids)] for one in answers]

    return Critic(values)


# Pages


def summary(by_language: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns the geometric means over all languages of each method's gain per answer and of its worth at
    each ρ, the best per token first. Methods that some language has not scored are left out; a gain that
    nobody could measure counts as nothing."""
    found = {}
    first, *others = by_language.values()
    for name in (one for one in first if all(one in methods for methods in others)):
        rows = [methods[name] for methods in by_language.values()]
        gains = [(max(row["gain"]["value"] or 0.0, 1e-6), row["cost"]) for row in rows]
        means = {"gain": geometric_mean([value for value, _ in gains])}
        means["token"] = geometric_mean([value / cost for value, cost in gains])
        means |= {f"{rho:g}": geometric_mean([at_ratio(*one, rho) for one in gains]) for rho in RATIOS}
        found[name] = means | {"cost": geometric_mean([cost for _, cost in gains])}
    return dict(sorted(found.items(), key=lambda item: -item[1]["token"]))


def summary_table(by_language: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns lines of Markdown."""
    keys = ("gain", "cost", "token", *(f"{rho:g}" for rho in RATIOS))
    rows = summary(by_language).items()
    return markdown(COLUMNS, [[name, *(f"{one[key]:.2f}" for key in keys)] for name, one in rows])


def rank_correlation(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Returns Spearman's of the gain per token, over all languages and methods whose gain both know; NaN for
    fewer than two."""
    from scipy.stats import spearmanr

    pairs = [
        (row["gain_per_token"]["value"], other[language][name]["gain_per_token"]["value"])
        for language, methods in one.items()
        for name, row in methods.items()
        if name in other.get(language, ())
    ]
    known = [pair for pair in pairs if None not in pair]
    return float(spearmanr(*zip(*known, strict=True)).statistic) if len(known) > 1 else math.nan


def draw_map(by_language: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure | None:
    """Draws which method is worth most where a quarter of the answers is correct: a panel for each ρ, numbers
    of choices from left to right, what decides from top to bottom. None where no language has a place."""
    cells: dict[tuple[str, int], list[str]] = {}
    for name in by_language:
        shape, of, choices = name.partition(" of ")
        # A majority has an odd number of choices, and stands with its neighbour.
        if of and "%" not in name and any(one["gain"]["value"] for one in by_language[name].values()):
            cells.setdefault((shape, int(choices) // 2), []).append(name)
    if not cells:
        return None
    lengths = sorted({length for _, length in cells})
    shapes = [shape for shape in CHOICES if any(shape == one for one, _ in cells)]
    figure, axes = panels([f"ρ = {rho:g}" for rho in RATIOS], rows=2)
    figure.set_size_inches(2 + 2.6 * len(lengths), 1.2 + 1.1 * len(shapes))
    for one, rho in zip(axes, RATIOS, strict=True):
        worths = np.full((len(shapes), len(lengths)), np.nan)
        for (shape, length), names in cells.items():
            best, worth = best_at(by_language[names[0]], rho)
            row, column = shapes.index(shape), lengths.index(length)
            worths[row, column] = math.log2(worth)
            words = f"{best.replace(', ', chr(10))}\n{worth:.1f} ×"
            one.text(column, row, words, ha="center", va="center", fontsize=6.5)
        one.imshow(worths, cmap="Greens", vmin=0, vmax=6, aspect="auto")
        one.set_xticks(range(len(lengths)), [f"{2 * length}" for length in lengths])
        one.set_yticks(range(len(shapes)), shapes)
        one.set_xlabel("choices of an answer", fontsize=8)
        one.grid(visible=False)
    return figure


def write_page(folder: Path, by_language: Mapping[str, Any], command: str, trained: Sequence[str]) -> None:
    """Writes arena.md and its figures. On the map there are none of the methods that were `trained` for."""
    lines = ["# The arena: what a credit gains", "", f"    {command}", "", PREFACE, ""]
    lines += ["## All languages (geometric means)", "", *summary_table(by_language), ""]
    lines += ["![gain over cost](arena.png)", ""]
    fair = {
        language: {name: one for name, one in methods.items() if name not in trained}
        for language, methods in by_language.items()
    }
    if (drawn := draw_map(fair)) is not None:
        save(drawn, folder, "arena_map")
        lines += ["## Which credit for which task", "", MAP, "", "![which credit where](arena_map.png)", ""]
    for language, methods in by_language.items():
        lines += [f"## {language}", "", *gain_table(methods), ""]
    (folder / "arena.md").write_text("\n".join(lines))
    save(draw_gain(by_language), folder, "arena")


PREFACE = """RLOO with eight answers is 1, and higher is better. *Gain per answer*: a problem's gradient
is so many times less noisy. *Cost* is what was sampled for it, in units of RLOO's. *Gain per token* is
their ratio. Training costs as well: *at ρ* counts a token that is trained as ρ sampled ones (a small CPU
0.25, a GPU with two epochs and a reference about 5). *True advantages* come from right values, at no
cost. Right values aren't quite the baseline with the least noise, so that others may beat them. Intervals
are of 95 %, by bootstrap over problems. A *bias* is the share of the mean gradient's squared length that
isn't along the true one. The critic has learnt from 32 problems' answers, which no cost counts. Figures
leave out gains below 0.05."""
MAP = """What a method is worth beside RLOO with eight answers, for the same money. Critics and true
advantages are left out: what they know came from elsewhere."""


def run_arena(
    modules: Sequence[str],
    languages: Sequence[str] | None,
    output: Path | None,
    seed: int,
    most: int,
    against: Path | None,
) -> None:
    """Scores the methods of some modules, or all shipped ones, and compares the scores with the arena.json of
    other seeds.

    What was scored of the shipped ones is kept in arena.json of `output`, and is not scored again; those of
    modules, which change, always are. Raises ValueError for an unknown language, for one problem, and where
    the folder has the scores of other seeds or of another number of problems.
    """
    if most < 2:
        raise ValueError(f"--problems {most}: noise is known from two on")
    others = None if against is None else json.loads(against.read_text())["scores"]
    tables = {name: language_of(name) for name in languages or LANGUAGES}
    methods = {
        name: one for module in modules for name, one in methods_of(module).items()
    } or shipped_methods()
    kept = None if output is None else output / "arena.json"
    found: dict[str, Any] = {}
    if kept is not None and kept.is_file():
        stored = json.loads(kept.read_text())
        if (stored["seed"], stored["problems"]) != (seed, most):
            raise ValueError(
                f"{kept} has the scores of --seed {stored['seed']} --problems {stored['problems']}: give"
                " these, or another folder"
            )
        found = stored["scores"]
    for name, language in tables.items():
        of_language = found.setdefault(name, {})
        missing = {key: one for key, one in methods.items() if modules or key not in of_language}
        of_language |= scores(language, missing, seed, most, seconds=5.0)
        for key in methods:
            one = of_language[key]
            told = f"gain {with_interval(one['gain']):24} cost {one['cost']:7.2f}"
            say(f"{name:16} {key:30} {told}  per token {with_interval(one['gain_per_token'])}")
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"seed": seed, "problems": most, "scores": found})
    say("\n".join(summary_table(found)))
    if others is not None:
        agreement = rank_correlation(found, others)
        say(f"rank correlation of the gains per token with those of {against}: {agreement:.3f}")
    if output is not None:
        words = ["treetune arena", *modules, f"--seed {seed}", f"--problems {most}"]
        trained = [CEILING, *(name for name, one in methods.items() if one.credit.needs_critic)]
        write_page(output, found, " ".join(words), trained)
