"""What the documents promise: their commands run, their examples work, what they name is there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.documents import PAGES, ROOT, Document, commands_in
from treetune.cli.arguments import BY_NAME, COMMANDS, parse
from treetune.cli.command import files_of
from treetune.cli.pages import pages as reference_pages
from treetune.config.layers import configurations
from treetune.tables.check import METRICS

DOCUMENTS = {str(path.relative_to(ROOT)): Document(path) for path in PAGES}
WRITTEN = {name: text for document in DOCUMENTS.values() for name, text in document.files.items()}
"""What a reader writes, on whichever page: one page goes on from another's files."""

CONFIGS = ROOT / "configs"
REFERENCE = ROOT / "docs" / "reference"
"""Made by scripts/docs.sh, and not in git."""
PLACES = ("configs/", "examples/", "scripts/", "docs/", "src/", "tests/")
MAIN = "src/treetune/main.py"
RUN_AS_IT_IS = ("check_config", "print_config", "explain_config", "list_parts", "describe", "plan", "schema")
AROUND = ("cd", "source", "export", "mkdir", "cp", "kill")
"""What the shell does around commands."""

RUN_ALL = """
import contextlib, io, itertools, json, os, sys
import treetune.parts
from treetune.cli.arguments import parse
from treetune.main import main
lines = [json.loads(line) for line in sys.stdin]
for folder, asked in itertools.groupby(lines, lambda line: line[0]):
    if os.fork():  # a page's own modules are called as another page's
        os.wait()
        continue
    os.chdir(folder)
    for _, typed, tried in asked:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                if typed:
                    parse(typed)
                code = main(tried) if tried else 0
            except SystemExit as end:
                code = end.code
        print(json.dumps([code, out.getvalue()[-500:] + err.getvalue()]), flush=True)
    os._exit(0)
"""


def treetune_commands(document: Document) -> Iterator[tuple[list[str], list[str]]]:
    """(what a reader types behind the program's name, what is tried of it without training)."""
    for environment, words in document.commands:
        if MAIN in words or words[0] == "treetune":
            typed = words[words.index(MAIN) + 1 if MAIN in words else 1 :]
        elif words[0] == "./run.sh" and "CONFIGSTR" in environment:
            typed = ["--configs", environment["CONFIGSTR"], "run_iteration_loop"]
        else:
            continue
        first = next(word for word in typed if word in BY_NAME)
        command = BY_NAME[first].name
        if command == "check_config":
            # This machine needn't have the data, models and GPUs that a page is about.
            yield typed, [*typed, "--config-only"]
        elif command in RUN_AS_IT_IS:
            yield typed, typed
        else:
            yield typed, checked_instead(command, typed)


def checked_instead(command: str, typed: list[str]) -> list[str]:
    """Returns the command that evaluates the configuration of another one; nothing where there is none."""
    try:
        options = parse(typed)
    except SystemExit:
        return []  # reported where it is parsed again
    files = files_of(options)
    # Overrides without files are of a run's own configuration, and a name without a folder is of a file that
    # the reader has: neither is among the documents.
    is_readers_own = any("/" not in name and name not in WRITTEN for name in files)
    # The files of a replay extend the configuration that the run has stored.
    if not files or is_readers_own or command == "replay":
        return []
    overrides = [word for text in options.override or () for word in ("--override", text)]
    # A task alone is not an experiment that could be checked.
    is_task = command in ("score_responses", "export_rows")
    instead = ["print_config"] if is_task else ["check_config", "--config-only"]
    return [*instead, "--configs", ",".join(files), *overrides]


ASKED = {name: list(treetune_commands(document)) for name, document in DOCUMENTS.items()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Exit code and output of every page's commands, from a folder with what its reader has."""
    lines = []
    for name, asked in ASKED.items():
        folder = tmp_path_factory.mktemp("reader")
        for shipped in ("configs", "examples"):
            (folder / shipped).symlink_to(ROOT / shipped)
        for file, text in ({} if name.startswith("examples/") else WRITTEN).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        lines += [json.dumps([str(folder), *pair]) + "\n" for pair in asked]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input="".join(lines),
        env={variable: value for variable, value in os.environ.items() if not variable.startswith("APP_")}
        | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(lines), done.stderr
    in_order = iter(found)
    return {name: [next(in_order) for _ in asked] for name, asked in ASKED.items()}


@pytest.mark.parametrize("name", [name for name, asked in ASKED.items() if asked])
def test_every_command_is_one_and_its_configuration_is_right(
    name: str, answers: dict[str, list[tuple[int, str]]]
) -> None:
    for (typed, _), (code, output) in zip(ASKED[name], answers[name], strict=True):
        assert code == 0, f"{' '.join(typed)}\n{output}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_is_tried_or_says_why_not(name: str) -> None:
    """What is no command of treetune, which the test above tries, has its reason above the fence."""
    document = DOCUMENTS[name]
    for (info, text), reason in zip(document.fences, document.unrun, strict=True):
        assert info not in ("console", "sh", "shell"), "commands are in fences of bash"
        for environment, words in commands_in(text) if info == "bash" else ():
            ours = MAIN in words or words[0] == "treetune" or "CONFIGSTR" in environment
            assert ours or words[0] in AROUND or len(reason) > 10, f"{name}: {' '.join(words)}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_script_that_is_run_is_there(name: str) -> None:
    for _, words in DOCUMENTS[name].commands:
        for word in words:
            if word.startswith(("./", "scripts/")):
                assert os.access(ROOT / word, os.X_OK if word.startswith("./") else os.R_OK), word


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_every_file_that_is_named_is_there(name: str) -> None:
    # An experiment has a folder of evaluations, too.
    folders = tuple(
        f"{path.name}/" for path in CONFIGS.iterdir() if path.is_dir() and path.name != "evaluations"
    )
    missing = []
    for one in DOCUMENTS[name].names:
        if " " not in one and one.startswith(PLACES):
            missing += [path for path in spelled_out(one) if not files(path.rstrip("/"))]
        elif not {" ", "<"} & set(one) and one.startswith(folders) and not is_metric(one):
            missing += [path for path in spelled_out(one) if not fragments_or_code(path)]
    assert not missing


def is_metric(name: str) -> bool:
    """Returns whether ``credit/value_mean`` is a metric: some groups are called as folders of fragments."""
    group, _, metric = name.partition("/")
    return metric in METRICS.get(group, ())


def fragments_or_code(name: str) -> list[Path]:
    """What a name without the folder's means: ``credit/group`` or ``runtime/loop.py``."""
    return [*files(f"configs/{name.rstrip('/')}*"), *(ROOT / "src" / "treetune").glob(name)]


def files(pattern: str) -> list[Path]:
    return [*ROOT.glob(pattern)]


def spelled_out(name: str) -> list[str]:
    """``a/{b,c}_{d,e}`` without its braces."""
    parts = [part.split("}") for part in name.split("{")]
    choices = [parts[0]] + [[one + rest for one in inside.split(",")] for inside, rest in parts[1:]]
    return ["".join(chosen) for chosen in product(*choices)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    for link in DOCUMENTS[name].links:
        if not link.startswith(("http", "#")):
            path = DOCUMENTS[name].path.parent / link.split("#")[0]
            is_reference = path.parent == REFERENCE and path.name in reference_pages()
            assert is_reference or path.exists(), link


def test_every_command_of_the_program_is_explained() -> None:
    explained = {name.split()[0] for name in DOCUMENTS["docs/configuration.md"].names if name.strip()}
    assert set(COMMANDS) <= explained


def test_the_readme_names_every_preset() -> None:
    readme = DOCUMENTS["README.md"]
    for preset in configurations(CONFIGS / "presets"):
        own = str(preset.relative_to(ROOT))
        if preset.stem not in ("policy_gradient", "spo"):  # what the others are made of
            assert own in readme.names


def test_the_method_that_is_added_gives_the_credit_that_it_describes(tmp_path: Path) -> None:
    (tmp_path / "median_credit.py").write_text(
        DOCUMENTS["docs/your_own_parts.md"].files["my_package/median.py"]
    )
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from median_credit import Median
from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.single_turn import SingleTurn
from statistics import median
context = mdp.context()
trees, _ = SingleTurn(samples=5, max_tokens=mdp.LONGEST).run(context, mdp.problems(4))
episodes, _ = Median(scale=2.0).assign(context, trees)
trajectories = [answer for tree in trees for answer in tree.leaves]
for start in range(0, 20, 5):
    rewards = [t.reward for t in trajectories[start:start + 5]]
    for episode, reward in zip(episodes[start:start + 5], rewards):
        assert set(episode.advantages) == {{2.0 * (reward - median(rewards))}}
assert len({{e.advantages[0] for e in episodes}}) > 1
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_sites_navigation() -> None:
    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        inside = entry.values() if isinstance(entry, dict) else entry
        assert isinstance(inside, Iterable)
        return set().union(*map(pages, inside))

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    docs = ROOT / "docs"
    written = {str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.parent != REFERENCE}
    # The reference's index leads to its pages.
    assert written <= pages(site["nav"]) <= written | {f"reference/{name}" for name in reference_pages()}


def test_messages_that_troubleshooting_quotes_are_the_codes() -> None:
    said = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    quoted = [entry for entry in DOCUMENTS["docs/troubleshooting.md"].entries if " " in entry]
    assert len(quoted) > 10
    for message in quoted:
        for piece in filter(None, map(str.strip, message.split("…"))):
            assert any(piece in one for one in said), message
