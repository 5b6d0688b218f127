"""Promises of the command line's answers and exit codes:

* `print_config`, `check_config` and `explain_config` answer on standard output, and nothing else is there;
* a wrong configuration ends with 2 before anything runs, a failure with 1, an interruption with 130;
* a failure is one message, its traceback is in the run's log, and `--debug` shows it;
* a command that refuses to work with a run's folder leaves the log there as it is;
* of several ranks the first one tells a mistake that all of them see;
* a Python without the packages is told how to install them;
* `fork` prints the command that runs the fork, and the folder of an experiment in place of a file is told
  the file to name.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import _jsonnet
import pytest

from tests.config.example_parts import Circle, Drawing, Frame, Wall
from treetune import main as command_line
from treetune.config.explain import as_plain
from treetune.config.remedies import override_option
from treetune.exceptions import FolderRefused

CIRCLE = """{ type: 'drawing', seed: 1, directory: 'out', experiment_name: 'x',
  shape: { type: 'circle', radius: 2 } }"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("APP_SEED", "APP_DIRECTORY", "APP_EXPERIMENT_NAME", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    Path("circle.jsonnet").write_text(CIRCLE)
    Path("wall.jsonnet").write_text("{ type: 'wall', rows: ['a'] }")


class Commands(ModuleType):
    """Stand in for the packages that carry out commands: record each call, and raise `error` if it is set."""

    def __init__(self) -> None:
        super().__init__("commands")
        self.calls: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None

    def run(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error
        return 0

    def make_table(self, *arguments: Any) -> int:
        return self.run("make_table", *arguments)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    stand_in = Commands()
    for module in ("treetune.runtime.commands", "treetune.tables.write"):
        monkeypatch.setitem(sys.modules, module, stand_in)
    return stand_in


def main(*arguments: str) -> int:
    return command_line.main(["--configs", "circle.jsonnet", *arguments])


def test_print_config_prints_the_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--override", "{ seed: 2 }", "print_config") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["seed"] == 2
    assert err == ""


def test_check_config_says_fine_or_tells_every_mistake_and_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("check_config") == 0
    assert "fine" in capsys.readouterr().out
    assert main("--override", "{ sed: 1, scale: 'x' }", "check_config") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "scale" in err and "sed" in err


def test_explain_config_lists_what_sets_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--override", "{ shape+: { radius: 3 } }", "explain_config", "shape.radius") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["shape.radius", "=", "3"]
    assert rows[-2:] == [["circle.jsonnet:2", "2"], ["--override", "3"]]


@pytest.mark.parametrize(
    ("key", "explanations"),
    [
        ("shape.radius", ["a number greater than 0; it must be given", "`radius` is half its width."]),
        ("shape.colour", ['one of "red", "green"; by default "red"', 'shape.colour = "red"  (the default']),
        ("shape.type", ["a shape: circle, square"]),
        ("shape.radius", ["example   --override '{shape+: {radius: 2}}'"]),
    ],
)
def test_explain_config_says_type_bounds_default_and_meaning(
    key: str, explanations: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("explain_config", key) == 0
    out = capsys.readouterr().out
    assert [explanation for explanation in explanations if explanation not in out] == []


def test_the_override_that_explain_config_prints_can_be_typed_into_a_shell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--override", '{ directory: "it\'s mine" }', "explain_config", "directory") == 0
    (example,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  example")]
    _, option, override = shlex.split(example)
    assert main(option, override, "print_config") == 0
    assert json.loads(capsys.readouterr().out)["directory"] == "it's mine"


@pytest.mark.parametrize("name", ["it's", "two words", "error", "$(exit)"])
def test_the_override_of_a_remedy_is_one_word_of_a_shell_and_an_object_of_jsonnet(name: str) -> None:
    option, override = shlex.split(override_option(("named", name), "1"))
    assert option == "--override"
    assert json.loads(_jsonnet.evaluate_snippet("override", override)) == {"named": {name: 1}}


def test_explain_config_lists_the_keys_of_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("explain_config", "shape") == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "tests.config.example_parts.Circle" in rows["keys"]
    assert rows["radius"].split()[1] == "2"
    assert "(the default)" in rows["colour"]


def test_a_default_that_is_a_part_is_printed_as_a_configuration_would_write_it() -> None:
    printed = json.dumps([Frame(width=1), Circle(radius=2), Path("a/b")], default=as_plain)
    assert json.loads(printed) == [
        {"width": 1, "tags": ["plain"]},
        {"type": "circle", "radius": 2, "colour": "red"},
        "a/b",
    ]


def test_explain_config_tells_what_replaced_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--override", "{ shape: { type: 'square' } }", "explain_config", "shape.radius") == 0
    assert "replaced by --override" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "right"), [("shape.radios", "shape.radius"), ("shape.color", "shape.colour")]
)
def test_explain_config_offers_the_nearest_key(
    wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("explain_config", wrong) == 2
    assert f"did you mean {right}" in capsys.readouterr().err


def test_options_may_stand_on_both_sides_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--override", "{ seed: 2 }", "print_config", "--override", "{ seed: super.seed * 2 }"]
    assert main(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 4
    assert command_line.main(["print_config", "--configs", "circle.jsonnet, circle.jsonnet,"]) == 0


def test_a_command_gets_the_checked_experiment_and_nothing_runs_with_a_wrong_one(commands: Commands) -> None:
    assert main("run_iteration_loop") == 0
    ((command, root, config, _),) = commands.calls
    assert command == "run_iteration_loop"
    assert isinstance(root, Drawing)
    assert config["shape"] == {"type": "circle", "radius": 2}
    assert main("--override", "{ seed: 'x' }", "run_iteration_loop") == 2
    assert len(commands.calls) == 1


def test_a_table_ignores_the_seed_of_the_environment(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_SEED", "3")
    monkeypatch.setenv("APP_DIRECTORY", "there")
    assert command_line.main(["--configs", "wall.jsonnet", "make_table"]) == 0
    assert [root for _, root, *_ in commands.calls] == [Wall(rows=("a",), directory="there")]


@pytest.mark.parametrize(("config", "command"), [("circle", "make_table"), ("wall", "run_iteration_loop")])
def test_a_command_for_experiments_refuses_a_table_and_the_other_way_round(
    config: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["--configs", f"{config}.jsonnet", command]) == 2
    kind = "an experiment" if config == "circle" else "a table"
    assert f"and this configuration is {kind}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("too long"), 2), (RuntimeError("died"), 1), (OSError(5, "Input/output error"), 1)],
)
def test_a_failure_is_one_message_and_its_traceback_goes_to_the_log(
    error: Exception, code: int, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path("out/x/logs/run.log")
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    commands.error = error
    assert main("run_iteration_loop") == code
    err = capsys.readouterr().err
    assert str(error) in err
    assert "Traceback" not in err
    assert str(log) in err
    assert log.read_text().startswith("before\nTraceback")


def test_a_command_that_refuses_a_runs_folder_leaves_its_log_as_it_is(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path("out/x/logs/run.log")
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    commands.error = FolderRefused("another process holds the lock")
    assert main("run_iteration_loop") == 2
    assert "run_iteration_loop failed: another process holds the lock" in capsys.readouterr().err
    assert log.read_text() == "before\n"
    assert main("run_iteration_loop", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_debug_shows_the_traceback_and_a_failed_assertion_is_never_shortened_to_a_message(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.error = RuntimeError("died")
    assert main("run_iteration_loop", "--debug") == 1
    assert "Traceback" in capsys.readouterr().err
    commands.error = AssertionError("cannot be")
    with pytest.raises(AssertionError):
        main("run_iteration_loop")


def test_an_interruption_ends_with_130(commands: Commands) -> None:
    commands.error = KeyboardInterrupt()
    assert main("run_iteration_loop") == 130


def test_only_the_first_rank_tells_a_mistake_that_all_ranks_see(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(command_line, "FIRST_RANK_SPEAKS_WITHIN_S", 0.0)
    assert main("--local_rank=1", "--override", "{ seed: 'x' }", "run_iteration_loop") == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert main("--override", "{ seed: 'x' }", "run_iteration_loop") == 2
    assert "seed" in capsys.readouterr().err


def test_a_failure_of_one_rank_says_which(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    commands.error = RuntimeError("died")
    assert main("run_iteration_loop") == 1
    assert "[rank 1] run_iteration_loop failed: died" in capsys.readouterr().err


def test_no_configuration_is_a_mistake_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["check_config"]) == 2
    assert "--configs" in capsys.readouterr().err


def store_run(folder: Path, config: str = CIRCLE, **manifest: Any) -> None:
    """Write the folder of a run with its configuration and its manifest."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(_jsonnet.evaluate_snippet("config", config))
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["run", "out/x y"], "which `treetune run --configs 'out/x y/config.json'` continues"),
        (["evaluate", "out/x y"], "name the configuration in it: out/x y/config.json"),
        (["check", "--configs", "out/x y"], "name the configuration in it: out/x y/config.json"),
    ],
)
def test_the_folder_of_an_experiment_in_place_of_a_file_is_told_the_file(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store_run(Path("out/x y"))
    assert command_line.main(arguments) == 2
    assert remedy in " ".join(capsys.readouterr().err.split())


def test_the_folder_of_a_model_is_not_taken_for_that_of_an_experiment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert command_line.main(["check", "--configs", "model"]) == 2
    assert "name the configuration in it" not in capsys.readouterr().err


def test_fork_prints_the_folder_and_the_command_that_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commands: Commands
) -> None:
    store_run(Path("out/x"))
    monkeypatch.setattr("treetune.lab.fork.fork", lambda *_: Path("out/x y"))
    override = "{ experiment_name+: ' y', seed: 5 }"
    assert command_line.main(["fork", "out/x", "--override", override]) == 0
    out, err = capsys.readouterr()
    assert out == "out/x y\n"

    # As `fork` writes it: the configuration with the override.
    store_run(Path("out/x y"), f"({CIRCLE}) + {override}")
    program, *arguments = shlex.split(err.partition("runs it: ")[2])
    arguments[arguments.index("run")] = "check_finished"  # which also builds the experiment, in this process
    assert program == "treetune" and command_line.main(arguments) == 0
    [call] = commands.calls
    data = call[2]
    assert (data["experiment_name"], data["seed"]) == ("x y", 5)


@pytest.mark.parametrize("command", [["check_config"], ["explain_config", "seed"]])
def test_a_stored_configuration_finds_the_modules_that_its_run_found(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("parts").mkdir()
    Path("parts/module_beside_a_configuration.py").write_text("print('it is imported')")
    config = f"{CIRCLE} + {{ imports: ['module_beside_a_configuration'] }}"
    store_run(Path("out/x"), config, own_folders=[str(Path("parts").resolve())])
    sys.modules.pop("module_beside_a_configuration", None)
    assert command_line.main(["--configs", "out/x/config.json", *command]) == 0
    assert "it is imported" in capsys.readouterr().out


def test_a_python_without_the_packages_is_told_what_to_run() -> None:
    source = str(Path(__file__).parents[2] / "src")
    program = f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p] + [{source!r}]; "
    program += "from treetune.main import main; sys.exit(main(['--configs', 'x.jsonnet', 'check_config']))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "scripts/setup.sh" in done.stderr
    assert "Traceback" not in done.stderr
