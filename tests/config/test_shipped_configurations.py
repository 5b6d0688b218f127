"""Every experiment and table under configs/ is right; twenty broken ones are told so in one screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shipped import CONFIGS, ROOT, whole_configurations
from treetune import main as command_line
from treetune.config import lexer

VINEPPO = "configs/quickstart/vineppo.jsonnet"
SCREEN_LINES, SCREEN_COLUMNS = 24, 120


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("name", whole_configurations())
def test_a_shipped_configuration_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in CONFIGS.rglob("*sonnet"):
        names = list(lexer.tokens(path.read_text()))
        for call, _, variable in zip(names, names[1:], names[2:], strict=False):
            if call.text == "extVar" and variable.value not in ("APP_DIRECTORY", "APP_EXPERIMENT_NAME"):
                monkeypatch.setenv(variable.value, "1")
    monkeypatch.setenv("APP_SEED", "1")
    assert command_line.main(["--configs", name, "check_config"]) == 0, capsys.readouterr().err


def test_the_quickstart_is_among_them() -> None:
    assert {f"configs/quickstart/{name}.jsonnet" for name in ("sft", "vineppo")} <= set(
        whole_configurations()
    )


BROKEN = {
    "unknown key": (
        "{ trainer+: { learning_rte: 1e-4 } }",
        ["trainer.learning_rte", "learning_rate", "--override"],
    ),
    "key of another object": ("{ learning_rate: 1e-4 }", ["learning_rate", "{trainer+: {learning_rate: …}}"]),
    "number in quotes": ("{ iterations: '25' }", ["iterations", "whole number", "without quotes: 25"]),
    "truth value for a number": ("{ iterations: true }", ["iterations", "whole number", "is true"]),
    "fraction for a count": (
        "{ problems_per_iteration: 6.4 }",
        ["problems_per_iteration", "whole number", "6.4"],
    ),
    "text for a truth value": (
        "{ engines+: { policy+: { async_scheduling: 'yes' } } }",
        ["engines.policy.async_scheduling", "true or false"],
    ),
    "nothing where a value is needed": ("{ context_length: null }", ["context_length", "is null"]),
    "no continuations": ("{ credit+: { samples: 0 } }", ["credit.samples", "greater than 0"]),
    "impossible probability": (
        "{ task+: { demonstration_noise: 1.5 } }",
        ["task.demonstration_noise", "1.5"],
    ),
    "object replaced and not merged": (
        "{ rollout: { type: 'single_turn', samples: 8 } }",
        ["rollout.max_tokens", "missing", "configs/rollouts/short_answers.jsonnet:3", "rollout+:"],
    ),
    "unknown type": (
        "{ credit+: { type: 'monte_carl' } }",
        ["credit.type", "monte_carl", "did you mean 'monte_carlo'", "rloo"],
    ),
    "no type": ("{ credit: { samples: 3 } }", ["credit.type", "missing", "credit+:"]),
    "a name for an object": ("{ credit: 'group' }", ["credit", "{type: …}", "write {type: 'group'}"]),
    "key of the former type": (
        "{ credit+: { type: 'rloo' } }",
        ["credit.samples", "quickstart/vineppo.jsonnet:3", "without `+`"],
    ),
    "word that is none of the choices": (
        "{ trainer+: { advantage_normalisation: 'whitten' } }",
        ["trainer.advantage_normalisation", "did you mean 'whiten'"],
    ),
    "wrong item of a list": (
        "{ evaluation+: { sets: [{ split: 'test' }, { split: 'tset' }] } }",
        ["evaluation.sets.1.split", "did you mean 'test'"],
    ),
    "two of the same name": (
        "{ evaluation+: { sets: [{ split: 'test' }, { split: 'test' }] } }",
        ["evaluation.sets", "are called test", "give each a name"],
    ),
    "parts that do not go together": (
        "{ rollout: { type: 'demonstrations' } }",
        ["credit", "rollout", "single_turn", "--override"],
    ),
    "error in Jsonnet": ("{ iterations: 3", ["--override:1", "expected a comma", "^"]),
    "unknown root type": ("{ type: 'policy_iterations' }", ["type", "did you mean 'policy_iteration'"]),
}


def told(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One screen on standard error that holds the words; exit code 2; no traceback."""
    code = command_line.main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    one_line = " ".join(err.split())
    assert [word for word in words if word not in one_line] == [], err
    assert "mistakes" not in lines[0], f"one mistake, told as several:\n{err}"


@pytest.mark.parametrize("mistake", BROKEN)
def test_one_mistake_in_an_experiment_is_told_in_one_screen(
    mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    override, words = BROKEN[mistake]
    told(["--configs", VINEPPO, "--override", override, "check_config"], words, capsys)


@pytest.mark.parametrize("mistake", ["unknown key", "unknown type", "error in Jsonnet", "no type"])
def test_a_mistake_in_a_file_is_told_with_file_and_line(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonnet"
    file.write_text("// mine\n" + BROKEN[mistake][0])
    words = [word for word in BROKEN[mistake][1] if not word.startswith("--override")]
    told(["--configs", f"{VINEPPO},{file}", "run_iteration_loop"], [*words, "mine.jsonnet:2"], capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "{ seed: std.parseInt(std.extVar('APP_SHARD')) }",
            ["APP_SHARD", "mine.jsonnet:1", "export APP_SHARD="],
        ),
        (
            "import 'quickstart/vinepo.jsonnet'",
            ["quickstart/vinepo.jsonnet", "no such file", "mine.jsonnet:1", "vineppo.jsonnet"],
        ),
        ("{ iterations: twelve }", ["mine.jsonnet:1", "Unknown variable: twelve"]),
        ("['a list']", ["mine.jsonnet", "object"]),
    ],
)
def test_a_file_that_cannot_be_evaluated_is_told_in_one_screen(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonnet"
    file.write_text(text)
    told(["--configs", f"{VINEPPO},{file}", "check_config"], words, capsys)


def test_a_seed_that_is_no_number_is_told_in_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APP_SEED", "one")
    told(["--configs", VINEPPO, "print_config"], ["APP_SEED", "whole number", "export APP_SEED=1"], capsys)


def test_a_missing_file_is_told_in_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    told(["--configs", "vinepo.jsonnet", "check_config"], ["vinepo.jsonnet", VINEPPO, "looked for"], capsys)
