r"""Prompts that only the critic sees: the problem with its reference answer (a privileged critic).

    policy    "2 + 3?"                         ── answer ──>  log π(y_t | x, y_<t)
    critic    "2 + 3?\nReference answer: 5\n"   ── answer ──>  V(x, y_<t, gold) before each token y_t

The critic has a value before each token of the same answer; only the tokens before the answer differ. A
critic that sees more than the policy is the asymmetric actor-critic of Pinto et al., arXiv:1710.06542. For
reasoning, arXiv:2607.27631 gives the critic the reference answer (its text was not available for this file).

The reference answer doesn't depend on what the policy chooses in a state, so subtracting V(s, gold) keeps the
policy gradient unbiased, as subtracting V(s) does: E[∇log π(a|s) · f(s, gold)] = 0 for every f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treetune.vocabulary import Episode, Message, Metrics, Problem, TextCodec, TokenIds

if TYPE_CHECKING:
    from treetune.rollouts.context import RolloutContext
    from treetune.tree import Tree

PROMPT_PLACEHOLDER, GOLD_PLACEHOLDER = "{prompt}", "{gold}"
"""The placeholders of the problem's text and of its reference answer in a critic's template."""


def fill_template(template: str, prompt: str, placeholder: str, privileged: str) -> str:
    """Returns the template with the prompt and the privileged text in the places of their placeholders."""
    # `str.format` isn't used, since it would fail on other braces in the template. The template is split at
    # the prompt, so that a placeholder that occurs in the problem's text is not replaced.
    beginning, _, end = template.partition(PROMPT_PLACEHOLDER)
    return beginning.replace(placeholder, privileged) + prompt + end.replace(placeholder, privileged)


def privileged_prompt(
    codec: TextCodec, problem: Problem, template: str, placeholder: str, privileged: str
) -> TokenIds:
    """Returns the tokens of a problem's prompt with a privileged text in it.

    Example: with the template ``"{prompt} ({gold})"``, the placeholder ``{gold}``, the problem ``2 + 3?`` and
    the privileged text ``5``, the prompt is that of the problem ``2 + 3? (5)``. In a conversation, only the
    last message is changed.

    Raises:
        ValueError: The tokenizer doesn't have a character of the template or of the text.
    """
    messages: tuple[Message, ...] = problem.messages
    if messages:
        content = fill_template(template, messages[-1].content, placeholder, privileged)
        messages = (*messages[:-1], replace(messages[-1], content=content))
    prompt = fill_template(template, problem.prompt, placeholder, privileged)
    privileged_problem = replace(problem, prompt=prompt, messages=messages)
    try:
        return codec.encode_prompt(privileged_problem)
    except ValueError as error:  # its message doesn't say which problem and template it is about
        raise ValueError(
            f"problem {problem.id!r} with the template of a privileged prompt: {error}"
        ) from error


class CriticPrompts:
    """Makes the critic's prompts, once for each problem.

    Args:
        codec: The model's tokenizer.
        template: `CriticSettings.template`; None: the critic has the policy's prompts.
        context_length: The largest length of prompt and answer together.
    """

    def __init__(self, codec: TextCodec, template: str | None, context_length: int) -> None:
        self._codec, self._template, self._context_length = codec, template, context_length
        self._prompts: dict[str, TokenIds] = {}

    def add_to(self, episode: Episode, problem: Problem) -> Episode:
        """Returns the row with the critic's prompt, or the unchanged row.

        The row is unchanged if there is no template, if the problem has no reference answer, or if the
        critic's prompt and the answer don't fit into the context together. The critic then sees the
        policy's prompt.
        """
        if self._template is None or not problem.gold:
            return episode
        if problem.id not in self._prompts:
            prompt_ids = privileged_prompt(
                self._codec, problem, self._template, GOLD_PLACEHOLDER, problem.gold
            )
            self._prompts[problem.id] = prompt_ids
        prompt_ids = self._prompts[problem.id]
        if len(prompt_ids) + len(episode.response_ids) > self._context_length:
            return episode
        return replace(episode, critic_prompt_ids=prompt_ids)


def with_critic_prompts(
    context: RolloutContext, template: str, trees: Sequence[Tree], episodes: Sequence[Episode]
) -> tuple[list[Episode], Metrics]:
    """Returns the rows of the trees' answers with the critic's prompts, and the metric
    ``critic/without_own_prompt``: the share of rows that have none. Collective.

    Args:
        template: `CriticSettings.template`.
    """
    problems = {tree.problem.id: tree.problem for tree in trees}
    prompts = CriticPrompts(context.codec, template, context.settings.context_length)
    with_prompts = [prompts.add_to(episode, problems[episode.group]) for episode in episodes]
    without_own_prompt = sum(episode.critic_prompt_ids is None for episode in with_prompts)
    counts_by_rank = context.ranks.exchange("critic's prompts", (without_own_prompt, len(with_prompts)))
    rows_of_ranks = sum(count for _, count in counts_by_rank)
    if not rows_of_ranks:
        return with_prompts, {}
    share_without_prompt = sum(count for count, _ in counts_by_rank) / rows_of_ranks
    return with_prompts, {"critic/without_own_prompt": share_without_prompt}
