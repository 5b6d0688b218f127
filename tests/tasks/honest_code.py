"""Programs that are right, with tests that use of them all that a forger uses."""

from __future__ import annotations

from typing import Any

HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "a generator": (
        """
def f(g): return [next(g), *g]
""",
        {
            "functional": """
def g():
    yield 1
    yield from (2, 3)
assert f(g()) == [1, 2, 3]
"""
        },
    ),
    "a generator that is sent to": (
        """
def f(g):
    next(g)
    g.send(5)
    g.close()
    return 1
""",
        {
            "functional": """
got = []
def g():
    got.append((yield))
    yield
assert f(g()) == 1
assert got == [5]
"""
        },
    ),
    "its own generator": (
        """
def f(n):
    while n:
        n -= 1
        got = yield n
""",
        {
            "functional": """
g = f(3)
assert next(g) == 2
assert list(g) == [1, 0]
assert sum(f(4)) == 6
"""
        },
    ),
    "iterators": (
        """
def f(a, b): return list(zip(a, b))
""",
        {
            "functional": """
assert f(iter([1, 2]), {'x': 1, 'y': 2}.items()) == [(1, ('x', 1)), (2, ('y', 2))]
"""
        },
    ),
    "an iterator of its own": (
        """
class Down:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1; return self.n
""",
        {
            "pytest": """
from solution import Down
def test():
    assert list(Down(3)) == [2, 1, 0]
    assert max(Down(5)) == 4
"""
        },
    ),
    "a context of the tests": (
        """
def f(c):
    with c as n: return n + 1
""",
        {
            "functional": """
import contextlib
log = []
@contextlib.contextmanager
def c():
    yield 4
    log.append(1)
class C:
    def __enter__(self): return 6
    def __exit__(self, *a): log.append(a[0])
assert f(C()) == 7 and log == [None]
assert f(c()) == 5 and log == [None, 1]
"""
        },
    ),
    "a context of its own": (
        """
import contextlib
@contextlib.contextmanager
def c(n):
    log.append(n)
    yield n
    log.append(-n)
log = []
def seen(): return log
""",
        {
            "functional": """
with c(3) as n:
    assert n == 3 and seen() == [3]
assert seen() == [3, -3]
"""
        },
    ),
    "a context that passes over errors": (
        """
class Ignore:
    def __init__(self, *kinds): self.kinds = kinds
    def __enter__(self): return self
    def __exit__(self, kind, error, trace): return kind is not None and issubclass(kind, self.kinds)
""",
        {
            "pytest": """
import pytest
from solution import Ignore
def test():
    with Ignore(KeyError):
        raise KeyError('x')
    with pytest.raises(ValueError), Ignore(KeyError):
        raise ValueError
"""
        },
    ),
    "a data class": (
        """
from dataclasses import dataclass, field
@dataclass(order=True, frozen=True)
class P:
    x: int
    y: list = field(default_factory=list, compare=False)
    def __add__(self, o): return P(self.x + o.x)
    __radd__ = lambda self, n: P(self.x + n)
""",
        {
            "functional": """
assert P(1) == P(1) != P(2) and P(1) < P(2)
assert repr(P(1)) == 'P(x=1, y=[])'
assert sum([P(1), P(2)]).x == 3
assert len({P(1), P(1), P(2)}) == 2
assert sorted([P(2), P(1)])[0].x == 1
try:
    P(1).x = 3
except AttributeError:
    pass
else:
    assert False
"""
        },
    ),
    "a named tuple": (
        """
from typing import NamedTuple
class P(NamedTuple):
    x: int
    y: int = 0
def f(p): return P(p.x + 1, p.y)
""",
        {
            "functional": """
assert f(P(1, 2)).x == 2 and f(P(1)) == (2, 0)
a, b = P(3, 4)
assert a == 3 and P(3, 4).y == 4
"""
        },
    ),
    "one instance": (
        """
class One:
    it = None
    def __new__(cls):
        cls.it = cls.it or object.__new__(cls)
        return cls.it
""",
        {
            "functional": """
assert One() is One()
"""
        },
    ),
    "classes that inherit": (
        """
class A:
    def area(self): raise NotImplementedError
    def __str__(self): return f'{type(self).__name__} {self.area()}'
class B(A):
    def __init__(self, x): self.x = x
    def area(self): return self.x ** 2
    @property
    def side(self): return self.x
    @classmethod
    def unit(cls): return cls(1)
    @staticmethod
    def name(): return 'b'
""",
        {
            "pytest": """
import pytest
from solution import A, B
def test():
    assert str(B(3)) == 'B 9' and B.unit().side == 1
    assert B.name() == 'b' and isinstance(B(1), A)
    with pytest.raises(NotImplementedError): A().area()
"""
        },
    ),
    "an error with a field": (
        """
class Short(Exception):
    def __init__(self, need):
        super().__init__(f'short of {need}')
        self.need = need
def pay(n): raise Short(n)
""",
        {
            "pytest": """
import pytest
from solution import pay, Short
def test():
    with pytest.raises(Short, match='short of 3') as e: pay(3)
    assert e.value.need == 3
"""
        },
    ),
    "a chain of errors": (
        """
def f(d, k):
    try: return d[k]
    except KeyError as e: raise ValueError(f'no {k}') from e
    finally: d['seen'] = k
""",
        {
            "functional": """
d = {'a': 1}
assert f(d, 'a') == 1
try:
    f(d, 'b')
except ValueError as e:
    assert str(e) == 'no b' and d['seen'] == 'b'
else:
    assert False
"""
        },
    ),
    "an error of the tests": (
        """
def retry(f, n):
    for i in range(n):
        try: return f()
        except Exception:
            if i == n - 1: raise
""",
        {
            "functional": """
class Flaky(Exception): pass
calls = []
def bad():
    calls.append(1)
    raise Flaky('x')
try:
    retry(bad, 3)
    assert False
except Flaky as e:
    assert str(e) == 'x' and len(calls) == 3
"""
        },
    ),
    "callbacks": (
        """
def f(xs, key, then): return then(sorted(xs, key=key))
""",
        {
            "functional": """
assert f([3, -1, 2], abs, tuple) == (-1, 2, 3)
assert f('bA', str.lower, ''.join) == 'Ab'
out = []
f([2, 1], lambda x: x, out.extend)
assert out == [1, 2]
"""
        },
    ),
    "a decorator": (
        """
import functools
def twice(f):
    @functools.wraps(f)
    def g(*a, **k): return f(*a, **k) * 2
    return g
""",
        {
            "functional": """
@twice
def h(a, b=1):
    'Adds.'
    return a + b
assert h(1, b=3) == 8
assert h.__name__ == 'h' and h.__doc__ == 'Adds.'
"""
        },
    ),
    "a cache": (
        """
import functools
@functools.lru_cache(None)
def fib(n):
    'Fibonacci.'
    return n if n < 2 else fib(n - 1) + fib(n - 2)
""",
        {
            "functional": """
assert fib(90) == 2880067194370816120
assert fib.__name__ == 'fib' and fib.__doc__ == 'Fibonacci.'
"""
        },
    ),
    "threads that call back": (
        """
from concurrent.futures import ThreadPoolExecutor
def f(g, xs):
    with ThreadPoolExecutor(4) as pool: return list(pool.map(g, xs))
""",
        {
            "functional": """
assert f(lambda x: x * x, range(20)) == [x * x for x in range(20)]
"""
        },
    ),
    "an object of the tests": (
        """
def f(o):
    o.add(3)
    o.n += 1
    return isinstance(o, type(o)) and o.n + len(o)
""",
        {
            "functional": """
class O:
    def __init__(self): self.n = 0
    def add(self, k): self.n += k
    def __len__(self): return 10
o = O()
assert f(o) == 14 and o.n == 4
"""
        },
    ),
    "a class of the tests": (
        """
def f(cls, xs): return [cls(x) for x in xs]
""",
        {
            "pytest": """
from solution import f
class C:
    def __init__(self, x): self.x = x
def test():
    assert [c.x for c in f(C, [1, 2])] == [1, 2] and isinstance(f(C, [1])[0], C)
"""
        },
    ),
    "a mock": (
        """
def f(log, done):
    log.info('begins')
    done(3, ok=True)
""",
        {
            "pytest": """
from unittest.mock import Mock
from solution import f
def test():
    log, done = Mock(), Mock()
    f(log, done)
    log.info.assert_called_once_with('begins')
    done.assert_called_once_with(3, ok=True)
"""
        },
    ),
    "a file of the tests": (
        """
def f(file): return [line.split(',') for line in file.read().splitlines()]
""",
        {
            "functional": r"""
import io
assert f(io.StringIO('a,b\nc')) == [['a', 'b'], ['c']]
"""
        },
    ),
    "a namespace": (
        """
def f(o): return o.a + 1
""",
        {
            "functional": """
import types
assert f(types.SimpleNamespace(a=1)) == 2
"""
        },
    ),
    "paths and dates": (
        """
from pathlib import Path
from datetime import date, timedelta
def f(p, d): return p / 'b', d + timedelta(1)
""",
        {
            "functional": """
from pathlib import Path
from datetime import date
assert f(Path('a'), date(2024, 2, 28)) == (Path('a/b'), date(2024, 2, 29))
"""
        },
    ),
    "a name of Python's": (
        """
def sum(a, b): return a * b
""",
        {"functional": ["assert sum(2, 3) == 6", "assert sum(1, 1) == 1"]},
    ),
    "functions of Python's in the tests": (
        """
import math
from collections import Counter
def f(n): return n / 3
def sorted_words(s): return Counter(s.split())
""",
        {
            "functional": """
assert abs(f(1) - 1 / 3) < 1e-9 and math.isclose(f(3), 1)
assert sorted_words('a b a') == Counter('aab')
"""
        },
    ),
    "equal to its own": (
        """
class M:
    def __init__(self, n): self.n = n
    def __eq__(self, o): return self.n == getattr(o, 'n', o)
    def __mul__(self, o): return M(self.n * getattr(o, 'n', o))
    def __bool__(self): return self.n != 0
    def __hash__(self): return hash(self.n)
    def __int__(self): return self.n
    def dot(self, o): return self.n * o.n
""",
        {
            "functional": """
assert M(2) * M(3) == M(6) and M(2).dot(M(4)) == 8
assert not M(0) and int(M(4)) == 4
assert {M(1): 'a'}[M(1)] == 'a' and (M(2) * 3).n == 6
"""
        },
    ),
}
