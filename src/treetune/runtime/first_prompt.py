"""Describes for `check` the first prompt, as the model gets it, and the tokens and texts that end an
answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.models.policy_files import resolve_policy
from treetune.models.pretrained import PretrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treetune.models.sources import ModelSource
    from treetune.tasks.base import Task
    from treetune.vocabulary import TextCodec

MOST_PROMPT_CHARACTERS = 600
"""Most characters of a prompt that are shown. The middle of a longer prompt is left out."""


def describe_first_prompt(model: ModelSource, task: Task, stop_strings: Sequence[str]) -> Iterator[str]:
    """Yields lines for people: what ends an answer, and the first prompt as the model gets it.

    Yields nothing for a model that is not in a local folder, since a download of the model may take minutes.
    For the same reason, yields no prompt for a task that can't make a problem at once.

    Raises:
        ValueError: The tokenizer can't be used, or a stop string can never be found. The start of the run
            would fail with the same message.
    """
    if not isinstance(model, PretrainedModel):
        return
    try:
        path = Path(resolve_policy(model.name_or_path))
    except ValueError:
        return  # the checkpoint of another experiment, which may not have run yet
    if not path.is_dir():
        return
    from treetune.models.control_tokens import ControlTokens, refuse_hidden_stops

    tokenizer = model.load_tokenizer(task.alphabet)
    codec = model.codec(tokenizer)
    refuse_hidden_stops(tokenizer, stop_strings)
    yield _describe_ends(tokenizer, codec, stop_strings)
    problem = next(iter(task.examples(1)), None)
    if problem is None:
        return
    prompt_ids = codec.encode_prompt(problem).tolist()
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    shown = repr(prompt)
    if len(shown) > MOST_PROMPT_CHARACTERS:
        half = MOST_PROMPT_CHARACTERS // 2
        shown = f"{shown[:half]} … {shown[-half:]}"
    yield f"the first prompt as the model gets it ({len(prompt_ids)} tokens): {shown}"
    # A control token structures a conversation, such as <|im_end|>. Without a chat template, text of the
    # prompt that looks like a control token becomes this token. An `as_is` problem gets no template whatever
    # `model.chat` is, so nothing is said about it.
    if model.chat is None and not problem.as_is:
        control = ControlTokens(tokenizer)
        marked_prompt = control.mark(problem.prompt)  # has a mark in place of each such text
        if control.is_marked(marked_prompt):
            yield (
                "the prompt contains control tokens, and model.chat is null: they are read as control tokens,"
                " from the task's template and from its rows alike"
            )


def _describe_ends(tokenizer: PreTrainedTokenizerBase, codec: TextCodec, stop_strings: Sequence[str]) -> str:
    """Returns a line such as ``an answer ends with </s> (id 2), the text '\\n\\n'``."""
    ends = [f"{tokenizer.convert_ids_to_tokens(token_id)} (id {token_id})" for token_id in codec.end_ids]
    if stop_strings:
        ends.append(f"the text {' or '.join(map(repr, stop_strings))}")
    return f"an answer ends with {', '.join(ends)}"
