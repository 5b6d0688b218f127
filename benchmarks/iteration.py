"""Measures a whole GRPO iteration (sample, grade, train, exchange weights) against TRL's GRPOTrainer."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from benchmarks.pairs import Measurement, compute_rates, take_turns
from benchmarks.peers import Child
from benchmarks.setting import (
    TAIL_CONTEXT,
    TAIL_MEAN,
    TAIL_PROMPT,
    Setting,
    write_long_tailed_model,
)
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Clock
from treetune.runtime.generation import generate
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.runtime.training import make_trainer
from treetune.tasks.drawing import draw_problems
from treetune.trainer.core import PolicyTrainer

START_S = 600.0
"""Seconds within which TRL starts."""
TURN_S = 1800.0
"""Seconds within which TRL takes a step."""
LONG_TURNS = 3
"""Most turns of the long-tailed pair, each of which takes minutes."""
SEQUENCES_PER_PASS = 64
"""The sequences that go through the quickstart's model at once in TRL; with 128 and 512, TRL was slower."""
VARIABLES_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def measure_short(setting: Setting) -> dict[str, Measurement]:
    """Measures with a trained model, as in the quickstart: all answers are about equally long."""
    config = setting.configuration("grpo", '{experiment_name: "iteration-short"}')
    return {"iteration/short_uniform": measure_iterations(setting, config)}


def measure_long_tailed(setting: Setting) -> dict[str, Measurement]:
    """Measures with answers of geometric length: most are short, and few are six times as long. Only with the
    quickstart's configuration, for which there is such a model."""
    if not setting.is_quickstart:
        return {}
    model = write_long_tailed_model(setting.configuration("grpo"), setting.workspace / "long-tailed")
    changes = {
        "experiment_name": "iteration-long-tailed",
        "model": {"type": "pretrained", "name_or_path": str(model)},
        "context_length": TAIL_CONTEXT,
    }
    max_tokens = TAIL_CONTEXT - TAIL_PROMPT
    rollout = f'{{"rollout"+: {{"max_tokens": {max_tokens}}}}}'
    config = setting.configuration("grpo", f"{json.dumps(changes)} + {rollout}")
    fewer_turns = replace(setting, repeats=min(setting.repeats, LONG_TURNS))
    measurement = measure_iterations(fewer_turns, config)
    measurement.details["setting"] = (
        f"untrained model that ends with the same probability after every token: lengths geometric with"
        f" mean {TAIL_MEAN}, cut at {max_tokens}"
    )
    return {"iteration/long_tailed": measurement}


def measure_iterations(setting: Setting, config: PolicyIteration) -> Measurement:
    """Lets treetune and TRL train in turns. Each turn is an iteration."""
    steps = setting.repeats + 1  # one warms up
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session, trains=True) as server,
        RunResources.open(session, server) as resources,
        start_trl(setting, session, steps) as trl,
    ):
        trainer = make_trainer(session)
        server.wait_until_ready()
        trl.wait_ready(deadline=START_S)
        our_iterations: list[dict[str, Any]] = []
        trl_steps: list[dict[str, Any]] = []

        def iterate(turn: int) -> float:
            our_iterations.append(run_iteration(resources, trainer, turn))
            return our_iterations[-1]["seconds"]

        def ask_trl(turn: int) -> float:
            trl_steps.append(trl.ask({"step": turn}, deadline=TURN_S))
            return trl_steps[-1]["seconds"]

        seconds = take_turns({"ours": iterate, "theirs": ask_trl}, setting.repeats)
    episodes = setting.problems * setting.samples
    return Measurement(
        unit="episodes/s",
        ours=compute_rates(episodes, seconds["ours"]),
        theirs=compute_rates(episodes, seconds["theirs"]),
        what={
            "ours": "sampling, grading, credit, one optimiser step, weights into the engine with canary",
            "theirs": "one step of trl.GRPOTrainer, its own generation by transformers",
        },
        details={
            "episodes": episodes,
            "ours": mean_of_each(our_iterations[1:]),  # without the warm-up
            "theirs": mean_of_each(trl_steps[1:]),
        },
    )


def run_iteration(resources: RunResources, trainer: PolicyTrainer, iteration: int) -> dict[str, Any]:
    """Runs an iteration as a run does, but without evaluation and checkpoint. Returns its numbers."""
    clock = Clock()
    start = time.perf_counter()
    episodes, metrics = generate(resources, iteration, clock)
    with clock.phase("training"):
        metrics |= trainer.train(iteration, episodes)
    with clock.phase("sync"):
        resources.server.offer(trainer, iteration + 1)
        resources.server.wait_until_ready()
    seconds = time.perf_counter() - start
    lengths = [len(episode.response_ids) for episode in episodes]
    numbers = {
        "seconds": seconds,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "reward": metrics["episodes/reward"],
    }
    for phase in ("generation", "credit", "training", "sync"):
        numbers[f"seconds_{phase}"] = clock.seconds[phase]
    return numbers


def mean_of_each(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the mean of each number over the turns."""
    return {name: fmean(turn[name] for turn in turns) for name in turns[0]}


def start_trl(setting: Setting, session: Session, steps: int) -> Child:
    """Starts TRL with the run's start model, prompts, samples, reward, optimiser and number of threads."""
    config = session.config
    trainer, sampling = config.trainer, config.rollout.sampling
    assert sampling is not None
    assert config.problems_per_iteration is not None  # the setting names it
    rows = []
    for step in range(steps):
        problems = draw_problems(session.train_problems, config.problems_per_iteration, config.seed, step)
        for problem in problems:
            rows.append({"prompt": session.model.codec.whole_prompt(problem), "gold": problem.gold})
    folder = session.directory.path
    rows_file = folder / "trl-rows.json"
    rows_file.write_text(json.dumps(rows))
    settings = {
        "model": config.model.name_or_path,  # type: ignore[attr-defined]
        "folder": str(folder / "trl"),
        "rows": str(rows_file),
        "samples": config.rollout.samples,
        "problems": config.problems_per_iteration,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "learning_rate": trainer.learning_rate,
        "warmup_steps": getattr(trainer.schedule, "steps", 0),
        "adam_betas": list(trainer.adam_betas),
        "max_grad_norm": trainer.max_grad_norm,
        "steps": steps,
        "sequences_per_pass": choose_sequences_per_pass(setting, config),
        "seed": config.seed,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    # TRL is a single process, and must not join the ranks of this one.
    for name in VARIABLES_OF_RANKS:
        environment.pop(name, None)
    return Child("trl_grpo", settings, environment=environment)


def choose_sequences_per_pass(setting: Setting, config: PolicyIteration) -> int:
    """Returns how many of a step's sequences go through the model at once in TRL: the largest divisor of
    their number that isn't too large."""
    sequences = setting.problems * setting.samples
    most = SEQUENCES_PER_PASS
    if not setting.is_quickstart:
        # Another model may need more memory for a token: as many as fit into our micro-batches.
        most = max(1, config.trainer.tokens_per_micro_batch // config.context_length)
    return max(count for count in range(1, most + 1) if sequences % count == 0)
