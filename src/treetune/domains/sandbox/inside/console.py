"""A Python console in the sandbox. It executes pieces of code one after the other, and returns their output.

A piece is read from standard input, after a line with the number of its bytes. The reply is written to
standard output in the same form. It has at most `MOST_REPLY_BYTES` bytes of output. Names remain defined for
later pieces.
"""

import ast
import os
import sys

MOST_REPLY_BYTES = 4000
"""The most bytes of output in a reply. `PythonTool` replaces this number when it sends the program."""


def _write_reply(descriptor: int, data: bytes) -> None:
    data = b"%d\n%b" % (len(data), data)
    while data:
        data = data[os.write(descriptor, data) :]


def _run_code(code: str, names: dict[str, object]) -> None:
    """Runs a piece of code, and prints the value of its last line if that is an expression. If the code
    raises, prints the traceback without this file's frames."""
    try:
        tree = ast.parse(code, "<code>")
        last_statement = tree.body[-1] if tree.body else None
        if isinstance(last_statement, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<code>", "exec"), names)
        if isinstance(last_statement, ast.Expr):
            value = eval(compile(ast.Expression(last_statement.value), "<code>", "eval"), names)
            if value is not None:
                print(repr(value))  # noqa: T201
    except SystemExit as end:
        if end.code is not None:
            print(f"SystemExit: {end.code}")  # noqa: T201
    except BaseException as error:
        import traceback

        trace = error.__traceback__  # begins with this file's frame; a SyntaxError has no other one
        while trace is not None and trace.tb_frame.f_code.co_filename != "<code>":
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)


def _read_log(log: int) -> bytes:
    """Returns the text of the log: all of it, or if it is too long, its beginning and its end."""
    size = os.fstat(log).st_size
    if size <= MOST_REPLY_BYTES:
        return os.pread(log, size, 0)
    half_size = MOST_REPLY_BYTES // 2
    gap = f"\n[{size - 2 * half_size} bytes left out]\n".encode()
    return os.pread(log, half_size, 0) + gap + os.pread(log, half_size, size - half_size)


def main() -> None:
    """Runs the pieces of code that come on standard input, and replies to each with its output."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(1)
    # The code has an empty standard input: it must not read the following requests.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    # A line with the number of a piece's bytes (`header`) comes before the piece.
    while header := requests.readline():
        code = requests.read(int(header)).decode(errors="replace")
        # The code and the processes that it starts write their output to a file. Nothing would read a pipe
        # while the code runs. The file loses its name, so that the code doesn't find it in its folder.
        log = os.open(".printed", os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_TRUNC, 0o600)
        os.unlink(".printed")
        os.dup2(log, 1)
        os.dup2(log, 2)
        _run_code(code, names)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # noqa: S112  # the code has broken its own stream
                continue
        _write_reply(replies, _read_log(log))
        os.close(log)


main()
