"""What a slow environment costs: throughput over the bound that engine and slowest answer set.

    python benchmarks/slow_environments.py [--answers 512] [--rows 40] [--simulate] [--output FILE.md]

The engine stands in for a server: each of `--rows` sequences gets a token every `--step` seconds, whatever
the machine does meanwhile. Turns take 0, 50 or 500 ms or 2 s, and one in twenty hangs until its deadline. The
bound is the longer of two: the same answers in an environment that takes no time, and the slowest answer by
itself.
"""

from __future__ import annotations

import argparse
import heapq
import queue
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fake_engine import FakeEngine  # noqa: E402
from tests.support.contexts import context_of  # noqa: E402
from tests.support.uneven_environment import Uneven  # noqa: E402
from treetune.domains.environments.base import EnvironmentTask  # noqa: E402
from treetune.domains.environments.pool import EnvironmentPool  # noqa: E402
from treetune.domains.multi_turn import MultiTurn  # noqa: E402
from treetune.engine.base import Completion, Later, OnResult, Request  # noqa: E402
from treetune.tasks.graders.pool import GraderPool  # noqa: E402
from treetune.tree import answers_of  # noqa: E402
from treetune.vocabulary import TextCodec, Trajectory  # noqa: E402

LETTERS = "0123456789?+\n"
END = len(LETTERS)
CODEC = TextCodec(
    encode=lambda text: [LETTERS.index(letter) for letter in text],
    decode=lambda ids: "".join(LETTERS[one] for one in ids if one != END),
    eos_id=END,
)


class MeteredEngine(FakeEngine):
    """Draws at once, and hands out as late as an engine would that gives each of `rows` sequences a token
    every `step` seconds."""

    def __init__(self, rows: int, step: float) -> None:
        super().__init__(lambda ids, version: [0.1] * 10 + [0.0] * 4, END)
        self.at_once, self._step = rows, step

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        waiting: deque[tuple[int, Request]] = deque()
        working: list[tuple[float, int, list[Completion]]] = []
        ready: queue.SimpleQueue[Later] = queue.SimpleQueue()
        promised = 0

        def ask(more: Sequence[Request | Later]) -> None:
            nonlocal promised
            for one in reversed(more):
                if isinstance(one, Later):
                    promised += 1
                    one.ready.add_done_callback(lambda _, one=one: ready.put(one))
                else:
                    waiting.appendleft((len(results), one))
                    results.append([])

        ask(requests)
        while waiting or working or promised:
            while waiting and len(working) < self.at_once:
                index, request = waiting.popleft()
                sampled = self._sample(tuple(request.prompt_ids.tolist()), request.seed, request.sampling)
                self.tokens += len(sampled.token_ids)
                until = time.monotonic() + self._step * len(sampled.token_ids)
                heapq.heappush(working, (until, index, [sampled]))
            try:
                left = working[0][0] - time.monotonic() if working else None
                later = ready.get(timeout=None if left is None else max(0.0, left))
                promised -= 1
                ask(later.requests())
            except queue.Empty:
                _, index, results[index] = heapq.heappop(working)
                ask((on_result and on_result(index, results[index])) or ())
        return results


def simulated(
    jobs: Sequence[Sequence[tuple[float, float]]], rows: int, in_flight: int, *, in_turn: bool = False
) -> float:
    """Returns when the last of these answers ends, each turns of so many seconds in the engine and in the
    environment, where nothing takes time but these: begun answers go first, or each request `in_turn`."""
    coming, clock, sampling = iter(range(len(jobs))), 0.0, 0
    waiting = deque((next(coming), 0) for _ in range(min(in_flight, len(jobs))))
    events: list[tuple[float, int, int, bool]] = []
    while waiting or events:
        while waiting and sampling < rows:
            job, turn = waiting.popleft()
            sampling += 1
            heapq.heappush(events, (clock + jobs[job][turn][0], job, turn, True))
        clock, job, turn, sampled = heapq.heappop(events)
        if sampled:
            sampling -= 1
            heapq.heappush(events, (clock + jobs[job][turn][1], job, turn, False))
        elif turn + 1 < len(jobs[job]):
            (waiting.append if in_turn else waiting.appendleft)((job, turn + 1))
        elif (following := next(coming, None)) is not None:
            waiting.append((following, 0))
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.02, help="seconds of the engine for a token")
    parser.add_argument("--tokens", type=int, default=16, help="of each turn")
    parser.add_argument("--in-flight", type=int, help="answers; by default what the rollout has")
    parser.add_argument("--deadline", type=float, default=5.0)
    parser.add_argument("--simulate", action="store_true", help="in simulated time, by order alone")
    parser.add_argument("--output", type=Path, help="also write the table there")
    options = parser.parse_args()
    turns = 4

    def rolled(waits: bool) -> tuple[float, int, list[Trajectory]]:
        game = Uneven(turns=turns, waits=waits, deadline=options.deadline)
        sizes = {"train_size": options.answers, "validation_size": 1, "test_size": 1}
        task = EnvironmentTask(environment=game, **sizes)
        rollout = MultiTurn(
            samples=1,
            max_turns=turns,
            turn_tokens=options.tokens,
            max_tokens=1000,
            in_flight=options.in_flight,
        )
        engine = MeteredEngine(options.rows, options.step)
        given = {"context_length": 2000, "sampling": rollout.sampling}
        with EnvironmentPool() as pool, GraderPool(task.grader) as grader:
            context = context_of(task, engine, grader, CODEC, services=[pool, rollout], **given)
            begun = time.monotonic()
            trees, _ = rollout.run(context, task.problems("train"))
            return time.monotonic() - begun, engine.tokens, answers_of(trees)

    if options.simulate:
        options.step, step = 0.0, options.step
    alone, tokens, expected = rolled(waits=False)
    game = Uneven(deadline=options.deadline)
    slowest, in_environments = 0.0, 0.0
    if options.simulate:
        jobs = []
        for answer in expected:
            lengths = [len(one.token_ids) * step for one in answer.segments if one.origin == "sampled"]
            taken = [game.seconds(int(answer.problem.gold), turn + 1) for turn in range(len(lengths))]
            spent = [options.deadline if one is None else one for one in taken]
            jobs.append(list(zip(lengths, spent, strict=True)))
        longest = sorted(jobs, key=lambda job: -sum(map(sum, job)))
        few = options.in_flight or 4 * options.rows
        alone = simulated([[(own, 0.0) for own, _ in job] for job in jobs], options.rows, few)
        bound = max(alone, sum(map(sum, longest[0])))
        ends = {
            f"{few} in flight, begun answers first": simulated(jobs, options.rows, few),
            "all in flight, in turn": simulated(jobs, options.rows, len(jobs), in_turn=True),
            "the longest answers first": simulated(longest, options.rows, len(jobs)),
        }
        print(f"engine alone {alone:.1f} s, bound {bound:.1f} s")
        print("\n".join(f"{bound / end:.2f} of it: {name}" for name, end in ends.items()))
        return
    for answer in expected:
        played = range(1, len(answer.step_ends) + 1)
        taken = [game.seconds(int(answer.problem.gold), turn) for turn in played]
        spent = sum(options.deadline if one is None else one for one in taken)
        in_environments += spent
        slowest = max(slowest, spent + len(played) * options.tokens * options.step)
    seconds, again, answers = rolled(waits=True)
    same = [one.response_ids.tolist() for one in answers] == [one.response_ids.tolist() for one in expected]
    assert again == tokens and same, "the same answers, however long their environments take"
    bound = max(alone, slowest)
    hung = sum(one.grade.outcome == "timeout" for one in answers)
    page = f"""| | |
|---|---|
| answers, turns, tokens | {len(answers)}, {sum(len(one.step_ends) for one in answers)}, {tokens} |
| answers that hung | {hung} |
| seconds in environments, all together | {in_environments:.0f} |
| engine alone | {alone:.1f} s, {tokens / alone:.0f} tokens/s |
| slowest answer | {slowest:.1f} s |
| as it was | {seconds:.1f} s, {tokens / seconds:.0f} tokens/s |
| over the bound | {bound / seconds:.2f} |
"""
    print(page)
    if options.output is not None:
        options.output.write_text(page)


if __name__ == "__main__":
    main()
