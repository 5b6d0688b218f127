"""Runs one program on many inputs in one sandbox, with a process for each input.

The program is compiled once, and reads its input from standard input or from the file .stdin. The report has
a line for each input, and after it what the program printed and the end of its error output. The line has the
exit status, whether the program ran out of time (1 or 0), and the numbers of characters of the two texts::

    0 0 3 0
    42
    1 0 0 36
    ZeroDivisionError: division by zero
"""

import atexit
import os
import select
import sys
import time

from treetune.domains.sandbox.inside.joining import import_customary_names, join_program

TYPE_CHECKING = False  # see `peers`
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

ERRORS_BYTES = 400
"""The number of bytes that are reported of a program's error output, from its end."""
SIGKILL = 9  # importing `signal` would cost each program five milliseconds


def _write_report(
    report_fd: int, status: int, ran_out_of_time: bool, printed: bytes, error_output: bytes
) -> None:
    """Writes the end of the program for one input to the report (see the head of this file)."""
    output, errors = printed.decode(errors="replace"), error_output.decode(errors="replace")
    data = f"{status} {ran_out_of_time:d} {len(output)} {len(errors)}\n{output}{errors}".encode()
    while data:
        data = data[os.write(report_fd, data) :]


def _follow_program(pid: int, output_fd: int, seconds: float, most_bytes: int) -> tuple[int, bool, bytes]:
    """Reads a program's output until the program ends, its time is over, or it has printed too much. Then
    kills the program and all that it started.

    Returns its exit status, whether it ran out of time, and the first `most_bytes` + 1 bytes that it printed.
    """
    deadline = time.monotonic() + seconds
    printed = b""
    # WNOWAIT looks without reaping the process. So no other process or group can get its number before the
    # process and its group are killed below.
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    has_ended = False
    while True:
        # Waits at most 20 ms, so that the end of a program that prints nothing is noticed soon.
        ready, _, _ = select.select([output_fd], [], [], 0.02)
        if ready:
            data = os.read(output_fd, 1 << 16)
            printed += data
            if not data or len(printed) > most_bytes:
                break
        elif has_ended:
            break  # only processes that the program started can still print
        if not has_ended:
            has_ended = os.waitid(os.P_PID, pid, look) is not None
        if time.monotonic() > deadline:
            break
    # If the loop above ended because the pipe's other ends are closed, the program is usually about to end.
    # This waits for its end. If the loop ended for another reason, it doesn't wait.
    while not has_ended and len(printed) <= most_bytes and time.monotonic() < deadline:
        has_ended = os.waitid(os.P_PID, pid, look) is not None
        if not has_ended:
            time.sleep(0.0005)
    ran_out_of_time = not has_ended and len(printed) <= most_bytes
    # Kills the program's group, with the processes that the program started. Then kills the program itself,
    # in case it has not yet made its group.
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, SIGKILL)
        except OSError:  # there is no such process (any more)
            continue
    _, wait_status = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(wait_status) if has_ended else -SIGKILL
    return status, ran_out_of_time, printed[: most_bytes + 1]


def _become_program(stdin: int, stdout: int, stderr: int) -> None:
    """Makes a new process group for this process, and makes the three descriptors its standard ones. All
    others are closed."""
    os.setsid()  # so that the program and all that it starts can be ended together
    for descriptor, standard_descriptor in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, standard_descriptor)
    os.closerange(3, 64)  # 64 is more than the few descriptors that this file has opened


def fork_for_inputs(inputs: list[str], seconds: float, most_bytes: int, stop_early: bool) -> bool:
    """Forks a process for each input, one after the other, and reports how the program ends in it.

    With `stop_early` it stops after an input for which the program failed.

    Returns:
        True in each forked process, which then has to run the program, and False in the first process at the
        end.
    """
    report_fd = os.dup(1)
    for text in inputs:
        # Line ends are not changed (`newline`), and half characters don't raise (`errors`).
        with open(".stdin", "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
        # A file takes the error output, of which only the end is read, after the end of the program.
        errors_fd = os.open(".stderr", os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND, 0o600)
        stdin_fd = os.open(".stdin", os.O_RDONLY)
        output_fd, output_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_program(stdin_fd, output_write, errors_fd)
            return True
        os.close(output_write)
        os.close(stdin_fd)
        status, ran_out_of_time, printed = _follow_program(pid, output_fd, seconds, most_bytes)
        os.close(output_fd)
        errors_size = os.fstat(errors_fd).st_size
        end_of_errors = os.pread(errors_fd, ERRORS_BYTES, max(0, errors_size - ERRORS_BYTES))
        os.close(errors_fd)
        _write_report(report_fd, status, ran_out_of_time, printed, end_of_errors)
        if stop_early and (status != 0 or ran_out_of_time):
            break
    return False


def run(prefix: str, code: str, inputs: list[str], seconds: float, most_bytes: int, stop_early: bool) -> None:
    """Runs an answer's code, joined to its problem's prefix, on all inputs.

    `seconds` and `most_bytes` (bytes of output) are the limits for each input. With `stop_early` no further
    input is tried after one for which the program failed.
    """
    sys.set_int_max_str_digits(0)  # only the time of a test bounds the digits of a number
    code = join_program(prefix, code)
    try:
        program = compile(code, "main.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        # Only the first input is reported. The reader of the report takes inputs without a line as failed.
        message = f"{type(error).__name__}: {error}".encode(errors="replace")
        _write_report(
            report_fd=1, status=1, ran_out_of_time=False, printed=b"", error_output=message[:ERRORS_BYTES]
        )
        return
    names = import_customary_names(code)
    is_process_of_an_input = fork_for_inputs(inputs, seconds, most_bytes, stop_early)
    if is_process_of_an_input:
        _end_process(_run_program(program, names))


def _run_program(program: "CodeType", names: "dict[str, Any]") -> int:
    """Runs the program as if Python had been started with it, and returns its exit status.

    `names` has the values that the program may use without defining them, by their names.
    """
    main = type(sys)("__main__")
    main.__dict__.update(names, __file__="main.py")
    sys.modules["__main__"] = main
    try:
        exec(program, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF  # an exit status has eight bits
        print(end.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end_process(status: int) -> None:
    """Ends the process as Python does: joins threads, calls exit functions, and flushes and closes files. A
    normal exit would also destroy all objects of the interpreter, which takes longer than most programs."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    # The first round flushes the present streams, by which the program may have replaced Python's. The second
    # round flushes Python's.
    for streams in ((sys.stdout, sys.stderr), (sys.__stdout__, sys.__stderr__)):
        for stream in streams:
            try:
                if stream is not None and not getattr(stream, "closed", False):
                    stream.flush()
            except Exception:
                status = status or 1  # some output is lost
        # Ends the program's objects, and so closes files that it has left open. Objects may print something
        # as they end. The second round flushes that text, too.
        sys.modules["__main__"].__dict__.clear()
    os._exit(status)
