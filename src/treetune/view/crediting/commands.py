"""The command that credits the answers in a log of another program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from treetune.cli.command import PATH, Command, Options, say
from treetune.cli.completion import CONFIGURATION_SUFFIXES


def credit_command(options: Options) -> int:
    from treetune.config.imports import import_parts
    from treetune.view.crediting.credit_log import CreditOfLog, credit_log

    # Imports the parts of installed packages, and lets modules be imported from the working directory: the
    # reward function may be in either.
    import_parts({})
    log = options.log.resolve()
    log_name = log.stem if log.is_file() else log.name
    output = options.output or log.with_name(f"{log_name}_credited")
    engine = options.engine  # a folder, an address, or Jsonnet, which has braces
    if engine is not None and "{" in engine:
        engine = _evaluate_option(engine, "engine")
    settings = CreditOfLog(
        log=options.log,
        output=output,
        credit=read_part(options.credit, "credit"),
        engine=engine,
        grader=None if options.grader is None else read_grader(options.grader),
        tokenizer=options.tokenizer,
        sampling=None if options.sampling is None else _evaluate_option(options.sampling, "sampling"),
        steps=None if options.steps is None else read_part(options.steps, "steps"),
        context_length=options.context_length,
        grade_unfinished=options.grade_unfinished,
        seed=options.seed,
        budget=options.budget,
        deadline=options.deadline,
    )
    credit_log(settings, say)
    say(f"treetune view {output}")
    return 0


def read_part(text: str, key: str) -> dict[str, Any]:
    """Returns the configuration of a part that is given by its name, as Jsonnet, or in a file.

    Examples: "rloo", "{type: 'monte_carlo', samples: 9}", and "configs/credit/spo_chain.jsonnet". A file has
    the part under `key`, or has only the part itself. `key` is also the option's name in messages.
    """
    if text.endswith(CONFIGURATION_SUFFIXES):
        from treetune.config.jsonnet import load

        content = load([text], environment_keys=()).data
        part = content if "type" in content else content.get(key)
        if not isinstance(part, Mapping):
            raise ValueError(f"--{key}: {text} has no key {key!r}")
        return dict(part)
    return _evaluate_option(text, key) if "{" in text else {"type": text}


def read_grader(text: str) -> dict[str, Any]:
    """Returns the configuration of a grader.

    The text "reward.py:score" names a function in a file. Any other text is read by `read_part`.
    """
    path, colon, function = text.rpartition(":")
    if path.endswith(".py") and colon and function.isidentifier():
        return {"type": "function", "path": text}
    if text.endswith(".py"):
        raise ValueError(f"--grader is {text}: name the function in it, such as {text}:score")
    return read_part(text, "grader")


def _evaluate_option(text: str, key: str) -> dict[str, Any]:
    """Returns the object that the Jsonnet `text` of an option evaluates to. `key` is the option's name."""
    from treetune.config.jsonnet import sum_of
    from treetune.config.layers import Layer

    value = sum_of([Layer(f"--{key}", text)], variables={})  # evaluates the only layer
    if not isinstance(value, Mapping):
        raise ValueError(f"--{key} is {text}: give an object such as '{{max_tokens: 512}}'")
    return dict(value)


COMMANDS = (
    Command(
        "credit",
        credit_command,
        "add step values and advantages to another trainer's rollouts; resumes",
        "Reads a log of verl, TRL, verifiers, prime-rl, SkyRL, slime, Inspect or W&B, assigns credit to its"
        " answers, and writes them into a folder that `treetune view` opens. The log stays as it is. Credits"
        " that sample continuations need the weights that sampled the answers (--engine), a grader and"
        " the sampling parameters. A killed command continues where it was.",
        (
            "treetune credit rollouts/10.jsonl --credit rloo --tokenizer models/qwen",
            "treetune credit rollouts --engine checkpoints/step_10 --credit monte_carlo --grader math"
            " --sampling '{max_tokens: 512}'",
        ),
        (
            click.Argument(["log"], type=PATH, metavar="LOG", help="a folder or file of another trainer"),
            click.Option(
                ["--credit"],
                required=True,
                metavar="NAME|JSONNET|FILE",
                help="such as rloo, or \"{type: 'monte_carlo', samples: 9}\"",
            ),
            click.Option(
                ["--engine"],
                metavar="FOLDER|ADDRESS|JSONNET",
                help="the policy: a model's folder, or a vLLM server",
            ),
            click.Option(
                ["--grader"],
                metavar="NAME|JSONNET|FILE.py:FUNCTION",
                help="grades continuations: math, \"{type: 'final_answer'}\", reward.py:score",
            ),
            click.Option(
                ["--sampling"],
                metavar="JSONNET",
                help='as the answers were sampled: "{max_tokens: 512, temperature: 0.6}"',
            ),
            click.Option(["--tokenizer"], metavar="FOLDER", help="default: the engine's folder"),
            click.Option(
                ["--steps"], metavar="NAME|JSONNET|FILE", help="splits answers into steps; default: lines"
            ),
            click.Option(
                ["--context-length"],
                type=int,
                metavar="N",
                help="tokens of prompt and answer; default: what the longest prompt needs",
            ),
            click.Option(
                ["--grade-unfinished"],
                is_flag=True,
                help="grade continuations that were cut off; by default they earn 0",
            ),
            click.Option(["--seed"], type=int, default=0, metavar="N", help="of continuations; default: 0"),
            click.Option(
                ["--budget"], type=int, metavar="N", help="stop after so many sampled tokens, over all starts"
            ),
            click.Option(["--deadline"], type=float, metavar="SECONDS", help="stop after this time"),
            click.Option(["--output"], type=PATH, metavar="DIR", help="default: LOG_credited"),
        ),
    ),
)
