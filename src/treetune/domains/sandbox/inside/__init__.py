"""Programs of ours that run inside of the sandbox. Nothing else of the package is there."""

from functools import cache
from pathlib import Path


@cache
def source(name: str) -> str:
    """The text of one of them."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


@cache
def bundle(name: str, *others: str) -> str:
    """The text of a program that makes `others`, and then one that imports these, known as modules. Its names
    are those of the latter."""
    texts = {f"{__name__}.{module}": source(module) for module in (*others, name)}
    return f"""import sys
for name, text in {texts!r}.items():
    sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
globals().update(sys.modules["{__name__}.{name}"].__dict__)
"""
