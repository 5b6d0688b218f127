"""The command line: ``treetune COMMAND a.jsonnet b.jsonnet``.

DeepSpeed's launcher starts the same file on every rank. Nothing heavy is imported before the configuration
has been checked.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and sys.path[:1] == [os.path.dirname(os.path.realpath(__file__))]:
    # Started as a script. `models` and `config` in this folder would hide other packages of these names.
    sys.path[0] = os.path.dirname(sys.path[0])

from treetune.exceptions import ClosedPipe
from treetune.processes.standard_error import use_patient_stream
from treetune.store.files import why_not_written

if TYPE_CHECKING:
    from treetune.cli.command import Options

USER_ERROR, FAILURE, INTERRUPTED, CLOSED_PIPE = 2, 1, 130, 141

FIRST_RANK_SPEAKS_WITHIN_S = 5.0
"""Seconds that the other ranks wait before they end, so that the first rank can print its message: the
launcher kills all ranks as soon as one has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 2 for a user's mistake, 1 for a failure, 130 after an
    interrupt, and 141 if the reader of standard output has closed it.

    Mistakes are ValueErrors, failures RuntimeErrors and errors of the system (`treetune.exceptions`). Other
    exceptions are bugs, and end the process with Python's traceback.
    """
    use_patient_stream()  # a paused terminal then doesn't stop the command
    try:
        from treetune.cli.arguments import COMMANDS, parse
    except ModuleNotFoundError as error:  # click, in a Python without this project's packages
        return _report_missing_package(error)
    options = parse(arguments)
    # Some commands start other commands, and find them here. They can't import `COMMANDS` themselves: its
    # module imports the modules of all commands.
    options.commands = COMMANDS
    try:
        return COMMANDS[options.command].run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except ClosedPipe:
        return CLOSED_PIPE
    except ModuleNotFoundError as error:
        return _report_missing_package(error)
    except ValueError as error:
        return _report_failure(error, USER_ERROR, options)
    except (OSError, RuntimeError, MemoryError) as error:
        return _report_failure(error, FAILURE, options)


def _report_missing_package(error: ModuleNotFoundError) -> int:
    """Prints how to install what is missing."""
    # A library raises the error without a name if it can't import one of its own modules because another
    # package is missing or has a wrong version.
    if error.name is not None and error.name.startswith("treetune"):
        raise error  # a bug of this project, which no installation would remedy
    missing_package = error.name or f"a set of packages that go together ({error.__cause__ or error})"
    print(
        f"{missing_package} is not installed for {sys.executable}: in a checkout run ./scripts/setup.sh, then"
        " `source .venv/bin/activate`; else pip install 'treetune[cpu]' or 'treetune[cuda]'",
        file=sys.stderr,
    )
    return USER_ERROR


def _report_failure(error: Exception, code: int, options: Options) -> int:
    """Prints one message on standard error, and returns the exit code.

    The traceback goes to the run's log or, with --debug, to standard error. If the command refused to work
    with the run's folder, the log belongs to another start, and gets no traceback.
    """
    from treetune.exceptions import FolderRefused, SameOnAllRanks

    rank = int(os.environ.get("RANK", "0"))
    if isinstance(error, SameOnAllRanks):
        # The first rank prints the message for all ranks. The other ranks wait until it has: as soon as one
        # rank ends, the launcher kills the first rank, too.
        if rank == 0:
            print(error, file=sys.stderr)
            if options.debug:
                traceback.print_exception(error)
        else:
            time.sleep(FIRST_RANK_SPEAKS_WITHIN_S)
        return code
    prefix = f"[rank {rank}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    log_file: Path | None = getattr(options, "log_file", None)
    traceback_text = "".join(traceback.format_exception(error))
    message = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno:  # raised by the system
        if error.filename is not None:
            # `why_not_written` takes the path from `error.filename`, so the working directory is not used.
            message = why_not_written(error, Path.cwd())
        elif error.errno in (errno.ENOSPC, errno.EDQUOT) and log_file is not None:
            # An error of writing to an open file doesn't name the file. A run writes below its own folder.
            message = why_not_written(error, log_file.parent)
    print(f"{prefix}{options.command} failed: {message}", file=sys.stderr)
    if options.debug:
        print(traceback_text, file=sys.stderr)
    elif log_file is not None and log_file.is_file() and not isinstance(error, FolderRefused):
        try:
            with log_file.open("a", encoding="utf-8") as file:
                file.write(traceback_text)
        except OSError:  # the disk that the run failed on, perhaps
            print(f"{prefix}--debug shows the traceback, which {log_file} has no room for", file=sys.stderr)
        else:
            print(f"{prefix}the traceback is at the end of {log_file}", file=sys.stderr)
    else:
        print(f"{prefix}--debug shows the traceback", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
