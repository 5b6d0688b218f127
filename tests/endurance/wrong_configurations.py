"""Wrong configurations, a thousand, each made of a shipped one by a single change that can't be meant.

    python tests/endurance/wrong_configurations.py [--only CLASS] [--show] [--output PAGE.md]

Every one goes through `check_config`. It has to be refused, each mistake with its key (or its file, where
Jsonnet can't be read), the place that set it, and a remedy. The exit code is 1 where one is accepted, ends
in a traceback, or is refused with less. Changes that are written by hand are in `wrong_configurations.json`:
parts, lengths and columns that are each right and don't go together, and texts that Jsonnet can't read.
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
from treetune.config.layers import CONFIGS, configurations  # noqa: E402
from treetune.main import main as carry_out  # noqa: E402
from treetune.runtime.base import Runtime  # noqa: E402

SFT, GRPO, PPO, VINEPPO, RESTEM, DPO = (
    f"quickstart/{name}.jsonnet" for name in ("sft", "grpo", "ppo", "vineppo", "restem", "dpo_positive")
)
COUNTDOWN = "countdown/tiny_grpo.jsonnet"
TABLE = "tables/quickstart_methods.jsonnet"
MECHANICAL = (VINEPPO, "quickstart/dapo.jsonnet", DPO, COUNTDOWN)
"""What types, names and numbers are changed in: every kind of part is in one of them."""

WRITTEN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

Verdict = Literal["refused", "vague", "traceback", "accepted"]


@dataclass(frozen=True)
class Mutation:
    """One wrong configuration. `files` are texts that are configurations of their own, by name."""

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


# Wrong by what the schema says


class Place(NamedTuple):
    """A key of a configuration that is written in an object, and what the schema says of it."""

    path: tuple[str, ...]
    value: Any
    annotation: Any

    def changed(self, kind: str, configs: str, text: str, *further: str) -> Mutation:
        """Another value, as Jsonnet, for the key or for one below it."""
        path = (*self.path, *further)
        return Mutation(kind, f"{'.'.join(path)} is {text}", configs, (override(path, text),))


def override(path: Sequence[str], value: str) -> str:
    """``{trainer+: {learning_rate: …}}``."""
    text = value
    for depth, name in enumerate(reversed(path)):
        text = f"{{{json.dumps(name)}{'+' if depth else ''}: {text}}}"
    return text


def places(configs: str) -> list[Place]:
    """Every key that can be overridden: those not within a list."""

    def below(annotation: Any, data: dict[str, Any], path: tuple[str, ...]) -> Iterator[Place]:
        part = class_of(annotation, data)
        for name, key in schema.keys_of(part).items() if part else ():
            if name in data:
                yield Place((*path, name), data[name], key.annotation)
                if isinstance(data[name], dict):
                    yield from below(schema.bare(key.annotation)[0], data[name], (*path, name))

    return list(below(Runtime, load([configs], environ={}).data, ()))


def changeable() -> Iterator[tuple[str, Place]]:
    return ((configs, one) for configs in MECHANICAL for one in places(configs))


def class_of(annotation: Any, data: Mapping[str, Any]) -> type | None:
    for member in schema.members(annotation):
        if schema.is_family(member):
            return schema.choices(member).get(data.get("type", ""))
        if schema.is_plain_part(member):
            return member
    return None


def misspelt(name: str) -> str:
    """The name with two letters in the middle exchanged, or one twice where they are the same."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return swapped if swapped != name else name[:middle] + name[middle - 1] + name[middle:]


def keys() -> Iterator[Mutation]:
    """A key that no object has, by two exchanged letters, by a foreign name, or in another object's place."""
    for configs in (VINEPPO, COUNTDOWN):
        found = places(configs)
        for one in found:
            if len(one.path[-1]) > 3:
                wrong = one._replace(path=(*one.path[:-1], misspelt(one.path[-1])))
                yield wrong.changed("keys", configs, json.dumps(one.value))
        objects = sorted(
            (one for one in found if isinstance(one.value, dict) and "type" in one.value),
            key=lambda one: one.path,
        )
        yield from (one.changed("keys", configs, "1", "colour") for one in objects)
        by_name = {one.path[-1]: one for one in found}
        for part, (name, one) in itertools.product(objects, sorted(by_name.items())):
            owner = class_of(schema.bare(part.annotation)[0], part.value)
            siblings = {other.path[-1] for other in found if other.path[:-1] == part.path}
            is_foreign = owner is not None and name not in {*siblings, *schema.keys_of(owner)}
            if is_foreign and (len(name) + len(part.path[-1])) % 7 == 0:  # some of the many
                yield part.changed("keys", configs, json.dumps(one.value), name)


def types() -> Iterator[Mutation]:
    """A value of another type than the key's."""
    for configs, one in changeable():
        words = schema.describe(one.annotation)
        wrong = None
        if isinstance(one.value, bool):
            wrong = "'yes'"
        elif isinstance(one.value, int | float):
            wrong = "'many'" if "a string" not in words else "[1]"
        elif isinstance(one.value, str) and one.path[-1] != "type":
            wrong = "{}" if "number" in words else "7"
        elif isinstance(one.value, dict | list):
            wrong = "7"
        if wrong is not None and words != "anything":
            yield one.changed("types", configs, wrong)


def names() -> Iterator[Mutation]:
    """The name of a part, or of one of a few choices, that is none of them."""
    for configs, one in changeable():
        if isinstance(one.value, dict) and "type" in one.value:
            yield one.changed("names", configs, json.dumps(misspelt(one.value["type"]) + "x"), "type")
            yield one.changed("names", configs, '{"size": 1}')
        if any(get_origin(member) is Literal for member in schema.members(schema.bare(one.annotation)[0])):
            yield one.changed("names", configs, '"neither"')


def numbers() -> Iterator[Mutation]:
    """A number beyond the bound that its key declares; a fraction for a count."""
    for configs, one in changeable():
        if isinstance(one.value, int | float) and not isinstance(one.value, bool):
            beyond = set[float]()
            for member in schema.members(one.annotation):
                for bound in schema.bare(member)[1]:
                    match bound:
                        case annotated_types.Gt(gt=value) | annotated_types.Lt(lt=value):
                            beyond.add(float(value))
                        case annotated_types.Ge(ge=value):
                            beyond.add(value - 1)
                        case annotated_types.Le(le=value):
                            beyond.add(value + 1)
            yield from (one.changed("numbers", configs, repr(wrong)) for wrong in sorted(beyond))
            if schema.describe(one.annotation).startswith("a whole number"):
                yield one.changed("numbers", configs, "2.5")


# Written by hand


def written(kind: str) -> Iterator[Mutation]:
    for configs, changes in WRITTEN[kind].items():
        for change in changes:
            name = Path(configs.split(",")[-1]).stem
            yield Mutation(kind, f"{name} {change}", configs, (change,))


def combinations() -> Iterator[Mutation]:
    return written("combinations")


def lengths() -> Iterator[Mutation]:
    return written("lengths")


def tables() -> Iterator[Mutation]:
    return written("tables")


def presets() -> Iterator[Mutation]:
    """Two presets, one on another kind of experiment, one on the left of the experiment."""
    known = [path.stem for path in configurations(CONFIGS / "presets")]
    on_a_corpus = "greedy_jsd"
    sampling = [name for name in known if name != on_a_corpus]
    given = [f"{SFT},presets/{name}.jsonnet" for name in sampling]
    given += [f"{configs},presets/{on_a_corpus}.jsonnet" for configs in (VINEPPO, PPO, RESTEM, DPO)]
    given += [f"presets/{name}.jsonnet,{SFT if name == on_a_corpus else PPO}" for name in known]
    for first, second in itertools.islice(itertools.permutations(sampling, 2), 0, None, 7):
        given.append(f"{PPO},presets/{first}.jsonnet,presets/{second}.jsonnet")
    yield from (Mutation("presets", configs, configs) for configs in given)


def jsonnet() -> Iterator[Mutation]:
    """Text that Jsonnet can't evaluate, or that is no object."""
    mine = f"{VINEPPO},mine.jsonnet"
    for name, text in WRITTEN["jsonnet"].items():
        yield Mutation("jsonnet", f"{name} (override)", VINEPPO, (text,))
        yield Mutation("jsonnet", f"{name} (file)", mine, files={"mine.jsonnet": text})
    yield Mutation("jsonnet", "not UTF-8", mine, files={"mine.jsonnet": b"{ x: '\xff' }"})


def folder_names() -> Iterator[Mutation]:
    """Names that folders can't have, or that lead out of the experiments' folder."""
    for name in [
        "", ".", "..", "/", "/tmp/x", "../x", "a/../../../x", "a/..", "a//b", "a/", "a/./b", " ", "a\nb",
        "a\tb", "a\x00b", "x" * 300, "a/" + "x" * 300, "ü" * 150, "a/ /b", "\u202ea",
    ]:  # fmt: skip
        label, text = repr(name if len(name) < 30 else name[:9] + "…"), json.dumps(name)
        change = override(["experiment_name"], text)
        yield Mutation("folder names", f"experiment {label}", GRPO, (change,))
        if name:  # an empty one of a set is the split's
            change = f"{{evaluation+: {{sets: [{{split: 'test', name: {text}}}]}}}}"
            yield Mutation("folder names", f"set {label}", GRPO, (change,))
    for name in ["", "a/b", "../x", ".hidden", "a\nb"]:
        yield Mutation("folder names", f"table {name!r}", TABLE, (override(["name"], json.dumps(name)),))
    for name in ["/tmp/x", "../x", "x" * 300]:
        environ = {"APP_EXPERIMENT_NAME": name}
        yield Mutation("folder names", f"APP_EXPERIMENT_NAME {name[:9]!r}", GRPO, environ=environ)


def starts() -> Iterator[Mutation]:
    """Files and variables that a start is wrong with."""
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
    for one in written("starts"):
        yield Mutation("starts", one.label, one.configs, one.overrides, environ)


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
        environment(mutation.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = carry_out([*arguments, "check_config"])
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
            print(f"== {found.verdict}: {mutation.kind}: {mutation.label}\n{found.message.strip()}\n")
    text = summary(tried)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0 if all(found.verdict == "refused" for _, found in tried) else 1


HEAD = """# Wrong configurations

Single changes of shipped configurations, each of which can't be meant, through `check_config`:
`python tests/endurance/wrong_configurations.py --output FILE.md`. *Refused* is with the key
(or file), the place that set it, and a remedy, for every mistake that is told; *vague* has less.
"""


def summary(tried: Sequence[tuple[Mutation, Outcome]]) -> str:
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    counts = Counter((mutation.kind, found.verdict) for mutation, found in tried)
    counts.update(("**all**", found.verdict) for _, found in tried)
    lines = [HEAD, f"| class | {' | '.join([*verdicts, 'all'])} |", "|---" + "|---:" * 5 + "|"]
    for kind in dict.fromkeys(kind for kind, _ in counts):
        row = [counts[kind, verdict] for verdict in verdicts]
        lines.append(f"| {kind} | {' | '.join(map(str, [*row, sum(row)]))} |")
    seconds = sorted(found.seconds for _, found in tried)
    middle, last = seconds[len(seconds) // 2], seconds[-1]
    lines.append(f"\nOne check took {middle:.2f} s in the middle and {last:.2f} s at most, in one process.\n")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
