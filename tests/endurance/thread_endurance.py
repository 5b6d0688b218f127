"""Ten thousand answers with threads, one after the other through one server, which is killed on the way.

    python tests/endurance/thread_endurance.py [--answers 10000] [--output docs/results/thread_endurance.md]

A model whose probabilities are known (tests/support/bigram_model.py) answers on the real
server, first undisturbed and then with its engine process killed by SIGKILL once half of the calls are
in. Told are: whether both gave the same answers, how often each call was asked for, and how this
process's memory grew. Some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.bigram_model import (  # noqa: E402
    MANY_THREADS,
    BigramModel,
    bigram_model,
)
from tests.support.processes import process_named  # noqa: E402
from treetune.inference.base import Completion, Engine, EngineLaunch, OnResult, Request  # noqa: E402
from treetune.inference.engine import VllmEngine, start_engine  # noqa: E402
from treetune.inference.journal import request_key  # noqa: E402
from treetune.inference.settings import VllmSettings  # noqa: E402
from treetune.rollouts.context import AnswerSettings, Log, RolloutContext  # noqa: E402
from treetune.tasks.arithmetic import AdditionChain  # noqa: E402
from treetune.tasks.graders.pool import GraderPool  # noqa: E402
from treetune.tree import answers_of  # noqa: E402
from treetune.vocabulary import Problem  # noqa: E402
from treetune_threads.parallel_threads import ParallelThreads  # noqa: E402

TABLE = {**MANY_THREADS, "</Outline>": {"<Outline>": 1, "</Outlines>": 1}}
"""Every answer forks; threads write until they are cut."""

TASK = AdditionChain()
"""Its grader compares strings in this process: what an answer earns is not what is looked at."""

CONTEXT = 512
SAMPLES = 4


@dataclass
class Watched(Engine):
    """Passes everything on, counts what is asked, and kills the server behind the call number `kill_at`."""

    engine: VllmEngine
    kill_at: int | None = None
    asked: Counter[str] = field(default_factory=Counter)
    answered: int = 0

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.engine.version

    def generate(
        self, requests: Sequence[Request], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        def told(index: int, completions: list[Completion]) -> Sequence[Request]:
            self.answered += 1
            if self.answered == self.kill_at:
                os.kill(process_named("VLLM::EngineCore"), signal.SIGKILL)
            assert on_result is not None
            further = on_result(index, completions) or ()
            self.asked.update(request_key(request, self.version) for request in further)
            return further

        self.asked.update(request_key(request, self.version) for request in requests)
        return self.engine.generate(requests, told)


@dataclass(frozen=True)
class Passed:
    """One pass over all problems."""

    answers: int
    digest: str
    calls: int
    asked_twice: int
    restarts: int
    seconds: float
    tokens: int
    memory_mib: list[float]
    """Before, and when each tenth of the answers was there."""


def passed(engine: VllmEngine, model: BigramModel, answers: int, kill_at: int | None) -> Passed:
    watched = Watched(engine, kill_at)
    memory = [rss_mib()]

    def progress(done: int, total: int) -> None:
        if done * 10 // total >= len(memory):
            memory.append(rss_mib())

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
    trajectories = answers_of(trees)
    seconds = time.monotonic() - started
    written = [
        (t.id, [(s.token_ids, s.logprobs, s.branch) for s in t.segments], t.finish_reason)
        for t in trajectories
    ]
    return Passed(
        answers=len(trajectories),
        digest=hashlib.blake2b(repr(written).encode(), digest_size=8).hexdigest(),
        calls=len(watched.asked),
        asked_twice=sum(count > 1 for count in watched.asked.values()),
        restarts=engine.restarts - restarts,
        seconds=seconds,
        tokens=sum(len(t.response_ids) for t in trajectories),
        memory_mib=memory,
    )


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def report(undisturbed: Passed, killed: Passed) -> str:
    rows = [
        f"| {name} | {one.answers:,} | {one.calls:,} | {one.asked_twice} | {one.restarts} | {one.tokens:,} |"
        f" {one.seconds:.0f} | {one.digest} |"
        for name, one in (("undisturbed", undisturbed), ("killed half-way", killed))
    ]
    tenths = " | ".join(f"{share} %" for share in range(0, 101, 10))
    memory = [
        f"| {name} | " + " | ".join(f"{mib:.0f}" for mib in one.memory_mib) + " |"
        for name, one in (("undisturbed", undisturbed), ("killed half-way", killed))
    ]
    return "\n".join(
        [
            "# Ten thousand answers with threads",
            "",
            f"`python tests/endurance/thread_endurance.py --answers {undisturbed.answers}`, on"
            f" {os.cpu_count()} cores of {platform.machine()}.",
            "",
            "| | answers | calls | asked for twice | server restarts | tokens | seconds | digest of all |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "A call is asked for twice if the rollout asks for it again; what the dead server had not",
            "answered is sent again below it, with the same seed. Memory of the process that samples, in",
            "MiB, when so many of the answers were there (they stay in it; the second pass begins with the",
            "first one's):",
            "",
            f"| | {tenths} |",
            "|---|" + "---|" * 11,
            *memory,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = bigram_model(TABLE, Path(folder) / "model", CONTEXT)
        settings = VllmSettings(prefix_caching=True, omp_threads=1, start_timeout=300.0)
        logs = Path(folder) / "logs"
        launch = EngineLaunch(model.folder, logs, seed=0, context_length=CONTEXT, end_ids=model.codec.end_ids)
        engine = start_engine(settings, launch)
        assert isinstance(engine, VllmEngine)
        try:
            engine.wait_ready()
            undisturbed = passed(engine, model, arguments.answers, None)
            killed = passed(engine, model, arguments.answers, undisturbed.calls // 2)
        finally:
            engine.close()
    text = report(undisturbed, killed)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    if undisturbed.digest != killed.digest or killed.asked_twice or killed.restarts != 1:
        sys.exit("the answers of the two passes differ, or a call was asked for twice")


if __name__ == "__main__":
    main()
