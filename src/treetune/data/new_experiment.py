"""Creates the folder of a new experiment: configurations, rows, a reward function and a README.

The configuration holds everything that one edits (data, prompt, reward, lengths, batch, iterations, model,
learning rate), with values that suit the rows. Its text comes from `examples/new/experiment.template`.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from treetune.cli.command import Options, build_root, evaluate_configuration
from treetune.config.errors import nearest
from treetune.config.jsonnet import load
from treetune.config.layers import CONFIGS_FOLDER, find_file
from treetune.data.scoring import score_responses
from treetune.exceptions import NoSplit
from treetune.runtime.base import check_name
from treetune.runtime.machine import list_gpus
from treetune.store.files import make_folder_atomically, write_text
from treetune.tasks.base import Split, Task
from treetune.tasks.row_values import text_of_value
from treetune.tasks.rows import fault_of_text
from treetune.tasks.sources import read_rows

PROBLEM_FIELDS = ("problem", "question", "prompt", "query", "instruction", "input", "text")
GOLD_FIELDS = ("answer", "gold", "ground_truth", "target", "label", "solution", "output", "response")
"""Common names of the fields of rows, the likeliest first."""

ROWS_PER_TEST_ROW = 10
"""One row in ten is for tests, and another one for validation."""

FEW_TESTS = 100
"""With fewer test problems than this, the 95 % interval of pass@1 may be wider than ±0.1."""

TEMPLATES = CONFIGS_FOLDER.parent / "examples/new"

HARDWARE = ("in_process", "cpu", "gpu")
SLOW_ON_A_CPU = 300_000_000
"""From this number of weights, a model is slow to train on a CPU."""

UNKNOWN_ROWS = 10_000
"""The number of training rows that is assumed if the task doesn't know how many it has."""

CHARACTERS_PER_TOKEN = 4
"""About the average of English text. Bounds on lengths assume 3, so that they are on the safe side."""

ExperimentKind = Literal["supervised", "policy_gradient", "filtered", "preferences"]


@dataclass(frozen=True)
class Method:
    """A method that an experiment can be created with."""

    fragment: str
    """Its file below configs/methods."""
    about: str
    """A sentence about the method, for a comment in the configuration."""
    kind: ExperimentKind = "policy_gradient"
    more: str = ""
    """Further keys of the configuration."""
    trainer: str = ""
    """Further keys of its trainer."""

    @property
    def whitens(self) -> bool:
        return self.kind == "policy_gradient"


METHODS = {
    "sft": Method("sft", "Supervised fine-tuning on the reference answers.", "supervised"),
    "vineppo": Method("vineppo", "VinePPO: a step's value is the mean reward of continuations from it."),
    "ppo": Method("ppo", "PPO with a critic."),
    "grpo": Method(
        "ppo_group_credit",
        "GRPO's credit (each reward minus its group's mean, over the group's deviation) with PPO's loss and"
        " no KL. GRPO as in its paper: `treetune new --method grpo_as_published`.",
    ),
    "rloo": Method("ppo_rloo_credit", "RLOO: each reward minus the mean of the other answers' rewards."),
    "restem": Method("restem", "RestEM: fine-tuning on the policy's own correct answers.", "filtered"),
    "dpo_positive": Method(
        "dpo_positive",
        "DPO-positive on pairs of a correct and a wrong answer.",
        "preferences",
        more="selection+: { max_pairs_per_problem: 16 }",
        trainer="objective+: { beta: 0.3 }",
    ),
}

SETTINGS_OF_SMALL_MODEL = {
    "vineppo": "credit+: { samples: 3 }",
    "ppo": "credit+: { critic+: { learning_rate: 1e-3 } }",
}
"""Settings of methods for a small model: three continuations from each state instead of nine; a critic that
learns faster than the policy."""

REASONING_PROMPT = '{problem}\nReason step by step, and end with a line "#### " and the answer.\n'
BOXED_PROMPT = "{problem}\n\nReason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class OwnRows:
    """The rows of a user's file, and the fields of problem and reference answer."""

    path: Path
    rows: list[dict[str, Any]]
    problem_field: str
    gold_field: str

    @property
    def held_out(self) -> int:
        """The number of rows for tests. As many again are for validation."""
        return len(self.rows[::ROWS_PER_TEST_ROW])

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Problem and reference answer of each row."""
        return [
            (text_of_value(row[self.problem_field]), text_of_value(row[self.gold_field])) for row in self.rows
        ]


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens: bounds, and means for `treetune plan`."""

    answer: int
    context: int
    mean_prompt: int
    mean_answer: int


@dataclass(frozen=True)
class TrainingAmount:
    """The amount of training, as keys of the configuration. The text "null" stands for Jsonnet's null."""

    iterations: int
    problems: int | str
    samples: int
    rate: str
    warmup: int
    minibatch: int | str
    epochs: int
    evaluate_every: int | str
    checkpoint_every: int
    passes: str = ""


@dataclass(frozen=True)
class TaskValues:
    """The values of the task for the template: of a user's rows, or of a task of configs/tasks."""

    texts: list[tuple[str, str]]
    """The problem and the reference answer of rows."""
    n_rows: int | None
    """The number of training rows; None if the task doesn't know it."""
    prompt: str
    """The template of prompts; "" for that of the builtin task."""
    sets: list[str]
    """The evaluation's sets, as Jsonnet."""
    own_rows: OwnRows | None = None
    """A user's rows; None with a builtin task."""
    builtin: str | None = None
    """The configuration of the builtin task, such as ``tasks/gsm8k``; None with a user's rows."""


def make_experiment(options: Options) -> Iterator[str]:
    """Creates the folder `options.name`, whole or not at all, and yields what to tell the user.

    Raises ValueError for wrong options and rows.
    """
    folder = _new_folder(options.name)
    _check_method(options.method)
    options.model = _model_name(options.model)
    is_small = options.model == "tiny"
    if options.hardware is None:
        options.hardware = "gpu" if list_gpus() and not is_small else "in_process"
    if options.hardware not in HARDWARE:
        raise ValueError(f"--hardware is {options.hardware!r}: give {', '.join(HARDWARE)}")
    is_file = bool(Path(options.data).suffix)  # the name of a task has no suffix
    own_rows = _read_own_rows(Path(options.data), options.fields) if is_file else None
    if own_rows is not None:
        yield (
            f"{options.data}: {len(own_rows.rows)} rows; the problem is {own_rows.problem_field!r}, the"
            f" reference answer {own_rows.gold_field!r}"
        )
        if own_rows.held_out < FEW_TESTS:
            # The interval is widest where half of the answers are right: 1.96 · √(½ · ½ / n).
            half_width = 0.98 / math.sqrt(own_rows.held_out)
            yield (
                f"note: {own_rows.held_out} test problems are few: pass@1 is uncertain by ±{half_width:.2f}"
                f" (95 %), so that methods can't be compared; give {FEW_TESTS * ROWS_PER_TEST_ROW} rows or"
                " more for that"
            )
    yield from _note_on_large_model(options)
    # Random weights have to learn the form of answers before an answer can be right.
    stages = ["sft", options.method] if is_small and options.method != "sft" else [options.method]
    commands = [f"treetune {subcommand} {stages[0]}.jsonnet" for subcommand in ("check", "plan")]
    commands += [f"treetune run {stage}.jsonnet" for stage in stages]
    with make_folder_atomically(folder) as unfinished:
        _write_readme(unfinished, options, commands, has_reward=own_rows is not None)
        for stage in stages:
            write_text(unfinished / f"{stage}.jsonnet", _text_of_configuration(options, stage, own_rows))
        if own_rows is not None:
            _write_rows(unfinished, own_rows)
        with contextlib.chdir(unfinished):
            # Checks the configurations of all stages, and that of the first stage last. So after the loop
            # `root` is the first stage's experiment, whose task grades the examples.
            for stage in reversed(stages):
                options.configs = [f"{stage}.jsonnet"]
                root: Any = build_root(evaluate_configuration(options), "check", "an experiment")
            if own_rows is not None:
                yield from _grade_examples(root.task)
    quoted_folder = shlex.quote(str(folder))
    next_commands = [f"cd {quoted_folder}", *commands]
    yield "\n".join([f"created {quoted_folder}. Next:", *(f"  {command}" for command in next_commands)])


# Options


def _new_folder(name: str) -> Path:
    """Returns the folder with this name. Raises ValueError for a name that an experiment can't have, and for
    a folder that exists."""
    finding = next(check_name(name, "--name", "a relative folder name"), None)
    if finding is not None:
        raise ValueError(f"--name: {finding.what}: {finding.remedy}")
    folder = Path(name)
    if folder.exists():
        raise ValueError(f"--name: {folder} exists already: give another name, or remove it")
    return folder


def _check_method(method: str) -> None:
    """Raises ValueError for an unknown method."""
    presets = [path.stem for path in (CONFIGS_FOLDER / "presets").glob("*.jsonnet")]
    if method in METHODS or method in presets:
        return
    nearest_names = nearest(method, [*METHODS, *presets])
    hint = (
        f"did you mean {nearest_names[0]}?"
        if nearest_names
        else f"give {', '.join(METHODS)}, or a name in configs/presets"
    )
    raise ValueError(f"--method is {method!r}: {hint}")


def _model_name(model: str) -> str:
    """Returns the name of a model. A folder becomes an absolute path, since the experiment is run from
    another working directory.

    Raises ValueError for a text that is neither a name in configs/models, nor a folder, nor of the form
    owner/name.
    """
    shipped = [path.stem for path in (CONFIGS_FOLDER / "models").glob("*.jsonnet")]
    if model in shipped:
        return model
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser().absolute())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    nearest_names = nearest(model, shipped)
    hint = (
        f"did you mean {nearest_names[0]}?"
        if nearest_names
        else "give tiny, a folder, or a name on the hub (owner/name)"
    )
    raise ValueError(
        f"--model is {model!r}, which is neither a folder here, nor in configs/models, nor owner/name: {hint}"
    )


def _note_on_large_model(options: Options) -> Iterator[str]:
    """Yields a note if a large model is to be trained on a CPU."""
    if options.hardware == "gpu" or options.model == "tiny":
        return
    weights = _count_weights(_hub_name_or_path(options.model))
    if weights is not None and weights >= SLOW_ON_A_CPU:
        yield (
            f"note: --hardware is {options.hardware}, and {options.model} has {weights / 1e9:.1f} billion"
            " weights: on a CPU, an iteration takes hours; give --hardware gpu, or a smaller model. `treetune"
            " plan` says how much memory it needs"
        )


def _count_weights(name: str) -> float | None:
    """Returns the number of a model's weights, from its config.json or from its name. Returns None if neither
    tells it."""
    from treetune.models.pretrained import PretrainedModel
    from treetune.models.shapes import number_of_weights

    with contextlib.suppress(ValueError):
        # The argument of `shape` is a function that returns a task's alphabet. A pretrained model doesn't
        # call it, so any function does, such as `str`.
        shape = PretrainedModel(name_or_path=name).shape(str)
        if shape is not None:
            return shape.parameters
    return number_of_weights(name)


def _hub_name_or_path(model: str) -> str:
    """Returns the hub's name or the path of a model. A name in configs/models is replaced by the
    `name_or_path` of its file."""
    shipped = CONFIGS_FOLDER / "models" / f"{model}.jsonnet"
    return str(_shipped_model(model)["name_or_path"]) if shipped.is_file() else model


def _shipped_model(name: str) -> dict[str, Any]:
    """Returns the `model` of a file below configs/models."""
    # The files there only extend an experiment, so they are loaded on top of one. With `environment_keys=()`,
    # no environment variable changes the configuration.
    config = load(["quickstart/grpo.jsonnet", f"models/{name}.jsonnet"], environment_keys=())
    model: dict[str, Any] = config.data["model"]
    # Jsonnet has sorted the keys by their names. These two are put first, for the reader of the file.
    return {"type": model["type"], "name_or_path": model["name_or_path"]} | model


# Rows


def _read_own_rows(path: Path, fields: str | None) -> OwnRows:
    """Reads the rows of a user's file. Raises ValueError if fields are missing or there are too few rows."""
    if path.suffix == ".csv" and path.is_file():  # `read_rows` raises an error for a file that doesn't exist
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        rows = [row for _, row in read_rows(path)]
    if len(rows) < 2 * ROWS_PER_TEST_ROW:
        raise ValueError(f"{path} has {len(rows)} rows: give at least {2 * ROWS_PER_TEST_ROW}")
    if fields:
        field_names = fields.split(",")
    else:
        field_names = [_likely_field(rows[0], PROBLEM_FIELDS), _likely_field(rows[0], GOLD_FIELDS)]
    if len(field_names) != 2 or not all(field_names):
        names = ", ".join(map(repr, rows[0]))
        raise ValueError(
            f"{path}: it isn't clear which fields hold problem and answer: give --fields PROBLEM,ANSWER of"
            f" {names}"
        )
    faults = []
    for number, row in enumerate(rows, start=1):
        for name in field_names:
            fault = fault_of_text(row, name)
            if fault:
                faults.append((number, fault))
    if faults:
        number, fault = faults[0]
        raise ValueError(
            f"{path}, row {number}: {fault} ({len(faults)} such faults): fix the rows, or give --fields"
        )
    problem_field, gold_field = field_names
    return OwnRows(path, rows, problem_field, gold_field)


def _likely_field(row: dict[str, Any], names: Sequence[str]) -> str:
    """Returns the first of the names that the row has; "" if it has none."""
    return next((name for name in names if name in row), "")


def _write_rows(folder: Path, own_rows: OwnRows) -> None:
    """Writes the rows for training and for tests, the reward function, and three answers to try the function
    on."""
    problem, gold = own_rows.problem_field, own_rows.gold_field
    # Every tenth row is for tests. The experiment holds the rows for validation out of the others.
    train = [row for number, row in enumerate(own_rows.rows) if number % ROWS_PER_TEST_ROW]
    # The three answers are a right one to the first problem, a wrong one to the second (the gold of another
    # row), and an empty one to the third.
    another_gold = next((text_of_value(row[gold]) for row in train if row[gold] != train[1][gold]), "")
    responses = [text_of_value(train[0][gold]), another_gold, ""]
    examples = [
        {"problem": row[problem], "gold": row[gold], "response": response}
        for row, response in zip(train, responses, strict=False)
    ]
    files = {"train": train, "test": own_rows.rows[::ROWS_PER_TEST_ROW], "examples": examples}
    for name, rows in files.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_text(folder / f"{name}.jsonl", "".join(lines))
    write_text(folder / "reward.py", TEMPLATES.joinpath("reward.py").read_text())


def _grade_examples(task: Task) -> Iterator[str]:
    """Grades the three answers, and yields a table of them."""
    score_responses(task, Path("examples.jsonl"), Path("graded.jsonl"))
    graded = [json.loads(line) for line in Path("graded.jsonl").read_text(encoding="utf-8").splitlines()]
    yield "three answers, graded by reward.py (the reference answer, another row's, an empty one):"
    for row in graded:
        verdict = f"{row['reward']} ({row['outcome']})"
        yield (
            f"  {verdict:<18} {row['response']!r:.24} to {row['problem']!r:.40}, reference answer"
            f" {row['gold']!r:.24}"
        )
    if graded[0]["reward"] != 1:
        yield "note: the reference answer itself doesn't earn 1: fix reward.py before you train"


# The configuration


def _write_readme(folder: Path, options: Options, commands: Sequence[str], has_reward: bool) -> None:
    """Fills in the template of the README. Only experiments with a user's rows have the section on the
    reward."""
    text = TEMPLATES.joinpath("README.template").read_text()
    about_experiment, about_reward = text.split("\n## The reward", 1)
    if has_reward:
        about_experiment += f"\n## The reward{about_reward}"
    filled = about_experiment.format(
        **vars(options), next_commands="\n".join(commands), main_file=f"{options.method}.jsonnet"
    )
    write_text(folder / "README.md", filled)


def _text_of_configuration(options: Options, stage: str, own_rows: OwnRows | None) -> str:
    """Returns the text of a stage's configuration: of ``sft`` or of the method."""
    from jinja2 import Environment, StrictUndefined

    is_small = options.model == "tiny"
    method = _method_of_stage(stage, is_small)
    if own_rows is not None:
        task = _task_of_own_rows(own_rows, is_small)
    else:
        task = _task_of_builtin(options.data, is_small)
    sizes = _estimate_sizes(task.texts, is_small)
    amount = _training_amount(method.kind, task.n_rows or UNKNOWN_ROWS, is_small)
    if task.n_rows is None:  # then the number of passes over the rows isn't known either
        amount = replace(amount, passes="")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    template = environment.from_string(TEMPLATES.joinpath("experiment.template").read_text())
    return template.render(
        about=method.about,
        stage=stage,
        name=options.name,
        task_name=Path(options.name).name,
        hardware=options.hardware,
        method=method,
        preset=stage if stage not in METHODS else None,
        main_stage=options.method,
        shares_task=stage != options.method,
        task=task,
        model=_text_of_model(options, stage, sizes, task.texts if own_rows is not None else None),
        supervised=method.kind == "supervised",
        sizes=sizes,
        amount=amount,
        q=_as_jsonnet,
    )


def _method_of_stage(stage: str, is_small: bool) -> Method:
    """Returns a stage's method, with all further keys of its configuration in `more`.

    A preset is added to GRPO's experiment, so its method is GRPO's.
    """
    method = METHODS.get(stage)
    if method is None:
        method = replace(METHODS["grpo"], about=f"GRPO's experiment with the preset {stage}.")
    further_keys = [method.more]
    if is_small:
        further_keys.append(SETTINGS_OF_SMALL_MODEL.get(stage, ""))
    if method.kind in ("filtered", "preferences"):
        further_keys.append("choose_checkpoint: { set: 'validation', rule: 'best' }")
    return replace(method, more=", ".join(filter(None, further_keys)))


def _task_of_own_rows(own_rows: OwnRows, is_small: bool) -> TaskValues:
    return TaskValues(
        texts=own_rows.texts,
        # The rows for training: all but those for tests, and as many again for validation.
        n_rows=len(own_rows.rows) - 2 * own_rows.held_out,
        prompt="{problem}" if is_small else REASONING_PROMPT,
        sets=[_evaluation_set("validation", problems=None), _evaluation_set("test", problems=None)],
        own_rows=own_rows,
    )


def _task_of_builtin(name: str, is_small: bool) -> TaskValues:
    """Raises ConfigError, with the nearest name, if there is no such task."""
    task = _builtin_task(name)
    return TaskValues(
        texts=_read_texts(task),
        n_rows=task.size("train"),
        prompt="" if is_small else _prompt_of_builtin(name),
        sets=[_evaluation_set(split, size) for split, size in _held_out_splits(task)],
        builtin=f"tasks/{name}",
    )


def _builtin_task(name: str) -> Task:
    """Returns a task of configs/tasks. Raises ConfigError, with the nearest name, if there is no such
    task."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.build import build

    find_file(f"tasks/{name}.jsonnet", CONFIGS_FOLDER)  # raises ConfigError if there is none
    config = load([f"tasks/{name}.jsonnet"], environment_keys=())
    return build(Task, config.data["task"], key=("task",))


def _read_texts(task: Task) -> list[tuple[str, str]]:
    """Returns the prompts and demonstrations of some problems. The list is empty if the task has no problems
    at hand."""
    texts = []
    with contextlib.suppress(ValueError):
        for problem in task.examples(64):
            texts.append((problem.prompt, task.demonstration(problem, seed=0)))
    return texts


def _held_out_splits(task: Task) -> Iterator[tuple[Split, int | None]]:
    """Yields the splits to evaluate on, each with the number of problems to take; None: all of them."""
    # The validation split is also evaluated while training, so fewer of its problems are taken.
    limits: dict[Split, int] = {"validation": 128, "test": 512}
    for split, limit in limits.items():
        with contextlib.suppress(NoSplit):
            size = task.size(split)
            yield split, None if size is None else min(size, limit)


def _evaluation_set(split: Split, problems: int | None) -> str:
    number = "" if problems is None else f", problems: {problems}"
    often = ", while_training: true" if split == "validation" else ""
    return f"{{ split: '{split}'{number}, samples: 4{often} }}"


def _prompt_of_builtin(name: str) -> str:
    """Returns the prompt that replaces the task's own prompt; "" if the task keeps its own prompt.

    A task's own prompt is replaced if models understand this prompt only after fine-tuning with it.
    """
    config = load([f"tasks/{name}.jsonnet"], environment_keys=())
    own_prompt = str(config.data["task"].get("prompt", ""))
    # The VinePPO paper's prompt, which its models learned in fine-tuning.
    if not own_prompt.startswith("[MATH_TASK]"):
        return ""
    # GSM8K's grader looks for the answer after ####, and those of other mathematics for a boxed one.
    return REASONING_PROMPT if config.data["task"]["type"] == "gsm8k" else BOXED_PROMPT


def _estimate_sizes(texts: Sequence[tuple[str, str]], is_small: bool) -> Sizes:
    """Returns lengths that suit the problems and reference answers.

    Args:
        texts: The problem and the reference answer of each row.
        is_small: Whether the model is the small one, which has a token for each character.
    """
    if not texts and not is_small:
        return Sizes(answer=1024, context=2048, mean_prompt=128, mean_answer=256)
    # Characters. Without texts, 64 and 32 are assumed.
    problems = [len(problem) for problem, _ in texts] or [64]
    golds = [len(gold) for _, gold in texts] or [32]
    if is_small:
        # A little more than the longest reference answer, since the model learns to write such answers.
        answer = max(golds) + 16
        return Sizes(
            answer=answer,
            context=max(problems) + answer + 8,  # some more than both need
            mean_prompt=_rounded_mean(problems),
            mean_answer=_rounded_mean(golds) + 1,  # with the end token
        )
    # A model reasons before it answers: it gets twice the longest reference answer, but at least 512 and at
    # most 1024 tokens. A token is taken for three characters, and not for four, so that the bounds are on the
    # safe side.
    answer = min(1024, max(512, _round_up(2 * max(golds) / 3, 128)))
    prompt = (max(problems) + len(REASONING_PROMPT)) / 3
    return Sizes(
        answer=answer,
        context=_round_up(prompt + answer, 256),
        mean_prompt=_rounded_mean(problems) // CHARACTERS_PER_TOKEN + 20,  # 20: about those of the template
        # For the estimates of `treetune plan`: at least a quarter of the longest answer.
        mean_answer=max(answer // 4, _rounded_mean(golds) // CHARACTERS_PER_TOKEN),
    )


def _rounded_mean(lengths: Sequence[int]) -> int:
    return round(sum(lengths) / len(lengths))


def _round_up(number: float, step: int) -> int:
    """Returns the next multiple of `step`."""
    return math.ceil(number / step) * step


def _training_amount(kind: ExperimentKind, rows: int, is_small: bool) -> TrainingAmount:
    """Returns the amount of training for a number of training rows.

    With enough rows, a small model gets the numbers of the quickstart (configs/lib/quickstart.libsonnet). A
    rate is text, such as ``1e-3``, since it is copied into the configuration as it is.
    """
    if kind == "supervised":
        return _supervised_amount(rows, is_small)
    if kind == "filtered":  # trains on the policy's own right answers
        problems = min(rows, 320)  # the quickstart takes 320
        return TrainingAmount(
            iterations=5,
            problems=problems,
            samples=8,
            rate="1e-3" if is_small else "1e-6",
            warmup=10,
            minibatch=min(64, 8 * problems),  # at most all samples of an iteration
            epochs=3,
            evaluate_every=1,
            checkpoint_every=1,
        )
    if kind == "preferences":
        return TrainingAmount(
            iterations=1,
            problems=min(rows, 200),  # the quickstart takes 200 problems, and 64 answers to each
            samples=64 if is_small else 16,
            rate="2e-4" if is_small else "1e-6",
            warmup=10,
            minibatch=64,
            epochs=4 if is_small else 1,
            evaluate_every=1,
            checkpoint_every=1,
        )
    # The number of problems of an iteration is a multiple of 8. There are 8 answers to a problem, so
    # minibatches of 64 answers divide an iteration. With few rows, an iteration has a third of them, so the
    # policy is updated several times in a pass over the rows.
    third_of_rows = rows // 3 // 8 * 8
    problems = min(rows, 64, max(8, third_of_rows))
    # With few rows, `passes_wanted` passes over them would be only a few updates: there are at least
    # `fewest_iterations` iterations. With many rows, so many passes would take too long: there are at most
    # `most_iterations`.
    passes_wanted, fewest_iterations, most_iterations = (10, 10, 25) if is_small else (5, 10, 200)
    iterations = min(most_iterations, max(fewest_iterations, math.ceil(passes_wanted * rows / problems)))
    return TrainingAmount(
        iterations=iterations,
        problems=problems,
        samples=8,
        rate="4e-4" if is_small else "1e-6",
        warmup=min(10, iterations),
        minibatch="null" if is_small else 64,  # null: all answers of an iteration
        epochs=1,
        evaluate_every=5,
        checkpoint_every=5,
        passes=f"{iterations * problems / rows:.1f} passes over the {rows:,} rows",
    )


def _supervised_amount(rows: int, is_small: bool) -> TrainingAmount:
    """Returns the amount of supervised training; see `_training_amount`."""
    if not is_small:
        return TrainingAmount(
            iterations=2,
            problems="null",  # all rows
            samples=1,
            rate="1e-5",
            warmup=1,
            minibatch=min(64, rows),
            epochs=1,
            evaluate_every=1,
            checkpoint_every=1,
        )
    # From 6,400 rows on, there are 12 iterations of 100 updates, as in the quickstart. Fewer rows get 6
    # iterations of about 100 updates, the least that random weights need. For that, an iteration passes
    # several times (`epochs`, at most 40) over the rows.
    iterations, minibatch = (12, 64) if rows >= 6400 else (6, min(16, rows))
    problems = min(rows, 6400)
    updates_of_a_pass = math.ceil(problems / minibatch)
    return TrainingAmount(
        iterations=iterations,
        problems="null" if problems == rows else problems,  # null: all rows
        samples=1,
        rate="2e-3",
        warmup=50,
        minibatch=minibatch,
        epochs=min(40, math.ceil(100 / updates_of_a_pass)),
        evaluate_every="null",
        checkpoint_every=iterations,  # only at the end
    )


def _text_of_model(
    options: Options, stage: str, sizes: Sizes, texts: Sequence[tuple[str, str]] | None
) -> str:
    """Returns the value of `model`. `texts` are a user's rows, whose characters a small model has to know."""
    if options.model == "tiny" and stage != "sft":
        # The small model begins with random weights. So `sft.jsonnet` trains it first, and the method goes on
        # with the result.
        policy_of_sft = _as_jsonnet(f"/{options.name}/sft/checkpoints/last/policy")
        return f"{{ type: 'pretrained', name_or_path: $.directory + {policy_of_sft} }}"
    if options.model == "tiny":
        model: dict[str, Any] = {"type": "tiny", "layers": 4, "hidden_size": 128, "heads": 4}
        model |= {"intermediate_size": 384, "context_length": sizes.context}
        if texts is not None:
            characters = {"\n"}  # with which a demonstration begins (`JsonLines.demonstration`)
            for problem, gold in texts:
                characters.update(problem, gold)
            model["alphabet"] = "".join(sorted(characters))
        return _as_jsonnet(model)
    if (CONFIGS_FOLDER / "models" / f"{options.model}.jsonnet").is_file():
        model = _shipped_model(options.model)
    else:
        model = {"type": "pretrained", "name_or_path": options.model}
        if _is_chat_model(options.model):
            model["chat"] = {}
    model["dtype"] = "bfloat16" if options.hardware == "gpu" else "float32"
    return _as_jsonnet(model)


def _is_chat_model(model: str) -> bool:
    """Returns whether problems are put into the model's chat template. The files of a model's folder tell;
    without a folder, the name does."""
    folder = Path(model)
    if folder.is_dir():
        config = folder / "tokenizer_config.json"
        has_template = config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))
        return has_template or (folder / "chat_template.jinja").is_file()
    return re.search(r"instruct|chat|-it\b", model, re.IGNORECASE) is not None


def _as_jsonnet(value: Any) -> str:
    """Returns plain data as Jsonnet on one line: ``{ type: 'tiny', layers: 4 }``."""
    if isinstance(value, dict):
        fields = []
        for key, item in value.items():
            name = key if re.fullmatch(r"[A-Za-z_]\w*", key) else _as_jsonnet(key)
            fields.append(f"{name}: {_as_jsonnet(item)}")
        return f"{{ {', '.join(fields)} }}" if fields else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_jsonnet, value))}]"
    if isinstance(value, str):
        # Jsonnet has the same escapes as JSON. But the text is put in single quotes, so its single quotes are
        # escaped here, and its double quotes aren't.
        escaped = json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
        return f"'{escaped}'"
    return json.dumps(value)
