"""What a run needs of a machine, and whether it fits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from treetune.cli.command import Argument, Command, built, evaluated, say

if TYPE_CHECKING:
    from treetune.models.shapes import Shape
    from treetune.planning.machine import Machine
    from treetune.runtime.base import PolicyIteration


def plan(options: argparse.Namespace) -> int:
    """0 where it fits, 1 where it doesn't."""
    config = evaluated(options)
    root = cast("PolicyIteration", built(config, options.command, "an experiment"))
    from treetune.planning.plan import Plan
    from treetune.planning.words import as_data, as_text

    found = Plan.of(root, _machine(options), options.answer_tokens, start_shape(root))
    say(json.dumps(as_data(found), indent=2, ensure_ascii=False) if options.json else as_text(found))
    return 0 if found.fits else 1


def _machine(options: argparse.Namespace) -> Machine:
    from treetune.planning.machine import described_machine, here

    if (options.gpus is None) != (options.memory is None):
        raise ValueError("--gpus and --memory go together, as in --gpus 8 --memory 80: give both, or neither")
    if options.gpus is None:
        return here()
    return described_machine(options.gpus, options.memory, options.machines, options.host_memory)


def start_shape(root: PolicyIteration) -> Shape | None:
    """The sizes of the model that the experiment starts from. Where that is a checkpoint that isn't there
    yet, they are those of the experiment that makes it, as far as a configuration of its name is among ours.
    Raises ValueError where it isn't.
    """
    try:
        return root.model.shape(root.task.alphabet)
    except ValueError:
        name = Path(getattr(root.model, "name_or_path", ""))
        maker = _maker(name)
        if maker is None:
            raise
        from treetune.config.jsonnet import load

        made_by = built(load([str(maker)], environment_keys=()), "plan", "an experiment")
        return start_shape(cast("PolicyIteration", made_by))


def _maker(name: Path) -> Path | None:
    from treetune.config.jsonnet import CONFIGS
    from treetune.models.checkpoints import CHECKPOINTS

    if CHECKPOINTS not in name.parts:
        return None
    experiment = Path(*name.parts[: name.parts.index(CHECKPOINTS)])
    for depth in range(1, len(experiment.parts)):
        *folders, last = experiment.parts[depth:]
        joined = (
            [*folders[:-1], f"{folders[-1]}_{last}"] if folders else [last]
        )  # fork/sft is fork_sft.jsonnet
        for named in ([*folders, last], joined):
            if (likely := CONFIGS.joinpath(*named).with_suffix(".jsonnet")).is_file():
                return likely
    return None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--gpus": {"type": _count, "metavar": "N", "help": "GPUs of a machine; default: this machine's"},
    "--memory": {"type": _amount, "metavar": "GIB", "help": "memory of each GPU"},
    "--machines": {"type": _count, "default": 1, "metavar": "N", "help": "alike; default: 1"},
    "--host-memory": {"type": _amount, "metavar": "GIB", "help": "a machine's own; default: not judged"},
    "--answer-tokens": {
        "type": _amount,
        "metavar": "N",
        "help": "mean length of an answer; default: half of the longest",
    },
    "--json": {"action": "store_true", "help": "for programs, in bytes"},
}

COMMANDS = (
    Command(
        "plan",
        plan,
        "what a run needs of a machine, phase by phase, and whether it fits",
        "Memory of GPUs and host in each phase, tokens that are sampled, seconds by estimate; what doesn't"
        " fit, and the smallest change that does. Needs no GPU, loads no model. Exit code 1: it doesn't fit.",
        (
            "treetune --configs configs/polIter_rho1bSft2_vineppo_MATH.jsonnet plan --gpus 4 --memory 80",
            "treetune --configs configs/quickstart/vineppo.jsonnet plan",
        ),
        tuple(Argument(name, settings) for name, settings in _ARGUMENTS.items()),
    ),
)
