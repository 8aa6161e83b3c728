# SPDX-License-Identifier: Apache-2.0
"""Lines in, lines out: files and standard input, in lists as long as what is there already."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from relpos.cli.arguments import flush, wait_for_room
from relpos.data.files import named
from relpos.data.text import GZIP_MAGIC, lines_of, text_of

STANDARD = "-"  # standard input
_CHUNK = 1 << 16


# Is told of a line that is not UTF-8, and gives what stands for it. None: it is an error.
Bad = Callable[[str], str]


def windows_of(files: Sequence[str], most: int, bad: Bad | None = None) -> Iterator[list[str]]:
    """The lines of files one after the other, "-" or none being standard input, `most` at a time.

    Of a pipe or terminal: those that have arrived, so that nobody who writes slowly waits for an
    answer.
    """
    for file in files or (STANDARD,):
        if file == STANDARD:
            yield from arriving(sys.stdin.fileno(), "standard input", most, bad)
        elif stat.S_ISREG(os.stat(file).st_mode):
            with closing(lines_of(file, bad)) as lines:
                yield from _by_windows(lines, most)
        else:
            with open(file, "rb", buffering=0) as stream:
                yield from arriving(stream.fileno(), file, most, bad)


def _by_windows(lines: Iterator[str], most: int) -> Iterator[list[str]]:
    """`most` at a time; those before what cannot be read come before its error."""
    window: list[str] = []
    try:
        for line in lines:
            window.append(line)
            if len(window) == most:
                yield window
                window = []
    except (ValueError, OSError):
        if window:
            yield window
        raise
    if window:
        yield window


def lines_in(files: Sequence[str]) -> list[str]:
    """Every line of files, the empty ones too."""
    return [line for window in windows_of(files, 1 << 20) for line in window]


def uneven(source: str, sources: int, target: str, targets: int) -> ValueError:
    """Of files that do not have as many lines as each other."""
    return ValueError(
        f"{target} has {targets:,} {'line' if targets == 1 else 'lines'}, {source} has "
        f"{sources:,}: each line of one belongs to a line of the other"
    )


def arriving(descriptor: int, name: str, most: int, bad: Bad | None = None) -> Iterator[list[str]]:
    """Lines of a stream, at least one at a time, and of those that are there about `most`."""
    number, rest, ended = 0, bytearray(), False
    while not ended:
        lines: list[bytes] = []
        while not ended and (not lines or (len(lines) < most and _ready(descriptor))):
            select.select((descriptor,), (), ())  # a pipe may be one that does not wait
            piece = os.read(descriptor, _CHUNK)
            ended = not piece
            rest += piece
            if b"\n" in piece:
                *whole, rest = rest.split(b"\n")
                lines += map(bytes, whole)
        if ended and rest:
            lines.append(bytes(rest))
        if number == 0 and lines and lines[0].startswith(GZIP_MAGIC):
            raise ValueError(
                f"{name}: is gzip, which only files may be: gzip -dc FILE.gz gives plain text"
            )
        numbered = enumerate(lines, number + 1)
        texts = (text_of(line, each, name, bad) for each, line in numbered)
        yield from _by_windows(texts, max(len(lines), 1))
        number += len(lines)


def _ready(descriptor: int) -> bool:
    return bool(select.select((descriptor,), (), (), 0)[0])


def one_line(text: str) -> str:
    """Text as a column of a line: what would end either is a space."""
    return text.translate(_SPACES)


_SPACES = {ord(each): " " for each in "\n\r\t"}


class Writer:
    """Writes lines as UTF-8, whatever the terminal thinks; each is there at once.

    file: the name of the stream. What is in it goes when the first line comes, or with `empty`.
    """

    def __init__(self, stream: BinaryIO, file: Path | None = None) -> None:
        self._stream, self._file = stream, file
        self._old = file is not None and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)

    def empty(self) -> None:
        if self._old:
            self._stream.truncate(0)
        self._old = False

    def __call__(self, line: str) -> None:
        left = memoryview(f"{line}\n".encode())
        try:
            self.empty()
            while left:
                left = left[self._taken(left) :]
            flush(self._stream)
        except OSError as error:
            raise error if self._file is None else named(error, self._file) from error

    def _taken(self, left: memoryview) -> int:
        """How much of it is written: of a pipe that does not wait, what there was room for."""
        try:
            count = self._stream.write(left)
        except BlockingIOError as error:
            count = error.characters_written
        if not count:
            wait_for_room(self._stream)
        return count or 0


@contextmanager
def written(output: Path | None, inputs: Iterable[str]) -> Iterator[Writer]:
    """Where lines go: a file, which is none of the inputs, or standard output.

    A file keeps what it has until there is a line, or an end without one: what is refused costs no
    result of before. That it can be written is seen at once.
    """
    if output is None:
        sys.stdout.flush()
        yield Writer(sys.stdout.buffer)
        return
    if output.is_file():
        there = output.stat()
        for file in inputs:
            with suppress(FileNotFoundError):  # which is told where it is read
                read = os.fstat(sys.stdin.fileno()) if file == STANDARD else os.stat(file)
                if os.path.samestat(read, there):
                    raise ValueError(f"--output: {output} is read as well")
    with output.open("ab", buffering=0) as stream:
        write = Writer(stream, output)
        yield write
        write.empty()
