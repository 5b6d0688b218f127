"""Several experiments stand beside each other: what they reached, what it cost, what differs."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from tests.viewer.recorded import begin_run, record_iteration, recorded_run
from treetune_view.pages.experiments import side_by_side
from treetune_view.store import Store


def test_chosen_experiments_are_compared_in_one_table(
    store: Store, client: TestClient, tmp_path: Path
) -> None:
    recorded_run(tmp_path / "experiments" / "one", iterations=2)
    other = begin_run(
        tmp_path / "experiments" / "two", planned=1, seed=2, credit={"type": "group", "note": "<b>"}
    )
    own = {
        "rollout/sampled_tokens": 1234.0,
        "train/steps": 8.0,
        "train/tokens": 1000.0,
        "seconds/total": 90.0,
    }
    record_iteration(other, 0, **own)

    runs = [store.run(name) for name in ("one", "two")]
    experiments = {run.name: store.experiment(run) for run in runs}
    rows = {row.name: row for row in side_by_side(experiments, {run.name: store.status(run) for run in runs})}
    one, two = (store.experiment(run) for run in runs)
    accuracy, nothing = rows["pass@1 on validation"].cells
    assert nothing is None and accuracy is not None and accuracy[1].endswith("after 2 iterations")
    assert rows["finished iterations"].cells == [("2", ""), ("1", "")]
    assert rows["optimiser steps"].cells[1] == ("8", "")
    assert rows["sampled tokens of answers"].cells[1] == ("1,234", "")
    taken = rows["time in iterations"].cells[1]
    assert taken is not None and taken == ("90 s", "90 s an iteration")
    assert "sampled tokens of continuations" not in rows, "nobody recorded any"
    assert rows["credit.type"].cells == [('"monte_carlo"', ""), ('"group"', "")]
    assert rows["credit.samples"].cells == [("3", ""), None]
    assert not {"experiment_name", "directory", "rollout.type"} & rows.keys()
    assert one.config["seed"] != two.config["seed"] and rows["seed"].kind == "setting"

    page = client.get("/run", params={"run": ["one", "two"]}).text
    assert "Side by side" in page and "&#34;&lt;b&gt;&#34;" in page and "not recorded" in page
    assert "Side by side" not in client.get("/run", params={"run": "one"}).text
