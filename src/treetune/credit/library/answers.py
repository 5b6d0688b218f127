"""Answers that were sampled and graded elsewhere, and the trees that credit works on.

    the user's answers ──read_answers──> checked `GradedAnswer` objects with NumPy columns
                       ──trees_of_answers──> a tree for each group, as a rollout returns them

A column (ids, log-probs, masks) may be a list, a NumPy array or a PyTorch tensor.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from treetune.rollouts.answers import split_steps
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree
from treetune.vocabulary import (
    Column,
    Fork,
    Grade,
    Problem,
    Segment,
    TokenIds,
    Trajectory,
    logprob_array,
    token_array,
)


@dataclass(frozen=True, eq=False)
class GradedAnswer:
    """An answer that was sampled and graded elsewhere.

    Example: the answer ``2 + 3 = 5`` and its end token, which is right::

        GradedAnswer(prompt_ids=[12, 7, 40], response_ids=[20, 31, 21, 9, 25, 2], reward=1.0)
    """

    prompt_ids: Any
    """The token ids of the whole prompt, with its chat template."""
    response_ids: Any
    """The token ids of the answer as they were sampled, with the end token, without padding."""
    reward: float
    group: str | None = None
    """The name of the problem. Answers of the same group are compared with each other, and the seeds of
    continuations derive from this name, too. None: answers with equal `prompt_ids` are a group."""
    logprobs: Any = None
    """The log-prob with which each token of the answer was sampled; None: unknown. Some credits need them."""
    sampled: Any = None
    """True for the tokens that the policy sampled, False for those of an environment or a tool; None: the
    policy sampled all of them."""
    finished: bool = True
    """False for an answer that was cut off at the token limit."""
    prompt: str = ""
    """The text of the problem, for the grader; empty: the decoded `prompt_ids`."""
    gold: str = ""
    """The reference answer, for graders that compare with one."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the problem's row, for graders."""
    step_ends: Sequence[int] | None = None
    """The number of response tokens up to the end of each step, such as ``[3, 6]``; None: the setting `steps`
    of `CreditAssigner` splits the text into steps."""
    step_rewards: Sequence[float] = ()
    """The reward of each turn, if an environment rewards turns; they add up to `reward`."""
    fork: tuple[int, int] | None = None
    """The point where this answer branched off from another answer of its group; None: it didn't. A pair: the
    number of the other answer in the group, counted from 0, and the number of response tokens that the two
    share. For the credits ``tree`` and ``monte_carlo``."""


def read_answers(answers: Iterable[GradedAnswer | Mapping[str, Any]]) -> list[GradedAnswer]:
    """Returns the answers with NumPy columns and with the names of their groups.

    Args:
        answers: `GradedAnswer` objects, or dictionaries with the same keys.

    Raises:
        ValueError: An answer is wrong. The message says which, and what would be right.
    """
    checked_answers = []
    for number, answer in enumerate(answers):
        try:
            checked_answers.append(_check_answer(answer))
        except (TypeError, ValueError) as error:
            raise ValueError(f"answer {number}: {error}") from error
    if not checked_answers:
        raise ValueError("there are no answers: give at least one")
    # For each group, the number of its first answer, and the prompt of this answer.
    first_of_group: dict[str | None, tuple[int, TokenIds]] = {}
    for number, answer in enumerate(checked_answers):
        first, prompt_ids = first_of_group.setdefault(answer.group, (number, answer.prompt_ids))
        if not _are_equal(prompt_ids, answer.prompt_ids):
            raise ValueError(
                f"answers {first} and {number} are both of the group {answer.group!r}, and their prompt_ids"
                " differ: give each problem a group of its own"
            )
    return checked_answers


def _check_answer(answer: GradedAnswer | Mapping[str, Any]) -> GradedAnswer:
    """Returns an answer with NumPy columns. Raises ValueError or TypeError for a wrong one."""
    if isinstance(answer, Mapping):
        names = [declared.name for declared in fields(GradedAnswer)]
        unknown_keys = [name for name in answer if name not in names]
        if unknown_keys:
            raise ValueError(f"there is no key {unknown_keys[0]!r}; keys are {', '.join(names)}")
        missing = [name for name in ("prompt_ids", "response_ids", "reward") if name not in answer]
        if missing:
            raise ValueError(f"the key {missing[0]!r} is missing")
        answer = GradedAnswer(**answer)
    if not isinstance(answer, GradedAnswer):
        raise TypeError(
            f"it is of the type {type(answer).__name__}: give a GradedAnswer, or a dictionary with its keys"
        )
    prompt_ids = _read_ids(answer.prompt_ids, "prompt_ids")
    response_ids = _read_ids(answer.response_ids, "response_ids")
    tokens = len(response_ids)
    try:
        reward = float(answer.reward)
    except (TypeError, ValueError):  # refused below, as infinity and NaN are
        reward = math.nan
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {answer.reward!r}: give a finite number, or leave the answer out")
    logprobs = None
    if answer.logprobs is not None:
        logprobs = logprob_array(_read_column(answer.logprobs, "logprobs", tokens))
    sampled: Column | None = None
    if answer.sampled is not None:
        sampled = _read_column(answer.sampled, "sampled", tokens).astype(bool)
        if not sampled.any():
            raise ValueError("sampled is False for all of its tokens: leave the answer out")
    step_ends = None if answer.step_ends is None else tuple(int(end) for end in answer.step_ends)
    if step_ends is not None:
        starts = (0, *step_ends[:-1])
        is_rising = all(start < end for start, end in zip(starts, step_ends, strict=True))
        if not is_rising or step_ends[-1:] != (tokens,):
            raise ValueError(
                f"its step_ends are {list(step_ends)}: they rise, and the last is the number of response"
                f" tokens ({tokens})"
            )
    step_rewards = tuple(float(step_reward) for step_reward in answer.step_rewards)
    # The sum may differ by rounding, since a trainer may have added the rewards up in float32.
    if step_rewards and not math.isclose(math.fsum(step_rewards), reward, rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(
            f"its step_rewards add up to {math.fsum(step_rewards):g}, and its reward is {reward:g}"
        )
    fork = None if answer.fork is None else _read_fork(answer.fork)
    group = str(answer.group) if answer.group is not None else _name_of_prompt(prompt_ids)
    return replace(
        answer,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        reward=reward,
        group=group,
        logprobs=logprobs,
        sampled=sampled,
        step_ends=step_ends,
        step_rewards=step_rewards,
        fork=fork,
    )


def _read_fork(fork: Any) -> tuple[int, int]:
    """Returns a fork as two integers. Raises ValueError if it isn't such a pair."""
    try:
        origin, tokens = fork
        return operator.index(origin), operator.index(tokens)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"its fork is {fork!r}: give two integers, the number of the answer in its group that it branched"
            " off from, and the number of response tokens that they share"
        ) from error


def _name_of_prompt(prompt_ids: TokenIds) -> str:
    """Returns a name that equal prompts share, in every call and on every process."""
    return "prompt-" + hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).hexdigest()


def _read_ids(values: Any, name: str) -> TokenIds:
    """Returns token ids as an array. Raises ValueError if there are none, or if they aren't ids."""
    import numpy as np

    ids = to_numpy(values)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"its {name} have the shape {list(ids.shape)}: give one row of token ids")
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise ValueError(f"its {name} are not token ids, which are integers of at least 0")
    return token_array(ids)


def _read_column(values: Any, name: str, tokens: int) -> Column:
    """Returns a column with a number for each response token. Raises ValueError for another length."""
    column = to_numpy(values)
    if column.shape != (tokens,):
        raise ValueError(
            f"its {name} have the shape {list(column.shape)}: give one for each of its {tokens} response"
            " tokens"
        )
    return column


def to_numpy(values: Any) -> Column:
    """Returns a list, a NumPy array or a PyTorch tensor as a NumPy array."""
    import numpy as np

    if hasattr(values, "detach"):  # a PyTorch tensor, on any device
        tensor = values.detach().cpu()
        # NumPy has no bfloat16. So floating-point tensors of every precision become float32.
        return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
    return np.asarray(values)


def convert_like(column: Column, example: Any) -> Any:
    """Returns a column with the type of `example`: a list, a NumPy array, or a PyTorch tensor on the device
    of `example`.

    Floating-point numbers in tensors have PyTorch's default precision, since a trainer multiplies them with
    its own tensors.
    """
    if hasattr(example, "detach"):
        import torch

        dtype = torch.bool if column.dtype == bool else torch.get_default_dtype()
        return torch.as_tensor(column, dtype=dtype, device=example.device)
    return column if hasattr(example, "dtype") else column.tolist()


def _are_equal(ids: TokenIds, other: TokenIds) -> bool:
    import numpy as np

    return np.array_equal(ids, other)


# Trees


def trees_of_answers(
    context: RolloutContext, answers: Sequence[GradedAnswer], *, has_text: bool
) -> list[Tree]:
    """Returns a tree for each group, in the order in which the groups first appear.

    Args:
        context: The context of the call. Its task and codec split answers into steps.
        answers: Answers that `read_answers` has checked.
        has_text: Whether the codec can decode. If it can't, the answers have no text, and an answer without
            `step_ends` is one step.
    """
    groups: dict[str, list[GradedAnswer]] = {}
    for answer in answers:
        assert answer.group is not None, "`read_answers` names each group"
        groups.setdefault(answer.group, []).append(answer)
    trees = []
    for name, group in groups.items():
        # All answers of a group have one prompt. The texts for the grader are those of the first answer.
        first = group[0]
        prompt = first.prompt
        if not prompt and has_text:
            prompt = _decode(context, first.prompt_ids, name)
        problem = Problem(id=name, prompt=prompt, gold=first.gold, data=first.data)
        tree = Tree(problem, first.prompt_ids)
        cuts_by_answer = _cuts_at_forks(name, group)
        for number, (answer, cuts) in enumerate(zip(group, cuts_by_answer, strict=True)):
            tree.add_answer(_make_trajectory(context, problem, number, answer, cuts, has_text))
        trees.append(tree)
    return trees


def _decode(context: RolloutContext, token_ids: TokenIds, name: str) -> str:
    """Returns the text of tokens. Raises ValueError if the tokenizer doesn't have one of them."""
    try:
        return context.codec.decode(token_ids)
    except (LookupError, OverflowError, TypeError) as error:  # tokenizers differ in what they raise
        raise ValueError(
            f"an answer or the prompt of the group {name!r} has tokens that the tokenizer can't decode, up to"
            f" {token_ids.max()}: give the tokenizer of the policy that sampled the answers"
        ) from error


def _cuts_at_forks(name: str, group: Sequence[GradedAnswer]) -> list[set[int]]:
    """Returns, for each answer of a group, the positions (numbers of response tokens) at which it is cut into
    segments.

    An answer is cut where it branched off from another answer (its fork), and where another answer branched
    off from it. Raises ValueError for a wrong fork.

    Example: the second answer branched off from the first after 4 tokens. Both are cut there:
    ``[{4}, {4}]``.
    """
    cuts_by_answer: list[set[int]] = [set() for _ in group]
    for number, answer in enumerate(group):
        if answer.fork is None:
            continue
        origin, tokens = answer.fork
        if not 0 <= origin < number:
            raise ValueError(
                f"answer {number} of the group {name!r} has the fork {answer.fork}: an answer branches off"
                " from an earlier one of its group"
            )
        shared_ids = group[origin].response_ids[:tokens]
        is_equal = _are_equal(shared_ids, answer.response_ids[:tokens])
        if not 0 < tokens < len(answer.response_ids) or not is_equal:
            raise ValueError(
                f"answer {number} of the group {name!r} has the fork {answer.fork}, and its first {tokens}"
                f" tokens are not those of answer {origin}"
            )
        if not _are_equal(_sampled_mask(group[origin])[:tokens], _sampled_mask(answer)[:tokens]):
            raise ValueError(
                f"answer {number} of the group {name!r} has the fork {answer.fork}, and sampled of its first"
                f" {tokens} tokens differs from that of answer {origin}: give both the same there, since the"
                " answers share these tokens (None: the policy sampled all tokens)"
            )
        cuts_by_answer[number].add(tokens)
        # The origin is cut at the same position. The origin may itself have branched off from an earlier
        # answer. If it did so at this position or later, the two share the tokens up to the cut, so that the
        # earlier answer is cut there, too; and so on.
        ancestor: int | None = origin
        while ancestor is not None:
            cuts_by_answer[ancestor].add(tokens)
            fork = group[ancestor].fork
            ancestor = fork[0] if fork is not None and fork[1] >= tokens else None
    # An answer gets the cuts of its origin up to their fork, so that both have the same segments up to there.
    # An origin comes earlier in the group than the answer, so its own cuts are complete by then.
    for number, answer in enumerate(group):
        if answer.fork is not None:
            origin, tokens = answer.fork
            cuts_by_answer[number] |= {cut for cut in cuts_by_answer[origin] if cut <= tokens}
    return cuts_by_answer


def _sampled_mask(answer: GradedAnswer) -> Column:
    """Returns for each token of a checked answer whether the policy sampled it."""
    import numpy as np

    if answer.sampled is None:
        return np.ones(len(answer.response_ids), np.bool_)
    mask: Column = answer.sampled  # the field has the type Any; a checked answer has an array
    return mask


def _make_trajectory(
    context: RolloutContext,
    problem: Problem,
    number: int,
    answer: GradedAnswer,
    cuts: set[int],
    has_text: bool,
) -> Trajectory:
    """Returns an answer as a rollout would have made it.

    Args:
        number: The number of the answer in its group.
        cuts: The numbers of tokens at which the answer is cut into segments; see `_cuts_at_forks`.
        has_text: Whether the codec can decode the answer.
    """
    import numpy as np

    tokens = len(answer.response_ids)
    sampled = _sampled_mask(answer)
    # A segment ends at each cut, and at each change between sampled tokens and those of an environment. No
    # segment starts at a cut at the answer's end, from which another answer continues.
    changes = (np.flatnonzero(np.diff(sampled)) + 1).tolist()
    starts = sorted({0, *changes, *cuts} - {tokens})
    segments = []
    for start, end in zip(starts, [*starts[1:], tokens], strict=True):
        is_sampled = bool(sampled[start])
        has_logprobs = is_sampled and answer.logprobs is not None
        segments.append(
            Segment(
                answer.response_ids[start:end],
                "sampled" if is_sampled else "injected",
                logprobs=answer.logprobs[start:end] if has_logprobs else None,
            )
        )
    text = _decode(context, answer.response_ids, problem.id) if has_text else ""
    if answer.step_ends is not None:
        step_ends = answer.step_ends
    elif has_text:
        stop = context.settings.sampling.stop if context.settings.sampling is not None else ()
        step_ends = split_steps(context, problem, answer.response_ids, text, stop)
    else:
        step_ends = (tokens,)  # one step
    return Trajectory(
        problem=problem,
        sample=number,
        prompt_ids=answer.prompt_ids,
        segments=tuple(segments),
        finish_reason="stop" if answer.finished else "length",
        text=text,
        grade=Grade(reward=answer.reward, outcome="ok"),
        step_ends=tuple(step_ends),
        step_rewards=tuple(answer.step_rewards),
        fork=None if answer.fork is None else Fork(*answer.fork),
    )
