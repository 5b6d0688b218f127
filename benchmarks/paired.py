"""Paired training beside independent seeds: how much less the difference of two credits varies.

    python benchmarks/paired.py [--seeds 8] [--work experiments/paired]

A tiny model learns a signpost whose one choice decides, before twelve that don't. Every seed is a run of GRPO
that is forked after four iterations (`treetune fork`) into GRPO and VinePPO with K = 1. A paired difference
is one of two branches of one seed; an independent one of branches of two seeds, whose variance is the sum of
both branches'. What differs is the chance of the right choice on held-out problems. The branch of GRPO is
held against the first seed's run that went on. Finished runs in FOLDER are not run again."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

STEM, BRANCH, SHOWN = 4, 6, (1, 2, 3, 4, 6)
"""Iterations of a stem and of a branch, and those of a branch after which the chance is shown."""

PARTS = (
    "models/tiny_narrow", "engines/in_process", "evaluations/quickstart", "trainers/tiny_one_step",
    "rollouts/short_answers", "methods/ppo_group_credit",
)  # fmt: skip
TASK = """{
  type: 'policy_iteration', experiment_name: 'stem', context_length: 64, selection: { type: 'all' },
  task: {
    type: 'signposts', rule: 'first', steps: 1, period: 1, rates: [0.25], options: 4, chatter: 0, signs: 12,
    wandering: 12, names: 3, train_size: 3000, validation_size: 300, test_size: 300,
    grader: { type: 'signposts', whole: true },
  },
}"""
START = """{
  experiment_name: 'start', iterations: 3, problems_per_iteration: 1600, seed: 1,
  evaluation+: { every: null, sets: [] }, checkpoints: { every: 3 },
}"""
ON_POLICY = """{
  model: { type: 'pretrained', name_or_path: '%s/start/checkpoints/last/policy' },
  seed: %d, rollout+: { samples: 8, max_tokens: 32 }, problems_per_iteration: 32, iterations: %d,
  trainer+: { learning_rate: 1e-3, schedule: { type: 'warmup', steps: 2 }, measure_kl: false },
  evaluation+: { every: null, sets: [] }, checkpoints: { every: 1, keep_every: 1 },
}"""
CREDITS = {
    "GRPO": "{ credit: { type: 'group' } }",
    "VinePPO, K = 1": "{ credit: { type: 'monte_carlo', samples: 1 } }",
}


def run(folder: Path, name: str, overrides: Sequence[str], parts: Sequence[str], stem: bool) -> None:
    """Runs an experiment to its end, forked from the stem beside it unless it is one."""
    from treetune.config.build import build
    from treetune.config.jsonnet import load
    from treetune.lab.fork import fork
    from treetune.runtime.base import PolicyIteration, Runtime
    from treetune.runtime.commands import run_iteration_loop

    named = f"{{ directory: '{folder}', experiment_name: '{name}' }}"
    files = [str(ROOT / "configs" / f"{part}.jsonnet") for part in parts]
    config = load(files, [TASK, *overrides, named], environment_keys=())
    root = build(Runtime, config.data)
    assert isinstance(root, PolicyIteration)
    log = (folder / "log.txt").open("a")
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        if not stem and not (folder / name).exists():
            fork(folder / "stem", STEM, root, config.data)
        run_iteration_loop(root, config.data)


def trained(
    folder: Path, name: str, *overrides: str, parts: Sequence[str] = PARTS, stem: bool = False
) -> Path:
    """Does the same in a process of its own, which begins with all imports done; returns its folder."""
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(folder, name, overrides, parts, stem)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{folder / name} failed: see {folder / 'log.txt'}")
    return folder / name


def chances(place: Path) -> dict[int, float]:
    """How likely the right choice is behind each held-out prompt and its sign, by iterations since the fork:
    the mean, computed and not sampled."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from treetune.config.build import build
    from treetune.models.tokenizer import codec_of
    from treetune.runtime.base import PolicyIteration, Runtime

    config = build(Runtime, json.loads((place / "config.json").read_text()))
    assert isinstance(config, PolicyIteration)
    problems, found = config.task.problems("validation"), {}
    for done in range(STEM, STEM + BRANCH + 1):
        policy = place / "checkpoints" / f"{done:04d}" / "policy"
        tokenizer = AutoTokenizer.from_pretrained(policy)
        prompts = [codec_of(tokenizer).encode_prompt(one).tolist() for one in problems]
        signs, golds = (
            tokenizer.convert_tokens_to_ids([take(one) for one in problems])
            for take in (lambda one: one.prompt[-3], lambda one: one.gold)
        )
        input_ids_BT = torch.tensor([[*prompt, sign] for prompt, sign in zip(prompts, signs, strict=True)])
        with torch.no_grad():
            logits_BV = AutoModelForCausalLM.from_pretrained(policy)(input_ids_BT).logits[:, -1]
        right_B = logits_BV.softmax(-1).gather(1, torch.tensor(golds)[:, None])
        found[done - STEM] = float(right_B.mean())
    return found


def ratio(own: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """The variance of independent differences over that of paired ones, with a 95 % interval by bootstrap
    over seeds."""

    def of(places: np.ndarray) -> float:
        one, two = own[places], other[places]
        return float((one.var(ddof=1) + two.var(ddof=1)) / max((one - two).var(ddof=1), 1e-12))

    generator, count = np.random.default_rng(0), len(own)
    found = [of(generator.integers(0, count, count)) for _ in range(2000)]
    return of(np.arange(count)), float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("experiments/paired"))
    options = parser.parse_args()
    import deepspeed  # noqa: F401  (once for all that are forked off)
    import transformers  # noqa: F401

    import treetune.parts  # noqa: F401  (registers all parts)
    from treetune.lab.analyzers.first_difference import first_difference

    begun, work = time.monotonic(), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    supervised = ("models/tiny_narrow", "engines/in_process", "evaluations/quickstart", "trainers/tiny_sft")
    trained(work, "start", START, parts=(*supervised, "methods/sft"), stem=True)
    found: dict[str, list[dict[int, float]]] = {name: [] for name in CREDITS}
    for seed in range(1, options.seeds + 1):
        folder = work / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        trained(folder, "stem", ON_POLICY % (work, seed, STEM), stem=True)
        for number, (name, credit) in enumerate(CREDITS.items()):
            settings = ON_POLICY % (work, seed, STEM + BRANCH)
            found[name].append(chances(trained(folder, f"branch-{number}", settings, credit)))
        ends = ", ".join(f"{name} {runs[-1][BRANCH]:.3f}" for name, runs in found.items())
        print(f"seed {seed}: {ends}, {time.monotonic() - begun:.0f} s", flush=True)
    going_on = ON_POLICY % (work, 1, STEM + BRANCH)
    gone_on = trained(work / "seed-1", "stem", going_on, stem=True)
    parted = first_difference(gone_on, work / "seed-1" / "branch-0")
    print(page(found, "the same, to the bit" if parted is None else str(parted), options.seeds))


def page(found: dict[str, list[dict[int, float]]], same: str, seeds: int) -> str:
    """Standard deviations in points. "Of changes" takes the chance at the fork off both branches first, so
    that what is left is what common random numbers do."""
    base, other = CREDITS
    values = {
        name: np.array([[run[done] for done in range(BRANCH + 1)] for run in found[name]]) for name in found
    }
    lines = [
        f"| after the fork | {base}: chance, spread | difference of {other}: independent"
        " | of changes, independent | paired | variances: independent over paired | of changes over paired |",
        "|---:" * 7 + "|",
    ]
    for done in SHOWN:
        own, theirs = (values[name][:, done] for name in (base, other))
        changes = own - values[base][:, 0], theirs - values[other][:, 0]
        apart = [100 * np.sqrt(a.var(ddof=1) + b.var(ddof=1)) for a, b in ((own, theirs), changes)]
        ratios = ["{:,.0f} [{:,.0f}, {:,.0f}]".format(*ratio(b, a)) for a, b in ((own, theirs), changes)]
        cells = [f"{100 * own.mean():.1f}, {100 * own.std(ddof=1):.1f}", *(f"{one:.2f}" for one in apart)]
        cells += [f"{100 * (theirs - own).std(ddof=1):.2f}", *ratios]
        lines.append(f"| {done} | {' | '.join(cells)} |")
    same = f"{seeds} seeds. The stem of seed 1 that went on, and its branch of {base}: {same}."
    return "\n".join([*lines, "", same])


if __name__ == "__main__":
    main()
