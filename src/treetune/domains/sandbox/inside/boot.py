"""The first Python code in the sandbox. It changes the user, sets the limits, and executes the program.

Bubblewrap binds this file into the sandbox, where the package can't be imported. This file imports little,
because every import would cost each program milliseconds. Therefore it reads the set-up with `marshal`, which
the same version of Python has written.
"""

import builtins
import marshal
import os
import resource
import sys

_SETUP_FD, _STARTED_FD = int(sys.argv[1]), int(sys.argv[2])
"""Descriptors: the set-up is read from the first, and a byte is written to the second before the program
begins."""


def _set_up(setup: dict) -> None:
    """Changes the user, sets the limits, and writes the program's files."""
    if setup["uid"] is not None:
        # Only root may change the groups, so the user is changed after them.
        os.setgroups([])
        os.setresgid(setup["uid"], setup["uid"], setup["uid"])
        os.setresuid(setup["uid"], setup["uid"], setup["uid"])  # this also drops all capabilities
    for name, limit in setup["limits"].items():
        resource_number = getattr(resource, name)
        # A lower hard limit, which a cluster may have set, remains.
        hard_limit = resource.getrlimit(resource_number)[1]
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource_number, (limit, limit))
    os.umask(0o022)
    os.chdir(setup["work"])
    for name, text in setup["files"].items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        # Line ends are not changed (`newline`), and half characters don't raise (`errors`).
        with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)


def _execute(code: str, path: list[str]) -> None:
    """Executes the program as the module ``__main__``."""
    from _sitebuiltins import Quitter

    # Usually `site` defines `exit` and `quit`. It is not imported, because this takes as long as the start of
    # the interpreter itself.
    builtins.exit = Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = Quitter("quit", "Ctrl-D (i.e. EOF)")
    main = type(sys)("__main__")
    main.__file__ = "main.py"
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    # The first folder of `path` is the work folder. It comes first, like the folder of a program in Python.
    # The others have packages, and come after Python's own modules.
    sys.path[:0] = path[:1]
    sys.path += path[1:]
    exec(compile(code, "main.py", "exec", dont_inherit=True), main.__dict__)


def _fork_program() -> None:
    """Forks the program's process, in which this function returns.

    The present process is the first one of a namespace. It waits for the program and for processes that lose
    their parents, and ends with the program. Then the kernel ends all other processes.
    """
    program = os.fork()
    if program == 0:
        return
    os.closerange(0, 64)  # so that the program's pipes end with the program, and not only with this process
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)  # -9 for signal 9, which is reported as 137
            os._exit(code if code >= 0 else 128 - code)


def _prepare_sandbox() -> tuple[str, list[str]]:
    """Prepares the sandbox, and returns the program's code and its search path."""
    if os.getpid() == 1:
        # The first process of a namespace gets all processes that lose their parents, and has to wait for
        # them. The program wouldn't do that, so it runs in a second process.
        _fork_program()
    with open(_SETUP_FD, "rb") as file:
        setup = marshal.load(file)
    _set_up(setup)
    os.write(_STARTED_FD, b"!")  # tells the reader of this descriptor that the set-up is done
    os.close(_STARTED_FD)
    return setup["code"], setup["path"]


_execute(*_prepare_sandbox())
