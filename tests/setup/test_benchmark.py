"""Promise of benchmarks/benchmark.py: threads are measured on any model, also one with few tokens."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.benchmark import PARTS
from treetune.models.policy_files import write_policy
from treetune.models.sources import TinyModel

ROOT = Path(__file__).parents[2]
FUNCTIONS = [function for functions in PARTS.values() for function in functions]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_function_of_each_part_exists(function: str) -> None:
    module, _, name = function.partition(".")
    assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), name))


@pytest.mark.slow
def test_threads_are_measured_on_a_model_with_fewer_tokens_than_made_up_answers_have(tmp_path: Path) -> None:
    source = TinyModel(
        layers=1, hidden_size=64, heads=2, intermediate_size=96, context_length=512, alphabet="0123456789"
    )
    model, tokenizer = source.load_model(0, str), source.load_tokenizer(str)
    write_policy(model.state_dict(), model.config, tokenizer, tmp_path / "policy")
    command = [sys.executable, "benchmarks/benchmark.py", "--only", "threads", "--json"]
    command += ["--checkpoint", str(tmp_path / "policy"), "--repeats=1", "--problems=2", "--samples=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    details = json.loads(done.stdout)["measurements"]["threads/tree"]["details"]
    assert details["with_threads"] == details["answers"] == 4
    assert details["computed_tokens"]["tree"] < details["computed_tokens"]["rows"]


def test_plans_leave_out_experiments_whose_start_model_a_table_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the import sets it; this restores it afterwards
    from benchmarks import plans

    monkeypatch.chdir(tmp_path)  # no experiment has been run here
    files = ["configs/equal_cost/all.jsonnet", "configs/quickstart/vineppo.jsonnet"]
    monkeypatch.setattr(plans, "whole_configurations", lambda: files)
    assert list(plans.read_experiments()) == ["quickstart/vineppo"]
    assert "equal_cost/all is left out: there is no complete checkpoint in" in capsys.readouterr().err
