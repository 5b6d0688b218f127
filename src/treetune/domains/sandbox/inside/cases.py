"""Runs one program on many inputs, each in a process of its own, inside of one sandbox.

For each input it says on what was standard output how that went: a line with the exit status, whether it
was stopped at its time (1 or 0), the numbers of characters that follow, then what was printed and the end of
what was printed as errors. The program is compiled once; it finds its input on standard input and in .stdin.
"""

import atexit
import os
import select
import sys
import time

from treetune.domains.sandbox.inside.joining import customary_names, joined

TYPE_CHECKING = False  # see `peers`
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

ERRORS_BYTES = 400
SIGKILL = 9  # `signal` would cost each program five milliseconds


def _answer(report: int, status: int, stopped: bool, printed: bytes, errors: bytes) -> None:
    one, other = printed.decode(errors="replace"), errors.decode(errors="replace")
    data = f"{status} {stopped:d} {len(one)} {len(other)}\n{one}{other}".encode()
    while data:
        data = data[os.write(report, data) :]


def _printed(pid: int, output: int, seconds: float, most: int) -> tuple[int, bool, bytes]:
    """Exit status, whether it was stopped at its time, and what it printed, `most` bytes and one at most."""
    due = time.monotonic() + seconds
    printed = b""
    ended = 0
    status = -SIGKILL
    while True:
        ready, _, _ = select.select([output], [], [], 0.02)
        if ready:
            data = os.read(output, 1 << 16)
            printed += data
            if not data or len(printed) > most:
                break
        elif ended:
            break  # what holds the other end still is not the program
        if not ended:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else status
        if time.monotonic() > due:
            break
    # All ends are closed, most often because the program has ended.
    while not ended and len(printed) <= most and time.monotonic() < due:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else status
        if not ended:
            time.sleep(0.0005)
    stopped = not ended and len(printed) <= most
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, SIGKILL)
        except OSError:
            continue
    if not ended:
        os.waitpid(pid, 0)
    return status, stopped, printed[: most + 1]


def _become_program(stdin: int, stdout: int, stderr: int) -> None:
    os.setsid()
    for descriptor, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, place)
    os.closerange(3, 64)


def serve(inputs: list[str], seconds: float, most: int, stop_early: bool) -> bool:
    """Returns True in the process that is to be the program on one input; False when all are done.

    With `stop_early` nothing is run after an input on which the program failed.
    """
    report = os.dup(1)
    for text in inputs:
        with open(".stdin", "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
        errors = os.open(".stderr", os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND, 0o600)
        stdin = os.open(".stdin", os.O_RDONLY)
        output, output_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_program(stdin, output_write, errors)
            return True
        os.close(output_write)
        os.close(stdin)
        status, stopped, printed = _printed(pid, output, seconds, most)
        os.close(output)
        said = os.pread(errors, ERRORS_BYTES, max(0, os.fstat(errors).st_size - ERRORS_BYTES))
        os.close(errors)
        _answer(report, status, stopped, printed, said)
        if stop_early and (status != 0 or stopped):
            break
    return False


def run(prefix: str, code: str, inputs: list[str], seconds: float, most: int, stop_early: bool) -> None:
    sys.set_int_max_str_digits(0)  # as many digits as a test's time allows
    code = joined(prefix, code)
    try:
        program = compile(code, "main.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        _answer(1, 1, False, b"", f"{type(error).__name__}: {error}".encode(errors="replace")[:ERRORS_BYTES])
        return
    names = customary_names(code)
    if serve(inputs, seconds, most, stop_early):
        _end(_status_of(program, names))


def _status_of(program: "CodeType", names: "dict[str, Any]") -> int:
    """The exit status of the program, which is run as if Python had been started with it."""
    main = type(sys)("__main__")
    main.__dict__.update(names, __file__="main.py")
    sys.modules["__main__"] = main
    try:
        exec(program, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(status: int) -> None:
    """Does what Python does before it ends, and no more: taking a copy of an interpreter apart, object by
    object, would cost more than most programs."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for streams in ((sys.stdout, sys.stderr), (sys.__stdout__, sys.__stderr__)):
        for stream in streams:
            try:
                if stream is not None and not getattr(stream, "closed", False):
                    stream.flush()
            except Exception:
                status = status or 1
        sys.modules["__main__"].__dict__.clear()  # closes files that the program has left open
    os._exit(status)
