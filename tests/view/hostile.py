"""300 answers that try to be more than text, and an experiment that sampled them."""

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
    """All 300: each kind alone, then in the midst of others, and a megabyte on one line."""
    found = [*KINDS, MEGABYTE]
    short = [kind for kind in KINDS if len(kind) < 2000]
    number = 0
    while len(found) < COUNT:
        one, other = short[number % len(short)], short[(7 * number + 3) % len(short)]
        found.append(f"Step {number}: {one}\n\n**{other}**\n\n#### \\boxed{{{number}}} {one}{other}")
        number += 1
    return found


def hostile_answer(number: int, text: str) -> Trajectory:
    """An answer that says the text in one token, to a problem that asks it, graded with it."""
    made = trajectory(number, 0, "x", correct=bool(number % 2))
    grade = dataclasses.replace(made.grade, extracted=text, message=text)
    problem = dataclasses.replace(
        made.problem, id=f"train/{number}", prompt=text, gold=text, data={"note": text}, domain=text[:50]
    )
    segment = Segment([256 + number, 256 + number], logprobs=[-0.5, -0.1], policy_version=0)
    return dataclasses.replace(
        made, problem=problem, segments=(segment,), text=text, grade=grade, step_ends=(1, 2)
    )


def hostile_run(path: Path, said: Sequence[str] = ()) -> ExperimentDirectory:
    """An experiment of one iteration and one evaluation, with these answers or all 300."""
    said = said or texts()
    run = begin_run(path, planned=1)
    codec = TextCodec(
        encode=CODEC.encode,
        decode=lambda ids: "".join(said[i - 256] if i >= 256 else chr(i) for i in map(int, ids)),
        eos_id=3,
    )
    write_tokens(path / TOKENS, codec, 256 + len(said))
    record_iteration(run, 0, [hostile_answer(number, text) for number, text in enumerate(said)])
    record_evaluation(run, 1)
    lines = [
        {"problem": f"v/{n}", "sample": 0, "prompt": text, "gold": text, "text": text, "reward": 0.0,
         "outcome": "ok", "extracted": text, "finish_reason": "stop", "tokens": 2}
        for n, text in enumerate(said)
    ]  # fmt: skip
    half = "half a character \ud800"
    lines.append(lines[-1] | {"problem": f"v/{len(said)}", "text": half, "extracted": half, "prompt": half})
    place = run.evaluation(1, "validation") / "answers.jsonl"
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = place.with_name("summary.json")
    write_record(summary, read_record(summary, "") | {"answers": digest_of(place)})
    return run
