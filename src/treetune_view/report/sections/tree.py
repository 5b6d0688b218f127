"""One problem's tree with the values of its states: where its answers part, and what each turn was worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treetune.rollouts.storage import TOKENS, read_episodes, read_tokens
from treetune.tree import State, Tree, trees_of
from treetune.vocabulary import Episode, Grade, Problem, Segment, Trajectory
from treetune_view.report.experiment import Experiment
from treetune_view.report.pages import render
from treetune_view.report.sections.base import ReportSection
from treetune_view.report.tokens import plain

ANSWERS = 16
"""More than these would not be read."""


class TreeSection(ReportSection):
    title = "A problem's tree"

    def applies(self, experiment: Experiment) -> bool:
        return (experiment.path / TOKENS).is_file()

    def html(self, experiment: Experiment) -> str:
        for path in sorted(experiment.path.glob("iterations/*/episodes.arrow"), reverse=True):
            try:
                group = _telling([one for one in read_episodes(path) if one.step_values is not None])
                texts = read_tokens(experiment.path / TOKENS)
            except (OSError, ValueError):  # another section says so
                return ""
            return tree_html(int(path.parent.name) + 1, group[:ANSWERS], texts, len(group)) if group else ""
        return ""


@dataclass
class _Step:
    """A step that answers share, with those that followed it. `value` is that of the state behind it."""

    text: str
    value: float | None = None
    ended: Counter[tuple[float, bool]] = field(default_factory=Counter)
    """How many answers ended with it, by their reward and whether they were correct."""
    following: list[_Step] = field(default_factory=list)


def _telling(episodes: Sequence[Episode]) -> list[Episode]:
    """The answers to the problem whose rewards differ most, and whose values move most among these."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)

    def spread(group: list[Episode]) -> tuple[float, float]:
        rewards = [one.reward for one in group]
        values = [value for one in group for value in one.step_values or ()]
        return max(rewards) - min(rewards), max(values) - min(values)

    several = [group for group in groups.values() if len({one.trajectory for one in group}) > 1]
    return max(several, key=spread, default=[])


def tree_html(iteration: int, group: Sequence[Episode], texts: Sequence[str], there: int) -> str:
    """The tree of some answers to one problem, whose steps have values, of those that are `there`; `texts`
    are of all tokens."""
    (tree,) = trees_of(_answer(episode, sample) for sample, episode in enumerate(group))
    root = _Step("", (group[0].step_values or (None,))[0])
    steps: dict[State, _Step] = {tree.state(0, 0): root}
    for leaf, episode in enumerate(group):
        _add(steps, tree, leaf, episode, texts)
    return render(
        "tree.html", iteration=iteration, problem=group[0].group, root=root, drawn=len(group), there=there
    )


def _add(steps: dict[State, _Step], tree: Tree, leaf: int, episode: Episode, texts: Sequence[str]) -> None:
    """An answer's steps, but for those that an earlier one went through."""
    values: Sequence[float] = episode.step_values or ()
    begin, last = 0, steps[tree.state(leaf, 0)]
    for number, end in enumerate(episode.step_ends):
        state = tree.state(leaf, end)
        if state not in steps:
            tokens = episode.response_ids[begin:end].tolist()
            text = plain(texts[token] if token < len(texts) else "" for token in tokens)
            steps[state] = _Step(text, values[number + 1] if number + 1 < len(values) else None)
            last.following.append(steps[state])
        begin, last = end, steps[state]
    last.ended[episode.reward, episode.correct] += 1


def _answer(episode: Episode, sample: int) -> Trajectory:
    ends: list[Any] = [(stretch.end, stretch.branch) for stretch in episode.stretches]
    segments, begin = [], 0
    for end, branch in ends or [(len(episode.response_ids), ())]:
        segments.append(Segment(episode.response_ids[begin:end], branch=branch))
        begin = end
    return Trajectory(
        problem=Problem(episode.group, "", ""),
        sample=sample,
        prompt_ids=episode.prompt_ids,
        segments=tuple(segments),
        finish_reason=episode.finish_reason,
        text=episode.text,
        grade=Grade(episode.score, "ok"),
        step_ends=episode.step_ends,
    )
