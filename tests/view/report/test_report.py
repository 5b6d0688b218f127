"""The HTML report on experiments.

Promises that these tests hold:

* It has results, curves, times, signs of collapse, domains and episodes, and names missing parts.
* It is one file that loads nothing, whose figures are well formed and whose texts are escaped.
* A user's section stands on the page, with its columns in the table of results.
* A path that is no experiment is refused with the experiments below it.
"""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.view.report.page import Page
from tests.view.report.synthetic import EPISODES, episode, report, summary, write_experiment, write_summary
from treetune import main as command_line
from treetune.rollouts.numbers import declared_numbers
from treetune.tables.columns import kind_of_value, means_by_problem, read_number_of_summary
from treetune.view.experiment import StoredExperiment
from treetune.view.report import sections as base
from treetune.view.report.recorded import NumbersSection
from treetune.view.report.write import write_report


def titles(page: Page) -> set[str | None]:
    """Returns the titles of the page's figures."""
    return {attributes.get("aria-label") for _, attributes in page.elements}


def texts_missing_from(page: Page, *texts: str) -> list[str]:
    return [text for text in texts if text not in page.text]


def test_the_report_shows_results_curves_times_and_coloured_steps(tmp_path: Path) -> None:
    page = report(write_experiment(tmp_path / "vineppo", passes={0: 0.58, 10: 0.84, 25: 0.93}))
    figures = " ".join(title or "" for title in titles(page))
    for title in (
        "pass@1 on test",
        "reward",
        "KL to the reference",
        "entropy",
        "gradient norm",
        "clip fraction",
    ):
        assert title in figures
    expected = ("0.930 [0.900, 0.960]", "0123abcd", "feedbeef+changes", "torch 2.13.0", "monte_carlo")
    assert texts_missing_from(page, *expected) == []
    assert page.text.count(": generation 1.9 s") == 25
    assert page.count("article", "episode") == len(EPISODES)
    assert "-0.90" in page.text, "the step that ruined an answer is shown with its advantage"
    for absent in ("Missing:", "Signs of collapse", "By domain"):
        assert absent not in page.text


def test_signs_of_collapse_are_a_table_with_the_iterations_that_showed_them(tmp_path: Path) -> None:
    def signs(i: int) -> dict[str, float]:
        return {
            "diagnostics/entropy_low": float(i in (3, 4, 5, 8, 11)),
            "diagnostics/truncated": 0.0,
            "diagnostics/stop": float(i == 11),
        }

    page = report(write_experiment(tmp_path / "run", iterations=12, planned=20, metrics=signs))
    assert page.count("table", "signs") == 1
    expected = ("entropy has collapsed", "at the end", "4–6, 9, 12", "train/entropy", "answers are cut off")
    assert texts_missing_from(page, *expected) == []
    assert "gradient norm does not settle" not in page.text, "the run did not compute this sign"
    assert "12 of 20 (stopped by a sign of collapse)" in page.text
    assert "the run was stopped by a sign of collapse" in page.text
    assert "continues with the same command" not in page.text


@pytest.mark.parametrize("stopped", [True, False])
def test_a_sign_has_its_key_value_and_threshold_and_the_stop_its_last_good_weights(
    tmp_path: Path, stopped: bool
) -> None:
    """Entropy below 0.05 in two iterations stops a run, in one it doesn't."""
    entropies = (0.2, 0.2, 0.2, 0.04, 0.03) if stopped else (0.2, 0.2, 0.2, 0.2, 0.04)

    def metrics(i: int) -> dict[str, float]:
        names = ("entropy_low", "gradient_noise", "truncated", "stop")
        seen = {f"diagnostics/{name}": 0.0 for name in names[: 4 if i == 4 else 3]}
        if i == 4:
            seen |= {"diagnostics/entropy_low": float(stopped), "diagnostics/stop": float(stopped)}
        return {"train/entropy": entropies[i], **seen}

    settings = {"entropy_floor": 0.05, "patience": 2, "on_collapse": "stop", "window": 6}
    path = write_experiment(tmp_path / "run", iterations=5, planned=20, metrics=metrics, diagnostics=settings)
    for number in (2, 5):
        (path / "checkpoints" / f"{number:04d}" / "policy").mkdir(parents=True)
        (path / "checkpoints" / f"{number:04d}" / "state.json").write_text("{}")
    page = report(path)
    if not stopped:
        assert "for fewer than 2 iterations" in page.text and "stopped at this sign" not in page.text
        return
    expected = (
        "entropy_low",
        "entropy in nats per token is below 0.05 (0.03)",
        "train/entropy: 0.03",
        "entropy_floor: 0.05",
        "unfinished_ceiling: 0.5",
        f"the last checkpoint from before is {path / 'checkpoints/0002/policy'}",
    )
    assert texts_missing_from(page, *expected) == []
    assert page.text.count("too early") == 1, "the gradient's window is not full"


def test_every_part_of_shaping_has_a_chart_of_its_own_name(tmp_path: Path) -> None:
    parts = {"shaping/overlong_penalty": -0.1, "shaping/own_part": 0.2, "credit/advantage_zero": 1.0}
    page = report(write_experiment(tmp_path / "run", iterations=3, metrics=lambda i: parts))
    assert {
        "reward added by shaping: overlong_penalty",
        "reward added by shaping: own_part",
        "share of trained tokens whose advantage is 0",
    } <= titles(page)


def test_the_page_loads_nothing_and_every_figure_is_well_formed(tmp_path: Path) -> None:
    first = write_experiment(tmp_path / "a", passes={0: 0.1, 5: 0.2})
    second = write_experiment(tmp_path / "b", iterations=200, passes={200: 0.9})
    text = write_report([first, second]).read_text()
    assert not re.search(r"https?://|src=|<link|@import|url\(|<script", text)
    figures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(figures) > 20
    for figure in figures:
        ElementTree.fromstring(figure)
        assert "nan" not in figure and "#" not in figure, "all colours are the page's"


def test_text_from_models_and_files_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('1')</script>\n</span></td>&amp;"
    episodes = (episode(hostile, (0.5, 0.2), 0.0, 'train/"><i>'),)
    path = write_experiment(tmp_path / "run", name="<b>bold</b>", episodes=episodes)
    write_summary(path, 5, "<u>", summary(0.5))
    page = report(path)
    assert {"script", "i", "u"}.isdisjoint(tag for tag, _ in page.elements)
    assert "<b>bold</b>" in page.text and "<script>alert('1')</script>" in page.text.replace("↵", "")


def test_a_run_that_has_just_begun_has_a_report_that_says_so(tmp_path: Path) -> None:
    page = report(write_experiment(tmp_path / "run", iterations=0, planned=25, passes={}, episodes=()))
    expected = (
        "no iteration is finished yet",
        "no checkpoint has been evaluated yet",
        "0 of 25 iterations are finished",
        "there are no episodes to show",
    )
    assert texts_missing_from(page, *expected) == []


@pytest.mark.parametrize(
    "name", ["config.json", "manifest.json", "metrics.jsonl", "iterations", "evaluations"]
)
def test_a_missing_part_is_named_and_the_others_are_shown(tmp_path: Path, name: str) -> None:
    path = write_experiment(tmp_path / "run")
    (path / name).rename(tmp_path / "elsewhere")
    assert "Missing:" in report(path).text


def test_files_cut_short_count_as_missing(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run")
    for name in ("manifest.json", "iterations/0024/episodes.arrow", "evaluations/0025/test/summary.json"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: len(content) // 2])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 25, "train/lo')
    expected = ("manifest.json can't be read", "iteration 25 can't be read", "episodes.arrow", "summary.json")
    assert texts_missing_from(report(path), *expected) == []


def test_nan_and_infinity_are_left_out_of_curves(tmp_path: Path) -> None:
    values = (0.1, float("nan"), float("inf"))
    path = write_experiment(
        tmp_path / "run", iterations=3, passes={}, metrics=lambda i: {"train/loss": values[i]}
    )
    [loss] = re.findall(r'aria-label="loss".*?</svg>', write_report([path]).read_text(), re.DOTALL)
    assert "nan" not in loss and "inf" not in loss


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        (tuple(replace(row, step_values=None) for row in EPISODES), "no values of states"),
        ((episode("46\n#46", None, 1.0),), "No advantages are stored"),
    ],
)
def test_episodes_without_values_or_credit_are_shown_without(
    tmp_path: Path, episodes: tuple, message: str
) -> None:
    page = report(write_experiment(tmp_path / "run", episodes=episodes))
    assert message in page.text and page.count("article", "episode") == len(episodes)


def test_right_and_wrong_answers_of_different_problems_are_sampled(tmp_path: Path) -> None:
    episodes = [episode("1\n2", (0.5, i / 20), 1.0, f"train/{i}") for i in range(20)]
    episodes += [episode("1\n3", (0.5, 0.1), 0.0, "train/0")] * 9
    page = report(write_experiment(tmp_path / "run", episodes=episodes))
    assert page.count("article", "episode") == 8
    assert sum("✗" in text for text in page.texts("episode")) == 4


def test_the_report_on_one_experiment_lies_in_its_folder_and_on_several_beside_them(tmp_path: Path) -> None:
    first, second = (write_experiment(tmp_path / "all" / name) for name in ("a", "b"))
    assert write_report([first]) == first / "report.html"
    assert write_report([first, second]) == tmp_path / "all" / "report.html"
    assert write_report([second], tmp_path / "x.html") == tmp_path / "x.html"


def test_a_wrong_directory_is_an_error_that_names_what_lies_below_it(tmp_path: Path) -> None:
    write_experiment(tmp_path / "all" / "sft")
    empty = tmp_path / "empty"
    for name in ("evaluations", "iterations"):
        (empty / name).mkdir(parents=True)
    for name, text in {"config.json": "{}", "manifest.json": "{}", "metrics.jsonl": ""}.items():
        (empty / name).write_text(text)
    for paths, message in (
        ([tmp_path / "absent"], "not a directory"),
        ([tmp_path / "all"], r"not an experiment.*experiments below it: .*sft"),
        ([empty], "no configuration, metrics or evaluations"),
        ([tmp_path], r"experiments below it: .*all/sft"),
        ([], "a report is about"),
    ):
        with pytest.raises(ValueError, match=message):
            write_report(paths)
    assert command_line.main(["report", str(empty)]) == 2
    assert not (empty / "report.html").exists()


@pytest.fixture
def _sections_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, a section that a test defines would stand in the reports of later tests.
    monkeypatch.setattr(base, "_SECTIONS", list(base._SECTIONS))


@pytest.mark.usefixtures("_sections_are_restored")
def test_a_users_section_is_on_the_page_with_its_columns_in_the_results(tmp_path: Path) -> None:
    class Hops(base.ReportSection):
        title = "Hops & skips"

        def applies(self, experiment: StoredExperiment) -> bool:
            return experiment.name == "with"

        def html(self, experiment: StoredExperiment) -> str:
            experiment.missing.append("no hop was seen")
            return f"<p>{len(experiment.metrics)} iterations of hops</p>"

        def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
            return {"hops": str(summary["hops"])} if "hops" in summary else {}

    class Empty(Hops):
        title = "Emptiness"

        def html(self, experiment: StoredExperiment) -> str:
            return ""

        def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
            return {}

    paths = [write_experiment(tmp_path / name, name=name, iterations=3) for name in ("with", "without")]
    write_summary(paths[0], 3, "validation", summary(0.5, hops=4.25))
    page = report(*paths)
    assert page.text.count("Hops & skips") == 1 and "3 iterations of hops" in page.text
    assert "no hop was seen" in page.text, "what a section misses is listed with the missing parts"
    assert "iteration hops" in page.words and page.words.count("4.25") == 1
    assert "Emptiness" not in page.text, "a section with nothing to show has no title"


def test_a_plain_number_under_the_name_of_a_group_is_ignored() -> None:
    section = NumbersSection()
    numbers_with_labels = [
        (name, number) for name, number in declared_numbers().items() if number.label is not None
    ]
    full_name, number = numbers_with_labels[0]
    group, _, name = full_name.partition("/")
    assert section.columns({group: 3.0}) == section.columns({}) == section.columns({group: None}) == {}
    assert list(section.columns({group: {name: 0.5}})) == [number.label]


DOMAINS = {"code": 0.2, "grids": 0.35, "logic": 0.5, "sums": 0.8}


def summary_with_domains(share: float, **more: Any) -> dict[str, Any]:
    by_domain = {name: summary(share * start, 0.05, n_problems=64) for name, start in DOMAINS.items()}
    return summary(share, domains=by_domain, **more)


def write_run_on_domains(path: Path, moved: bool = False) -> Path:
    """Writes a run on four domains that are learnt at different speeds; their weights stay or change."""

    def metrics(iteration: int) -> dict[str, float]:
        row: dict[str, float] = {}
        for position, (name, start) in enumerate(DOMAINS.items()):
            correct = start + (0.95 - start) * (1 - math.exp(-iteration / (6 + 4 * position)))
            numbers = {
                "reward": correct,
                "correct": correct,
                "unfinished": 0.05 * math.exp(-iteration / 5),
                "unavailable": 0.0,
                "response_tokens": 20 + 9 * position + math.sin(iteration),
                "problems": 8,
                "mixed": 2 * correct * (1 - correct),
                "learnable": correct * (1 - correct),
                "advantage_std": 0.5 * correct,
                "advantage_zero": 1 - correct,
                "weight": 0.25 + (0.01 * (position - 1.5) * (iteration % 7) if moved else 0.0),
            }
            row |= {f"domains/{name}/{number}": value for number, value in numbers.items()}
        return row

    write_experiment(path, name=path.name, passes={}, metrics=metrics)
    for done in (5, 10, 15, 20, 25):
        write_summary(path, done, "test", summary_with_domains(0.5 + done / 60))
    return path


def test_each_domain_has_a_curve_and_a_row_with_its_interval_and_weights_are_drawn_where_they_move(
    tmp_path: Path,
) -> None:
    page = report(write_run_on_domains(tmp_path / "mixed"))
    assert page.text.count("By domain") == 1
    for name, start in DOMAINS.items():
        share = (0.5 + 25 / 60) * start
        assert f"{name} test {share:.3f} [{share - 0.05:.3f}, {share + 0.05:.3f}]" in page.words
    assert "share of correct answers" in page.text and "spread of the advantages" in page.text
    assert "could not be graded" not in page.text, "what is always 0 has no chart"
    assert "by the domain's weight" not in page.text
    moved = report(write_run_on_domains(tmp_path / "moved", moved=True), tmp_path / "mixed")
    assert "by the domain's weight" in moved.text
    assert [name for name in DOMAINS if f"pass@1 on test, domain {name}" not in moved.text] == []


def test_a_tables_number_of_a_domain_is_that_of_its_summary_and_its_answers() -> None:
    measured = summary_with_domains(0.5)
    assert read_number_of_summary(measured, "domains/logic/pass_at_1", "there") == 0.25
    assert read_number_of_summary(measured, "domains/logic/pass_at_4", "there") == 0.35
    assert kind_of_value("domains/logic/mean_tokens").better == "lower"
    with pytest.raises(ValueError, match="no domain 'logik' in there: its domains are code, grids"):
        read_number_of_summary(measured, "domains/logik/pass_at_1", "there")
    with pytest.raises(ValueError, match="'domains/logic/num_tokens_in_the_longest_thread' is not a number"):
        kind_of_value("domains/logic/num_tokens_in_the_longest_thread")
    rows = [
        {"problem": "logic/a", "domain": "logic", "reward": 1.0},
        {"problem": "logic/a", "domain": "logic", "reward": 0.0},
        {"problem": "code/a", "domain": "code", "reward": 1.0},
    ]
    assert means_by_problem(rows, "domains/logic/pass_at_1") == {"logic/a": 0.5}
