"""Promises of the documents:

* every command on a page is valid and its configuration right, or the page says why it isn't tried;
* every file, link, script and command that a page names exists;
* the tests that a page shows pass;
* messages that the page on troubleshooting quotes are messages of the code.
"""

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

from tests.support.documents import PAGES, ROOT, Document, commands_in
from treetune.cli.arguments import COMMANDS, COMMANDS_BY_NAME, parse
from treetune.cli.command import files_of
from treetune.cli.pages import make_pages as reference_pages
from treetune.config.layers import find_configuration_files
from treetune.tables.check import METRICS_OF_GROUPS

DOCUMENTS = {str(path.relative_to(ROOT)): Document(path) for path in PAGES}
READERS_FILES = {name: text for document in DOCUMENTS.values() for name, text in document.files.items()}
"""Files that a reader writes, on all pages together: one page continues with another's files."""

CONFIGS = ROOT / "configs"
REFERENCE = ROOT / "docs" / "reference"
"""Made by scripts/docs.sh, and not in git."""
FOLDERS = ("configs/", "examples/", "scripts/", "docs/", "src/", "tests/")
MAIN = "src/treetune/main.py"
RUN_UNCHANGED = ("check_config", "print_config", "explain_config", "list_parts", "describe", "plan", "schema")
SHELL_COMMANDS = ("cd", "source", "export", "mkdir", "cp", "kill")
"""Commands of the shell around those of treetune."""

RUN_ALL = """
import contextlib, io, itertools, json, os, sys
import treetune.parts
from treetune.cli.arguments import parse
from treetune.main import main
lines = [json.loads(line) for line in sys.stdin]
for folder, commands in itertools.groupby(lines, lambda line: line[0]):
    if os.fork():  # a process for each page, since modules of two pages have the same names
        os.wait()
        continue
    os.chdir(folder)
    for _, typed, tried in commands:
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
    """Yield the arguments of each command that a reader types, and those that try it without training."""
    for environment, words in document.commands:
        if MAIN in words or words[0] == "treetune":
            typed = words[words.index(MAIN) + 1 if MAIN in words else 1 :]
        elif words[0] == "./run.sh" and "CONFIGSTR" in environment:
            typed = ["--configs", environment["CONFIGSTR"], "run_iteration_loop"]
        else:
            continue
        first_command = next(word for word in typed if word in COMMANDS_BY_NAME)
        command = COMMANDS_BY_NAME[first_command].name
        if command == "check_config":
            # This machine needn't have the data, models and GPUs that a page is about.
            yield typed, [*typed, "--config-only"]
        elif command in RUN_UNCHANGED:
            yield typed, typed
        else:
            yield typed, checking_command(command, typed)


def checking_command(command: str, typed: list[str]) -> list[str]:
    """Return a command that only evaluates the configuration of this one, or nothing if it has none."""
    try:
        options = parse(typed)
    except SystemExit:
        return []  # reported where it is parsed again
    files = files_of(options)
    # Overrides without files extend the configuration that a run has stored, and a name without a folder is a
    # file of the reader: neither is among the documents.
    is_readers_own = any("/" not in name and name not in READERS_FILES for name in files)
    # The files of a replay extend the configuration that the run has stored.
    if not files or is_readers_own or command == "replay":
        return []
    overrides = []
    for text in options.override or ():
        overrides += ["--override", text]
    # A task alone is not an experiment that could be checked.
    is_task = command in ("score_responses", "export_rows")
    instead = ["print_config"] if is_task else ["check_config", "--config-only"]
    return [*instead, "--configs", ",".join(files), *overrides]


COMMANDS_OF_PAGE = {name: list(treetune_commands(document)) for name, document in DOCUMENTS.items()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Run every page's commands in a folder with its reader's files, and return exit codes and outputs.

    A command that several pages with the same files have is tried once, and parsed for each.
    """
    lines = []
    first_lines: dict[tuple[bool, tuple[str, ...]], int] = {}
    line_tried_for: list[int] = []
    for name, commands in COMMANDS_OF_PAGE.items():
        folder = tmp_path_factory.mktemp("reader")
        for shipped in ("configs", "examples"):
            (folder / shipped).symlink_to(ROOT / shipped)
        for file, text in ({} if name.startswith("examples/") else READERS_FILES).items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        for typed, tried in commands:
            number = len(lines)
            first_line = first_lines.setdefault((name.startswith("examples/"), tuple(tried)), number)
            line_tried_for.append(first_line)
            lines.append(json.dumps([str(folder), typed, tried if first_line == number else []]) + "\n")
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
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(lines), done.stderr
    in_order = iter(zip(results, line_tried_for, strict=True))
    answers: dict[str, list[tuple[int, str]]] = {}
    for name, commands in COMMANDS_OF_PAGE.items():
        answers[name] = []
        for _ in commands:
            (code, output), first_line = next(in_order)
            code_of_first, output_of_first = results[first_line]
            answers[name].append((code or code_of_first, output + output_of_first))
    return answers


@pytest.mark.parametrize("name", [name for name, commands in COMMANDS_OF_PAGE.items() if commands])
def test_every_command_is_valid_and_its_configuration_right(
    name: str, answers: dict[str, list[tuple[int, str]]]
) -> None:
    for (typed, _), (code, output) in zip(COMMANDS_OF_PAGE[name], answers[name], strict=True):
        assert code == 0, f"{' '.join(typed)}\n{output}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_is_tried_or_the_page_says_why_not(name: str) -> None:
    """The test above tries commands of treetune; any other needs its reason above the fence."""
    document = DOCUMENTS[name]
    for (info, text), reason in zip(document.fences, document.unrun, strict=True):
        assert info not in ("console", "sh", "shell"), "commands are in fences of bash"
        for environment, words in commands_in(text) if info == "bash" else ():
            ours = MAIN in words or words[0] == "treetune" or "CONFIGSTR" in environment
            assert ours or words[0] in SHELL_COMMANDS or len(reason) > 10, f"{name}: {' '.join(words)}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_script_that_is_run_exists(name: str) -> None:
    for _, words in DOCUMENTS[name].commands:
        for word in words:
            if word.startswith(("./", "scripts/")):
                assert os.access(ROOT / word, os.X_OK if word.startswith("./") else os.R_OK), word


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_every_file_that_is_named_exists(name: str) -> None:
    # An experiment has a folder of evaluations, too.
    folders = tuple(
        f"{path.name}/" for path in CONFIGS.iterdir() if path.is_dir() and path.name != "evaluations"
    )
    missing = []
    for code in DOCUMENTS[name].names:
        if " " not in code and code.startswith(FOLDERS):
            missing += [path for path in expand_braces(code) if not matching_files(path.rstrip("/"))]
        elif not {" ", "<"} & set(code) and code.startswith(folders) and not is_metric(code):
            missing += [path for path in expand_braces(code) if not fragments_or_code(path)]
    assert not missing


def is_metric(name: str) -> bool:
    """Say whether ``credit/value_mean`` is a metric: some groups are called like folders of fragments."""
    group, _, metric = name.partition("/")
    return metric in METRICS_OF_GROUPS.get(group, ())


def fragments_or_code(name: str) -> list[Path]:
    """Find the files of a name without its folder, such as ``credit/group`` or ``runtime/loop.py``."""
    return [*matching_files(f"configs/{name.rstrip('/')}*"), *(ROOT / "src" / "treetune").glob(name)]


def matching_files(pattern: str) -> list[Path]:
    return [*ROOT.glob(pattern)]


def expand_braces(name: str) -> list[str]:
    """List the names that ``a/{b,c}_{d,e}`` stands for."""
    beginning, *braces = name.split("{")
    choices = [[beginning]]
    for part in braces:
        alternatives, after = part.split("}")
        choices.append([alternative + after for alternative in alternatives.split(",")])
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
    for preset in find_configuration_files(CONFIGS / "presets"):
        path = str(preset.relative_to(ROOT))
        if preset.stem not in ("policy_gradient", "spo"):  # other presets are made of these two
            assert path in readme.names


def test_the_method_that_is_added_gives_the_credit_that_it_describes(tmp_path: Path) -> None:
    (tmp_path / "median_credit.py").write_text(
        DOCUMENTS["docs/your_own_parts.md"].files["my_package/median.py"]
    )
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from median_credit import Median
from tests.support import tabular_mdp as mdp
from treetune.rollouts.single_turn import SingleTurn
from statistics import median
context = mdp.context()
trees, _ = SingleTurn(samples=5, max_tokens=mdp.LONGEST).run(context, mdp.problems(4))
episodes, _ = Median(weight_below=0.5).assign(context, trees)
trajectories = [answer for tree in trees for answer in tree.leaves]
for start in range(0, 20, 5):
    rewards = [t.reward for t in trajectories[start:start + 5]]
    for episode, reward in zip(episodes[start:start + 5], rewards):
        weight = 0.5 if reward < median(rewards) else 1.0
        assert set(episode.advantages) == {{weight * (reward - median(rewards))}}
assert {{-0.5, 0.0, 1.0}} <= {{e.advantages[0] for e in episodes}}
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


def test_the_tests_that_pages_show_pass(tmp_path: Path) -> None:
    for name, text in READERS_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tests = [name for name in READERS_FILES if name.startswith("tests/test_")]
    assert {"tests/test_fading.py", "tests/test_last_line.py"} <= set(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_in_the_sites_navigation() -> None:
    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        inside = entry.values() if isinstance(entry, dict) else entry
        assert isinstance(inside, Iterable)
        return set().union(*map(pages, inside))

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    docs = ROOT / "docs"
    pages_of_docs = {str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.parent != REFERENCE}
    # The reference's index leads to its pages.
    assert (
        pages_of_docs
        <= pages(site["nav"])
        <= pages_of_docs | {f"reference/{name}" for name in reference_pages()}
    )


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    texts_of_code = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts_of_code.append(node.value)
    quoted = [entry for entry in DOCUMENTS["docs/troubleshooting.md"].entries if " " in entry]
    assert len(quoted) > 10
    for message in quoted:
        for piece in filter(None, map(str.strip, message.split("…"))):
            assert any(piece in text for text in texts_of_code), message
