"""All exceptions of the project, as a tree: who raises which, and the exit code of a command that meets one.

A user's mistake is a ValueError and ends a command with exit code 2. A failure is a RuntimeError or an
OSError and ends it with exit code 1. The project catches exceptions that derive directly from Exception.

    ValueError                       a user's mistake: exit code 2
    ├── SameOnAllRanks               every rank finds it: the first one speaks  config, runtime
    │   ├── ConfigError              all that is wrong with a configuration     config
    │   └── MachinesDiffer           machines that can't do a run together      runtime.several_machines
    ├── FolderRefused                a run's folder isn't fit for a command     runtime
    ├── CheckpointGone               the run has deleted it meanwhile           runtime.weights_folder
    ├── Damaged                      a file isn't as it was written             store.checksums
    ├── NoSplit                      a split that the task doesn't have         tasks
    ├── BadRow                       a row that isn't a problem of its task     tasks.rows
    ├── NoPlainValue                 a value that JSON can't hold               tasks.row_values
    ├── MissingField                 a row has no field that a template uses    data.templates
    ├── NotReached                   an accuracy above all that were measured   tables.curves
    │   (those below are caught where texts are read)
    ├── UnreadableValue              neither JSON nor a Python literal          tasks.graders.extraction
    ├── NotAnExpression              no arithmetic expression                   tasks.graders.countdown
    ├── NotAFormula                  no formula                                 domains.graders.residues
    ├── Absurd                       a formula that would cost too much         domains.graders.residues
    ├── NoJson                       no JSON at a text's beginning              domains.environments.calls
    ├── Unreadable                   a model's reply isn't what was asked for    data.asking
    └── NotAnAnswer                  a row of a file that isn't an answer       view.store.foreign
    RuntimeError                     a failure: exit code 1
    ├── EngineError                  the engine failed for good                 engine
    ├── WorkerStartError             a worker process doesn't come up           processes.pool
    ├── EndpointError                an endpoint will answer nothing more       domains.endpoints
    ├── NothingGraded                no answer could be graded                  rollouts.unavailable
    ├── CreditLimitReached           a call's budget or deadline                credit.library
    └── Collapsed                    a sign of collapse stopped the run         runtime.record
    Exception                        caught within the project
    ├── Unavailable                  a grader can't work here: no verdict        graders, yours too
    │   └── SandboxUnavailable       the sandbox did not run the program        domains.sandbox
    ├── Unanswered                   a request came to nothing                  domains.endpoints
    │   └── RequestRefused           the endpoint doesn't take this request     domains.endpoints
    ├── ServerFailure                a server failed; another may do it         engine
    │   └── TemporaryFailure         the same request may succeed later         engine
    ├── NotInParts                   weights can't be read one after the other  models.shards
    ├── Incomplete                   a check looked at a value that was wrong   findings
    ├── Endless                      a Jsonnet program comes to no end          config.jsonnet
    ├── OutOfBudget                  the next request could cost too much       data.asking
    ├── Rejected                     a solution can't be made parallel          data.parallel_solutions
    ├── NoteChanged                  another has changed the note: HTTP 409      view.notes
    └── ClosedPipe                   standard output was closed: exit code 141  cli.command
    LookupError
    └── NotThere                     a page of what isn't there: HTTP 404        view.store.folders
    SystemExit
    └── Stopped                      a signal: exit code 128 + its number       processes.lifetime

The list leaves out private exceptions, and those of programs that run by themselves and can't import this
package: in `domains/sandbox/inside`, `domains/puzzles/reasoning_gym_maker.py` (Refused) and
`cluster/slurm.py` (SlurmRefused, SlurmBusy).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from treetune.config.errors import ConfigIssue

# A user's mistakes


class SameOnAllRanks(ValueError):
    """A mistake that every rank of a run finds in the same way, so only the first rank prints it."""


class ConfigError(SameOnAllRanks):
    """Everything that is wrong with a configuration, collected; `str()` is the message for users.

    Args:
        issues: The mistakes.
        title: The first line of the message; by default it says that the configuration is wrong.
    """

    def __init__(self, issues: Iterable[ConfigIssue], title: str = "") -> None:
        self.issues = tuple(issues)
        count = len(self.issues)
        title = title or ("wrong configuration" if count == 1 else f"wrong configuration, {count} mistakes")
        super().__init__("\n\n".join([f"{title}:", *(issue.render() for issue in self.issues)]))


class MachinesDiffer(SameOnAllRanks):
    """The machines can't do a run together. The message has a line for each difference."""


class FolderRefused(ValueError):
    """A command refuses to work with an experiment's folder: the folder holds another run, another process
    works in it, or it lacks what the command needs. The command has changed nothing in it.

    The log in the folder belongs to another start, so the command writes no traceback into it.
    """


class CheckpointGone(ValueError):
    """A running experiment has deleted the checkpoint in the meantime."""


class Damaged(ValueError):
    """A file's content isn't as it was written."""


class NoSplit(ValueError):
    """The configuration doesn't have this split."""


class BadRow(ValueError):
    """A row can't be read as a problem of its task; the message says what is missing."""


class NoPlainValue(ValueError):
    """A value can't be written as JSON; the message has its type, and its place in its row."""


class MissingField(ValueError):
    """A row doesn't have a field that a template uses; the message names it."""


class NotReached(ValueError):
    """The accuracy that is asked about is higher than all that were measured."""


# Texts that can't be read


class UnreadableValue(ValueError):
    """A text is neither a JSON value nor a Python literal, or is larger than any answer."""


class NotAnExpression(ValueError):
    """A text doesn't follow Countdown's grammar, has no value, or is larger than any answer. The message says
    which."""


class NotAFormula(ValueError):
    """A text is not a formula of the grammar of `domains.graders.residues`."""


class Absurd(ValueError):
    """Reading or computing a formula would cost more than any real answer's."""


class NoJson(ValueError):
    """A text has no JSON at its beginning that could be read in one way."""


class Unreadable(ValueError):
    """A model's reply is not what was asked for; the message says what is wrong with it."""


class NotAnAnswer(ValueError):
    """A row of a file of answers can't be read as an answer; the message says what is missing."""


# Failures


class EngineError(RuntimeError):
    """The engine has failed for good; the message has the awaited event and the path of the log."""


class WorkerStartError(RuntimeError):
    """A worker process did not come up: its servant cannot be unpickled or imported there."""


class EndpointError(RuntimeError):
    """An endpoint will answer nothing more: the work has to stop. What was answered is kept."""


class NothingGraded(RuntimeError):
    """No answer could be graded, so there is nothing to learn from or to measure."""


class CreditLimitReached(RuntimeError):
    """A call of the library of credit has reached its budget or its deadline, or was cancelled.

    Args:
        message: The message for users.
        limit: The reason: the budget, the deadline, or the cancellation.
    """

    def __init__(self, message: str, limit: Literal["budget", "deadline", "cancelled"]) -> None:
        super().__init__(message)
        self.limit = limit


class Collapsed(RuntimeError):
    """A sign of collapse stopped the run, because its configuration asks for that."""


# Caught within the project


class Unavailable(Exception):
    """Something that a grader needs isn't there (a judge, a sandbox), so the answer has no verdict.

    Never raised for what the answer itself is or does. The answer is left out of training and measurements,
    and counted; the message says what was missing.
    """


class SandboxUnavailable(Unavailable):
    """The sandbox did not run the program: it isn't installed, or may not be used here. This says nothing
    about the program."""


class Unanswered(Exception):
    """A request failed in all its attempts. Other requests may succeed."""


class RequestRefused(Unanswered):
    """The endpoint works, but refuses this request."""


class ServerFailure(Exception):
    """A server's failure to do its work; another server may do it."""


class TemporaryFailure(ServerFailure):
    """A server can't be reached or is overloaded; the same request may succeed a little later."""


class NotInParts(Exception):
    """A model's weights can't be read one after the other; the message says why."""


class Incomplete(Exception):
    """A check used a value that could not be read, because it was written wrongly."""


class Endless(Exception):
    """A Jsonnet program did not end in time."""


class OutOfBudget(Exception):
    """The next request could cost more than is left."""


class Rejected(Exception):
    """A solution can't be made parallel.

    Args:
        reason: One of a few fixed texts, by which rejected solutions are counted.
        detail: What is particular to this solution.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class NoteChanged(Exception):
    """Someone has changed a note since its writer last read it.

    Args:
        now: The present note (a `view.notes.Note`); None if it was deleted.
    """

    def __init__(self, now: Any) -> None:
        super().__init__("the note was changed meanwhile")
        self.now = now


class ClosedPipe(Exception):
    """The reader of standard output has closed it, as ``| head`` does."""


class NotThere(LookupError):
    """An experiment, an answer or a row of a data set isn't there; the message says which one."""


class Stopped(SystemExit):
    """A signal that ends the process. It is raised as an exception, so that every `finally` block runs before
    the end."""

    @property
    def signal_name(self) -> str:
        """The name of the signal: ``SIGTERM``."""
        # Exit codes of signals are 128 + their number. `SystemExit` also allows a text or None as the code.
        exit_code = self.code if isinstance(self.code, int) else 128 + signal.SIGTERM
        return signal.Signals(exit_code - 128).name
