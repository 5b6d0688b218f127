"""Languages in which the share of decisive steps can be set, for the page on that share.

A decisive step has a choice that changes the chance of success; a routine step has none. There are three ways
to make the share smaller, which are not equivalent:

* `dilute` with more steps adds routine steps, so that answers become longer;
* `dilute` of a language with fewer choices, at the same number of steps, replaces decisive steps by routine
  ones;
* `by_luck` with fewer choices does so too, but the environment's luck decides most of the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treetune.lab.arena.languages import Language, make_language


def dilute(language: Language, steps: int, wordings: int = 2, tokens: int = 1) -> Language:
    """Returns a language with routine steps between the choices of another language.

    A language is a toy task whose answer is a Markov chain. A status is the chain's state, and wordings are
    tokens that move to the same status. A routine step changes nothing about the chance of success.

    Example: the choices of "majority of 3" in an answer of six steps, of which every second is routine::

        dilute(majority(3), steps=6)

    Args:
        language: A language whose steps have one token each.
        steps: The number of steps of an answer, at least the language's length.
        wordings: The number of wordings of a routine token. They have no meaning.
        tokens: The number of tokens in a step. Only the first can be a choice.

    Raises:
        ValueError: There are more choices than steps.
    """
    if steps < language.length:
        raise ValueError(f"steps is {steps}, and the language has {language.length} choices: add steps")
    # The choices are spread evenly over the steps, each at the first token of its step.
    choice_by_position: dict[int, int] = {}
    for choice in range(language.length):
        step = choice * steps // language.length
        choice_by_position[step * tokens] = choice

    def chances(position: int, status: int) -> Mapping[int, float]:
        if position not in choice_by_position:
            return {status: 1.0}
        choice = choice_by_position[position]
        after_O = language.after_TSO[choice, status].tolist()
        chances_O = language.chances_TSO[choice, status].tolist()
        # Options that pad the array have probability 0.
        return {after: chance for after, chance in zip(after_O, chances_O, strict=True) if chance}

    def wordings_of(position: int, status: int) -> int:
        if position not in choice_by_position:
            return wordings
        return int(language.wordings_TS[choice_by_position[position], status])

    correct = np.flatnonzero(language.correct_S).tolist()
    return make_language(steps * tokens, len(language.correct_S), chances, wordings_of, correct, step=tokens)


def by_luck(steps: int, choices: int, effect: float, right: float = 0.25, success: float = 0.25) -> Language:
    """Returns a language in which each right choice adds `effect` to the chance of success.

    A language is a toy task whose answer is a Markov chain. After the steps comes one more token, which the
    environment writes: it draws the outcome. The mean chance of success is `success` for any number of
    choices, so the variance of the outcome is the same for all.

    Args:
        steps: The number of steps of an answer, each of one token.
        choices: The number of steps that have a choice.
        effect: The difference that a right choice makes to the chance of success.
        right: The probability that the policy chooses right.
        success: The mean chance of success.

    Raises:
        ValueError: The chance of success would be below 0 or above 1 for some number of right choices.
    """
    # The status is the number of right choices so far. After the last token it says whether the answer is
    # correct.
    is_correct, is_wrong = choices + 1, choices + 2
    chance_by_status = [success + effect * (status - choices * right) for status in range(choices + 1)]
    if min(chance_by_status) < 0 or max(chance_by_status) > 1:
        raise ValueError(
            f"an effect of {effect} of {choices} choices makes chances of success from"
            f" {min(chance_by_status):.2f} to {max(chance_by_status):.2f}: choose a smaller effect"
        )
    positions_of_choices = {number * steps // choices for number in range(choices)}

    def chances(position: int, status: int) -> Mapping[int, float]:
        # A status up to `choices` is the number of right choices so far, and the two higher ones say that the
        # answer is correct or wrong. `make_language` asks for every status at every position, also where no
        # answer has it.
        if status > choices:
            return {status: 1.0}
        if position == steps:  # the environment's token
            return {is_correct: chance_by_status[status], is_wrong: 1 - chance_by_status[status]}
        if position in positions_of_choices and status < choices:
            # The next statuses and their chances: `right` is the chance of a right choice.
            return {status + 1: right, status: 1 - right}
        return {status: 1.0}

    def wordings(position: int, status: int) -> int:
        # A step without a choice is written by one of two tokens, which mean the same.
        return 1 if position in positions_of_choices or position == steps else 2

    status_count = choices + 3  # 0 to `choices` right choices, `is_correct` and `is_wrong`
    return make_language(steps + 1, status_count, chances, wordings, [is_correct])
