"""Credit methods against exact truth: which credit is worth its tokens, on languages that can be solved.

    python benchmarks/credit_bench.py --output docs/results

Four languages (`tests.support.chains`), three policies of rising skill, 128 problems with 8 answers each,
and the methods of configs/analyzers/credit_bench_critic.jsonnet. The policies are tables, so that values,
advantages and gradients are known exactly; credit is the same code that trains. Critics are fitted to as many
answers of a slightly worse policy; how wrong each is stands beside its panel. For a model of any size, the
analyzer of the same name does the same with many continuations as the truth."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from tests.support import chains  # noqa: E402
from tests.support.chain_critic import ChainCritic  # noqa: E402
from treetune.config.build import build  # noqa: E402
from treetune.config.jsonnet import load  # noqa: E402
from treetune.rollouts.base import Credit, Critic  # noqa: E402
from treetune.runtime.base import PolicyIteration, Runtime  # noqa: E402
from treetune.seeds import derive_seed  # noqa: E402
from treetune.tree import trees_of  # noqa: E402
from treetune.vocabulary import Episode, Trajectory  # noqa: E402
from treetune_lab.analyzers.credit_bench import (  # noqa: E402
    CreditBench,
    credited,
    draw_credit,
    table,
    told,
)
from treetune_lab.analyzers.credit_measures import Truth, measure  # noqa: E402
from treetune_lab.analyzers.figures import save  # noqa: E402

SKILLS = {"early": 0.2, "midway": 0.45, "late": 0.75}
SAMPLES, OF_BATCH = 8, 64


CONFIGURATION = ("quickstart/critic_values.jsonnet", "analyzers/credit_bench_critic.jsonnet")


LEAST_PROBLEMS = 2 * OF_BATCH // SAMPLES
"""Of fewer there are no two batches, whose gradients could vary."""


def credit_methods() -> Mapping[str, Credit]:
    import treetune.parts  # noqa: F401  # registers all parts

    root = build(Runtime, load(CONFIGURATION).data)
    assert isinstance(root, PolicyIteration)
    bench = root.analyzers[-1]
    assert isinstance(bench, CreditBench)
    return bench.methods


def gradients(
    task: chains.ChainTask, answers: Sequence[Trajectory], episodes: Sequence[Episode]
) -> dict[str, float]:
    """Of batches of `OF_BATCH` answers: the mean cosine to the exact gradient, and the variance of a batch's
    as a share of the squared length of their mean."""
    exact = chains.exact_gradient(task)
    batches: list[chains.Gradient] = []
    for start in range(0, len(answers) - OF_BATCH + 1, OF_BATCH):
        batch: chains.Gradient = {}
        for place in range(start, start + OF_BATCH):
            for slot, value in chains.gradient(answers[place], episodes[place]).items():
                batch[slot] = batch.get(slot, 0.0) + value / OF_BATCH
        batches.append(batch)
    middle: chains.Gradient = {}
    for batch in batches:
        for slot, value in batch.items():
            middle[slot] = middle.get(slot, 0.0) + value / len(batches)
    off = [
        math.fsum((batch.get(slot, 0.0) - value) ** 2 for slot, value in middle.items()) for batch in batches
    ]
    return {
        "cosine": math.fsum(chains.cosine(batch, exact) for batch in batches) / len(batches),
        "relative_variance": math.fsum(off) / (len(batches) - 1) / chains.length(middle) ** 2,
    }


def bench(
    language: chains.Language, skill: float, problems: int, seed: int, methods: Mapping[str, Any]
) -> Any:
    task = chains.ChainTask(language=language, skill=skill, count=problems)
    answers = chains.answers_of_chains(task, SAMPLES, seed)
    assert len(trees_of(answers)) == problems
    truths = [Truth(a.problem.id, a.step_ends, chains.true_values(a), a.reward) for a in answers]
    critic = ChainCritic.of_earlier(task, SAMPLES, derive_seed(seed, "critic"))
    found = {}
    for name, credit in methods.items():
        context = chains.context_of(task, seed).with_services(Critic(critic))
        of_method = credited(context, credit, answers)
        found[name] = measure(truths, of_method, seed) | gradients(task, answers, of_method.episodes)
    return {
        "solved": sum(a.reward for a in answers) / len(answers),
        "critic_error": critic.error(answers),
        "methods": found,
    }


def page(results: Mapping[str, Any]) -> str:
    lines = ["# Credit methods against exact truth", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += ["![quality against tokens](credit_bench.png)", ""]
    for panel, found in results.items():
        state = f"{found['solved']:.0%} solved, the critic off by {found['critic_error']:.2f}"
        lines += [f"## {panel} ({state})", "", *table(found["methods"])]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for credit_bench.md, .json, .png")
    parser.add_argument(
        "--problems", type=int, default=128, help=f"with {SAMPLES} answers each; at least {LEAST_PROBLEMS}"
    )
    parser.add_argument("--languages", nargs="+", default=list(chains.LANGUAGES), choices=chains.LANGUAGES)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.problems < LEAST_PROBLEMS:
        parser.error(
            f"--problems {options.problems} are too few answers for two batches of {OF_BATCH}, whose"
            f" gradients are compared: give {LEAST_PROBLEMS} or more"
        )
    methods = credit_methods()
    results = {}
    for language in options.languages:
        for stage, skill in SKILLS.items():
            panel = f"{language}, {stage}"
            results[panel] = bench(language, skill, options.problems, options.seed, methods)
            print(f"{panel}: {results[panel]['solved']:.0%} solved", flush=True)
            for name, one in results[panel]["methods"].items():
                cost = f"{one['tokens_per_answer']:8.0f} tokens  {one['seconds']:.1f} s"
                quality = f"correlation {told(one, 'correlation')}  cosine {one['cosine']:.3f}"
                print(f"  {name:28} {cost}  {quality}", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "credit_bench.md").write_text(page(results))
    (options.output / "credit_bench.json").write_text(json.dumps(results, indent=1) + "\n")
    save(
        draw_credit({panel: found["methods"] for panel, found in results.items()}),
        options.output,
        "credit_bench",
    )


if __name__ == "__main__":
    main()
