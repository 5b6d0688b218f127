"""RRPO, which continues wrong answers from one of their states.

These tests promise:

* The rollout continues each wrong answer, and no other.
* The credit trains these continuations alone, and compares each with the others from its state.
* The bias of the expected gradient is as stated.
"""

from __future__ import annotations

import itertools
from statistics import fmean, stdev

import pytest

from tests.credit.expectations import bias_and_cosine
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.shipped import experiment_of
from treetune.credit.literature.resets import Resets
from treetune.credit.states.one_line import StepBoundaries
from treetune.lab.trees.branching import ResetsOfWrongAnswers
from treetune.lab.trees.rollout import TreeRollout
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Fork, Segment, Trajectory

BRANCHING = ResetsOfWrongAnswers(states=StepBoundaries(), ways=3)


def make_answer(answer: mdp.Ids, sample: int, fork: Fork | None = None, cut: int = 0) -> Trajectory:
    """Returns an answer of two segments, the first of which has `cut` tokens."""
    answer_in_one_segment = mdp.trajectory(answer, sample=sample)
    parts = [answer[:cut], answer[cut:]] if cut else [answer]
    segments = tuple(Segment(part, logprobs=(-0.5,) * len(part), policy_version=3) for part in parts)
    return Trajectory(
        problem=answer_in_one_segment.problem,
        sample=sample,
        prompt_ids=answer_in_one_segment.prompt_ids,
        segments=segments,
        finish_reason=answer_in_one_segment.finish_reason,
        text=answer_in_one_segment.text,
        grade=answer_in_one_segment.grade,
        step_ends=answer_in_one_segment.step_ends,
        fork=fork,
    )


def make_tree(wrong: mdp.Ids, length: int, suffixes: list[mdp.Ids]) -> Tree:
    """Returns the tree of a wrong answer and of the answers that continue its first `length` tokens."""
    answers = [make_answer(wrong, 0, cut=length)]
    for number, suffix in enumerate(suffixes, start=1):
        answers.append(make_answer((*wrong[:length], *suffix), number, Fork(0, length), length))
    (tree,) = trees_of(answers)
    return tree


def test_wrong_answers_continue_from_one_of_their_states_and_right_ones_do_not() -> None:
    rollout = TreeRollout(samples=4, branching=BRANCHING, max_tokens=mdp.LONGEST)
    engine = mdp.TabularEngine()
    trees, _ = rollout.run(mdp.context(engine=engine), mdp.problems(6))
    states = set()
    for tree in trees:
        from_prompt = [leaf for leaf in tree.leaves if leaf.fork is None]
        assert len(from_prompt) == 4
        for answer in from_prompt:
            further = [leaf for leaf in tree.leaves if leaf.fork and leaf.fork.sample == answer.sample]
            assert len(further) == (0 if answer.grade.correct else 3)
            lengths = {leaf.fork.tokens for leaf in further if leaf.fork}
            assert len(lengths) <= 1 and lengths <= {0, *answer.step_ends[:-1]}
            states |= lengths
    assert len(states) > 1, "the state is drawn"


@pytest.mark.parametrize("std", [True, False])
def test_the_tokens_after_the_reset_are_compared_with_the_other_continuations(std: bool) -> None:
    texts = ["a?", "b?", "a;a?"]
    (wrong,) = [answer for answer in mdp.answers() if mdp.decode(answer) == "b;b;b"]
    suffixes = [tuple(mdp.encode(text[:-1])) + (mdp.EOS,) for text in texts]
    tree = make_tree(wrong, 2, suffixes)
    rewards = [leaf.reward for leaf in tree.leaves[1:]]
    episodes, metrics = Resets(std=std).assign(mdp.context(), [tree])
    scale = stdev(rewards) + 1e-6 if std and len(set(rewards)) > 1 else 1.0
    assert len(episodes) == 3 and "credit/advantage_mean" in metrics
    for episode, reward, suffix in zip(episodes, rewards, suffixes, strict=True):
        assert plain(episode.trained) == (False,) * 2 + (True,) * len(suffix)
        expected = (reward - fmean(rewards)) / scale
        assert episode.advantages[2:] == pytest.approx([expected] * len(suffix))


def test_a_problem_without_wrong_answers_trains_nothing() -> None:
    (tree,) = trees_of([mdp.trajectory(next(iter(mdp.answers())))])
    assert Resets().assign(mdp.context(), [tree]) == ([], {})


def test_the_expected_gradient_is_as_far_off_as_stated() -> None:
    longest = 4
    gradient: mdp.Gradient = {}
    for answer, chance in mdp.answers((), longest).items():
        if mdp.reward(answer):
            continue
        starts = (0, *mdp.step_ends(answer)[:-1])
        for start in starts:
            prefix = answer[:start]
            following = mdp.answers(prefix, longest)
            for pair in itertools.product(following, repeat=2):
                tree = make_tree(answer, start, [continuation[start:] for continuation in pair])
                weight = chance / len(starts) * following[pair[0]] * following[pair[1]]
                for episode in Resets(std=False).assign(mdp.context(), [tree])[0]:
                    mdp.add(gradient, mdp.gradient_of(episode), weight / 2)
    bias, cosine = bias_and_cosine(gradient, mdp.exact_gradient(longest))
    assert (bias, cosine) == pytest.approx((0.5932, 0.9834), abs=5e-5)


def test_the_fragment_chooses_the_branching_and_the_credit() -> None:
    experiment = experiment_of("quickstart/grpo,credit/resets")
    assert experiment.credit == Resets()
    assert isinstance(experiment.rollout, TreeRollout)
    assert experiment.rollout.branching == ResetsOfWrongAnswers(states=StepBoundaries(), ways=4)
