"""Ten thousand answers with threads, one after the other through one server, which is killed on the way.

    python tests/endurance/thread_endurance.py [--answers 10000] [--output FILE.md]

A model whose probabilities are known (tests/support/bigram_model.py) answers on the real server, first
undisturbed and then with its engine process killed by SIGKILL once half of the calls are in. Both have to
give the same answers and to ask for each call once. Some ten minutes on two cores.
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
"""Its grader compares strings in this process: what an answer earns is not what is looked at."""

CONTEXT, SAMPLES = 512, 4
PAGE = """# Ten thousand answers with threads

`python tests/endurance/thread_endurance.py --answers {answers}`, on {cores} cores of {machine}.

| | answers | calls | asked for twice | server restarts | tokens | seconds | digest of all |
|---|---|---|---|---|---|---|---|
{rows}

A call is asked for twice if the rollout asks for it again; what the dead server had not answered is sent
again below it, with the same seed. Memory of the process that samples, in MiB, when so many of the answers
were there (they stay in it; the second pass begins with the first one's):

| | {tenths} |
|---|{columns}
{memory}
"""


class Watched(Engine):
    """Passes everything on, counts what is asked, and kills the server behind the call number `kill_at`."""

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
        def noted(index: int, completions: list[Completion]) -> Sequence[Request]:
            self.answered += 1
            if self.answered == self.kill_at:
                os.kill(engine_core_of(self.engine._replicas[0].server.ready().url), signal.SIGKILL)
            assert on_result is not None
            further = on_result(index, completions) or ()
            self.asked.update(request_key(request, self.version) for request in further)
            return further

        self.asked.update(request_key(request, self.version) for request in requests)
        return self.engine.generate(requests, noted)


def passed(engine: VllmEngine, model: BigramModel, answers: int, kill_at: int | None) -> dict[str, Any]:
    """One pass over all problems, by the columns of the page, and this process's memory at each tenth."""
    watched, process = Watched(engine, kill_at), psutil.Process()
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
    seconds, found = time.monotonic() - started, answers_of(trees)
    written = [
        (one.id, [(s.token_ids, s.logprobs, s.branch) for s in one.segments], one.finish_reason)
        for one in found
    ]
    return {
        "answers": len(found),
        "calls": len(watched.asked),
        "asked twice": sum(count > 1 for count in watched.asked.values()),
        "restarts": engine.restarts - restarts,
        "tokens": sum(len(one.response_ids) for one in found),
        "seconds": round(seconds),
        "digest": hashlib.blake2b(repr(written).encode(), digest_size=8).hexdigest(),
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
            whole = passed(engine, model, options.answers, None)
            killed = passed(engine, model, options.answers, whole["calls"] // 2)
        finally:
            engine.close()
    both = {"undisturbed": whole, "killed half-way": killed}
    memory = {name: one.pop("memory") for name, one in both.items()}
    text = PAGE.format(
        answers=options.answers,
        cores=os.cpu_count(),
        machine=platform.machine(),
        rows="\n".join(f"| {name} | {' | '.join(map(str, one.values()))} |" for name, one in both.items()),
        tenths=" | ".join(f"{share} %" for share in range(0, 101, 10)),
        columns="---|" * 11,
        memory="\n".join(f"| {name} | {' | '.join(map(str, one))} |" for name, one in memory.items()),
    )
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    if whole["digest"] != killed["digest"] or killed["asked twice"] or killed["restarts"] != 1:
        sys.exit("the answers of the two passes differ, or a call was asked for twice")


if __name__ == "__main__":
    main()
