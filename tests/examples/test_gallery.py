"""Each example of the gallery runs to its end, with a smaller model and fewer answers, and is listed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import treetune
from tests.examples.test_own_parts_run import SAMPLED, SMALL
from tests.support.many_runs import ROOT, run_each

EXAMPLES = ROOT / "examples"
ALPHABET = "{ model+: { alphabet: '\\n0123456789>' } }"


def command_of(name: str, *overrides: str) -> list[str]:
    """Returns the arguments of treetune that train an example in small."""
    arguments = ["--configs", f"examples/{name}.jsonnet"]
    for override in (SMALL % "runs", *overrides):
        arguments += ["--override", override]
    return [*arguments, "run_iteration_loop"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    for shipped in ("configs", "examples"):
        (folder / shipped).symlink_to(ROOT / shipped)
    return folder


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of the example's judge, which runs in a thread."""
    spec = importlib.util.spec_from_file_location("stand_in", EXAMPLES / "judge/stand_in.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = ThreadingHTTPServer(("127.0.0.1", 0), module.Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def run_python(folder: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_run_of_the_gallery_runs_to_its_end(folder: Path, judge: str) -> None:
    run_python(folder, "examples/own_data/make_rows.py")
    address = f"{{ task+: {{ grader+: {{ endpoint+: {{ base_url: '{judge}' }} }} }} }}"
    printed = run_each(
        command_of("own_data/sft", ALPHABET),
        command_of("own_data/grpo", ALPHABET, SAMPLED),
        command_of("own_credit/first_mistake", SAMPLED),
        command_of("own_environment/nim", SAMPLED),
        command_of("judge/judged", SAMPLED, address),
        cwd=folder,
    )
    assert printed.count("iteration 1/1") == 5
    [metrics] = treetune.open(folder / "runs/judge/judged").metrics.to_dict("records")
    assert metrics["judge/asked"] > 0


FIND_FIRST_MISTAKE = """
import numpy as np
from examples.own_credit.first_mistake import first_wrong_step
from treetune import Episode, TextCodec

tokens = ["", "27+64", "=91", "=92", "\\n", "#92"]
codec = TextCodec(lambda text: [], lambda ids: "".join(tokens[i] for i in ids), eos_id=0)

def episode(*ids, step_ends):
    ids = np.array(ids, np.int32)
    trained = np.ones(len(ids), bool)
    return Episode(ids[:0], ids, trained, 0.0, "", "", 0, step_ends=step_ends)

wrong = episode(1, 2, 4, 1, 3, 4, 5, 0, step_ends=(3, 6, 8))
assert first_wrong_step(codec, wrong) == slice(3, 6), first_wrong_step(codec, wrong)
right = episode(1, 2, 4, 5, 0, step_ends=(3, 5))
assert first_wrong_step(codec, right) is None
"""


def test_the_first_mistake_is_found_with_tokens_of_several_characters(folder: Path) -> None:
    run_python(folder, "-c", FIND_FIRST_MISTAKE)


def test_the_notebook_reads_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = "{ problems_per_iteration: 8, rollout+: { samples: 4 }, credit+: { samples: 2 } }"
    run_each(command_of("looking_into_credit/vineppo", SAMPLED, fewer), cwd=folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / "read_a_run.ipynb").read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("experiments/examples", "runs"), names)
    opened = names["run"]
    assert len(opened.metrics) == 1 and len(opened.answers) == len(opened.episodes) == 32
    assert set(opened.answers["set"]) == {"sampled"} and opened.answers["correct"].dtype == bool
    by_step = opened.values.groupby("answer")
    assert len(by_step) == 32 and (by_step["start"].min() == 0).all()
    # VinePPO's advantages of a whole answer add up to its reward minus the value of its prompt.
    first = by_step.first()
    assert by_step["advantage"].sum().to_numpy() == pytest.approx(
        (first["reward"] - first["value"]).to_numpy()
    )
    with pytest.raises(ValueError, match="is not a run"):
        treetune.open(folder)


def test_every_example_is_listed() -> None:
    text = (EXAMPLES / "README.md").read_text()
    folders = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    assert {name for name in folders if f"({name}/README.md)" not in text} == set()
