"""Tries a thousand wrong configurations, each a shipped one with a single change that can't be meant.

    python tests/endurance/wrong_configurations.py [--only CLASS] [--show] [--output PAGE.md]

Each is given to `check_config`, which has to refuse it: every mistake with its key (or its file, where
Jsonnet can't be read), the line that set it, and a remedy. The exit code is 1 if one is accepted, ends in a
traceback, or is refused with less. Changes that are written by hand are in `wrong_configurations.json`:
parts, lengths and columns that are right one by one and don't go together, and texts that Jsonnet can't
read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import annotated_types

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import treetune.parts  # noqa: E402, F401  (registers them)
from treetune.config import schema  # noqa: E402
from treetune.config.jsonnet import load  # noqa: E402
from treetune.config.layers import CONFIGS_FOLDER, find_configuration_files  # noqa: E402
from treetune.main import main as run_treetune  # noqa: E402
from treetune.runtime.base import Runtime  # noqa: E402

SFT, GRPO, PPO, VINEPPO, RESTEM, DPO = (
    f"quickstart/{name}.jsonnet" for name in ("sft", "grpo", "ppo", "vineppo", "restem", "dpo_positive")
)
COUNTDOWN = "countdown/tiny_grpo.jsonnet"
TABLE = "tables/quickstart_methods.jsonnet"
MECHANICAL = (VINEPPO, "quickstart/dapo.jsonnet", DPO, COUNTDOWN)
"""The configurations whose types, names and numbers are changed; together they have every kind of part."""

WRITTEN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

Verdict = Literal["refused", "vague", "traceback", "accepted"]


@dataclass(frozen=True)
class Mutation:
    """A wrong configuration. `files` are further configurations, by name, that are written for it."""

    kind: str
    label: str
    configs: str
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    seconds: float
    message: str


# Mistakes that follow from the schema


class ConfigKey(NamedTuple):
    """A key of a configuration that can be overridden, with its value and its annotation in the schema."""

    path: tuple[str, ...]
    value: Any
    annotation: Any

    def set_to(self, text: str, *below: str, kind: str, configs: str) -> Mutation:
        """Sets the key, or one below it, to another value, which is Jsonnet."""
        path = (*self.path, *below)
        return Mutation(kind, f"{'.'.join(path)} is {text}", configs, (override(path, text),))


def override(path: Sequence[str], value: str) -> str:
    """Returns an override such as ``{trainer+: {learning_rate: …}}``."""
    text = value
    for depth, name in enumerate(reversed(path)):
        text = f"{{{json.dumps(name)}{'+' if depth else ''}: {text}}}"
    return text


def keys_of(configs: str) -> list[ConfigKey]:
    """Finds every key that can be overridden: all that are not in a list."""

    def keys_below(annotation: Any, data: dict[str, Any], path: tuple[str, ...]) -> Iterator[ConfigKey]:
        part = class_of(annotation, data)
        for name, key in schema.keys_of(part).items() if part else ():
            if name in data:
                yield ConfigKey((*path, name), data[name], key.annotation)
                if isinstance(data[name], dict):
                    yield from keys_below(
                        schema.split_constraints(key.annotation)[0], data[name], (*path, name)
                    )

    return list(keys_below(Runtime, load([configs], environ={}).data, ()))


def changeable_keys() -> Iterator[tuple[str, ConfigKey]]:
    for configs in MECHANICAL:
        for key in keys_of(configs):
            yield configs, key


def class_of(annotation: Any, data: Mapping[str, Any]) -> type | None:
    for member in schema.alternatives_of(annotation):
        if schema.is_family(member):
            return schema.registered_parts(member).get(data.get("type", ""))
        if schema.is_plain_part(member):
            return member
    return None


def misspelt(name: str) -> str:
    """Exchanges two letters in the middle of a name, or doubles one where they are the same."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return swapped if swapped != name else name[:middle] + name[middle - 1] + name[middle:]


def keys() -> Iterator[Mutation]:
    """Sets keys that an object doesn't have: misspelt ones, an invented one, and keys of other objects."""
    for configs in (VINEPPO, COUNTDOWN):
        config_keys = keys_of(configs)
        for key in config_keys:
            if len(key.path[-1]) > 3:
                wrong = key._replace(path=(*key.path[:-1], misspelt(key.path[-1])))
                yield wrong.set_to(json.dumps(key.value), kind="keys", configs=configs)
        parts = [key for key in config_keys if isinstance(key.value, dict) and "type" in key.value]
        parts.sort(key=lambda part: part.path)
        for part in parts:
            yield part.set_to("1", "colour", kind="keys", configs=configs)
        by_name = {key.path[-1]: key for key in config_keys}
        for part, (name, key) in itertools.product(parts, sorted(by_name.items())):
            owner = class_of(schema.split_constraints(part.annotation)[0], part.value)
            siblings = {other.path[-1] for other in config_keys if other.path[:-1] == part.path}
            is_foreign = owner is not None and name not in {*siblings, *schema.keys_of(owner)}
            # There are many such pairs: about a seventh of them is tried.
            if is_foreign and (len(name) + len(part.path[-1])) % 7 == 0:
                yield part.set_to(json.dumps(key.value), name, kind="keys", configs=configs)


def types() -> Iterator[Mutation]:
    """Sets keys to a value of another type."""
    for configs, key in changeable_keys():
        description = schema.describe_type(key.annotation)
        wrong = None
        if isinstance(key.value, bool):
            wrong = "'yes'"
        elif isinstance(key.value, int | float):
            wrong = "'many'" if "a string" not in description else "[1]"
        elif isinstance(key.value, str) and key.path[-1] != "type":
            wrong = "{}" if "number" in description else "7"
        elif isinstance(key.value, dict | list):
            wrong = "7"
        if wrong is not None and description != "anything":
            yield key.set_to(wrong, kind="types", configs=configs)


def names() -> Iterator[Mutation]:
    """Sets names of parts, and choices among a few names, to an unknown name; leaves a part's name out."""
    for configs, key in changeable_keys():
        if isinstance(key.value, dict) and "type" in key.value:
            unknown = json.dumps(misspelt(key.value["type"]) + "x")
            yield key.set_to(unknown, "type", kind="names", configs=configs)
            yield key.set_to('{"size": 1}', kind="names", configs=configs)
        if any(
            get_origin(member) is Literal
            for member in schema.alternatives_of(schema.split_constraints(key.annotation)[0])
        ):
            yield key.set_to('"neither"', kind="names", configs=configs)


def numbers() -> Iterator[Mutation]:
    """Sets numbers beyond the bound that their key declares, and counts to a fraction."""
    for configs, key in changeable_keys():
        if isinstance(key.value, int | float) and not isinstance(key.value, bool):
            beyond = set[float]()
            for member in schema.alternatives_of(key.annotation):
                for bound in schema.split_constraints(member)[1]:
                    match bound:
                        case annotated_types.Gt(gt=value) | annotated_types.Lt(lt=value):
                            beyond.add(float(value))
                        case annotated_types.Ge(ge=value):
                            beyond.add(value - 1)
                        case annotated_types.Le(le=value):
                            beyond.add(value + 1)
            for wrong in sorted(beyond):
                yield key.set_to(repr(wrong), kind="numbers", configs=configs)
            if schema.describe_type(key.annotation).startswith("a whole number"):
                yield key.set_to("2.5", kind="numbers", configs=configs)


# Written by hand


def written_by_hand(kind: str) -> Iterator[Mutation]:
    for configs, changes in WRITTEN[kind].items():
        for change in changes:
            name = Path(configs.split(",")[-1]).stem
            yield Mutation(kind, f"{name} {change}", configs, (change,))


def combinations() -> Iterator[Mutation]:
    return written_by_hand("combinations")


def lengths() -> Iterator[Mutation]:
    return written_by_hand("lengths")


def tables() -> Iterator[Mutation]:
    return written_by_hand("tables")


def presets() -> Iterator[Mutation]:
    """Combines presets wrongly: with another kind of experiment, before the experiment, or two of them."""
    all_presets = [path.stem for path in find_configuration_files(CONFIGS_FOLDER / "presets")]
    on_a_corpus = "greedy_jsd"
    sampling = [name for name in all_presets if name != on_a_corpus]
    combined = [f"{SFT},presets/{name}.jsonnet" for name in sampling]
    combined += [f"{configs},presets/{on_a_corpus}.jsonnet" for configs in (VINEPPO, PPO, RESTEM, DPO)]
    combined += [f"presets/{name}.jsonnet,{SFT if name == on_a_corpus else PPO}" for name in all_presets]
    # Every seventh of the many pairs.
    for first, second in itertools.islice(itertools.permutations(sampling, 2), 0, None, 7):
        combined.append(f"{PPO},presets/{first}.jsonnet,presets/{second}.jsonnet")
    for configs in combined:
        yield Mutation("presets", configs, configs)


def jsonnet() -> Iterator[Mutation]:
    """Gives texts that Jsonnet can't evaluate, or that are no object."""
    mine = f"{VINEPPO},mine.jsonnet"
    for name, text in WRITTEN["jsonnet"].items():
        yield Mutation("jsonnet", f"{name} (override)", VINEPPO, (text,))
        yield Mutation("jsonnet", f"{name} (file)", mine, files={"mine.jsonnet": text})
    yield Mutation("jsonnet", "not UTF-8", mine, files={"mine.jsonnet": b"{ x: '\xff' }"})


def folder_names() -> Iterator[Mutation]:
    """Sets names that folders can't have, or that lead out of the experiments' folder."""
    for name in [
        "", ".", "..", "/", "/tmp/x", "../x", "a/../../../x", "a/..", "a//b", "a/", "a/./b", " ", "a\nb",
        "a\tb", "a\x00b", "x" * 300, "a/" + "x" * 300, "ü" * 150, "a/ /b", "\u202ea",
    ]:  # fmt: skip
        label, text = repr(name if len(name) < 30 else name[:9] + "…"), json.dumps(name)
        change = override(["experiment_name"], text)
        yield Mutation("folder names", f"experiment {label}", GRPO, (change,))
        if name:  # a set with an empty name has the name of its split
            change = f"{{evaluation+: {{sets: [{{split: 'test', name: {text}}}]}}}}"
            yield Mutation("folder names", f"set {label}", GRPO, (change,))
    for name in ["", "a/b", "../x", ".hidden", "a\nb"]:
        yield Mutation("folder names", f"table {name!r}", TABLE, (override(["name"], json.dumps(name)),))
    for name in ["/tmp/x", "../x", "x" * 300]:
        environ = {"APP_EXPERIMENT_NAME": name}
        yield Mutation("folder names", f"APP_EXPERIMENT_NAME {name[:9]!r}", GRPO, environ=environ)


def starts() -> Iterator[Mutation]:
    """Starts with wrong files and wrong variables."""
    for label, configs in {
        "no such file": "quickstart/vinepo.jsonnet",
        "no such second file": f"{VINEPPO},presets/grop.jsonnet",
        "a folder": "quickstart",
        "no file at all": ",",
        "a fragment alone": "credit/group.jsonnet",
        "a task alone": "tasks/math.jsonnet",
        "a library": "lib/quickstart.libsonnet",
    }.items():
        yield Mutation("starts", label, configs)
    yield Mutation("starts", "a program", f"{VINEPPO},mine.jsonnet", files={"mine.jsonnet": "print('hello')"})
    for value in ("one", "1.5", "", "-1", "9" * 30):
        yield Mutation("starts", f"APP_SEED={value!r}", GRPO, environ={"APP_SEED": value})
    for name, value in {"APP_DIRECTORY": " ", "APP_EXPERIMENT_NAME": ""}.items():
        yield Mutation("starts", f"{name}={value!r}", GRPO, environ={name: value})
    environ = {"APP_ENDPOINT": "https://host/v1", "APP_MODEL": "m"}
    for mutation in written_by_hand("starts"):
        yield Mutation("starts", mutation.label, mutation.configs, mutation.overrides, environ)


CLASSES: Mapping[str, Callable[[], Iterator[Mutation]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        keys, types, names, numbers, jsonnet, combinations, presets, lengths, folder_names, tables, starts,
    )
}  # fmt: skip


def mutations(kinds: Sequence[str] = tuple(CLASSES)) -> list[Mutation]:
    of_all_kinds: list[Mutation] = []
    for kind in kinds:
        of_all_kinds.extend(CLASSES[kind]())
    return of_all_kinds


# Trying them


def outcome(mutation: Mutation, folder: Path) -> Outcome:
    """Gives a mutation to `check_config` in this process. `folder` is an empty folder for its files."""
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
        environment(mutation.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = run_treetune([*arguments, "check_config"])
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:
            return Outcome("traceback", time.perf_counter() - started, traceback.format_exc())
    seconds, message = time.perf_counter() - started, err.getvalue()
    if code == 0:
        return Outcome("accepted", seconds, out.getvalue())
    if "Traceback" in message:
        return Outcome("traceback", seconds, message)
    return Outcome("refused" if is_clear(message) else "vague", seconds, message)


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("APP_")]:
        del os.environ[name]
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def is_clear(message: str) -> bool:
    """Tells whether every mistake has a key or a file, the line that set it, and a remedy."""
    without_notes = re.sub(r"(?m)^note: .*\n(      .*\n)*", "", message.strip() + "\n").strip()
    head, *issues = re.split(r"\n\n", without_notes)
    return head.startswith("wrong configuration") and bool(issues) and all(map(is_clear_issue, issues))


def is_clear_issue(issue: str) -> bool:
    key, colon, _ = issue.partition(": ")
    is_file_or_option = re.search(r"sonnet$|:\d+:\d+$|^--", key)
    return bool(colon and "\n  remedy  " in issue and (is_file_or_option or "\n  where   " in issue))


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
            result = outcome(mutation, Path(folder))
        tried.append((mutation, result))
        if options.show or result.verdict != "refused":
            print(f"== {result.verdict}: {mutation.kind}: {mutation.label}\n{result.message.strip()}\n")
    text = summary(tried)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0 if all(result.verdict == "refused" for _, result in tried) else 1


HEAD = """# Wrong configurations

Single changes of shipped configurations, each of which can't be meant, through `check_config`:
`python tests/endurance/wrong_configurations.py --output FILE.md`. *Refused* means with the key (or file), the
line that set it, and a remedy, for every mistake that is named; *vague* has less.
"""


def summary(tried: Sequence[tuple[Mutation, Outcome]]) -> str:
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    counts = Counter((mutation.kind, result.verdict) for mutation, result in tried)
    counts.update(("**all**", result.verdict) for _, result in tried)
    lines = [HEAD, f"| class | {' | '.join([*verdicts, 'all'])} |", "|---" + "|---:" * 5 + "|"]
    for kind in dict.fromkeys(kind for kind, _ in counts):
        row = [counts[kind, verdict] for verdict in verdicts]
        lines.append(f"| {kind} | {' | '.join(map(str, [*row, sum(row)]))} |")
    seconds = sorted(result.seconds for _, result in tried)
    median, longest = seconds[len(seconds) // 2], seconds[-1]
    lines.append(
        f"\nA check took {median:.2f} s in the median and {longest:.2f} s at most, in one process.\n"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
