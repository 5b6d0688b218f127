"""The package's own programs in the sandbox, where they can't import the rest of the package."""

from functools import cache
from pathlib import Path


@cache
def read_source(name: str) -> str:
    """Returns the text of a program."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


@cache
def bundle(name: str, *earlier_modules: str) -> str:
    """Returns the text of a program that makes modules of files of this package.

    `earlier_modules` are made in this order, and then `name`, which may import them. The program itself has
    all names of the module `name`, so code that is put after it can use them. Example:
    ``bundle("scoring", "reading") + "serve(…)"``.
    """
    texts = {f"{__name__}.{module}": read_source(module) for module in (*earlier_modules, name)}
    return f"""import sys
for name, text in {texts!r}.items():
    sys.modules[name] = type(sys)(name)
    exec(compile(text, name, "exec"), sys.modules[name].__dict__)
globals().update(sys.modules["{__name__}.{name}"].__dict__)
"""
