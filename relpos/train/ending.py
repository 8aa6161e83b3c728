# SPDX-License-Identifier: Apache-2.0
"""What ends a run, or does not let it begin: signals, and another run in the same folder."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any


class TrainingError(RuntimeError):
    """Training cannot go on; the sentence says why."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One run to a folder: a second one is refused, not mixed in."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{folder}: another process trains here") from None
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked within has it as well
        os.close(descriptor)


@contextmanager
def leaving_at_the_second_signal(quiet: bool = False) -> Iterator[None]:
    """The second SIGINT or SIGTERM ends the process, also within a step: Python's own handlers hear
    of none before its end. For a command: what embeds Python is not to be ended.

    quiet: the first is not answered in words.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        came = 0
        while number := os.read(reading, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            came += 1
            if came == 2:
                _answer("interrupted: what came after the last checkpoint is not saved")
                os._exit(128 + signal.SIGINT)
            if not quiet:
                _answer("finishing the step, then saving; a second time leaves at once")

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()
        os.close(reading)


def _answer(line: str) -> None:
    """A line on standard error, unless it would have to wait for a reader; below a bar."""
    with suppress(OSError):
        if select.select((), (2,), (), 0)[1]:
            below = "\n" if os.isatty(2) else ""
            os.write(2, f"{below}relpos: {line}\n".encode())


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come; the second of them raises KeyboardInterrupt.

    Signals reach the main thread alone; in others nothing is changed. One that is ignored, as
    SIGINT in what a script has put into the background, stays so.
    """
    came = False
    before: dict[signal.Signals, Any] = {}

    def note(_: int, __: FrameType | None) -> None:
        nonlocal came
        came = True
        for each in before:
            signal.signal(each, signal.default_int_handler)

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM):
            # None: a handler of a program that Python is part of, which cannot be put back
            if signal.getsignal(each) not in (signal.SIG_IGN, None):
                before[each] = signal.signal(each, note)
    try:
        yield lambda: came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
