"""Threads on a real vLLM server.

These tests promise:

* Every sampled part has the log-probs that follow from what its call saw, whatever the policy writes.
* A server that is killed in the middle of joins changes no answer.
* A run trains on what each call saw.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs.shared_server import shared_server
from tests.support.bigram_model import MANY_THREADS, THREADS, BigramModel, bigram_model
from tests.support.columns import plain
from tests.support.contexts import context_of
from tests.support.processes import engine_core_of
from tests.support.small_run import directory_of
from tests.support.tabular_mdp import InlinePool, LetterTask
from treetune.credit.base import Credit
from treetune.credit.grpo import Group
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.base import Engine, EngineLaunch
from treetune.engine.engine import VllmEngine, start_engine
from treetune.engine.requests import Completion, OnResult, Request
from treetune.engine.settings import Engines, VllmSettings
from treetune.models.pretrained import PretrainedModel
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.selection import All
from treetune.runtime.base import PolicyIteration
from treetune.runtime.commands import run_iteration_loop
from treetune.tasks.base import Split
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune.threads.fork_join import EVENTS
from treetune.threads.parallel_threads import ParallelThreads, ThreadStates
from treetune.trainer.base import Trainer
from treetune.trainer.batches import Layout
from treetune.tree import answers_of
from treetune.vocabulary import Problem, Trajectory, concatenate, sees

pytestmark = [pytest.mark.server, pytest.mark.slow]

Models = dict[str, BigramModel]
CONTEXT = 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    tables = {"threads": THREADS, "many": MANY_THREADS}
    return {name: bigram_model(table, folder / name, CONTEXT) for name, table in tables.items()}


# One server: with two, the other one may answer everything before a killed one is there again.
SETTINGS_OF_SERVER = VllmSettings(replicas=1, prefix_caching=True, omp_threads=1, start_timeout=300.0)


@pytest.fixture(scope="module")
def engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    logs = tmp_path_factory.mktemp("logs")
    model = models["threads"]
    launch = EngineLaunch(model.folder, logs, seed=0, context_length=CONTEXT, end_ids=model.codec.end_ids)
    vllm_engine = start_engine(SETTINGS_OF_SERVER, launch)
    assert isinstance(vllm_engine, VllmEngine)
    vllm_engine.wait_ready()
    yield vllm_engine
    vllm_engine.close()


class RecordingEngine(Engine):
    """Passes requests on and records them; kills the server at the result with the number `killed_at`."""

    def __init__(self, engine: VllmEngine, killed_at: int | None = None) -> None:
        self.engine, self.version, self.at = engine, engine.version, killed_at
        self.requests: list[Request] = []
        self.most_waiting = 0

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        self.requests += requests
        arrivals = itertools.count()

        def record_result(index: int, completions: list[Completion]) -> Sequence[Request]:
            if next(arrivals) == self.at:
                os.kill(
                    engine_core_of(self.engine._replicas[0].server.wait_until_ready().url), signal.SIGKILL
                )
            further = on_result(index, completions) or ()
            self.requests += further
            return further

        return self.engine.generate(requests, record_result)


def roll_out_threads(
    engine: Engine, model: BigramModel, problems: int, iteration: int = 0, **settings: Any
) -> list[Trajectory]:
    context = context_of(
        LetterTask(), engine, InlinePool(), model.codec, seed=7, iteration=iteration, context_length=CONTEXT
    )
    problem_list = [Problem(id=f"train/{i}", prompt="?", gold="") for i in range(problems)]
    rollout = ParallelThreads(**{"samples": 2, "max_tokens": 300, **settings})
    return answers_of(rollout.run(context, problem_list)[0])


def assert_sampled_after_what_it_saw(trajectory: Trajectory, model: BigramModel) -> None:
    for number, segment in enumerate(trajectory.segments):
        if segment.origin == "sampled":
            before = [
                other_segment
                for other_segment in trajectory.segments[:number]
                if sees(segment.branch, other_segment.branch)
            ]
            context = plain(
                concatenate([trajectory.prompt_ids, *(other_segment.token_ids for other_segment in before)])
            )
            assert plain(segment.logprobs) == pytest.approx(
                model.logprobs(context, plain(segment.token_ids)), abs=2e-3
            )
            assert segment.seconds > 0


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two deep": {"max_depth": 2},
    "few": {"max_threads": 1, "max_blocks": 1},
    "short threads": {"thread_tokens": 3},
    "short threads are dropped": {"thread_tokens": 3, "stragglers": "drop"},
    "malformed blocks are text": {"malformed": "go_on", "max_tokens": 60},
    "little room": {"max_tokens": 40, "stragglers": "go_on"},
    "with conclusions": {"conclusion": True},
}


def test_each_part_has_the_log_probs_of_what_it_saw_and_every_event_occurs(
    engine: VllmEngine, models: Models
) -> None:
    engine.load(models["threads"].folder, 0)
    events_seen: set[str] = set()
    for name, settings in CASES.items():
        watched = RecordingEngine(engine)
        trajectories = roll_out_threads(watched, models["threads"], problems=30, **settings)
        for trajectory in trajectories:
            assert_sampled_after_what_it_saw(trajectory, models["threads"])
            assert len(trajectory.response_ids) <= settings.get("max_tokens", 300)
        sampled = sum(
            segment.origin == "sampled" for trajectory in trajectories for segment in trajectory.segments
        )
        dropped = sum(trajectory.numbers["threads/dropped"] for trajectory in trajectories)
        assert len(watched.requests) == sampled + dropped, f"{name}: each call is in an answer once"
        if name != "little room":
            assert any(len(trajectory.segments) > 4 for trajectory in trajectories), (
                f"{name}: no answer forked"
            )
        events_seen.update(
            event for event in EVENTS for trajectory in trajectories if trajectory.numbers[f"threads/{event}"]
        )
    assert events_seen == set(EVENTS)


def test_an_answer_of_fifty_threads_is_sampled_and_joined(engine: VllmEngine, models: Models) -> None:
    engine.load(models["many"].folder, 1)
    trajectories = roll_out_threads(engine, models["many"], problems=12, max_tokens=2000)
    most_threads = max(
        len({segment.branch for segment in trajectory.segments}) - 1 for trajectory in trajectories
    )
    assert most_threads == 50
    for trajectory in trajectories:
        assert_sampled_after_what_it_saw(trajectory, models["many"])


def test_a_server_killed_in_the_middle_of_joins_changes_no_answer(engine: VllmEngine, models: Models) -> None:
    engine.load(models["threads"].folder, 2)
    undisturbed = RecordingEngine(engine)
    expected = roll_out_threads(undisturbed, models["threads"], problems=100)
    restarts = engine.restarts
    killed = RecordingEngine(engine, killed_at=len(undisturbed.requests) // 2)
    assert roll_out_threads(killed, models["threads"], problems=100) == expected
    assert engine.restarts == restarts + 1
    requests_of_runs = [
        [(request.seed, plain(request.prompt_ids)) for request in recording.requests]
        for recording in (killed, undisturbed)
    ]
    assert sorted(requests_of_runs[0]) == sorted(requests_of_runs[1]), "each call once"


@dataclass(frozen=True, kw_only=True)
class QuestionMarks(LetterTask):
    """Has eight problems, all of them a question mark; a right answer ends with one x after its last tag."""

    grader: Grader = field(default_factory=lambda: FinalAnswer(marker=">"))

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(id=f"{split}/{i}", prompt="?", gold="x") for i in range(8)]


@pytest.mark.parametrize(
    ("credit", "layout"),
    [(Group(std=False), "tree"), (MonteCarlo(samples=2, states=ThreadStates()), "packed")],
    ids=str,
)
def test_a_run_trains_on_what_each_call_saw(
    credit: Credit, layout: Layout, engine: VllmEngine, models: Models, tmp_path: Path
) -> None:
    with shared_server() as shared, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "close", lambda: None)  # the server is the module's
        shared.started.append((SETTINGS_OF_SERVER, engine))
        experiment = PolicyIteration(
            task=QuestionMarks(),
            model=PretrainedModel(name_or_path=str(models["threads"].folder)),
            engines=Engines(policy=replace(shared, settings=SETTINGS_OF_SERVER)),
            rollout=ParallelThreads(samples=4, max_tokens=120, max_depth=2),
            credit=credit,
            selection=All(),
            trainer=Trainer(
                objective=ClippedPolicyGradient(), learning_rate=1e-3, layout=layout, measure_kl=False
            ),
            iterations=2,
            problems_per_iteration=4,
            context_length=CONTEXT,
            experiment_name="threads",
            directory=str(tmp_path),
        )
        run_iteration_loop(experiment, {})
        shared.started.clear()
    rows = directory_of(experiment).read_metrics()
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert row["threads/with_parallel"] > 0 and row["train/grad_norm"] > 0
        # In the second iteration, this shows that what the new weights sampled is trained as it was sampled.
        assert row["engine/logprob_gap_max"] <= 1e-4
