"""A rollout's own numbers of an answer are averaged and shown everywhere, from one declaration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts import numbers
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import Number, NumberGroup
from treetune.tree import answers_of, trees_of
from treetune.vocabulary import TextCodec, Trajectory
from treetune_tables.columns import Column, Panel, number_in


def lengths(trajectories: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    return [{"letters": float(len(one.text))} for one in trajectories]


TURNS = NumberGroup(
    "turns",
    {
        "count": Number(
            "turns of an answer", better="lower", largest=True, while_training=True, label="turns"
        ),
        "letters": Number("letters of an answer"),
    },
    lengths,
    ratios={"fewer_turns": ("count", "count")},
)


@pytest.fixture(autouse=True)
def _turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_groups", {})
    numbers.declare(TURNS)


def answers() -> list[Trajectory]:
    """The first three with a number of turns, as a rollout counts it."""
    found = mdp.all_trajectories()
    turns = [replace(one, numbers={"turns/count": float(place)}) for place, one in enumerate(found[:3])]
    return answers_of(numbers.measured(trees_of([*turns, *found[3:]]), mdp.CODEC))


def test_means_are_over_the_answers_that_have_the_number_and_over_correct_ones() -> None:
    own = answers()
    metrics = trajectory_metrics(mdp.context(), own)
    assert (metrics["turns/count"], metrics["turns/count_max"]) == (1.0, 2.0)
    assert metrics["turns/letters"] == sum(len(one.text) for one in own) / len(own)
    correct = [place for place, one in enumerate(own[:3]) if one.grade.correct]
    assert 0 < len(correct) < 3
    assert metrics["turns/count_right"] == sum(correct) / len(correct)
    assert "turns/letters_max" not in metrics


def test_a_rank_without_such_an_answer_has_the_others_means() -> None:
    own = answers()
    with_turns, without = (
        [one for one in own if ("turns/count" in one.numbers) == having] for having in (1, 0)
    )
    shares = [with_turns, without]
    ranks = mdp.on_ranks(2, lambda context: trajectory_metrics(context, shares[context.ranks.rank]))
    assert ranks[0] == ranks[1] and ranks[0]["turns/count"] == 1.0


def test_evaluations_and_the_line_of_an_iteration_have_what_is_declared_for_them() -> None:
    means = numbers.number_metrics(numbers.columns(answers()))
    summary = {"pass_at_1": 0.5, **numbers.by_group(means)}
    assert summary["turns"]["count"] == 1.0
    metrics = numbers.evaluated("test", summary)
    assert metrics["evaluation/test/turns/count"] == 1.0
    assert not [name for name in metrics if "letters" in name]
    assert numbers.in_words({"turns/count": 2.25, "turns/letters": 3.0}) == ["turns 2.2"]


def test_tables_show_a_declared_number_by_its_short_or_full_name() -> None:
    for name in ("count", "turns/count"):
        column = Column(name="turns", evaluation="test", value=name)
        assert column.improves == "lower" and not column.in_percent
        assert number_in({"turns": {"count": 3.0}}, name, "summary.json") == 3.0
    Panel(name="of correct ones", evaluation="test", value="count_right")
    Column(name="fewer", evaluation="test", value="fewer_turns", over="another row")
    with pytest.raises(ValueError, match="did you mean 'letters'"):
        Column(name="x", evaluation="test", value="leters")
