"""Promises of scorers that come from libraries, such as reasoning_gym:

* an answer is read and never executed: texts become values by our reader (`inside/reading.py`);
* nothing of an answer remains for the next: each has a process in a sandbox (`inside/scoring.py`), unless its
  scorer is proven to only compare; this is tested with a scorer that executes answers, without our reader;
* an answer on which a scorer fails, hangs or ends costs itself alone.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from treetune.domains.graders.reasoning_gym import ReasoningGymGrader
from treetune.domains.puzzles.reasoning_gym import ReasoningGym, missing_packages
from treetune.domains.sandbox import inside, served
from treetune.domains.sandbox.base import ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.domains.sandbox.inside.comparing import NotProven, prove_only_compares
from treetune.domains.sandbox.inside.reading import NotAPlainValue, read_formula, read_literal
from treetune.domains.sandbox.program import UnsafeLocal
from treetune.domains.sandbox.served import LibraryScorer
from treetune.exceptions import SandboxUnavailable
from treetune.findings import missing_requirements
from treetune.tasks.graders.pool import GraderPool
from treetune.vocabulary import Problem

needs_reasoning_gym = pytest.mark.skipif(bool(missing_packages()), reason="reasoning_gym is not installed")

DATA_SETS_THAT_READ_PYTHON = [
    "countdown", "puzzle24", "n_queens", "binary_matrix", "spiral_matrix", "string_insertion",
    "simple_integration", "intermediate_integration", "polynomial_multiplication",
]  # fmt: skip
"""Data sets whose scorers hand answers to `eval`, or to sympy's parser, which uses it."""

GRADER = ReasoningGymGrader(limits=ProgramLimits(seconds=5.0, memory_mib=2048))


@cache
def problems(dataset: str) -> list[Problem]:
    test_problems = ReasoningGym(dataset=dataset, train_size=1, validation_size=1, test_size=3).problems(
        "test"
    )
    return [replace(problem, id=f"{dataset}/{problem.id}") for problem in test_problems]


def tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


# The first defence: texts are read


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "-2.5",
        "'a'",
        "[1, [2, 3]]",
        "(1, 'b')",
        "{1: 2}",
        "{1, 2}",
        "2*3+1",
        "[0]*3",
        "0xff << 2 | 1",
        "True and 0",
        "1 < 2 < 3",
        "3 < 2",
        "not 1",
        "7 // 2 % 2",
        "None",
        " 5",
        "-~3",
        "0 or 'x'",
        "1 == 1.0",
    ],
)
def test_literals_and_arithmetic_are_read_as_python_does(text: str) -> None:
    assert repr(read_literal(text)) == repr(eval(text.strip()))  # the literals above, and no answer


@pytest.mark.parametrize(
    "text",
    [
        "print(1)",
        "__import__('os')",
        "x",
        "().__class__",
        "[x for x in 'ab']",
        "lambda: 1",
        "f'{1}'",
        "a[0]",
        "'%s' % 1",
        "(y := 1)",
        "1 if 1 else 2",
        "[*'ab']",
        "{**{}}",
        "exec('1')",
        "1 in [1]",
        "await x",
    ],
)
def test_a_text_that_is_more_than_a_value_is_refused(text: str) -> None:
    with pytest.raises((NotAPlainValue, SyntaxError)):
        read_literal(text)


@pytest.mark.parametrize(
    "code",
    [
        "open ('x')",
        "exec ('1')",
        "Symbol ('x' ).name",
        "getattr (Symbol ,'x' )",
        "eval ('1')",
        "lambdify (x ,'y' )",
        "(lambda : 1)()",
        "[x for x in (1 ,)]",
        "S .__class__",
        "sympify ('1')",
        "preview (1 )",
        "compile ('1','','eval')",
    ],
)
def test_a_formula_calls_nothing_but_mathematics(code: str) -> None:
    import builtins

    import sympy

    names = {name: getattr(sympy, name) for name in sympy.__all__} | vars(builtins)
    with pytest.raises((NotAPlainValue, NameError)):
        read_formula(code, {}, names)


# The proof that a scorer only compares

SCORERS = """
import json
import math
import os
import re
from fractions import Fraction

CACHE = {}
SEEN = []
NUMBER = re.compile("[0-9]+")
eval_it = eval

class Data:
    def __init__(self):
        self.config = type("Config", (), {"factor": 0.5, "keep": print})()
        self.memo = {}

    def _rows(self, text):
        return [row.split() for row in text.splitlines()]

    def _memo(self):
        return self.memo

    def _same(self, thing):
        return thing

    def _raise(self):
        raise ValueError(self.memo)

    def _keep(self, answer, seen=CACHE):
        seen[answer] = 1

    @property
    def watched(self):
        return self.memo

def same(left, right):
    return left.strip() == right.strip()

def remembers(left, right):
    CACHE[left] = right
    return left == right

def same_thing(thing):
    return thing

def with_default(answer, seen=[]):
    seen.append(answer)
    return len(seen)

class Scorer(Data):
    def score_answer(self, answer, entry):
        # BODY
"""

BODIES_THAT_COMPARE = [
    "return float(answer == entry['answer'])",
    "return 1.0 if same(answer, entry['answer']) else 0.0",
    "return self.config.factor * (self._rows(answer) == self._rows(entry['answer']))",
    "reward = 0.0\nfor a, b in zip(answer, entry['x']):\n    reward += a == b\nreward *= self.config.factor",
    "seen = {}\nfor word in answer.split(','):\n    seen[word] = len(word)\nreturn seen == entry['x']",
    "moves = []\nfor move in json.loads(answer):\n    moves.append(move)\nreturn math.exp(-len(moves))",
    "entry['metadata']['seen'] = answer\nreturn 0.0",
    "try:\n    return float(Fraction(answer))\nexcept (ValueError, ZeroDivisionError):\n    return 0.0",
    "try:\n    return float(answer)\nexcept ValueError as error:\n    return str(error) == entry['answer']",
    "return sorted(answer, key=lambda c: -ord(c)) == entry['answer'] and bool(NUMBER.findall(answer))",
    "rows = self._rows(answer)\nrows.pop()\nreturn rows == self._rows(entry['answer'])",
    "same_thing(json.loads(answer)).append(1)\nprint(answer)\nreturn 'x{}'.format(answer) == entry['answer']",
    "return next(c for c in answer if c == 'a') == entry['answer']",
    "def norm(text):\n    return text.lower()\nreturn norm(answer) == norm(entry['answer'])",
]

BODIES_THAT_DO_MORE = [
    "return eval(answer)",
    "return eval_it(answer)",
    "e = eval\nreturn e(answer)",
    "return float(max(map(eval, answer)))",
    "return sorted(answer, key=self.config.keep)",
    "exec(answer)",
    "import os\nreturn os.system(answer)",
    "return os.system(answer)",
    "return open(answer).read()",
    "return compile(answer, 'x', 'eval')",
    "return getattr(self, answer)()",
    "return vars()[answer]",
    "return answer.format(self)",
    "return ().__class__",
    "return print(answer, file=SEEN)",
    "return list(map(print, answer))",
    "return next(self.memo)",
    "return next(iter(answer))",
    "return '{.score_answer}'.format(self)",
    "m = self._same(self.memo)\nm[answer] = 1",
    "m = same_thing(CACHE)\nm[answer] = 1",
    "return self._keep(answer)",
    "self.last = answer",
    "self.memo[answer] = 1",
    "self.memo.update(json.loads(answer))",
    "m = self.memo\nm[answer] = 1",
    "m = self._memo()\nm[answer] = 1",
    "for m in [self.memo]:\n    m[answer] = 1",
    "m, n = self.memo, 1\nm.setdefault(answer, 1)",
    "xs = []\nxs.append(self.memo)\nxs[0][answer] = 1",
    "xs = [self.memo]\nxs[0][answer] = 1",
    "d = {}\nd['m'] = self.memo\nd['m'].update({answer: 1})",
    "(m := self.memo).update({answer: 1})",
    "m = self.watched\nm[answer] = 1",
    "try:\n    self._raise()\nexcept ValueError as error:\n    error.args[0][answer] = 1",
    "try:\n    self._raise()\nexcept ValueError as error:\n    m = error.args[0]\n    m.update({answer: 1})",
    "s = SEEN\ns += [answer]",
    "SEEN.append(answer)",
    "return list(map(SEEN.append, answer))",
    "f = SEEN.append\nreturn f(answer)",
    "global CACHE\nCACHE = answer",
    "return remembers(answer, entry)",
    "return with_default(answer)",
    "def inner():\n    return self.memo\ninner()[answer] = 1",
    "return (lambda m: m.update({answer: 1}))(self.memo)",
    "del self.memo[answer]",
    "with self.config.keep(answer):\n    pass",
    "[self.memo.pop(k) for k in answer]",
    "return re.sub('.', self.config.keep, answer, key=self.config.keep)",
    "return self.config.keep(answer)",
    "return re.template(answer)",
    "yield answer",
]


def scorer_of(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> object:
    name = f"package_of_scorers_{abs(hash(body))}"
    indented = body.replace("\n", "\n        ")
    (folder / f"{name}.py").write_text(SCORERS.replace("# BODY", indented))
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module.Scorer().score_answer


@pytest.mark.parametrize("body", BODIES_THAT_COMPARE)
def test_a_scorer_that_only_compares_is_proven_to_only_compare(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = scorer_of(tmp_path, body, monkeypatch)
    prove_only_compares(method, type(method.__self__).__module__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("body", BODIES_THAT_DO_MORE)
def test_a_scorer_that_evaluates_or_keeps_something_is_not_proven(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = scorer_of(tmp_path, body, monkeypatch)
    with pytest.raises(NotProven):
        prove_only_compares(method, type(method.__self__).__module__)  # type: ignore[attr-defined]


# Data sets of reasoning_gym

ATTACKS = [
    "exec(\"open('{marker}', 'w').write('x')\")",
    "open('{marker}', 'w').write('x')",
    "[].append(open('{marker}', 'w'))",
    "__import__('os').system('touch {marker}')",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{marker}'])",
    'sympify(\'open("{marker}", "w")\')',
    'sin(\'open("{marker}", "w")\')',
    "(lambda: open('{marker}', 'w'))()",
    "lambdify('x', 'open(\"{marker}\", \"w\")')(1)",
    'eval(\'open("{marker}", "w")\')',
    "'{{0.__class__}}'.format(open('{marker}', 'w'))",
    "print(1, file=open('{marker}', 'w'))",
    "compile(\"open('{marker}', 'w')\", '/usr/lib/x.py', 'exec')",
]


@pytest.fixture(scope="module")
def pool(sandbox: Bubblewrap) -> Iterator[GraderPool]:
    with GraderPool(GRADER, workers=1) as grader_pool:
        yield grader_pool


@needs_reasoning_gym
@pytest.mark.parametrize("dataset", DATA_SETS_THAT_READ_PYTHON)
def test_answers_that_are_python_write_nothing_and_earn_nothing(
    dataset: str, pool: GraderPool, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    problem = problems(dataset)[0]
    gold = pool.submit(tagged(problem.gold), problem).result()
    grades = pool.grade_many((tagged(attack.format(marker=marker)), problem) for attack in ATTACKS)
    assert gold.reward == 1.0
    assert max(grade.reward for grade in grades) <= 0.05
    assert not marker.exists()


POISONS = [
    'exec("import reasoning_gym.games.countdown as c; c.CountdownDataset.score_answer=lambda s, a, e: 1.0")',
    'exec("import reasoning_gym.factory as f\\nfor k, _ in f.DATASETS.values(): k.score_answer = float")',
    "setattr(__import__('builtins'), 'eval', lambda *a: 24)",
    'exec("import sympy; sympy.parse_expr = sympy.simplify = lambda *a, **k: 0")',
    "globals().update(float=lambda x: 1.0)",
]


@needs_reasoning_gym
@pytest.mark.parametrize("dataset", ["countdown", "binary_matrix", "simple_integration"])
def test_an_answer_changes_nothing_for_a_later_one(dataset: str, pool: GraderPool) -> None:
    problem, other_problem, _ = problems(dataset)
    wrong = tagged("2+2")
    before = pool.submit(wrong, problem).result().reward
    for poison in POISONS:
        pool.submit(tagged(poison), problem).result()
    assert pool.submit(wrong, replace(other_problem, id=f"{dataset} again")).result().reward == before < 1.0


COUNTING_SCORER = """
import os
STATE = []
def prepare():
    return lambda problem: (score, problem["only_compares"])
def score(answer):
    STATE.append(answer)
    if answer == "hang":
        while True:
            pass
    if answer == "evaluate":
        eval(compile("1", "<answer>", "eval"))
    if answer == "end":
        os._exit(3)
    if answer == "raise":
        raise ValueError(answer)
    if answer == "fill" or (answer == "need memory" and len(STATE) > 1):
        raise MemoryError
    if answer == "end once" and len(STATE) > 1:
        os._exit(3)
    return float(len(STATE))
"""


@pytest.fixture
def counting_scorer(sandbox: Bubblewrap) -> Iterator[LibraryScorer]:
    """Make a scorer whose score is the number of answers that its process has scored."""
    source = inside.read_source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            inside, "read_source", lambda name: COUNTING_SCORER if name == "keeping" else source(name)
        )
        scorer = LibraryScorer(sandbox, ProgramLimits(seconds=2.0, memory_mib=256), "keeping", "json")
        yield scorer
        scorer.close()


def test_only_answers_that_are_compared_share_a_process(counting_scorer: LibraryScorer) -> None:
    def count(only_compares: bool) -> float | None:
        return counting_scorer.score("x", {"only_compares": only_compares}).score

    assert [count(False), count(False)] == [1.0, 1.0]
    assert [count(True), count(True), count(True)] == [1.0, 2.0, 3.0]
    assert [count(False), count(False), count(True)] == [4.0, 1.0, 1.0]


@pytest.mark.parametrize("answer", ["hang", "evaluate", "end"])
def test_a_process_that_compares_ends_with_an_answer_that_does_more(
    counting_scorer: LibraryScorer, answer: str
) -> None:
    compared = {"only_compares": True}
    assert counting_scorer.score("x", compared).score == 1.0
    assert counting_scorer.score(answer, compared).score is None
    assert counting_scorer.score("x", compared).score == 1.0


@pytest.mark.parametrize("answer", ["need memory", "end once"])
def test_an_answer_that_fails_in_a_used_process_is_scored_again_in_a_new_one(
    counting_scorer: LibraryScorer, answer: str
) -> None:
    compared = {"only_compares": True}
    assert counting_scorer.score("x", compared).score == 1.0
    assert counting_scorer.score(answer, compared).score == 1.0
    assert counting_scorer.score("fill", compared).message == "the scorer raised MemoryError"


def test_a_scorer_that_raises_on_an_answer_goes_on_with_the_next(counting_scorer: LibraryScorer) -> None:
    compared = {"only_compares": True}
    assert counting_scorer.score("raise", compared).message == "the scorer raised ValueError('raise')"
    assert counting_scorer.score("x", compared).score == 2.0


PROVING_PROGRAM = """
import json, sys
from treetune.domains.sandbox.inside import reading, reasoning_gym_scores as scores
names = json.loads(sys.argv[1])
data_sets = {name: scores._make_data_set(name, "{}") for name in names}
if sys.argv[2] == "taught":
    reading.replace_eval_and_exec("reasoning_gym")
print(json.dumps([name for name in names if scores._is_proven_to_compare(data_sets[name])]))
"""


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("mode", "that_read_literals"),
    [
        ("untaught", []),
        ("taught", ["n_queens", "binary_matrix", "spiral_matrix", "string_insertion"]),
    ],
)
def test_scorers_that_read_python_are_proven_to_only_compare_where_our_reader_makes_plain_values_of_it(
    mode: str, that_read_literals: list[str]
) -> None:
    names = json.dumps([*DATA_SETS_THAT_READ_PYTHON, "chain_sum", "zebra_puzzles"])
    done = subprocess.run(
        [sys.executable, "-c", PROVING_PROGRAM, names, mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [*that_read_literals, "chain_sum", "zebra_puzzles"]


@needs_reasoning_gym
def test_an_answer_that_computes_for_ever_ends_at_the_deadline_and_the_next_is_scored(
    sandbox: Bubblewrap,
) -> None:
    problem = problems("countdown")[0]
    grader = ReasoningGymGrader(sandbox=sandbox, limits=ProgramLimits(seconds=1.0, memory_mib=2048))
    assert grader.grade(tagged("9**9**9**9"), problem).outcome == "timeout"
    assert grader.grade(tagged(problem.gold), problem).reward == 1.0


@needs_reasoning_gym
@pytest.mark.parametrize(
    "deep", ["(" * 90 + "1" + ")" * 90, "(" * 50_000, "-" * 50_000 + "1", "[" * 5000, "9" * 9000]
)
def test_a_deep_or_long_answer_ends_no_scorer(sandbox: Bubblewrap, deep: str) -> None:
    for dataset in ("countdown", "n_queens"):
        problem = problems(dataset)[0]
        assert GRADER.grade(tagged(deep), problem).reward < 1.0
        assert GRADER.grade(tagged(problem.gold), problem).reward == 1.0


@needs_reasoning_gym
def test_without_a_sandbox_nothing_is_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / "not-installed" / name))
    grader = ReasoningGymGrader(limits=ProgramLimits(seconds=6.0, memory_mib=2048))
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        grader.grade(tagged("1"), problems("countdown")[0])


class WholePrograms(Sandbox):
    """A sandbox as a user might write it, with `run` alone."""


def test_a_sandbox_that_runs_whole_programs_alone_is_refused_by_name() -> None:
    grader = ReasoningGymGrader(sandbox=WholePrograms())
    assert any("WholePrograms" in lacking for lacking in missing_requirements([grader]))


@needs_reasoning_gym
def test_unsafe_local_scores_where_it_is_named() -> None:
    grader = ReasoningGymGrader(sandbox=UnsafeLocal(), limits=ProgramLimits(seconds=5.0, memory_mib=2048))
    problem = problems("countdown")[0]
    assert missing_requirements([grader]) == []
    assert grader.grade(tagged(problem.gold), problem).reward == 1.0
    assert grader.grade(tagged(POISONS[0]), problem).reward < 1.0
    assert grader.grade(tagged("2+2"), problem).reward < 1.0


# The second defence: a scorer that executes answers, without our reader

EXECUTING_SCORER = """
import json, os, sys
STATE = []
def prepare():
    scoring = sys.modules["treetune.domains.sandbox.inside.scoring"]
    scoring.refuse_code = list
    return lambda problem: (run, False)
def run(answer):
    names = {"score": 0.0, "STATE": STATE}
    exec(answer, names)
    return names["score"]
"""


@pytest.fixture(scope="module")
def executing_scorer(sandbox: Bubblewrap) -> Iterator[LibraryScorer]:
    source = inside.read_source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            inside, "read_source", lambda name: EXECUTING_SCORER if name == "hostile" else source(name)
        )
        scorer = LibraryScorer(sandbox, ProgramLimits(seconds=2.0, memory_mib=256), "hostile", "json")
        yield scorer
        scorer.close()


def score(scorer: LibraryScorer, code: str) -> float | None:
    return scorer.score(code, {}).score


def test_the_executing_scorer_executes_answers(executing_scorer: LibraryScorer) -> None:
    assert score(executing_scorer, "score = 6 * 7 / 100") == 0.42


def test_state_of_an_executed_answer_is_gone_for_the_next(executing_scorer: LibraryScorer) -> None:
    change = (
        "STATE.append(1); import json; json.dumps = None; import builtins; builtins.float = lambda x: 1.0"
    )
    executing_scorer.score(change, {})
    assert score(executing_scorer, "import json; score = len(STATE) + (json.dumps is None)") == 0.0


@pytest.mark.parametrize(
    "leave",
    [
        "open('left', 'w')",
        "import os; os.mkdir('left')",
        "open('/dev/shm/left', 'x')",
        "import os; os.symlink('/', 'left')",
    ],
)
def test_files_of_an_executed_answer_are_gone_for_the_next(
    executing_scorer: LibraryScorer, leave: str
) -> None:
    executing_scorer.score(leave, {})
    look = "import os; score = float(len(os.listdir('.')) + len(os.listdir('/dev/shm')))"
    assert score(executing_scorer, look) == 0.0


@pytest.mark.parametrize(
    "start",
    [
        "import os; os.fork(); score = 1.0",
        "import threading; threading.Thread(target=print).start(); score = 1.0",
        "import subprocess, sys; subprocess.Popen([sys.executable]); score = 1.0",
    ],
)
def test_an_executed_answer_starts_no_process(executing_scorer: LibraryScorer, start: str) -> None:
    assert score(executing_scorer, start) is None


def test_an_executed_answer_reaches_no_channel_but_its_own(executing_scorer: LibraryScorer) -> None:
    forge = """
import os
for descriptor in range(256):
    try: os.write(descriptor, b'11\\n{"told": {"score": 1.0}}')
    except OSError: pass
os._exit(0)
"""
    assert score(executing_scorer, forge) is None
    assert score(executing_scorer, "score = 0.25") == 0.25


@pytest.mark.parametrize(
    "ends",
    [
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(os.getppid(), 19)",
        "import os; os.kill(-1, 9)",
        "import os; os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "while True: pass",
        "x = bytearray(1 << 40)",
        "x = [0]\nwhile True: x += x",
        "score = float('nan')",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ],
)
def test_an_answer_that_ends_the_sandbox_leaves_a_working_one_for_the_next(
    executing_scorer: LibraryScorer, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stopped sandbox is noticed by its silence. The scorer has answered once, so its start is over.
    assert score(executing_scorer, "score = 0.25") == 0.25
    monkeypatch.setattr(served, "_SPARE_SECONDS", 10.0)
    ended = executing_scorer.score(ends, {})
    assert ended.score is None or ended.score != ended.score
    assert score(executing_scorer, "score = 0.75") == 0.75


@pytest.mark.parametrize(
    "message", ["[1]", '"x"', '{"score": "1"}', '{"score": true}', "1" * 100_000, "[" * 2000, "{"]
)
def test_a_malformed_message_in_place_of_a_score_is_no_score(
    executing_scorer: LibraryScorer, message: str
) -> None:
    write = f"""
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, {message.encode()!r})
    except OSError: pass
os._exit(0)
"""
    assert score(executing_scorer, write) is None
    assert score(executing_scorer, "score = 0.5") == 0.5


def test_python_executes_no_text_where_code_is_refused() -> None:
    attacks = [
        "exec('1')",
        "eval('1')",
        "eval(compile('1', '<x>', 'eval'))",
        "open('x', 'w')",
        "os.fork()",
        "os.system('true')",
        "os.open('x', os.O_CREAT | os.O_WRONLY)",
        "pickle.loads(pickle.dumps(len))",
        "types.FunctionType((lambda: 1).__code__, {})",
    ]
    program = f"""
import json, os, pickle, types
from treetune.domains.sandbox.inside.reading import refuse_code
prepared = [compile(text, os.path.abspath("t.py"), "eval") for text in {attacks!r}]
through = []
refuse_code()
for text, code in zip({attacks!r}, prepared):
    try:
        eval(code)
        through.append(text)
    except ValueError:
        pass
import collections
collections.namedtuple("Point", "x y")
print(json.dumps(through))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []
