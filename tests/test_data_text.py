# SPDX-License-Identifier: Apache-2.0
"""relpos.data.text: what a line is, which are dropped, and every file that is refused."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from relpos.data import Report, read_lines, read_pairs


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nb", ["a", "b"]),  # the last line may go without its end
        ("a\x85b\n c\n", ["a\x85b", " c"]),
        ("a\u2028b\u2029c\n", ["a\u2028b\u2029c"]),
        ("a\x0bb\x0cc\x1cd\x1ee\n", ["a\x0bb\x0cc\x1cd\x1ee"]),
        ("a\rb\nc\n", ["a\rb", "c"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\r\r\nb\r", ["a\r", "b"]),
        ("\ufeffa\n\ufeffb\n", ["a", "\ufeffb"]),  # a mark at the head of the file alone
        ("a\0b\n", ["a\0b"]),
        ("\U0001f600 \u00a0x\n", ["\U0001f600 \u00a0x"]),
    ],
)
def test_only_a_newline_ends_a_line(tmp_path: Path, content: str, lines: list[str]) -> None:
    read = read_lines(write(tmp_path / "x", content))
    assert list(read) == lines
    assert read.report == Report(len(lines))


def test_empty_lines_are_dropped_and_counted(tmp_path: Path) -> None:
    read = read_lines(write(tmp_path / "x", "a\n\n \t\u00a0\u2028\n\r\nb\n"))
    assert list(read) == ["a", "b"]
    assert read.report == Report(lines=5, empty=3)
    assert str(read.report) == "5 read, 3 empty, 2 kept"


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    read = read_lines(write(tmp_path / "x", ""))
    assert list(read) == [] and read.report == Report()


def test_a_pass_may_be_made_again(tmp_path: Path) -> None:
    read = read_lines(str(write(tmp_path / "x", "a\n\nb\n")))
    assert list(read) == list(read) == ["a", "b"]
    assert read.report == Report(3, 1)


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    text = "Zwei Hunde\x85laufen.\r\n\nEin Ball\n"
    zipped = gzip.compress(text[:10].encode()) + gzip.compress(text[10:].encode())  # two members
    for name in ("x.gz", "x.txt"):
        read = read_lines(write(tmp_path / name, zipped))
        assert list(read) == ["Zwei Hunde\x85laufen.", "Ein Ball"]


def test_several_files_are_one_after_the_other(tmp_path: Path) -> None:
    one = write(tmp_path / "one", "a\nb")  # its last line does not run into the next file
    other = write(tmp_path / "other.gz", gzip.compress(b"c\n\n"))
    read = read_lines([one, str(other)])
    assert list(read) == ["a", "b", "c"]
    assert read.report == Report(4, 1) and read.files == (str(one), str(other))


# ---- pairs ---------------------------------------------------------------------------------------


def test_pairs_lose_those_with_an_empty_side(tmp_path: Path) -> None:
    pairs = read_pairs(
        write(tmp_path / "s", "a\n\nc\n \nd\x85e\n"),
        write(tmp_path / "t.gz", gzip.compress(b"A\nB\n\n\t\nD\n")),
    )
    assert list(pairs) == [("a", "A"), ("d\x85e", "D")]
    assert pairs.report == Report(5, 3) and pairs.report.kept == 2


def test_pairs_of_several_files(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"s{i}", f"s{i}\n") for i in range(2)]
    targets = [write(tmp_path / f"t{i}", f"t{i}\n") for i in range(2)]
    pairs = read_pairs(sources, targets)
    assert list(pairs) == [("s0", "t0"), ("s1", "t1")] == list(pairs)
    assert pairs.report == Report(2)


@pytest.mark.parametrize(
    ("source", "target", "counts"),
    [
        ("a\nb\nc\n", "A\n", (3, 1)),
        ("a\n", "A\n\n\nB\n", (1, 4)),
        ("", "A\n", (0, 1)),
        ("a\nb\n" * 5000, "A\n" * 9999, (10_000, 9_999)),
    ],
)
def test_unequal_files_are_refused_with_both_counts(
    tmp_path: Path, source: str, target: str, counts: tuple[int, int]
) -> None:
    one, other = write(tmp_path / "s", source), write(tmp_path / "t", target)
    with pytest.raises(ValueError) as error:
        list(read_pairs(one, other))
    assert f"{one} has {counts[0]:,} lines, {other} has {counts[1]:,}" in str(error.value)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "line", "byte", "value"),
    [
        (b"a\nb\xffc\n", 2, 2, "0xff"),
        (b"\xff\xfea\0\n\0", 1, 1, "0xff"),  # UTF-16
        (b"ok\nGr\xfc\xdfe\n", 2, 3, "0xfc"),  # Latin-1
        (b"ok\n\nab\xc3\n", 3, 3, "0xc3"),  # cut in the middle
        (b"\xed\xa0\x80\n", 1, 1, "0xed"),  # half of a surrogate pair
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_what_is_not_utf8_is_named(
    tmp_path: Path, content: bytes, line: int, byte: int, value: str, zipped: bool
) -> None:
    path = write(tmp_path / "x", gzip.compress(content) if zipped else content)
    with pytest.raises(ValueError) as error:
        list(read_lines(path))
    sentence = f"{path}: line {line}, byte {byte} of it: {value} is not UTF-8 here"
    assert str(error.value).startswith(sentence)


def test_broken_gzip_files(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(50_000).hex().encode() + b"\n")
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    for content in (whole[:-9], whole[:100], bytes(spoilt), whole[:4]):
        path = write(tmp_path / "x.gz", bytes(content))
        with pytest.raises(ValueError, match="x.gz: not a whole gzip file: "):
            list(read_lines(path))


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (([],), ValueError, "files: expected a file or several, got none"),
        (([3],), TypeError, "files: expected paths, got int"),
        (("absent",), FileNotFoundError, "absent"),
        ((".",), ValueError, "files: '.' is no file that can be read twice"),
        (("here", ["here", "here"]), ValueError, "targets: expected 1 files as in sources, got 2"),
        (("here", "absent"), FileNotFoundError, "absent"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, error: Any, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "here", "a\n")
    with pytest.raises(error) as raised:
        (read_lines if len(arguments) == 1 else read_pairs)(*arguments)
    assert sentence in str(raised.value)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="files: .*pipe' is no file that can be read twice"):
        read_lines(tmp_path / "pipe")


def test_files_are_closed_however_a_pass_ends(tmp_path: Path) -> None:
    good = write(tmp_path / "good", "a\nb\n" * 10_000)
    bad = write(tmp_path / "bad", b"a\n\xff\n")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        iterator = iter(read_pairs(good, good))
        next(iterator)
        del iterator
        with pytest.raises(ValueError):
            list(read_pairs(good, bad))
    assert len(os.listdir("/proc/self/fd")) == before
