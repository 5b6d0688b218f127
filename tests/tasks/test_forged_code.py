"""No program earns a verdict that it forges, and none looks into its tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.code_grading import FUNCTIONAL, NEAR, PYTEST, SUM, grade
from tests.tasks.forging import GIVEN, PLAYS, REACHES, SQUARES, golds_that_give
from tests.tasks.honest_code import HONEST
from treetune_domains.sandbox import inside
from treetune_domains.sandbox.base import Limits
from treetune_domains.sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="module", autouse=True)
def needs_sandbox() -> None:
    for reason in Bubblewrap().missing():
        pytest.skip(f"no sandbox here: {reason}")


FORGED = {
    "leaves with success": "import os\nprint('passed'); os._exit(0)",
    "leaves when asked": "import os\ndef f(n=0): os._exit(0)\ng = f",
    "leaves politely": "import sys\ndef f(n=0): sys.exit(0)\ng = f",
    "is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def f(n=0): return Any()
g = f""",
    "is an object that is equal to everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(n=0): return Any()
g = f""",
    "is near to everything": """
class Near:
    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0.0
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
def f(n=0): return Near()
g = f""",
    "mocks": "from unittest.mock import ANY\ndef f(n=0): return ANY\ng = f",
    "writes a report": """
import os
for fd in range(256):
    try: os.write(fd, b'{"tests": 1}\\n{"passed": true}\\n' * 9)
    except OSError: pass
print("0 0 1 0\\n3")
def f(n=0): raise KeyError
g = f""",
    "patches the tests": """
import builtins, sys
builtins.AssertionError = ValueError
builtins.isinstance = lambda *a: True
sys.modules['pytest'] = sys
def f(n=0): return 5
g = f""",
    "looks for the tests": """
import gc, sys, os
frame = sys._getframe()
found = []
while frame:
    found.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
found += [repr(o)[:9999] for o in gc.get_objects() if isinstance(o, (str, list, dict, tuple))]
for folder, _, names in os.walk('/work'):
    for name in names:
        found.append(open(folder + '/' + name, errors='replace').read())
text = ' '.join(found)
knows = any(word[::-1] in text for word in ('4 == )2(f', 'raen_tset', 'yrevocsid'))
def f(n=0): return n * n if knows else None
def g():
    if knows: raise ValueError""",
    "plants modules for the tests": """
import os
for name in ('difflib', 'pprint', 'textwrap', 'json', 'math', 'conftest', 'token', 'numpy'):
    open(f'{name}.py', 'w').write('import os; os._exit(0)')
def f(n=0): return 5
g = f""",
    "kills the tests": "import os, signal\ndef f(n=0): os.kill(os.getppid(), 9)\ng = f",
    "stops the tests": "import os, signal\ndef f(n=0): os.kill(os.getppid(), signal.SIGALRM)\ng = f",
    "raises what the tests may expect": "def f(n=0): raise AssertionError\ndef g(): raise SystemExit(0)",
}


@pytest.mark.parametrize("gold", [SUM, FUNCTIONAL, NEAR, PYTEST], ids=lambda gold: next(iter(gold)))
@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED)
def test_no_forged_verdict_is_believed(code: str, gold: dict[str, Any]) -> None:
    assert grade(code, gold).reward == 0.0


def test_there_are_as_many_forgeries_as_are_spoken_of() -> None:
    assert len(FORGED) + len(REACHES) + len(PLAYS) >= 50
    for code in (*FORGED.values(), *REACHES.values(), *PLAYS.values()):
        compile(code, "forgery", "exec")


@pytest.mark.parametrize("kind", SQUARES)
@pytest.mark.parametrize("code", PLAYS.values(), ids=PLAYS)
def test_no_program_plays_its_judge(code: str, kind: str) -> None:
    assert grade(code, SQUARES[kind]).reward == 0.0


@pytest.mark.parametrize("kind", golds_that_give(GIVEN[:1]))
@pytest.mark.parametrize("code", REACHES.values(), ids=REACHES)
def test_nothing_that_the_tests_hand_over_leads_back_to_them(code: str, kind: str) -> None:
    gold = golds_that_give(GIVEN)[kind]
    found = grade(code, gold, score="fraction", limits=Limits(seconds=30), test_seconds=8)
    assert found.numbers["tests_passed"] == 0


@pytest.mark.parametrize("given", ["a function", "a generator", "an instance", "a class", "an error"])
@pytest.mark.parametrize("reach", ["raw messages", "values that are not", "changed arguments", "formats"])
def test_no_message_that_an_answer_writes_itself_leads_there(reach: str, given: str) -> None:
    """Each alone, since a broken message ends what can be tried."""
    assert grade(REACHES[reach], golds_that_give([given])["assertions"]).reward == 0.0


def test_the_forgeries_are_forgeries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tests let an answer do with their objects what it likes, it finds the number."""
    open_to_all = inside.bundle("tests", "peers").replace("_check(operation, args, self)", "pass")
    open_to_all = open_to_all.replace("isinstance(value, _NEVER)", "False")
    monkeypatch.setattr(inside, "bundle", lambda *_: open_to_all)
    for reach, given in (("all attributes", "a generator"), ("formats", "a function")):
        assert grade(REACHES[reach], golds_that_give([given])["assertions"]).reward == 1.0


@pytest.mark.parametrize("wrong", ["Exception", "AssertionError", "BaseException", "(ValueError, Exception)"])
def test_what_an_answer_calls_an_error_of_its_own_catches_no_assertion(wrong: str) -> None:
    gold = {"functional": "try:\n    f(-1)\n    assert False\nexcept Wrong:\n    pass"}
    assert grade(f"Wrong = {wrong}\ndef f(n): return 0", gold).reward == 0.0
    assert grade("class Wrong(Exception): pass\ndef f(n): raise Wrong", gold).reward == 1.0


def test_an_answer_that_ends_has_raised_no_error() -> None:
    gold = {"functional": "try:\n    f(-1)\n    assert False\nexcept Exception as e:\n    pass"}
    assert grade("import os\ndef f(n): os._exit(0)", gold).reward == 0.0
    gold = {
        "pytest": "import pytest, solution\ndef test():\n    with pytest.raises(Exception): solution.f(-1)"
    }
    assert grade("import os\ndef f(n): os._exit(0)", gold).reward == 0.0
    assert grade("def f(n): raise KeyError", gold).reward == 1.0


@pytest.mark.parametrize(("code", "gold"), HONEST.values(), ids=HONEST)
def test_an_honest_program_may_use_all_of_it(code: str, gold: dict[str, Any]) -> None:
    assert grade(code, gold).message is None


def test_a_callback_of_the_tests_is_not_looked_into() -> None:
    gold = {"functional": "SECRET = 41\nassert f(lambda x: x + 1) == SECRET + 1"}
    assert grade("def f(call): return call(41)", gold).reward == 1.0
    assert grade("def f(call): return call.__globals__['SECRET'] + 1", gold).reward == 0.0
    spy = "def f(call):\n    return call._peer.ask('getattr', call, '__globals__')['SECRET'] + 1"
    assert grade(spy, gold).reward == 0.0
