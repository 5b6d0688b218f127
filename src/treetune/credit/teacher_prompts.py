"""Privileged prompts, with which the model is the teacher of its own answers (self-distillation).

    policy     "2 + 3?"                       ── answer ──>  π(· | x, y_<t)
    teacher    "2 + 3?  The answer is 5."     ── answer ──>  π_T(· | c, x, y_<t), at the same tokens

Here x is the problem, c the privileged text, and y_<t the answer's tokens before token t.

The credit `self_distillation` scores answers after such prompts. For the objective
`distribution_distillation`, a training row keeps the prompt (`Episode.teacher_prompt_ids`), and the trainer
runs the teacher over this prompt and the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from treetune.credit.critic_prompts import PROMPT_PLACEHOLDER, privileged_prompt
from treetune.vocabulary import Episode, Metrics, TextCodec, TokenIds

if TYPE_CHECKING:
    from treetune.rollouts.context import RolloutContext
    from treetune.tree import Tree

PrivilegedText: TypeAlias = Literal["gold", "right_answer", "feedback"]
"""A text that only the teacher sees: the reference answer, another right answer, or the grader's message."""

CONTEXT_PLACEHOLDER = "{context}"
"""The placeholder of the privileged text in a template."""

DEFAULT_TEMPLATE = "{prompt}\n\nFor reference, this is known about the problem:\n{context}\n"
"""The default template of a privileged prompt."""


@dataclass(frozen=True, kw_only=True)
class PrivilegedPrompt:
    """The settings of the prompt that the teacher sees.

    Raises:
        ValueError: A placeholder is missing in the template.
    """

    context: PrivilegedText = "gold"
    """The privileged text: the problem's reference answer (``gold``), the text of another right answer to the
    same problem (``right_answer``), or the grader's message on the answer (``feedback``)."""
    template: str = DEFAULT_TEMPLATE
    """The privileged prompt. ``{prompt}`` is the problem's text (of a conversation, its last message), and
    ``{context}`` the privileged text. The model's chat template is put around it, as around every prompt."""

    def __post_init__(self) -> None:
        refuse_template(self.template)

    def ids_of_answer(self, codec: TextCodec, tree: Tree, leaf: int) -> TokenIds | None:
        """Returns the tokens of the privileged prompt of an answer; None if it has no privileged text."""
        text = privileged_text(tree, leaf, self.context)
        if not text:
            return None
        return privileged_prompt(codec, tree.leaves[leaf].problem, self.template, CONTEXT_PLACEHOLDER, text)


def refuse_template(template: str) -> None:
    """Raises ValueError if the template doesn't contain both placeholders."""
    missing = [
        placeholder
        for placeholder in (PROMPT_PLACEHOLDER, CONTEXT_PLACEHOLDER)
        if placeholder not in template
    ]
    if missing:
        raise ValueError(
            f"template doesn't contain {' and '.join(missing)}: put the problem's text and the privileged"
            " text into it"
        )


def privileged_text(tree: Tree, leaf: int, context: PrivilegedText) -> str | None:
    """Returns the text that only the teacher of an answer sees; None or empty if there is none."""
    answer = tree.leaves[leaf]
    if context == "gold":
        return answer.problem.gold
    if context == "feedback":
        return answer.grade.message
    # "right_answer": the first right one of the other answers. A teacher that sees the answer itself would
    # copy it.
    for index, other in enumerate(tree.leaves):
        if index != leaf and other.grade.correct:
            return other.text
    return None


def with_teacher_prompts(
    context: RolloutContext, prompt: PrivilegedPrompt, trees: Sequence[Tree], episodes: Sequence[Episode]
) -> tuple[list[Episode], Metrics]:
    """Returns the training rows with the teacher's prompts, and the metric ``credit/without_context``: the
    share of rows without such a prompt. Collective.

    A row gets no prompt if its answer has no privileged text, or if the prompt and the answer together are
    longer than the model's context.

    Args:
        prompt: Makes the prompts.
        trees: The trees of the answers.
        episodes: The rows of these answers.
    """
    prompts: dict[str, TokenIds | None] = {}
    for tree in trees:
        for leaf, answer in enumerate(tree.leaves):
            prompts[answer.id] = prompt.ids_of_answer(context.codec, tree, leaf)
    rows = []
    without_context = 0
    for episode in episodes:
        prompt_ids = prompts[episode.trajectory]
        fits = (
            prompt_ids is not None
            and len(prompt_ids) + len(episode.response_ids) <= context.settings.context_length
        )
        if fits:
            rows.append(replace(episode, teacher_prompt_ids=prompt_ids))
        else:
            rows.append(episode)
            without_context += 1
    counts_by_rank = context.ranks.exchange("teacher's prompts", (without_context, len(rows)))
    rows_of_all_ranks = sum(row_count for _, row_count in counts_by_rank)
    if not rows_of_all_ranks:
        return rows, {}
    without_context_of_all_ranks = sum(without_count for without_count, _ in counts_by_rank)
    return rows, {"credit/without_context": without_context_of_all_ranks / rows_of_all_ranks}
