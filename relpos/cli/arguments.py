# SPDX-License-Identifier: Apache-2.0
"""What the commands share: how one is added, and the options that several have."""

from __future__ import annotations

import argparse
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from relpos import library

FAILED, USAGE, INTERRUPTED = 1, 2, 130
LARGEST = 2**31 - 1  # of whole numbers that are given
PRECISIONS = ("f32", "bf16")

Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Any, name: str, what: str, more: str, run: Run, usage: str | None = None
) -> Any:
    command = commands.add_parser(
        name,
        usage=usage,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.\n\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run, parser=command)
    return command


def _whole(text: str, least: int, most: int, allowed: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"expected a whole number, {allowed}, got {text}")
    return value


def count(text: str) -> int:
    return _whole(text, 1, LARGEST, f"1 to {LARGEST:,}")


def _threads(text: str) -> int:
    """How many there may be libcore knows."""
    return _whole(text, 0, LARGEST, "or 0 for the default")


def seed(text: str) -> int:
    return _whole(text, 0, 2**64 - 1, "0 to 2^64 - 1")


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected minutes above 0, got {text}")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected 0 or more and below 1, got {text}")
    return value


def add_output(command: Any) -> None:
    command.add_argument(
        "-o", "--output", type=_file, metavar="FILE", help="where to (standard output, as -)"
    )


def _file(text: str) -> Path | None:
    return None if text == "-" else Path(text)


def add_progress(command: Any, elsewhere: str = "lines") -> None:
    command.add_argument(
        "--progress",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help=f"a bar on a terminal and {elsewhere} elsewhere (auto), or what you say",
    )


def add_threads(command: Any) -> None:
    command.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help="threads to compute with (0: RELPOS_NUM_THREADS, OMP_NUM_THREADS, or all cores)",
    )


def add_unpickle(group: Any) -> None:
    group.add_argument(
        "--unpickle",
        action="store_true",
        help="read somebody's own tokenizer from its pickle, which runs their code",
    )


def add_device(command: Any) -> None:
    command.add_argument(
        "--device",
        default="cpu",
        metavar="D",
        help="where to compute: cpu, or a GPU as cuda or cuda:1 (cpu)",
    )
    command.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="f32",
        help="of matrix products; bf16: numbers are rounded first, which is faster on GPUs, and on "
        "CPUs that have instructions for it (f32)",
    )


def use_threads(options: argparse.Namespace) -> None:
    if options.threads is not None:
        library.set_threads(options.threads)


def complain(line: str) -> None:
    """A line on standard error, whose full disk or lost reader ends nothing."""
    with suppress(OSError):
        print(line, file=sys.stderr)


def flush(stream: IO[Any]) -> None:
    """All that is buffered, also into a pipe that does not wait, for whose reader this waits then."""
    while True:
        try:
            return stream.flush()
        except BlockingIOError:
            wait_for_room(stream)


def wait_for_room(stream: IO[Any]) -> None:
    select.select((), (stream,), ())
