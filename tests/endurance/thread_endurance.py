"""Samples ten thousand answers with threads from one server, which is killed half-way.

    python tests/endurance/thread_endurance.py [--answers 10000] [--output FILE.md]

A model of known probabilities (tests/support/bigram_model.py) answers on the real server, first undisturbed
and then with SIGKILL for its engine process after half of the calls. Both passes have to give the same
answers, and to ask for each call once. It takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.bigram_model import MANY_THREADS, BigramModel, bigram_model  # noqa: E402
from tests.support.processes import engine_core_of  # noqa: E402
from treetune.engine.base import Engine, EngineLaunch  # noqa: E402
from treetune.engine.engine import VllmEngine, start_engine  # noqa: E402
from treetune.engine.journal import request_key  # noqa: E402
from treetune.engine.requests import Completion, OnResult, Request  # noqa: E402
from treetune.engine.settings import VllmSettings  # noqa: E402
from treetune.rollouts.context import AnswerSettings, Log, RolloutContext  # noqa: E402
from treetune.tasks.arithmetic import AdditionChain  # noqa: E402
from treetune.tasks.graders.pool import GraderPool  # noqa: E402
from treetune.threads.parallel_threads import ParallelThreads  # noqa: E402
from treetune.tree import answers_of  # noqa: E402
from treetune.vocabulary import Problem  # noqa: E402

TABLE = {**MANY_THREADS, "</Outline>": {"<Outline>": 1, "</Outlines>": 1}}
"""Every answer forks; threads write until they are cut."""

TASK = AdditionChain()
"""Its grader compares strings in this process; the rewards don't matter here."""

CONTEXT, SAMPLES = 512, 4
PAGE = """# Ten thousand answers with threads

`python tests/endurance/thread_endurance.py --answers {answers}`, on {cores} cores of {machine}.

| | answers | calls | asked for twice | server restarts | tokens | seconds | digest of all |
|---|---|---|---|---|---|---|---|
{rows}

A call is asked for twice if the rollout asks for it again; the engine itself repeats requests that the dead
server had not answered, with the same seed. Memory of the sampling process in MiB, by share of the answers
(they stay in it, and the second pass begins with those of the first):

| | {tenths} |
|---|{columns}
{memory}
"""


class WatchedEngine(Engine):
    """Passes requests on, counts them, and kills the server after the answer number `kill_at`."""

    def __init__(self, engine: VllmEngine, kill_at: int | None) -> None:
        self.engine, self.kill_at = engine, kill_at
        self.asked: Counter[str] = Counter()
        self.answered = 0

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.engine.version

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        def count_and_continue(index: int, completions: list[Completion]) -> Sequence[Request]:
            self.answered += 1
            if self.answered == self.kill_at:
                os.kill(
                    engine_core_of(self.engine._replicas[0].server.wait_until_ready().url), signal.SIGKILL
                )
            assert on_result is not None
            further = on_result(index, completions) or ()
            self.asked.update(request_key(request, self.version) for request in further)
            return further

        self.asked.update(request_key(request, self.version) for request in requests)
        return self.engine.generate(requests, count_and_continue)


def sample_all(engine: VllmEngine, model: BigramModel, answers: int, kill_at: int | None) -> dict[str, Any]:
    """Samples all problems once, and returns the page's columns and this process's memory at each tenth."""
    watched, process = WatchedEngine(engine, kill_at), psutil.Process()
    memory = [process.memory_info().rss >> 20]

    def progress(done: int, total: int) -> None:
        if done * 10 // total >= len(memory):
            memory.append(process.memory_info().rss >> 20)

    context = RolloutContext(
        task=TASK,
        engine=watched,
        grader=GraderPool(TASK.grader),
        codec=model.codec,
        seed=3,
        iteration=0,
        settings=AnswerSettings(CONTEXT),
        log=Log(progress=progress),
    )
    problems = [Problem(id=f"train/{i}", prompt="?", gold="") for i in range(answers // SAMPLES)]
    restarts, started = engine.restarts, time.monotonic()
    trees, _ = ParallelThreads(samples=SAMPLES, max_tokens=300, thread_tokens=8).run(context, problems)
    seconds, trajectories = time.monotonic() - started, answers_of(trees)
    content = []
    for answer in trajectories:
        segments = [(segment.token_ids, segment.logprobs, segment.branch) for segment in answer.segments]
        content.append((answer.id, segments, answer.finish_reason))
    return {
        "answers": len(trajectories),
        "calls": len(watched.asked),
        "asked twice": sum(count > 1 for count in watched.asked.values()),
        "restarts": engine.restarts - restarts,
        "tokens": sum(len(answer.response_ids) for answer in trajectories),
        "seconds": round(seconds),
        "digest": hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest(),
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = bigram_model(TABLE, Path(folder) / "model", CONTEXT)
        settings = VllmSettings(prefix_caching=True, omp_threads=1, start_timeout=300.0)
        logs = Path(folder) / "logs"
        launch = EngineLaunch(model.folder, logs, seed=0, context_length=CONTEXT, end_ids=model.codec.end_ids)
        engine = start_engine(settings, launch)
        assert isinstance(engine, VllmEngine)
        try:
            engine.wait_ready()
            whole = sample_all(engine, model, options.answers, None)
            killed = sample_all(engine, model, options.answers, whole["calls"] // 2)
        finally:
            engine.close()
    passes = {"undisturbed": whole, "killed half-way": killed}
    memory = {name: columns.pop("memory") for name, columns in passes.items()}
    rows = [f"| {name} | {' | '.join(map(str, columns.values()))} |" for name, columns in passes.items()]
    rows_of_memory = [f"| {name} | {' | '.join(map(str, mib))} |" for name, mib in memory.items()]
    text = PAGE.format(
        answers=options.answers,
        cores=os.cpu_count(),
        machine=platform.machine(),
        rows="\n".join(rows),
        tenths=" | ".join(f"{share} %" for share in range(0, 101, 10)),
        columns="---|" * 11,
        memory="\n".join(rows_of_memory),
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    if whole["digest"] != killed["digest"] or killed["asked twice"] or killed["restarts"] != 1:
        sys.exit("the answers of the two passes differ, or a call was asked for twice")


if __name__ == "__main__":
    main()
