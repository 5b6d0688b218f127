"""The command `chat_template`: copies a model, with a chat template that has it think first.

Any Jinja template stays as it is. What stands before it gives conversations a system message where they have
none; what stands behind it opens the thought where an answer is to begin."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune.cli.command import Argument, Command, say
from treetune.models.chat import Chat, end_of_turn, render
from treetune.store.files import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = (
    "Think before you answer: write what you think between <think> and </think>, and behind </think> the"
    " answer alone."
)
OPENING = "<think>\n"
REFUSED = "refused:"
"""Begins what stands for a conversation that a template doesn't take."""

Messages = Sequence[Mapping[str, str]]

_QUESTION = {"role": "user", "content": "What is 6 * 7?"}
_ANSWER = {"role": "assistant", "content": "<think>\nSix sevens.\n</think>\n\n42"}
PROBES: tuple[Messages, ...] = (
    (_QUESTION,),
    ({"role": "system", "content": "Be brief."}, _QUESTION),
    (_QUESTION, _ANSWER, {"role": "user", "content": "And 6 * 8?"}),
)


@dataclass(frozen=True)
class ThinkModel:
    """The result: a prompt before and after, and the token that ends an answer, if that changed."""

    before: str
    after: str
    system_in: Literal["system", "user", "nowhere"]
    opened: bool
    end_token: str | None


def write_think_model(
    source: Path, output: Path, *, system: str = SYSTEM, opening: str = OPENING, end_token: str | None = None
) -> ThinkModel:
    """Copies the model in `source` to `output`, with a template that has it think.

    Conversations without a system message get `system` (empty: none); where the template knows no system
    message, it is put before the first question. A prompt ends with `opening`, unless the template's own does
    already, or is told not to think (``enable_thinking: false``). `end_token` ends an answer; None: what the
    template puts behind one.

    Raises ValueError where there is no template, nothing would change, or the template can't be gone around.
    """
    from transformers import AutoTokenizer

    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is no folder of a model: it has no config.json")
    if output.exists():
        raise ValueError(f"{output} is there already: name a folder that is not")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer in {source} has no chat template to go around: take a model that has one, or copy"
            " that of its family into its chat_template.jinja"
        )
    made = _think(tokenizer, source, system, opening)
    ends = _end_token(tokenizer, end_token)
    with whole_folder(output) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        for left_over in ("chat_template.json", "chat_template.jinja"):
            (folder / left_over).unlink(missing_ok=True)
        if ends is not None:
            tokenizer.eos_token = ends
            _end_with(folder, tokenizer.convert_tokens_to_ids(ends))
        tokenizer.save_pretrained(folder)
    return ThinkModel(**{**vars(made), "end_token": ends})


def _think(tokenizer: PreTrainedTokenizerBase, source: Path, system: str, opening: str) -> ThinkModel:
    """Gives the tokenizer its new templates."""
    kept = tokenizer.chat_template
    before = [_rendered(tokenizer, probe) for probe in PROBES]
    opened = bool(opening.strip()) and not before[0].rstrip().endswith(opening.strip())
    target: Literal["system", "user", "nowhere"] = "nowhere"
    if system:
        target = "system" if _refuses(tokenizer, system) is None else "user"
    several = isinstance(kept, dict)
    templates = kept if several else {"default": kept}
    made = {name: around(text, system, target, opening if opened else "") for name, text in templates.items()}
    # What is expected of the new template is rendered by the old one.
    rendered = [_rendered(tokenizer, with_system(probe, system, target)) for probe in PROBES]
    expected = [text + opening if opened and not text.startswith(REFUSED) else text for text in rendered]
    tokenizer.chat_template = made if several else made["default"]
    after = [_rendered(tokenizer, probe) for probe in PROBES]
    if after == before:
        raise ValueError(
            f"nothing would change: prompts of the model in {source} end with {before[0][-40:]!r} already"
            + ("" if system else ", and no system message is asked for")
        )
    if after != expected:
        raise ValueError(
            f"the chat template in {source} can't be gone around: it gives {after[0]!r}, where"
            f" {expected[0]!r} was to be"
        )
    return ThinkModel(before[0], after[0], target, opened, None)


def around(template: str, system: str, target: str, opening: str) -> str:
    """Returns the template between what gives the system message and what opens the thought."""
    first, last = "", ""
    if target != "nowhere":
        text = _literal(system)
        if target == "system":
            own = f"[{{'role': 'system', 'content': {text}}}] + (messages | list)"
            needed = "messages[0]['role'] != 'system'"
        else:
            asked = f"{{'role': 'user', 'content': {text} + '\\n\\n' + messages[0]['content']}}"
            own = f"[{asked}] + (messages | list)[1:]"
            needed = "messages[0]['role'] == 'user'"
        # The newline behind a block goes with it, in the environment that chat templates have.
        first = f"{{% set messages = ({own}) if messages and {needed} else messages %}}\n"
    if opening:
        thinks = "add_generation_prompt and not (enable_thinking is defined and not enable_thinking)"
        last = f"{{{{ {_literal(opening)} if {thinks} else '' }}}}"
    # Jinja drops a template's last newline, which no longer is the last.
    return first + template.removesuffix("\n") + last


def with_system(messages: Messages, system: str, target: str) -> list[Mapping[str, str]]:
    """Returns the conversation as the old template has to be shown it, to say what the new one makes of
    it."""
    first = messages[0]
    if target == "system" and first["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if target == "user" and first["role"] == "user":
        return [{**first, "content": f"{system}\n\n{first['content']}"}, *messages[1:]]
    return list(messages)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """Renders a conversation; one that the template refuses gives why."""
    try:
        return render(tokenizer, Chat(), list(messages))
    except ValueError as error:
        if len(messages) == 1:
            raise
        return f"{REFUSED} {error}"


def _refuses(tokenizer: PreTrainedTokenizerBase, system: str) -> str | None:
    """Returns why the template doesn't take a system message; None where it does."""
    try:
        text = render(tokenizer, Chat(), [{"role": "system", "content": system}, _QUESTION])
    except ValueError as error:
        return str(error)
    return None if system in text else "it leaves the system message out"


def _end_token(tokenizer: PreTrainedTokenizerBase, end_token: str | None) -> str | None:
    """The token that has to end answers from now on; None where it does already."""
    if end_token is not None:
        if end_token not in tokenizer.get_vocab():
            raise ValueError(f"the tokenizer has no token {end_token!r} to end an answer with")
        return None if end_token == tokenizer.eos_token else end_token
    end_id = end_of_turn(tokenizer, Chat())
    if end_id is None or end_id == tokenizer.eos_token_id:
        return None
    return str(tokenizer.convert_ids_to_tokens(end_id))


def _end_with(folder: Path, token_id: int) -> None:
    """Says in the model's files that this token ends an answer, and those that did still do when sampling."""
    for name, several in (("config.json", False), ("generation_config.json", True)):
        path = folder / name
        if not path.is_file():
            continue
        described: dict[str, Any] = json.loads(path.read_text())
        before = described.get("eos_token_id")
        others = before if isinstance(before, list) else [] if before is None else [before]
        ids = [token_id, *(one for one in others if one != token_id)]
        described["eos_token_id"] = ids if several and len(ids) > 1 else token_id
        path.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def _literal(text: str) -> str:
    """Returns a text as Jinja writes it."""
    return json.dumps(text, ensure_ascii=False)


def chat_template(options: argparse.Namespace) -> int:
    from treetune.threads.commands import OPENING, SYSTEM, write_think_model

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
        "add a thinking chat template to a copy of a model",
        "Copies a model and extends its chat template by a system message and an opening <think> tag. Prints"
        " a prompt before and after. Refuses to copy if nothing would change.",
        ("treetune chat_template --model models/Qwen2.5-7B --output models/Qwen2.5-7B-think",),
        (
            Argument(
                "--model", {"type": Path, "required": True, "metavar": "DIR", "help": "folder of the model"}
            ),
            Argument(
                "--output", {"type": Path, "required": True, "metavar": "DIR", "help": "folder to create"}
            ),
            Argument(
                "--system",
                {"metavar": "TEXT", "help": "system message; '' for none; default: think, then answer"},
            ),
            Argument(
                "--opening", {"metavar": "TEXT", "help": "ends a prompt; default: <think> and a newline"}
            ),
            Argument(
                "--end-token",
                {
                    "metavar": "TOKEN",
                    "help": "ends an answer; default: the token that the template puts after one",
                },
            ),
        ),
    ),
)
