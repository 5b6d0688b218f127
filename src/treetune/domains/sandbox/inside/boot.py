"""The first Python code inside of the sandbox: becomes nobody, takes the limits on, then is the program.

Bubblewrap binds this file into the sandbox. Nothing of ours is importable there, and every import costs each
program its milliseconds, so what it is told comes through `marshal`, written by the same Python.
"""

import builtins
import marshal
import os
import resource
import sys

_SETUP, _STARTED = int(sys.argv[1]), int(sys.argv[2])
"""Descriptors: what to do is read from one, and the other is told that the program is about to begin."""


def _take_on(setup: dict) -> None:
    if setup["uid"] is not None:
        os.setgroups([])
        os.setresgid(setup["uid"], setup["uid"], setup["uid"])
        os.setresuid(setup["uid"], setup["uid"], setup["uid"])  # the capabilities go with it
    for name, most in setup["limits"].items():
        which = getattr(resource, name)
        # A hard limit that is lower already, as a cluster may have set it, stays.
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    os.umask(0o022)
    os.chdir(setup["work"])
    for name, text in setup["files"].items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)


def _be_the_program(code: str, path: list[str]) -> None:
    from _sitebuiltins import Quitter

    # `site`, which defines these two, is not imported: it takes as long as the interpreter itself.
    builtins.exit = Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = Quitter("quit", "Ctrl-D (i.e. EOF)")
    main = type(sys)("__main__")
    main.__file__ = "main.py"
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    sys.path[:0] = path[:1]
    sys.path += path[1:]
    exec(compile(code, "main.py", "exec", dont_inherit=True), main.__dict__)


def _look_after_the_rest() -> None:
    """Waits, as the first process of a namespace, for the program and whoever loses its parent, and ends with
    the program; then the kernel ends all others. What returns is the program's process."""
    program = os.fork()
    if program == 0:
        return
    os.closerange(0, 64)
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _start() -> tuple[str, list[str]]:
    if os.getpid() == 1:
        _look_after_the_rest()
    with open(_SETUP, "rb") as file:
        setup = marshal.load(file)
    _take_on(setup)
    os.write(_STARTED, b"!")
    os.close(_STARTED)
    return setup["code"], setup["path"]


_be_the_program(*_start())
