"""Wrong configurations, hundreds of them, each made of a shipped one by a single change that can't be meant.

    python tests/endurance/mutations.py [--only CLASS] [--show] [--output docs/results/mutations.md]

Every one goes through `check_config`. It has to be refused, each mistake with its key (or its file, where
Jsonnet can't be read), the place that set it, and a remedy. The exit code is 1 where one is accepted, ends
in a traceback, or is refused with less. How the changes are made says why each is wrong: see the functions.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.endurance.wrong_configurations.combinations import combinations, lengths, presets  # noqa: E402
from tests.endurance.wrong_configurations.from_schema import keys, names, numbers, types  # noqa: E402
from tests.endurance.wrong_configurations.mutation import Mutation  # noqa: E402
from tests.endurance.wrong_configurations.texts import folder_names, jsonnet, starts, tables  # noqa: E402
from treetune.main import main as treetune  # noqa: E402

Verdict = Literal["refused", "vague", "traceback", "accepted"]


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    seconds: float
    message: str


CLASSES: Mapping[str, Callable[[], Iterator[Mutation]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        keys, types, names, numbers, jsonnet, combinations, presets, lengths, folder_names, tables, starts,
    )
}  # fmt: skip


def mutations(kinds: Sequence[str] = tuple(CLASSES)) -> list[Mutation]:
    return [mutation for kind in kinds for mutation in CLASSES[kind]()]


# Trying them


def outcome(mutation: Mutation, folder: Path) -> Outcome:
    """What `check_config` says, in this process. `folder` is an empty one of this mutation's own."""
    configs = []
    for name in mutation.configs.split(","):
        if name in mutation.files:
            content = mutation.files[name]
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
            name = str(folder / name)
        configs.append(name)
    arguments = ["--configs", ",".join(configs)]
    for text in mutation.overrides:
        arguments += ["--override", text]
    out, err = io.StringIO(), io.StringIO()
    started = time.perf_counter()
    with (
        contextlib.chdir(ROOT),
        _environment(mutation.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = treetune([*arguments, "check_config"])
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:
            return Outcome("traceback", time.perf_counter() - started, traceback.format_exc())
    seconds, told = time.perf_counter() - started, err.getvalue()
    if code == 0:
        return Outcome("accepted", seconds, out.getvalue())
    if "Traceback" in told:
        return Outcome("traceback", seconds, told)
    return Outcome("refused" if is_clear(told) else "vague", seconds, told)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("APP_")]:
        del os.environ[name]
    os.environ.update({name: value for name, value in changes.items() if "\x00" not in value})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def is_clear(told: str) -> bool:
    """Whether every mistake has a key or a file, the place that made it, and a remedy."""
    text = re.sub(r"(?m)^note: .*\n(      .*\n)*", "", told.strip() + "\n").strip()
    head, *issues = re.split(r"\n\n", text)
    return head.startswith("wrong configuration") and bool(issues) and all(map(_is_clear, issues))


def _is_clear(issue: str) -> bool:
    key, colon, _ = issue.partition(": ")
    is_place = re.search(r"sonnet$|:\d+:\d+$|^--", key)
    return bool(colon and "\n  remedy  " in issue and (is_place or "\n  where   " in issue))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(CLASSES), help="one class of mutations")
    parser.add_argument("--output", type=Path, help="a Markdown file for the counts")
    parser.add_argument("--show", action="store_true", help="every message")
    options = parser.parse_args()
    tried: list[tuple[Mutation, Outcome]] = []
    for mutation in mutations([options.only] if options.only else tuple(CLASSES)):
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(mutation, Path(folder))
        tried.append((mutation, found))
        if options.show or found.verdict != "refused":
            print(
                f"== {found.verdict}: {mutation.kind}: {mutation.label}\n{found.message.strip()}\n",
                flush=True,
            )
    text = summary(tried)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0 if all(found.verdict == "refused" for _, found in tried) else 1


def summary(tried: Sequence[tuple[Mutation, Outcome]]) -> str:
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    counts = Counter((mutation.kind, found.verdict) for mutation, found in tried)
    kinds = list(dict.fromkeys(mutation.kind for mutation, _ in tried))
    seconds = sorted(found.seconds for _, found in tried)
    lines = [
        "# Wrong configurations",
        "",
        "Single changes of shipped configurations, each of which can't be meant, through `check_config`:",
        "`python tests/endurance/mutations.py --output docs/results/mutations.md`. *Refused* is with the key",
        "(or file), the place that set it, and a remedy, for every mistake that is told; *vague* has less.",
        "",
        "| class | " + " | ".join([*verdicts, "all"]) + " |",
        "|---" + "|---:" * (len(verdicts) + 1) + "|",
    ]
    for kind in kinds:
        row = [counts[kind, verdict] for verdict in verdicts]
        lines.append(f"| {kind} | " + " | ".join(map(str, [*row, sum(row)])) + " |")
    row = [sum(counts[kind, verdict] for kind in kinds) for verdict in verdicts]
    lines.append("| **all** | " + " | ".join(f"**{count}**" for count in [*row, sum(row)]) + " |")
    middle, last = seconds[len(seconds) // 2], seconds[-1]
    lines += [
        "",
        f"One check took {middle:.2f} s in the middle and {last:.2f} s at most, in one process.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
