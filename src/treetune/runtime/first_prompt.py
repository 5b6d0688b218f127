"""Remarks of `check` on the first prompt, as the model gets it, and on what ends an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.models.policy_files import resolve_policy
from treetune.models.pretrained import PretrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treetune.runtime.base import PolicyIteration
    from treetune.vocabulary import TextCodec

SHOWN = 600
"""Characters of a prompt; of a longer one, the middle is left out."""


def prompt_remarks(config: PolicyIteration) -> Iterator[str]:
    """Yields what ends an answer and how the first problem is asked.

    Only for models in a folder that is there, and tasks that know a problem at once: loading what isn't here
    may take minutes. Raises ValueError as the start of the run would.
    """
    if not isinstance(config.model, PretrainedModel):
        return
    try:
        path = Path(resolve_policy(config.model.name_or_path))
    except ValueError:
        return  # an experiment that comes before this one may still have to make it
    if not path.is_dir():
        return
    from treetune.models.control_tokens import ControlTokens, refuse_hidden_stops

    tokenizer = config.model.load_tokenizer(config.task.alphabet)
    codec = config.model.codec(tokenizer)
    refuse_hidden_stops(tokenizer, config.stop_strings())
    yield from _ends(config, tokenizer, codec)
    problem = next(iter(config.task.examples(1)), None)
    if problem is None:
        return
    prompt_ids = codec.encode_prompt(problem).tolist()
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    shown = repr(prompt)
    if len(shown) > SHOWN:
        shown = f"{shown[: SHOWN // 2]} … {shown[-SHOWN // 2 :]}"
    yield f"the first prompt as the model gets it ({len(prompt_ids)} tokens): {shown}"
    control = ControlTokens(tokenizer)
    if config.model.chat is None and not problem.as_is and control.is_marked(control.mark(problem.prompt)):
        yield (
            "the prompt holds control tokens, and model.chat is null: they are read as such, be they the"
            " task's or a row's"
        )


def _ends(config: PolicyIteration, tokenizer: PreTrainedTokenizerBase, codec: TextCodec) -> Iterator[str]:
    ends = [f"{tokenizer.convert_ids_to_tokens(token_id)} (id {token_id})" for token_id in codec.end_ids]
    if stops := config.stop_strings():
        ends.append(f"the text {' or '.join(map(repr, stops))}")
    yield f"an answer ends with {', '.join(ends)}"
