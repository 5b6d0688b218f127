"""A whole GRPO iteration (sample, grade, train, exchange weights) against TRL's GRPOTrainer."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.pairs import Measurement, in_turns
from benchmarks.peers import Child
from benchmarks.setting import (
    TAIL_CONTEXT,
    TAIL_MEAN,
    TAIL_PROMPT,
    Setting,
    long_tailed_model,
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
TURN_S = 1800.0
LONG_TURNS = 3
"""Turns of the long-tailed pair: one takes minutes."""


def measure_short(setting: Setting) -> dict[str, Measurement]:
    """Answers of a trained model, as the quickstart's: all about equally long."""
    config = setting.configuration("grpo", '{experiment_name: "iteration-short"}')
    return {"iteration/short_uniform": _against_trl(setting, config)}


def measure_long_tailed(setting: Setting) -> dict[str, Measurement]:
    """Answers of geometric length: most are short, few are six times as long. Only with the quickstart's
    configuration, whose model it can make."""
    if not setting.is_quickstart:
        return {}
    plain = setting.configuration("grpo")
    model = long_tailed_model(plain, setting.workspace / "long-tailed")
    more = {
        "experiment_name": "iteration-long-tailed",
        "model": {"type": "pretrained", "name_or_path": str(model)},
        "context_length": TAIL_CONTEXT,
    }
    answers = f'{{"rollout"+: {{"max_tokens": {TAIL_CONTEXT - TAIL_PROMPT}}}}}'
    config = setting.configuration("grpo", f"{json.dumps(more)} + {answers}")
    fewer = replace(setting, repeats=min(setting.repeats, LONG_TURNS))
    measurement = _against_trl(fewer, config)
    measurement.details["setting"] = (
        f"untrained model that ends with the same probability after every token: lengths geometric with"
        f" mean {TAIL_MEAN}, cut at {TAIL_CONTEXT - TAIL_PROMPT}"
    )
    return {"iteration/long_tailed": measurement}


def _against_trl(setting: Setting, config: PolicyIteration) -> Measurement:
    turns = setting.repeats + 1
    with (
        Session.open(config, {}) as session,
        PolicyServer.start(session, trains=True) as server,
        RunResources.open(session, server) as resources,
        _trl(setting, session, turns) as trl,
    ):
        trainer = make_trainer(session)
        server.ready()
        trl.wait_ready(deadline=START_S)
        ours: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []

        def iterate(turn: int) -> float:
            ours.append(_iteration(resources, trainer, turn))
            return ours[-1]["seconds"]

        def ask(turn: int) -> float:
            theirs.append(trl.ask({"step": turn}, deadline=TURN_S))
            return theirs[-1]["seconds"]

        seconds = in_turns({"ours": iterate, "theirs": ask}, setting.repeats)
    count = setting.problems * setting.samples
    return Measurement(
        unit="episodes/s",
        ours=[count / one for one in seconds["ours"]],
        theirs=[count / one for one in seconds["theirs"]],
        what={
            "ours": "sampling, grading, credit, one optimiser step, weights into the engine with canary",
            "theirs": "one step of trl.GRPOTrainer, its own generation by transformers",
        },
        details={
            "episodes": count,
            "ours": _summary(ours[1:]),
            "theirs": _summary(theirs[1:]),
        },
    )


def _iteration(resources: RunResources, trainer: PolicyTrainer, turn: int) -> dict[str, Any]:
    """As the loop runs one, but for evaluation and checkpoint."""
    clock = Clock()
    start = time.perf_counter()
    episodes, metrics = generate(resources, turn, clock)
    with clock.phase("training"):
        metrics |= trainer.train(turn, episodes)
    with clock.phase("sync"):
        resources.server.offer(trainer, turn + 1)
        resources.server.ready()
    return {
        "seconds": time.perf_counter() - start,
        "tokens": sum(len(episode.response_ids) for episode in episodes),
        "longest": max(len(episode.response_ids) for episode in episodes),
        "reward": metrics["episodes/reward"],
        **{
            f"seconds_{phase}": clock.seconds[phase] for phase in ("generation", "credit", "training", "sync")
        },
    }


def _summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    return {name: fmean(turn[name] for turn in turns) for name in turns[0]}


SEQUENCES_PER_PASS = 64
"""Of the sequences of a step of the quickstart's model, how many go through it at once in TRL: 128 and 512
were slower."""


def _sequences_per_pass(setting: Setting, config: PolicyIteration) -> int:
    """Returns how many of a step's sequences go through the model at once in TRL."""
    sequences = setting.problems * setting.samples
    most = SEQUENCES_PER_PASS
    if not setting.is_quickstart:
        # Another model may need more memory for a token: as many as fit into our micro-batches.
        most = max(1, config.trainer.tokens_per_micro_batch // config.context_length)
    return max(count for count in range(1, most + 1) if sequences % count == 0)


def _trl(setting: Setting, session: Session, turns: int) -> Child:
    """TRL on the same start model, prompts, samples, reward, optimiser and number of threads."""
    config = session.config
    trainer, sampling = config.trainer, config.rollout.sampling
    assert sampling is not None
    rows = [
        {"prompt": session.model.codec.framed(problem), "gold": problem.gold}
        for turn in range(turns)
        for problem in draw_problems(session.train_problems, config.problems_per_iteration, config.seed, turn)
    ]
    settings = {
        "model": config.model.name_or_path,  # type: ignore[attr-defined]
        "folder": str(session.directory.path / "trl"),
        "rows": f"{session.directory.path}/trl-rows.json",
        "samples": config.rollout.samples,  # type: ignore[attr-defined]
        "problems": config.problems_per_iteration,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "learning_rate": trainer.learning_rate,
        "warmup_steps": getattr(trainer.schedule, "steps", 0),
        "adam_betas": list(trainer.adam_betas),
        "max_grad_norm": trainer.max_grad_norm,
        "steps": turns,
        "sequences_per_pass": _sequences_per_pass(setting, config),
        "seed": config.seed,
    }
    Path(settings["rows"]).write_text(json.dumps(rows))
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return Child("trl_grpo", settings, environment=environment)
