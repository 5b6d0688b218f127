"""The sandbox holds as well where whoever runs it is not root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import annotated_types
import pytest

import treetune
import treetune_domains
from treetune_domains.sandbox.bubblewrap import Bubblewrap

NOBODY = 65534
PYTHON = "/usr/bin/python3"

TRIED = """
from treetune_domains.sandbox.base import Limits
from treetune_domains.sandbox.bubblewrap import Bubblewrap
sandbox = Bubblewrap()
assert not sandbox.missing(), sandbox.missing()
limits = Limits(seconds=2, memory_mib=128, processes=8)
assert sandbox.run("print(input())", stdin="1").stdout == "1\\n"
assert sandbox.run("import os\\nwhile True: os.fork()", limits=limits).exit == 1
assert sandbox.run("import os, time\\nos.fork(), os.fork()\\nx = b'x' * (50 << 20)\\ntime.sleep(9)", limits=limits).killed_by == "memory"
assert sandbox.run("import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(9)", limits=limits).killed_by == "time"
for code in ("open('/etc/passwd')", "import os; os.listdir('/home')", "import socket; socket.socket()",
             "open('/boot.py', 'w')", "import os; os.setuid(0)", "import os; os.kill(%d, 0)"):
    outcome = sandbox.run(code.replace("%d", str(__import__("os").getpid())))
    assert outcome.exit == 1, (code, outcome)
print("held")
"""  # noqa: E501


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody can read."""
    path = Path(tempfile.mkdtemp(prefix="sandbox-of-a-user-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests of the sandbox show it, where nobody is root")
def test_the_sandbox_holds_for_a_user_too(sandbox: Bubblewrap, folder: Path) -> None:
    if not Path(PYTHON).exists():
        pytest.skip(f"needs a {PYTHON} of 3.11 or later, that any user can run")
    version = subprocess.run(
        [PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    if version.stdout != b"True\n":
        pytest.skip(f"needs a {PYTHON} of 3.11 or later, that any user can run")
    for package in (treetune, treetune_domains, annotated_types):
        assert package.__file__ is not None
        source = Path(package.__file__).parent
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    done = subprocess.run(
        [PYTHON, "-c", TRIED],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "held\n", done.stderr
