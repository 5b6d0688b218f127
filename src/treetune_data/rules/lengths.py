"""Rows whose prompts or answers are too long, by the tokens of a model or by characters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from treetune.models.sources import ModelSource
from treetune.vocabulary import TextCodec
from treetune_data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune_domains.domain_rows import GROUND_TRUTH, REWARD_MODEL, Row, problem_of, prompt_text

if TYPE_CHECKING:
    from collections.abc import Callable


@Rule.register("length")
@dataclass(frozen=True, kw_only=True)
class Length(Rule):
    """Drops rows whose prompt has more than `max_prompt_tokens`, or whose ground truth has more than
    `max_ground_truth_tokens`, of `model`'s tokenizer; prompts are counted as the model is asked them, with
    its chat template where `model.chat` is set. `max_prompt_characters`, `min_prompt_characters` and
    `max_ground_truth_characters` need no model.
    """

    model: ModelSource | None = None
    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    max_ground_truth_tokens: Annotated[int, Gt(0)] | None = None
    max_prompt_characters: Annotated[int, Gt(0)] | None = None
    min_prompt_characters: Annotated[int, Ge(0)] = 0
    max_ground_truth_characters: Annotated[int, Gt(0)] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        tokens = (self.max_prompt_tokens, self.max_ground_truth_tokens)
        if any(tokens) and self.model is None:
            raise ValueError("max_prompt_tokens and max_ground_truth_tokens need a model: name one, as an"
                             " experiment does, or bound characters")  # fmt: skip
        bounds = (*tokens, self.max_prompt_characters, self.max_ground_truth_characters)
        if not any(bounds) and not self.min_prompt_characters:
            raise ValueError("the rule 'length' bounds nothing: set max_prompt_tokens, or leave it out")

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        codec = self._codec()
        found = {}
        for done, one in enumerate(rows):
            if done % 256 == 0:
                context.progress(done, len(rows))
            if why := self._too_long(one.row, codec):
                found[one.number] = why
        return Verdict(found)

    def _codec(self) -> TextCodec | None:
        if self.model is None:
            return None
        return self.model.codec(self.model.load_tokenizer(_no_alphabet))

    def _too_long(self, row: Row, codec: TextCodec | None) -> str | None:
        prompt, gold = prompt_text(row), row[REWARD_MODEL][GROUND_TRUTH]
        if len(prompt) < self.min_prompt_characters:
            return f"a prompt of {len(prompt)} characters"
        for what, length, most in (
            ("a prompt of {} characters", len(prompt), self.max_prompt_characters),
            ("a ground truth of {} characters", len(gold), self.max_ground_truth_characters),
        ):
            if most is not None and length > most:
                return what.format(length)
        if codec is None:
            return None
        problem = problem_of(row, "row")
        counted: tuple[tuple[str, Callable[[], int], int | None], ...] = (
            ("a prompt of {} tokens", lambda: len(codec.encode_prompt(problem)), self.max_prompt_tokens),
            ("a ground truth of {} tokens", lambda: len(codec.encode(gold)), self.max_ground_truth_tokens),
        )
        for what, count, most in counted:
            if most is not None and (tokens := count()) > most:
                return what.format(tokens)
        return None


def _no_alphabet() -> str:
    raise ValueError(
        "the model 'tiny' knows the characters of a task, and rows have none: give its alphabet, or take the"
        " model 'pretrained'"
    )
