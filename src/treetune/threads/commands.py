"""The command `chat_template`."""

from __future__ import annotations

import click

from treetune.cli.command import PATH, Command, Options, say


def chat_template(options: Options) -> int:
    """Copies a model, gives the copy a chat template that makes it think, and prints what has changed.

    The output shows a prompt of the old template, and the same prompt of the new one.
    """
    from treetune.threads.think_template import SYSTEM_MESSAGE, THOUGHT_OPENING, write_think_model

    think_model = write_think_model(
        options.model,
        options.output,
        system=SYSTEM_MESSAGE if options.system is None else options.system,
        opening=THOUGHT_OPENING if options.opening is None else options.opening,
        end_token=options.end_token,
    )
    say(f"before:\n{think_model.before}\n\nafter:\n{think_model.after}\n")
    explanations = {
        "system": "conversations without a system message get one",
        "user": "the template does not support system messages: the text is put before the first question",
        "nowhere": "no system message is added",
    }
    say(explanations[think_model.system_in])
    if think_model.opens_thought:
        say("prompts open a thought now")
    elif options.opening is not None and not options.opening.strip():
        say("no opening is added, since --opening is empty")
    else:
        say("prompts opened a thought before, and still do")
    if think_model.end_token is not None:
        say(f"answers end with {think_model.end_token}")
    say(f"the model is in {options.output}")
    return 0


COMMANDS = (
    Command(
        "chat_template",
        chat_template,
        "add a thinking chat template to a copy of a model",
        "Copies a model and extends its chat template by a system message and an opening <think> tag. Prints"
        " a prompt before and after. Refuses to copy if nothing would change.",
        ("treetune chat_template --model models/Qwen2.5-7B --output models/Qwen2.5-7B-think",),
        (
            click.Option(["--model"], required=True, type=PATH, metavar="DIR", help="folder of the model"),
            click.Option(["--output"], required=True, type=PATH, metavar="DIR", help="folder to create"),
            click.Option(
                ["--system"], metavar="TEXT", help="system message; '' for none; default: think, then answer"
            ),
            click.Option(["--opening"], metavar="TEXT", help="ends a prompt; default: <think> and a newline"),
            click.Option(
                ["--end-token"],
                metavar="TOKEN",
                help="ends an answer; default: the token that the template puts after one",
            ),
        ),
    ),
)
