"""Promises about texts that a model wrote, outside the sandbox:

* no module runs, unpickles or fills in a text, but for the listed places with their reasons;
* no grader and no other reader runs a hostile answer (seen by an audit hook);
* no inline grader, and no reader in the run's process, hangs on a long text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.domains.graders.code_grading import needs_sandbox
from tests.domains.sandbox.text_that_runs import find_text_that_runs

ROOT = Path(__file__).parents[3]
INSIDE = ROOT / "src/treetune/domains/sandbox/inside"

OURS = "a name that stands in our own source"
TEMPLATE = "a template that stands in our own source; what is filled in is no template"

ALLOWED = {
    ("src/treetune/processes/pool.py", "pickle.loads"): "what our own worker wrote",
    ("src/treetune/processes/worker.py", "pickle.loads"): "what the run wrote",
    ("src/treetune/tasks/graders/conformance.py", "pickle.loads"): "the grader itself",
    ("src/treetune/domains/environments/worlds.py", "pickle.loads"): "an environment's state, made by us",
    ("src/treetune/tasks/graders/extraction.py", "ast.literal_eval"): "up to a length and a depth",
    (
        "src/treetune/domains/graders/cruxeval.py",
        "ast.literal_eval",
    ): "of a tree, to see that it is a literal",
    ("src/treetune/config/imports.py", "importlib.import_module"): "the configuration's `imports`",
    ("src/treetune/domains/environments/tools.py", "importlib.import_module"): "the configuration's `path`",
    ("src/treetune/domains/foreign.py", "importlib.import_module"): "a reward of the configuration's",
    ("src/treetune/domains/foreign.py", "importlib.util.spec_from_file_location"): "the same",
    ("src/treetune/domains/foreign.py", "importlib.util.module_from_spec"): "the same",
    ("src/treetune/domains/foreign.py", "?.exec_module"): "the same",
    ("src/treetune/__init__.py", "importlib.import_module"): OURS,
    ("src/treetune/__init__.py", "globals()"): OURS,
    ("src/treetune/credit/__init__.py", "importlib.import_module"): OURS,
    ("src/treetune/lab/arena/scores.py", "importlib.import_module"): "a module of a registered part",
    ("src/treetune/engine/vllm_server.py", "importlib.import_module"): "a module of vLLM",
    ("src/treetune/engine/guard.py", "ctypes.CDLL"): "the C library",
    ("src/treetune/processes/lifetime.py", "ctypes.CDLL"): "the C library",
    ("src/treetune/processes/worker.py", "ctypes.CDLL"): "the C library",
    ("src/treetune/runtime/rank_launcher.py", "ctypes.CDLL"): "the C library",
    ("src/treetune/runtime/first_reward.py", "?.format"): TEMPLATE,
    ("src/treetune/runtime/record.py", "?.format"): TEMPLATE,
    ("src/treetune/runtime/resources.py", "?.format"): TEMPLATE,
    ("src/treetune/tasks/graders/conformance.py", "?.format"): TEMPLATE,
    ("src/treetune/data/asking.py", "?.format"): TEMPLATE,
    ("src/treetune/data/new_experiment.py", "?.format"): TEMPLATE,
    ("src/treetune/data/parallel_solutions.py", "?.format"): TEMPLATE,
    ("src/treetune/data/thread_blocks.py", "?.format"): TEMPLATE,
    ("src/treetune/domains/graders/codeio.py", "?.format"): TEMPLATE,
    ("src/treetune/domains/mixture.py", "?.format"): TEMPLATE,
    ("src/treetune/domains/puzzles/grid_puzzles.py", "?.format"): TEMPLATE,
    ("src/treetune/domains/puzzles/zebra_puzzles.py", "?.format"): TEMPLATE,
    ("src/treetune/view/report/recorded.py", "?.format"): TEMPLATE,
}
"""Places outside the sandbox that could run a text, make objects of bytes or import what a text names,
and the origin of the text of each."""


def test_no_module_outside_the_sandbox_runs_text() -> None:
    places = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        if not path.is_relative_to(INSIDE):
            names = find_text_that_runs(path.read_text(encoding="utf-8"))
            places |= {(str(path.relative_to(ROOT)), name) for name in names}
    assert places == ALLOWED.keys()


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "exec(x)",
        "e = eval",
        "e = eval\nf = e\ndef run(x):\n    return f(x)",
        "from builtins import eval as e",
        "import builtins as b\nb.eval(x)",
        "import builtins\ngetattr(builtins, 'ev' + 'al')(x)",
        "import builtins\ngetattr(builtins, 'exec')(x)",
        "import builtins\nvars(builtins)[name](x)",
        "import builtins\nbuiltins.__dict__['eval'](x)",
        "__builtins__['eval'](x)",
        "globals()['eval'](x)",
        "f.__globals__['eval'](x)",
        "list(map(eval, xs))",
        "run = compile",
        "__import__(name)",
        "__import__('pickle').loads(x)",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module as get\nget(row['module'])",
        "import importlib\nimportlib.import_module('pickle').loads(x)",
        "import runpy\nrunpy.run_path(x)",
        "import code\ncode.InteractiveInterpreter().runsource(x)",
        "import timeit\ntimeit.timeit(x)",
        "import ast\nast.literal_eval(x)",
        "from ast import literal_eval",
        "import sympy\nsympy.sympify(x)",
        "from sympy.parsing.sympy_parser import parse_expr as read",
        "frame.eval('a + b')",
        "import pandas as pd\npd.eval(x)",
        "import pickle\npickle.loads(x)",
        "import pickle as p\np.Unpickler(file).load()",
        "from pickle import load as read",
        "from pickle import *",
        "import joblib\njoblib.load(path)",
        "import dill\ndill.loads(x)",
        "import cloudpickle\ncloudpickle.load(file)",
        "import shelve\nshelve.open(path)",
        "import marshal\nmarshal.loads(x)",
        "import pandas\npandas.read_pickle(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, **options)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\nt = torch\nt.load(path)",
        "import yaml\nyaml.load(x)",
        "import yaml\nyaml.load(x, Loader=yaml.FullLoader)",
        "import yaml\nyaml.load(x, yaml.Loader)",
        "import yaml\nyaml.load(x, Loader=chosen)",
        "import yaml\nyaml.unsafe_load(x)",
        "from yaml import full_load",
        "import os\nos.system(x)",
        "import os as o\no.popen(x)",
        "from os import system",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "import subprocess as s\ns.Popen(x, shell=flag)",
        "import subprocess\nsubprocess.getoutput(x)",
        "import asyncio\nasyncio.create_subprocess_shell(x)",
        "template.format(row)",
        "row['prompt'].format_map(row)",
        "import jinja2\njinja2.Template(x).render()",
        "import ctypes\nctypes.CDLL(x)",
        "import types\ntypes.FunctionType(code, {})",
        "spec.loader.exec_module(module)",
    ],
)
def test_code_that_runs_a_text_is_found_under_every_name(source: str) -> None:
    assert find_text_that_runs(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import pickle\npickle.dumps(x)",
        "import yaml\nyaml.safe_load(x)",
        "import yaml\nyaml.load(x, Loader=yaml.CSafeLoader)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'])",
        "import importlib\nimportlib.import_module('json')",
        "import json\njson.loads(x)",
        "import re\nre.compile(x)",
        "'{} of {}'.format(a, b)",
        "getattr(part, name)",
        "evaluate(x)",
    ],
)
def test_code_that_runs_no_text_is_not_found(source: str) -> None:
    assert find_text_that_runs(source) == set()


@needs_sandbox
def test_no_grader_runs_a_hostile_answer(tmp_path: Path) -> None:
    report = report_of_watch(tmp_path, "attacks")
    assert report.pop("evaluates"), "the watch doesn't see a grader that evaluates answers"
    assert {"math", "minerva", "countdown", "cruxeval", "livebench"} <= report.keys()
    assert {"judge's verdict", "weighted", "tools by JSON", "threads' faults", "a page"} <= report.keys()
    assert {name: faults for name, faults in report.items() if faults} == {}


def test_inline_graders_end_on_long_answers(tmp_path: Path) -> None:
    report = report_of_watch(tmp_path, "long")
    assert {"final_answer", "multiple_choice", "exact_match", "livebench"} <= report.keys()
    assert {name: late for name, late in report.items() if late} == {}


def test_readers_in_the_runs_process_end_on_long_texts(tmp_path: Path) -> None:
    report = report_of_watch(tmp_path, "read")
    assert {"judge's verdict", "tools by JSON", "threads' faults", "a page", "a terminal"} <= report.keys()
    assert {name: late for name, late in report.items() if late} == {}


def report_of_watch(folder: Path, mode: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "tests.domains.sandbox.audited_answers", str(folder), mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
    report: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return report
