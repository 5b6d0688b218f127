"""Promise of benchmarks/benchmark.py: threads are measured on any model, also one with few tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treetune.models.policy_files import write_policy
from treetune.models.sources import TinyModel

ROOT = Path(__file__).parents[2]


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
