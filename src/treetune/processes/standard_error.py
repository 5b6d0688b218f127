"""Lets no paused terminal, and no pipe that nobody reads, stop the process that writes to standard error.

A terminal is paused by Ctrl-S, for example, or while text is selected in tmux. A write then waits until
somebody continues it. `PatientStream` writes from a thread::

    a thread that writes                    thread "standard error"
    ──────────────────────────────────      ──────────────────────────────────
    write(text)
      queue  ─────────────────────────►     os.write: may wait for ever
      waits until it is written, but at
      most `WAIT_S`; afterwards, until
      the other thread has caught up,
      it doesn't wait at all
"""

from __future__ import annotations

import atexit
import io
import os
import queue
import stat
import sys
import threading
import time
from typing import Any, TextIO

from treetune.overriding import override

WAIT_S = 1.0
"""The longest that a write waits for the terminal. Then the stream is behind, until all is written."""

END_S = 5.0
"""The longest that the end of the process waits until all is written."""

MOST_TEXTS = 10_000
"""The most texts that wait for the terminal. Further ones are left out, and their number is written later."""


ERASE_LINE, SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"


class _StreamAround(io.TextIOBase):
    """A stream that writes to another one in its own way, and otherwise is like it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @override
    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    @override
    def fileno(self) -> int:
        return int(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PatientStream(_StreamAround):
    """A stream for `sys.stderr` whose `write` returns within `WAIT_S`, even if the terminal takes no text.

    `write` takes no lock, so that a signal's handler may call it, even within another call.
    """

    def __init__(self, stream: TextIO) -> None:
        """Starts the thread that writes to `stream`, which may be a paused terminal."""
        super().__init__(stream)
        self._texts: queue.SimpleQueue[tuple[str, threading.Event]] = queue.SimpleQueue()
        """The texts that the thread writes next. It sets a text's event when the text is written."""
        self.is_behind = False
        """True from when the terminal has not taken a text within `WAIT_S` until all texts are written.
        Meanwhile, `write` doesn't wait."""
        self._left_out = 0
        """The number of texts that were dropped because too many waited for the terminal."""
        threading.Thread(target=self._write_texts, name="standard error", daemon=True).start()

    @override
    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"standard error takes text, and not {type(text).__name__}")
        if self.is_behind and self._texts.qsize() >= MOST_TEXTS:
            self._left_out += 1
            return len(text)
        is_written = threading.Event()
        self._texts.put((text, is_written))
        if not self.is_behind and not is_written.wait(WAIT_S):
            self.is_behind = True
            # The writing thread sets `is_behind` to False after the last text. If it did so just before the
            # line above, nothing else would undo this line.
            if is_written.is_set():
                self.is_behind = False
        return len(text)

    def finish(self) -> None:
        """Waits until all is written, but at most `END_S`."""
        deadline = time.monotonic() + END_S
        while self.is_behind and time.monotonic() < deadline:
            time.sleep(0.05)

    @override
    def flush(self) -> None:
        """Does nothing, since `write` has no buffer."""

    @override
    def writable(self) -> bool:
        return True

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    @property
    @override
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def _write_texts(self) -> None:
        """Writes the texts that `write` queues, in the thread "standard error"."""
        while True:
            text, is_written = self._texts.get()
            self._write_now(text)
            is_written.set()
            if not self._texts.empty():
                continue
            if self._left_out:
                left_out, self._left_out = self._left_out, 0
                self._write_now(f"({left_out} lines or parts of lines are missing here: nothing read them)\n")
            self.is_behind = False

    def _write_now(self, text: str) -> None:
        """Writes a text, however long that takes. If nobody can read it any more, drops it."""
        unwritten = text.encode(self.encoding, self.errors or "strict")
        try:
            # Not through `self._stream`: its lock would be held meanwhile, and Python's own flush at the exit
            # of the interpreter would wait for it.
            while unwritten:
                unwritten = unwritten[os.write(self._stream.fileno(), unwritten) :]
        except OSError:  # the reader of the pipe has ended, or the terminal is gone
            return


class LiveStream(_StreamAround):
    """A stream for a live line, which is left out while the patient stream is behind: only its newest state
    is of interest."""

    def __init__(self, stream: PatientStream) -> None:
        super().__init__(stream)
        self._has_left_out = False

    @override
    def write(self, text: str) -> int:
        if self._stream.is_behind:
            self._has_left_out = True
            return len(text)
        return self._stream.write(text)

    def end(self) -> None:
        """Removes the line and shows the cursor again, if the text that does so may have been left out."""
        if self._has_left_out:
            self._stream.write(ERASE_LINE + SHOW_CURSOR)


_patient: PatientStream | None = None


def patient_stream() -> PatientStream | None:
    """Returns the stream that `use_patient_stream` has put in place; None if it has put none."""
    return _patient


def use_patient_stream() -> None:
    """Puts a `PatientStream` in the place of `sys.stderr`, so that no paused terminal stops this process.

    Does nothing if standard error is a file, where no write waits for a reader. Does nothing either if
    `sys.stderr` is not the process's standard error, as in a notebook or in pytest.
    """
    global _patient
    stream = sys.__stderr__
    if _patient is not None or stream is None or sys.stderr is not stream:
        return
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):  # a file
        return
    stream.flush()
    _patient = PatientStream(stream)
    sys.stderr = _patient
    atexit.register(_patient.finish)

    def restore() -> None:
        sys.stderr = stream

    os.register_at_fork(after_in_child=restore)  # the thread that writes isn't forked
