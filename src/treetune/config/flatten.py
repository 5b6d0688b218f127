"""Many Jsonnet files as one text: Jsonnet reads its standard library anew for every import.

That is 10 to 20 ms a file, and nearly all of the time that a configuration of thirty fragments takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from treetune.config import lexer

Read = Callable[[Path], str]
Find = Callable[[str, Path], Path]


def flattened(operands: list[tuple[str, Path]], find: Find, read: Read) -> str:
    """The sum of the texts, each with the folder that its imports are relative to, without an import.

    Every imported file is a local variable, which Jsonnet evaluates once and only if it is needed, as it
    does an import. Raises RuntimeError where a file asks for its own name; what `find` and `read` raise goes
    through.
    """
    names: dict[Path, str] = {}
    definitions: list[str] = []
    texts: list[str] = []

    def own(text: str, folder: Path) -> str:
        texts.append(text)

        def instead(keyword: str, name: str) -> str:
            path = find(name, folder)
            return variable(path) if keyword == "import" else f"{keyword} {json.dumps(str(path))}"

        return f"(\n{lexer.replace_imports(text, instead)}\n)"

    def variable(path: Path) -> str:
        if path not in names:
            names[path] = f"imported_file_{len(names)}"
            definitions.append(f"{names[path]} = {own(read(path), path.parent)}")
        return names[path]

    total = " + ".join(own(text, folder) for text, folder in operands)
    if any("thisFile" in text for text in texts):
        raise RuntimeError("std.thisFile would be the name of the whole")
    return f"local {', '.join(definitions)};\n{total}" if definitions else total
