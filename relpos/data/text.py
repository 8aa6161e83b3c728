# SPDX-License-Identifier: Apache-2.0
"""Lines of text files: what a line is, which are dropped, and what is refused.

Only "\\n" ends a line. U+0085, U+2028 and a "\\r" inside a line belong to it, so that two files stay
aligned whatever they hold; a "\\r" just before the "\\n" is the rest of a CRLF ending and goes, and so
does a byte order mark at the head of a file.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import IO, Any, cast

Path = str | os.PathLike[str]
Files = Path | Iterable[Path]
Item = str | tuple[str, str]  # a sentence, or source and target

GZIP_MAGIC = b"\x1f\x8b"  # never the beginning of UTF-8
BYTE_ORDER_MARK = "\ufeff"


@dataclass(slots=True)
class Report:
    """What became of lines, or of pairs of lines.

    lines: int. How many were read.
    empty: int. Dropped because a side has nothing but white space, or gives no token.
    too_long: int. Dropped because a side has more tokens than allowed.
    """

    lines: int = 0
    empty: int = 0
    too_long: int = 0

    @property
    def kept(self) -> int:
        """Those that were not dropped."""
        return self.lines - self.empty - self.too_long

    def __str__(self) -> str:
        reasons = (("empty", self.empty), ("too long", self.too_long))
        dropped = "".join(f", {count:,} {reason}" for reason, count in reasons if count)
        return f"{self.lines:,} read{dropped}, {self.kept:,} kept"


class Lines(Iterable[str]):
    """The lines of files, one file after the other; made by `read_lines`.

    files: tuple of str. Where they come from.
    report: Report. Of the last pass, complete when it has ended.
    """

    def __init__(self, files: Files) -> None:
        self.files = check_files("files", files)
        self.report = Report()

    def __iter__(self) -> Iterator[str]:
        self.report = report = Report()
        for path in self.files:
            with closing(lines_of(path)) as lines:
                for line in lines:
                    report.lines += 1
                    if line and not line.isspace():
                        yield line
                    else:
                        report.empty += 1


class Pairs(Iterable[tuple[str, str]]):
    """Line i of the sources with line i of the targets; made by `read_pairs`.

    files: tuple of str. The sources, and then the targets.
    report: Report. Of the last pass, complete when it has ended.
    """

    def __init__(self, sources: Files, targets: Files) -> None:
        self._sources = check_files("sources", sources)
        self._targets = check_files("targets", targets)
        if len(self._sources) != len(self._targets):
            raise ValueError(
                f"targets: expected {len(self._sources)} files as in sources, "
                f"got {len(self._targets)}"
            )
        self.files = self._sources + self._targets
        self.report = Report()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self.report = report = Report()
        for paths in zip(self._sources, self._targets, strict=True):
            yield from _pairs_of(*paths, report)


def read_lines(files: Files) -> Lines:
    """The lines of text files, without the empty ones.

    files: str or PathLike, or several. UTF-8, plain or gzip, which their content tells.

    A pass may be made more than once. Text that is not UTF-8 is a ValueError with file, line and
    byte.
    """
    return Lines(files)


def read_pairs(sources: Files, targets: Files) -> Pairs:
    """The pairs of lines of text files, without those of which a side is empty.

        pairs = relpos.data.read_pairs("train.en.gz", "train.de.gz")
        for source, target in pairs: ...
        print(pairs.report)  # 29,000 read, 12 empty, 28,988 kept

    sources, targets: str or PathLike, or several, as many on both sides. UTF-8, plain or gzip.

    A pass may be made more than once. Files of unequal length are a ValueError with both counts,
    raised where the shorter one ends.
    """
    return Pairs(sources, targets)


def has_sides(item: Any, sides: int) -> bool:
    """Is it what its type says: of one side str, of two sides a pair of them?"""
    texts = (item,) if sides == 1 else item
    fits = isinstance(texts, tuple | list) and len(texts) == sides
    return fits and all(isinstance(text, str) for text in texts)


def check_text(name: str, text: Any) -> str:
    """A sentence: a str that UTF-8 can write, which half of a surrogate pair cannot be."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected str, got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ValueError(
                f"{name}: expected text, got {half!r}, half of a surrogate pair, at character "
                f"{error.start + 1}"
            ) from None
    return text


def texts_of(name: str, items: Iterable[Item]) -> Iterator[str]:
    """Sentences as they are, pairs one side after the other."""
    if isinstance(items, str):
        raise TypeError(f"{name}: expected several str, or pairs of str, got one str")
    for i, item in enumerate(items):
        texts = item if isinstance(item, tuple | list) else (item,)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name}: expected str, or pairs of str, item {i} is {item!r:.80}")
        yield from (check_text(f"{name}: item {i}", text) for text in texts)


def check_files(name: str, files: Files) -> tuple[str, ...]:
    """The paths, of which each is there and may be read again and again."""
    given: Iterable[Path] = (files,) if isinstance(files, str | os.PathLike) else files
    paths = []
    for path in given:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"{name}: expected paths, got {type(path).__name__}")
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{name}: {os.fspath(path)!r} is no file that can be read twice")
        paths.append(os.fspath(path))
    if not paths:
        raise ValueError(f"{name}: expected a file or several, got none")
    return tuple(paths)


def lines_of(path: str, bad: Callable[[str], str] | None = None) -> Generator[str, None, None]:
    """Every line of a file, the empty ones too.

    bad: is told of a line that is not UTF-8, and gives what stands for it; None: it is an error.
    """
    number = 0
    with open(path, "rb") as plain:
        zipped = plain.peek(2)[:2] == GZIP_MAGIC
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if zipped else plain
        try:
            for number, line in enumerate(stream, 1):  # of bytes: only b"\n" ends it
                yield text_of(line.removesuffix(b"\n"), number, path, bad)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file: {error}, line {number + 1}") from None


def text_of(line: bytes, number: int, name: str, bad: Callable[[str], str] | None = None) -> str:
    """A line without its end, the first of them being number 1."""
    try:
        text = line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        said = (
            f"{name}: line {number:,}, byte {error.start + 1} of it: {line[error.start]:#04x} is "
            f"not UTF-8 here ({error.reason})"
        )
        if bad is None:
            raise ValueError(said) from None
        return bad(said)
    return text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text


def _pairs_of(source: str, target: str, report: Report) -> Iterator[tuple[str, str]]:
    with closing(lines_of(source)) as sources, closing(lines_of(target)) as targets:
        count = 0
        for one, other in zip_longest(sources, targets):
            if one is None or other is None:
                more = count + 1 + sum(1 for _ in (targets if one is None else sources))
                counts = (count, more) if one is None else (more, count)
                raise ValueError(
                    f"{source} has {counts[0]:,} lines, {target} has {counts[1]:,}: "
                    "line i of one must be line i of the other"
                )
            count += 1
            report.lines += 1
            if one and other and not one.isspace() and not other.isspace():
                yield one, other
            else:
                report.empty += 1
