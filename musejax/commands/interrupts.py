"""Ctrl-C that is neither lost nor ends in a crash.

A KeyboardInterrupt that lands in one of JAX's callbacks (garbage collection, imports) is printed and forgotten, and
one that leaves JAX in the middle of something can make its teardown crash. So the command line lets no SIGINT raise:
the process leaves at once without teardown, or, in `generate`, a flag is looked at between tokens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def leave(code: int) -> None:
    """Ends the process with all output written, but without the teardown of any library."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, full, or interrupted inside its own write
            stream.flush()
    os._exit(code)


def leave_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once: what `convert` has finished is on disk, others leave nothing."""
    if _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if it is ignored
        signal.signal(signal.SIGINT, _leave_now)


def ignore_interrupts() -> None:
    """Ctrl-C changes nothing from now on: the work is done, and the exit code says how.

    Python gives SIGINT its default action back before the last libraries are torn down, which would end the process
    with a signal instead.
    """
    if _in_main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave_now(signum, frame) -> None:
    _say("interrupted")
    leave(INTERRUPTED)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _say(text: str) -> None:
    """A line on stderr, past Python's buffers: a signal may come while they are in use."""
    with contextlib.suppress(OSError):
        os.write(2, f"musejax: {text}\n".encode())


class Deferred:
    """While it is entered, the first Ctrl-C only sets a flag, and the second ends the process at once.

    Outside the main thread, and where SIGINT is ignored, it does nothing.

    Attributes:
        asked: whether Ctrl-C came.

    Args:
        quiet: do not say that Ctrl-C was seen.
    """

    def __init__(self, quiet: bool = False):
        self.asked = False
        self._quiet = quiet
        self._old = None

    def __enter__(self) -> Deferred:
        if _in_main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._old = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _handle(self, signum, frame) -> None:
        if self.asked:
            leave(INTERRUPTED)
        self.asked = True
        if not self._quiet:
            _say("stopping after this step; Ctrl-C again stops at once")

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C came."""
        if self.asked:
            raise KeyboardInterrupt
