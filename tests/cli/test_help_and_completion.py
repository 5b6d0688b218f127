"""Promises of the command line to somebody who types at it:

* every command has help with an example, and every example of the help is a command of files that exist;
* a misspelled command or option is answered with the nearest right one, in two lines;
* files may follow a command or stand in `--configs`, and options may stand before or after the command;
* `list_parts` and `describe` tell the parts, with those that a configuration imports;
* the shell completes commands, files, parts and keys;
* a package that brings wrong commands is a note and ends no command.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from treetune.cli.arguments import COMMANDS, COMMANDS_BY_NAME, PROGRAM, SHORT_NAMES, overview, parse
from treetune.cli.completion import complete_configs
from treetune.cli.configuration import complete_keys
from treetune.config.layers import find_file
from treetune.main import main

ROOT = Path(__file__).parents[2]
MAIN = ROOT / "src" / "treetune" / "main.py"
EXAMPLES = [example for command in COMMANDS.values() for example in command.examples]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_help_is_a_command_of_files_that_are_there(example: str) -> None:
    program, *arguments = shlex.split(example)
    assert program == "treetune"
    options = parse(arguments)
    assert options.command in [
        COMMANDS_BY_NAME[argument].name for argument in arguments if argument in COMMANDS_BY_NAME
    ]
    for comma_separated in options.configs or ():
        for name in comma_separated.split(","):
            find_file(name, ROOT)  # raises where there is none


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse([name, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "Examples:" in out
    assert f"Usage: treetune {SHORT_NAMES.get(name, name)}" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_the_first_help_fits_a_screen_and_leads_to_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    screen = capsys.readouterr().out.splitlines()
    assert screen == overview().splitlines()
    assert len(screen) < 24 and max(map(len, screen)) <= 80
    names = [line.split()[0] for line in screen if line.startswith("  ") and "$" not in line]
    assert names[:9] == [
        "run", "evaluate", "check", "explain", "parts", "configs", "plan", "doctor", "new",
    ]  # fmt: skip
    assert main(["help", "all"]) == 0
    everything = capsys.readouterr().out.replace(",", "").split()
    assert {SHORT_NAMES.get(name, name) for name in COMMANDS} <= {*everything}
    assert main(["help", "data"]) == 0
    assert "treetune score_responses --configs configs/tasks/math.jsonnet" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "check"])
    assert capsys.readouterr().out.startswith("Usage: treetune check ")
    assert main(["help", "dta"]) == 2
    assert "did you mean data?" in capsys.readouterr().err


@pytest.mark.parametrize("short", SHORT_NAMES.values())
def test_a_short_name_is_the_command_whose_old_name_goes_on_working(short: str) -> None:
    command = COMMANDS_BY_NAME[short]
    arguments = ["x" for argument in command.arguments if argument.required]
    assert parse([short, *arguments]) == parse([command.name, *arguments])
    assert parse([short, *arguments]).command == command.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "a.jsonnet", "check_config"], "No such option '--config'. Did you mean '--configs'?"),
        (["--configs=a", "check_config", "--overide={}"], "'--overide'. Did you mean '--override'?"),
        (["--configs", "a", "chek_config"], "no command 'chek_config': did you mean check?"),
        (["chek"], "no command 'chek': did you mean check?"),
        (["train"], "no command 'train': did you mean run?"),
        (["xyzzy"], "no command 'xyzzy': `treetune help` lists the commands"),
        (["grpo.jsonnet"], "grpo.jsonnet is a file, and a command comes first: treetune run grpo.jsonnet"),
        (["report", "x", "--plan"], "treetune report: No such option '--plan'"),
        (["plan", "--gpus", "0"], "'--gpus': 0 is not in the range x>=1"),
        (["serve_engine", "--host", "a"], "Missing option"),
        ([], "Missing command"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_nearest_right_one(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert message in err
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["run", "a.jsonnet"], ["a.jsonnet"]),
        (["run", "a.jsonnet", "b.yaml", "evaluate"], ["a.jsonnet", "b.yaml"]),
        (["run", "a.jsonnet,b.libsonnet", "c.libsonnet"], ["a.jsonnet,b.libsonnet", "c.libsonnet"]),
        (["run", "evaluate", "a.jsonnet", "--ranks", "2", "b.jsonnet"], ["a.jsonnet", "b.jsonnet"]),
        (["--configs", "a.jsonnet", "check", "b.jsonnet"], ["a.jsonnet", "b.jsonnet"]),
        (
            ["check", "b.jsonnet", "--configs=c.jsonnet", "--override", "d.jsonnet"],
            ["b.jsonnet", "c.jsonnet"],
        ),
        (["explain", "a.jsonnet", "trainer.learning_rate"], ["a.jsonnet"]),
        (["score_responses", "a.jsonnet", "--input", "b.json", "--output", "c.json"], ["a.jsonnet"]),
        (["check", "grpo"], ["grpo"]),
        (["--configs", "a.jsonnet,b.jsonnet", "run_iteration_loop"], ["a.jsonnet,b.jsonnet"]),
    ],
)
def test_files_follow_a_command_as_well_as_the_option_and_keep_their_order(
    arguments: list[str], files: list[str]
) -> None:
    options = parse(arguments)
    assert options.configs == files
    if "evaluate" in arguments:
        assert options.what == "evaluate"
    if options.command == "explain_config":
        assert options.key == "trainer.learning_rate"


def test_arguments_of_a_command_without_a_configuration_are_not_taken_for_files() -> None:
    assert parse(["view", "a.json"]).paths == ("a.json",)
    assert parse(["parts", "credit"]).family == "credit"


def test_an_option_of_several_words_takes_those_up_to_the_next_option() -> None:
    options = parse(["arena", "mine", "--languages", "first of 8", "slips", "--problems", "5"])
    assert (options.modules, options.languages, options.problems) == (("mine",), ("first of 8", "slips"), 5)


def test_options_before_the_command_count_as_those_after_it() -> None:
    before_and_with_the_command = [
        "--override",
        "{a: 1}",
        "--debug",
        "--local_rank=0",
        "--configs",
        "a.jsonnet",
        "run_iteration_loop",
    ]
    options = parse([*before_and_with_the_command, "--configs", "b.jsonnet", "--override", "{b: 2}"])
    assert options.configs == ["a.jsonnet", "b.jsonnet"]
    assert options.override == ["{a: 1}", "{b: 2}"] and options.debug


def test_version_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("treetune 0.")


def test_list_parts_names_all_parts_or_those_of_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list_parts"]) == 0
    out = capsys.readouterr().out
    assert {"monte_carlo", "gsm8k", "vllm", "policy_iteration"} <= set(out.split())
    assert "(of treetune" not in out, "packages of treetune's own are nobody else's"
    assert main(["list_parts", "credit"]) == 0
    out = capsys.readouterr().out
    assert "monte_carlo" in out
    assert "gsm8k" not in out


def test_list_parts_knows_those_that_a_configuration_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "listed_part.py").write_text(
        "from dataclasses import dataclass\nfrom treetune.runtime.sinks import Sink\n"
        "@Sink.register('nowhere')\n@dataclass(frozen=True)\nclass Nowhere(Sink):\n    'Keeps nothing.'\n"
        "    def open(self, *_): ...\n    def log(self, *_): ...\n    def close(self, *_): ...\n"
    )
    (tmp_path / "mine.jsonnet").write_text("{ imports: ['listed_part'] }")
    command = [sys.executable, str(MAIN), "--configs", str(tmp_path / "mine.jsonnet"), "list_parts", "sink"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "nowhere" in done.stdout
    assert "(of listed_part) Keeps nothing." in done.stdout


def test_describe_tells_keys_types_bounds_defaults_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "credit.monte_carlo"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "samples: a whole number greater than 0;" in out
    assert "The usual number of continuations of a state" in out


def test_describe_knows_objects_without_type_and_offers_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["describe", "evaluation_set"]) == 0
    assert "while_training" in capsys.readouterr().out
    assert main(["describe", "monte_carl"]) == 2
    assert "did you mean monte_carlo" in capsys.readouterr().err
    assert main(["describe", "credit"]) == 2
    assert "`treetune parts credit` lists them" in capsys.readouterr().err


def test_the_last_of_several_configurations_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    context = click.Context(PROGRAM)

    def completions(prefix: str) -> list[str]:
        return complete_configs(context, COMMANDS["check_config"].params[0], prefix)

    preset = "configs/quickstart/sft.jsonnet,configs/presets/grpo_as_published.jsonnet"
    assert completions("configs/quickstart/sft.jsonnet,configs/presets/grp") == [preset]
    assert "quickstart/vineppo.jsonnet" in completions("quickstart/v")  # below configs/
    assert "quickstart/vineppo.jsonnet" in completions("quicksta"), "the files of the only folder"


def test_key_paths_of_the_configuration_on_the_line_are_completed() -> None:
    command = COMMANDS["explain_config"]

    def completions(configs: str, prefix: str) -> list[str]:
        context = click.Context(command)
        context.params = {"configs": (configs,), "override": ()}
        return complete_keys(context, command.params[0], prefix)

    assert "trainer.learning_rate" in completions("quickstart/vineppo.jsonnet", "trainer.l")
    assert completions("no.jsonnet", "") == []


def test_a_shell_that_asks_is_answered_with_commands_and_parts() -> None:
    def completions(*words: str) -> list[str]:
        # Bash hands the words over in these variables; the last word is the one to complete.
        variables = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
        environ = os.environ | variables | {"_TREETUNE_COMPLETE": "bash_complete"}
        command = [sys.executable, "-m", "treetune.main"]
        done = subprocess.run(command, env=environ, timeout=60, cwd=ROOT, capture_output=True, text=True)
        return [line.removeprefix("plain,") for line in done.stdout.splitlines()]

    assert sorted(completions("treetune", "check")) == ["check", "check_finished"]
    assert completions("treetune", "run", "run_an") == ["run_analyzers"]
    assert "credit.monte_carlo" in completions("treetune", "describe", "credit.")
    assert "trainer.learning_rate" in completions(
        "treetune", "explain", "quickstart/sft.jsonnet", "trainer.l"
    )


PACKAGE = """\
from treetune.cli.command import Command

def hello(options):
    print("hello")
    return 0

COMMANDS = (Command("hello", hello, "say hello", "Says hello.", ("treetune hello",)),)
"""
NAMESAKES = f"""\
{PACKAGE}
NAMES = ("hello", "check", "plan", "help")
COMMANDS = tuple(Command(name, hello, "say hello", "Says hello.", ()) for name in NAMES)
"""
"""Commands with the names of others: of a package, a short name, a full name, and help."""

BROKEN = {
    "without_commands": ("x = 1", "it has no COMMANDS"),
    "of_a_wrong_kind": ("COMMANDS = 3", "should be a tuple of treetune.cli.command.Command, and is 3"),
    "of_wrong_items": ("COMMANDS = ('hello',)", "and is ('hello',)"),
    "raising": ("raise KeyError('missing')", "missing"),
    "exiting": ("raise SystemExit('not here')", "not here"),
}


def test_a_package_whose_commands_are_wrong_is_a_note_and_ends_no_command(tmp_path: Path) -> None:
    """In a process of its own: commands are collected once."""
    sources = {name: source for name, (source, _) in BROKEN.items()} | {
        "greeting": PACKAGE,
        "namesakes": NAMESAKES,
    }
    info = tmp_path / "installed-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    entry_points = ["[treetune.commands]"]
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        entry_points.append(f"{name} = {name}")
    (info / "entry_points.txt").write_text("\n".join(entry_points) + "\n")
    program = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from treetune.main import main; sys.exit(main(['hello']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    for name, (_, reason) in BROKEN.items():
        (note,) = [line for line in done.stderr.splitlines() if f"the commands of {name} " in line]
        assert note.startswith("note: ") and reason in note
    notes = [line for line in done.stderr.splitlines() if "of namesakes is left out" in line]
    owners = {"hello": "greeting", "check": "treetune", "plan": "treetune", "help": "treetune"}
    for name, owner in owners.items():
        [note] = [note for note in notes if f"the command {name!r} " in note]
        assert f"since {owner} has a command of this name: rename it" in note
