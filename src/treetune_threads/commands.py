"""Commands that make a model's folder out of another's."""

from __future__ import annotations

import argparse
from pathlib import Path

from treetune.cli.command import Argument, Command, say


def chat_template(options: argparse.Namespace) -> int:
    from treetune_threads.think_template import OPENING, SYSTEM, write_think_model

    made = write_think_model(
        options.model,
        options.output,
        system=SYSTEM if options.system is None else options.system,
        opening=OPENING if options.opening is None else options.opening,
        end_token=options.end_token,
    )
    say(f"before:\n{made.before}\n\nafter:\n{made.after}\n")
    words = {
        "system": "conversations without a system message get one",
        "user": "the template knows no system message: it stands before the first question",
        "nowhere": "no system message is added",
    }
    say(words[made.system_in])
    say("prompts open a thought now" if made.opened else "prompts opened a thought before, and do still")
    if made.end_token is not None:
        say(f"answers end with {made.end_token}")
    say(f"the model is in {options.output}")
    return 0


COMMANDS = (
    Command(
        "chat_template",
        chat_template,
        "copy a model, with a chat template that has it think first",
        "Puts a system message and an opened thought around the model's own chat template, whatever Jinja"
        " that is, and prints a prompt before and after. Refused where nothing would change.",
        ("treetune chat_template --model models/Qwen2.5-7B --output models/Qwen2.5-7B-think",),
        (
            Argument("--model", {"type": Path, "required": True, "metavar": "DIR", "help": "of a model"}),
            Argument("--output", {"type": Path, "required": True, "metavar": "DIR", "help": "not there yet"}),
            Argument(
                "--system",
                {"metavar": "TEXT", "help": "system message; '' for none; default: think, then answer"},
            ),
            Argument(
                "--opening", {"metavar": "TEXT", "help": "ends a prompt; default: <think> and a newline"}
            ),
            Argument(
                "--end-token",
                {"metavar": "TOKEN", "help": "ends an answer; default: what the template puts behind one"},
            ),
        ),
    ),
)
