"""300 hostile answers (HTML, scripts, endless nesting, megabytes), and an experiment that sampled them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from tests.view.recorded import begin_run, record_evaluation, record_iteration, trajectory
from tests.view.report.synthetic import CODEC
from treetune.rollouts.storage import TOKENS, write_tokens
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import digest_of, read_record, write_record
from treetune.vocabulary import Segment, TextCodec, Trajectory

_HERE = Path(__file__).parent
KINDS: Sequence[str] = (
    *map(json.loads, (_HERE / "hostile_texts.jsonl").read_text().splitlines()),
    "> " * 200 + "deep",
    "- " * 200 + "deep",
    "*" * 5000 + "a" + "*" * 5000,
    "[" * 5000 + "]" * 5000,
    "Z\u0351\u036b\u0343\u036a\u0302" * 50,
    "$" + "{" * 900 + "x" + "}" * 900 + "$",
    "$" + "\\sqrt{" * 200 + "x" + "}" * 200 + "$",
    "\\[" + "\\frac{1}{" * 150 + "1" + "}" * 150 + "\\]",
    "a" * 100_000,
    " " * 100_000,
    "\n" * 20_000,
    "<" * 50_000,
    "&" * 50_000,
    "\u202e" * 20_000,
    "😀" * 20_000,
    "$x$" * 5_000,
)

COUNT = 300
MEGABYTE = "<b>one line</b> " * 65_536


def texts() -> list[str]:
    """Builds all 300: each kind alone, a megabyte on one line, and kinds in the midst of others."""
    hostile_texts = [*KINDS, MEGABYTE]
    short = [kind for kind in KINDS if len(kind) < 2000]
    number = 0
    while len(hostile_texts) < COUNT:
        first, second = short[number % len(short)], short[(7 * number + 3) % len(short)]
        hostile_texts.append(
            f"Step {number}: {first}\n\n**{second}**\n\n#### \\boxed{{{number}}} {first}{second}"
        )
        number += 1
    return hostile_texts


def hostile_answer(number: int, text: str) -> Trajectory:
    """Builds an answer with a hostile text as one token, as its problem and in its grade."""
    answer = trajectory(number, 0, "x", correct=bool(number % 2))
    grade = dataclasses.replace(answer.grade, extracted=text, message=text)
    problem = dataclasses.replace(
        answer.problem, id=f"train/{number}", prompt=text, gold=text, data={"note": text}, domain=text[:50]
    )
    segment = Segment([256 + number, 256 + number], logprobs=[-0.5, -0.1], policy_version=0)
    return dataclasses.replace(
        answer, problem=problem, segments=(segment,), text=text, grade=grade, step_ends=(1, 2)
    )


def hostile_run(path: Path, answers: Sequence[str] = ()) -> ExperimentDirectory:
    """Writes an experiment of one iteration and one evaluation, with `answers` or all 300."""
    answers = answers or texts()
    run = begin_run(path, planned=1)
    codec = TextCodec(
        encode=CODEC.encode,
        decode=lambda ids: "".join(answers[i - 256] if i >= 256 else chr(i) for i in map(int, ids)),
        eos_id=3,
    )
    write_tokens(path / TOKENS, codec, 256 + len(answers))
    record_iteration(run, 0, [hostile_answer(number, text) for number, text in enumerate(answers)])
    record_evaluation(run, 1)
    lines = [
        {"problem": f"v/{n}", "sample": 0, "prompt": text, "gold": text, "text": text, "reward": 0.0,
         "outcome": "ok", "extracted": text, "finish_reason": "stop", "tokens": 2}
        for n, text in enumerate(answers)
    ]  # fmt: skip
    half = "half a character \ud800"
    lines.append(
        lines[-1] | {"problem": f"v/{len(answers)}", "text": half, "extracted": half, "prompt": half}
    )
    answers_file = run.evaluation_folder(1, "validation") / "answers.jsonl"
    answers_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = answers_file.with_name("summary.json")
    write_record(summary, read_record(summary, "") | {"answers": digest_of(answers_file)})
    return run
