"""An answer of several turns is shown turn by turn, with what was injected told from what was sampled."""

from __future__ import annotations

from pathlib import Path

from tests.reports.page import Page
from tests.reports.synthetic import write_experiment
from tests.rollouts import turns
from tests.rollouts.turns import Letters, lent, rollout
from treetune.rollouts.credit import Group
from treetune.rollouts.storage import TOKENS, write_episodes, write_tokens
from treetune.tree import answers_of
from treetune_domains.environments.pool import EnvironmentPool
from treetune_view.report import write_report


def test_each_turn_is_a_line_with_its_reward_and_what_was_said_to_it_is_marked(tmp_path: Path) -> None:
    with EnvironmentPool() as environments:
        context = lent(Letters(golds=("",) * 2), turns.engine(), environments)
        trees, _ = rollout(samples=4).run(context, context.task.problems("train"))
    path = write_experiment(tmp_path / "run", iterations=1, episodes=())
    write_episodes(path / "iterations/0000/episodes.arrow", Group().assign(context, trees)[0], turns.CODEC)
    write_tokens(path / TOKENS, turns.CODEC, len(turns.ALPHABET) + 1)
    page = Page(write_report([path]))
    assert page.open == []
    injected = [attributes for tag, attributes in page.elements if attributes.get("class") == "injected"]
    said = sum(one.text.count("+") + one.text.count("-") for one in answers_of(trees))
    assert len(injected) == said + 1, "and one in the words that explain it"
    assert "injected and not sampled" in page.text
    first = next(one for one in answers_of(trees) if one.step_rewards)
    for reward in first.step_rewards:
        assert f"r {reward:+.3g}" in page.text
