"""The report shows what a directory holds, says what it lacks, and needs nothing but itself."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reports.page import Page
from tests.reports.synthetic import (
    CODEC,
    EPISODES,
    episode,
    metrics_row,
    summary,
    write_experiment,
    write_summary,
)
from treetune import main as command_line
from treetune.rollouts.storage import write_episodes
from treetune_view.report import write_report


def test_the_report_shows_results_curves_times_and_coloured_steps(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "vineppo", passes={0: 0.58, 10: 0.84, 25: 0.93})

    page = Page(write_report([path]))

    assert page.open == []
    for words in ("0.930 [0.900, 0.960]", "0123abcd", "feedbeef+changes", "torch 2.13.0", "monte_carlo"):
        assert words in page.text
    for title in (
        "pass@1 on test",
        "reward",
        "KL to the reference",
        "entropy",
        "gradient norm",
        "clip fraction",
    ):
        assert any(title in (attrs.get("aria-label") or "") for _, attrs in page.elements), title
    assert page.text.count(": generation 1.9 s") == 25
    assert page.count("article", "episode") == len(EPISODES)
    assert "-0.90" in page.text, "the step that ruined an answer is shown with its advantage"
    assert "Not here (yet)" not in page.text


def test_signs_of_collapse_are_a_table_with_the_iterations_that_showed_them(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", iterations=12, planned=20)
    rows = [
        metrics_row(i)
        | {
            "diagnostics/entropy_low": float(i in (3, 4, 5, 8, 11)),
            "diagnostics/truncated": 0.0,
            "diagnostics/stop": float(i == 11),
        }
        for i in range(12)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report([path]))
    assert page.open == []
    assert page.count("table", "signs") == 1
    for words in (
        "entropy has collapsed",
        "at the end",
        "4–6, 9, 12",
        "train/entropy",
        "answers are cut off",
    ):
        assert words in page.text
    assert "gradient norm does not settle" not in page.text, "it was not looked for"
    assert "12 of 20 (stopped by a collapse sign)" in page.text
    assert "the run was stopped by a sign of collapse" in page.text
    assert "continues with the same command" not in page.text


def falling_run(path: Path, entropies: tuple[float, ...], *, stopped: bool) -> Path:
    """Entropy below 0.05 in two iterations stops it; it has checkpoints of 2 and 5 iterations."""
    write_experiment(path, iterations=len(entropies), planned=20)
    config = json.loads((path / "config.json").read_text())
    config["diagnostics"] = {"entropy_floor": 0.05, "patience": 2, "on_collapse": "stop", "window": 6}
    (path / "config.json").write_text(json.dumps(config))
    rows = [
        metrics_row(i, **{"train/entropy": value})
        | {"diagnostics/entropy_low": 0.0, "diagnostics/gradient_noise": 0.0, "diagnostics/truncated": 0.0}
        for i, value in enumerate(entropies)
    ]
    rows[-1] |= {"diagnostics/entropy_low": float(stopped), "diagnostics/stop": float(stopped)}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in (2, 5):
        (path / "checkpoints" / f"{number:04d}" / "policy").mkdir(parents=True)
        (path / "checkpoints" / f"{number:04d}" / "state.json").write_text("{}")
    return path


def test_a_sign_has_its_key_value_and_threshold_and_the_stop_its_last_good_weights(tmp_path: Path) -> None:
    path = falling_run(tmp_path / "run", (0.2, 0.2, 0.2, 0.04, 0.03), stopped=True)
    page = Page(write_report([path]))
    for words in (
        "entropy_low",
        "entropy in nats per token is below 0.05 (0.03)",
        "train/entropy: 0.03",
        "entropy_floor: 0.05",
        "unfinished_ceiling: 0.5",
        f"the last checkpoint from before is {path / 'checkpoints/0002/policy'}",
    ):
        assert words in page.text, words
    assert page.text.count("too early") == 1, "the gradient's window is not full"


def test_a_sign_that_was_not_seen_long_enough_is_said_to_have_been_seen(tmp_path: Path) -> None:
    path = falling_run(tmp_path / "run", (0.2, 0.2, 0.2, 0.2, 0.04), stopped=False)
    page = Page(write_report([path]))
    assert "for fewer than 2 iterations" in page.text
    assert "stopped for it" not in page.text


def test_every_part_of_shaping_has_a_chart_of_its_own_name(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", iterations=3)
    parts = {"shaping/overlong_penalty": -0.1, "shaping/own_part": 0.2, "credit/advantage_zero": 1.0}
    rows = [metrics_row(i, **parts) for i in range(3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titles = {attrs.get("aria-label") for _, attrs in Page(write_report([path])).elements}
    assert {
        "what shaping added: overlong_penalty",
        "what shaping added: own_part",
        "share of trained tokens whose advantage is 0",
    } <= titles


def test_a_run_that_looked_for_no_sign_has_no_section_on_them(tmp_path: Path) -> None:
    page = Page(write_report([write_experiment(tmp_path / "run")]))
    assert "Signs of collapse" not in page.text


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    text = write_report([write_experiment(tmp_path / "run")]).read_text()
    assert not re.search(r"https?://|src=|<link|@import|url\(|<script", text)


def test_every_figure_is_well_formed(tmp_path: Path) -> None:
    first = write_experiment(tmp_path / "a", passes={0: 0.1, 5: 0.2})
    second = write_experiment(tmp_path / "b", iterations=200, passes={200: 0.9})
    figures = re.findall(r"<svg.*?</svg>", write_report([first, second]).read_text(), re.DOTALL)
    assert len(figures) > 20
    for figure in figures:
        ElementTree.fromstring(figure)
        assert "nan" not in figure and "#" not in figure, "all colours are the page's"


def test_text_from_models_and_files_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('1')</script>\n</span></td>&amp;"
    path = write_experiment(
        tmp_path / "run", name="<b>bold</b>", episodes=(episode(hostile, (0.5, 0.2), 0.0, 'train/"><i>'),)
    )
    write_summary(path, 5, "<u>", summary(0.5))
    page = Page(write_report([path]))
    assert {"script", "i", "u"}.isdisjoint(tag for tag, _ in page.elements)
    assert "<b>bold</b>" in page.text
    assert "<script>alert('1')</script>" in page.text.replace("↵", "")


def test_a_run_that_has_just_begun_has_a_report_that_says_so(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", iterations=0, planned=25, passes={}, episodes=())
    page = Page(write_report([path]))
    assert "no iteration is finished yet" in page.text
    assert "no checkpoint has been evaluated yet" in page.text
    assert "0 of 25 iterations are finished" in page.text
    assert "no episodes are there to show" in page.text


@pytest.mark.parametrize(
    "name", ["config.json", "manifest.json", "metrics.jsonl", "iterations", "evaluations"]
)
def test_a_part_that_is_not_there_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    path = write_experiment(tmp_path / "run")
    (path / name).rename(tmp_path / "elsewhere")
    page = Page(write_report([path]))
    assert "Not here (yet)" in page.text
    assert page.open == []


def test_files_cut_short_count_as_missing(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run")
    for name in ("manifest.json", "iterations/0024/episodes.arrow", "evaluations/0025/test/summary.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[: len(whole) // 2])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 25, "train/lo')
    page = Page(write_report([path]))
    for words in ("manifest.json can't be read", "episodes.arrow can't be read", "summary.json"):
        assert words in page.text


def test_values_that_are_no_numbers_are_left_out_of_curves(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", iterations=0, planned=3, passes={})
    rows = [
        metrics_row(i, **{"train/loss": value}) for i, value in enumerate((0.1, float("nan"), float("inf")))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report([path]).read_text()
    assert 'aria-label="loss"' in text
    assert "nan" not in re.findall(r'aria-label="loss".*?</svg>', text, re.DOTALL)[0]


def test_episodes_without_values_are_shown_by_their_advantages_alone(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", episodes=())
    group = [replace(one, step_values=None) for one in EPISODES]
    write_episodes(path / "iterations/0024/episodes.arrow", group, CODEC)
    page = Page(write_report([path]))
    assert "no values of steps" in page.text
    assert page.count("article", "episode") == 3


def test_supervised_episodes_are_shown_without_colours(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", episodes=(episode("46\n#46", None, 1.0),))
    page = Page(write_report([path]))
    assert "carry no advantages" in page.text
    assert page.count("article", "episode") == 1


def test_right_and_wrong_answers_of_different_problems_are_sampled(tmp_path: Path) -> None:
    many = [episode("1\n2", (0.5, i / 20), 1.0, f"train/{i}") for i in range(20)]
    many += [episode("1\n3", (0.5, 0.1), 0.0, "train/0")] * 9
    path = write_experiment(tmp_path / "run", episodes=tuple(many))
    page = Page(write_report([path]))
    assert page.count("article", "episode") == 8
    assert sum("✗" in text for text in page.texts("episode")) == 4


def test_one_experiment_gets_its_report_inside_and_several_beside(tmp_path: Path) -> None:
    first, second = (write_experiment(tmp_path / "all" / name) for name in ("a", "b"))
    assert write_report([first]) == first / "report.html"
    assert write_report([first, second]) == tmp_path / "all" / "report.html"
    assert write_report([second], tmp_path / "x.html") == tmp_path / "x.html"


def test_a_wrong_directory_is_an_error_that_names_what_lies_below_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no directory"):
        write_report([tmp_path / "absent"])
    write_experiment(tmp_path / "all" / "sft")
    with pytest.raises(ValueError, match=r"no experiment.*below it lie .*sft"):
        write_report([tmp_path / "all"])
    for name in ("evaluations", "iterations"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    for name, text in {"config.json": "{}", "manifest.json": "{}", "metrics.jsonl": ""}.items():
        (tmp_path / "empty" / name).write_text(text)
    with pytest.raises(ValueError, match="no configuration, metrics or evaluations"):
        write_report([tmp_path / "empty"])
    assert command_line.main(["report", str(tmp_path / "empty")]) == 2
    assert not (tmp_path / "empty" / "report.html").exists()
    with pytest.raises(ValueError, match=r"below it lie .*all/sft"):
        write_report([tmp_path])
    with pytest.raises(ValueError, match="a report is about"):
        write_report([])
