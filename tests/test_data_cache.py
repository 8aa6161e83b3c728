# SPDX-License-Identifier: Apache-2.0
"""relpos.data.cache: what is in it, when it is built anew, and that no failure harms it."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos.data import Report, TokenCache, Words, cache, files, read_lines, read_pairs
from small_data import Numbers, cache_of, random_pairs, sentence

PAIRS = random_pairs(500)


def content(built: TokenCache) -> list[tuple[list[int], list[int]]]:
    return [(built.source(i).tolist(), built.target(i).tolist()) for i in range(len(built))]


def tokens_of(pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    encode = Numbers().encode
    return [(encode(source), encode(target)) for source, target in pairs]


def write_pairs(folder: Path, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    for side, name in enumerate(("s", "t")):
        (folder / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    return folder / "s", folder / "t"


def generation(folder: Path) -> str:
    """Which build the cache is from."""
    return str(json.loads((folder / "meta.json").read_text())["files"]["tokens"])


# ---- content -------------------------------------------------------------------------------------


def test_pairs_come_back(tmp_path: Path) -> None:
    built = cache_of(tmp_path / "a" / "b", PAIRS)
    assert content(built) == tokens_of(PAIRS)
    assert built.sides == 2 and len(built) == 500 and built.report == Report(500)
    assert built.source_lengths is not None
    assert built.source_lengths.tolist() == [len(s) for s, _ in tokens_of(PAIRS)]
    assert built.target_lengths.tolist() == [len(t) for _, t in tokens_of(PAIRS)]
    assert (built.size, built.bos, built.eos, built.unknown) == (1000, 1, 2, 0)
    again = TokenCache.open(tmp_path / "a" / "b")
    assert content(again) == content(built) and again.checksum == built.checksum
    assert repr(again) == f"<TokenCache of 500 pairs, {len(built.tokens):,} tokens>"
    for i in (-1, 500):
        with pytest.raises(IndexError, match=f"i: expected 0 to 499, got {i}"):
            built.source(i)


def test_sentences_come_back(tmp_path: Path) -> None:
    lines = [source for source, _ in PAIRS]
    built = cache_of(tmp_path, iter(lines))
    assert [built.target(i).tolist() for i in range(500)] == [s for s, _ in tokens_of(PAIRS)]
    assert built.sides == 1 and built.source_lengths is None
    with pytest.raises(ValueError, match="this cache has single sentences, which are targets"):
        built.source(0)
    names = {path.name.split(".")[0] for path in tmp_path.glob("*.bin")}
    assert names == {"tokens", "offsets", "target"}


@pytest.mark.parametrize(
    ("size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "int32")]
)
def test_tokens_are_as_small_as_they_can_be(tmp_path: Path, size: int, dtype: str) -> None:
    built = cache_of(tmp_path, [(str(size - 1), "0")], size)
    assert built.tokens.dtype == np.dtype(dtype)
    assert built.tokens.tolist() == [size - 1, 0] and built.unknown_tokens == 1


def test_pairs_without_a_token_on_a_side_are_dropped(tmp_path: Path) -> None:
    built = cache_of(tmp_path, [("5", ""), ("6", "7"), (" ", "8"), ("", ""), ("9", "9")])
    assert content(built) == [([6], [7]), ([9], [9])]
    assert built.report == Report(lines=5, empty=3)


def test_lines_of_files_are_counted_once(tmp_path: Path) -> None:
    paths = write_pairs(tmp_path, [("5", ""), ("6", "7"), ("8", "9")])
    built = cache_of(tmp_path / "cache", read_pairs(*paths))
    assert built.report == Report(lines=3, empty=1) and len(built) == 2


def test_blocks_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [*PAIRS[:20], ("", "5"), *PAIRS[20:40], ("", ""), ("5", ""), ("", "6"), *PAIRS[40:]]
    whole = cache_of(tmp_path / "whole", pairs)
    monkeypatch.setattr(cache, "BLOCK", 3)  # one of them is dropped altogether
    parts = cache_of(tmp_path / "parts", pairs)
    for name in ("tokens", "offsets", "source_lengths", "target_lengths"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name)), name
    assert whole.checksum == parts.checksum and whole.report == parts.report == Report(504, 4)


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 200)
    told: list[int] = []
    TokenCache.build(tmp_path, PAIRS, Numbers(), progress=told.append)
    assert told == [200, 400, 500]


def test_memory_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 256)

    def peak(count: int) -> int:
        lines = (sentence(range(3, 30)) for _ in range(count))
        tracemalloc.start()
        cache_of(tmp_path / str(count), lines)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    first = peak(512)
    assert peak(8192) < 1.2 * first + 50_000  # the whole: 16 times as much


# ---- used again, or built anew -------------------------------------------------------------------


def test_it_is_used_again_as_long_as_nothing_changes(tmp_path: Path) -> None:
    folder, words = tmp_path / "cache", Words.train(PAIRS, size=900)
    paths = write_pairs(tmp_path, PAIRS)

    def built_by(pairs: Any, subwords: Any = words) -> str:
        TokenCache.build(folder, pairs, subwords)
        return generation(folder)

    def changed(act: Callable[[], Any], subwords: Any = words) -> bool:
        before = generation(folder)
        act()
        return built_by(read_pairs(*paths), subwords) != before

    first = built_by(read_pairs(*paths))
    assert built_by(read_pairs(*paths)) == first
    assert not changed(lambda: [os.utime(path, (1, 1)) for path in paths])
    paths[0].rename(tmp_path / "moved")
    assert built_by(read_pairs(tmp_path / "moved", paths[1])) == first
    (tmp_path / "moved").rename(paths[0])
    assert not changed(lambda: None)

    def other_letter() -> None:  # of the same length, at the same time
        status, text = os.stat(paths[1]), paths[1].read_text()
        paths[1].write_text(text[:-2] + ("1" if text[-2] != "1" else "2") + "\n")
        os.utime(paths[1], ns=(status.st_atime_ns, status.st_mtime_ns))

    assert changed(other_letter)
    assert changed(lambda: paths[0].write_text(paths[0].read_text().replace(" ", "  ", 1)))
    assert changed(lambda: None, Words.train(PAIRS, size=899))
    swapped = built_by(read_pairs(paths[1], paths[0]))
    assert built_by(read_pairs(*paths)) != swapped
    lines = built_by(read_lines(paths))
    assert lines != built_by(read_lines(paths[::-1]))
    for pairs, sides in ((read_lines(paths), 1), (read_pairs(*paths), 2), (read_lines(paths), 1)):
        assert TokenCache.build(folder, pairs, words).sides == sides  # of the same files


def test_tokens_that_are_damaged_are_made_anew(tmp_path: Path) -> None:
    paths, folder = write_pairs(tmp_path, PAIRS), tmp_path / "cache"
    built = TokenCache.build(folder, read_pairs(*paths), Numbers())
    [file] = folder.glob("tokens.*")
    damaged = bytearray(file.read_bytes())
    damaged[100] ^= 1
    file.write_bytes(damaged)
    again = TokenCache.build(folder, read_pairs(*paths), Numbers())
    assert content(again) == tokens_of(PAIRS) and again.checksum == built.checksum


def test_other_iterables_have_a_key(tmp_path: Path) -> None:
    def built_by(**keys: Any) -> str:
        TokenCache.build(tmp_path, PAIRS, Numbers(), **keys)
        return generation(tmp_path)

    first = built_by(key="numbers, 500")
    assert built_by(key="numbers, 500") == first
    assert built_by(key="others") != first
    assert len({built_by(), built_by(), built_by()}) == 3
    with pytest.raises(TypeError, match="key: expected str, got set"):
        built_by(key={1})
    assert len(list(tmp_path.glob("*.bin"))) == 4  # those of the last


@pytest.mark.parametrize("name", ["size", "bos", "eos", "unknown"])
def test_special_tokens_belong_to_the_vocabulary(tmp_path: Path, name: str) -> None:
    TokenCache.build(tmp_path, PAIRS, Numbers(), key="pairs")
    subwords = Numbers()
    setattr(subwords, name, 1001 if name == "size" else 7)
    built = TokenCache.build(tmp_path, PAIRS, subwords, key="pairs")
    assert getattr(built, name) == getattr(subwords, name)


def test_a_reader_keeps_the_cache_that_it_opened(tmp_path: Path) -> None:
    old = cache_of(tmp_path, PAIRS)
    new = cache_of(tmp_path, PAIRS[:7])
    assert content(old) == tokens_of(PAIRS) and content(new) == tokens_of(PAIRS[:7])


def test_a_build_may_overtake_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of(tmp_path, PAIRS)
    read_json = cache.read_json

    def slowly(path: Path) -> dict[str, Any]:
        told = read_json(path)
        monkeypatch.undo()
        cache_of(tmp_path, PAIRS[:7])
        return told

    monkeypatch.setattr(cache, "read_json", slowly)
    assert content(TokenCache.open(tmp_path)) == tokens_of(PAIRS[:7])


def test_two_builders_wait_for_each_other(tmp_path: Path) -> None:
    paths = write_pairs(tmp_path, PAIRS)
    made: list[str] = []

    def build() -> None:
        built = TokenCache.build(tmp_path / "cache", read_pairs(*paths), Numbers())
        made.append(generation(tmp_path / "cache") if content(built) == tokens_of(PAIRS) else "")

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6 and len(set(made)) == 1 and made[0]


# ---- failures ------------------------------------------------------------------------------------


def check_old(folder: Path) -> None:
    """The old cache, and nothing beside it."""
    assert content(TokenCache.open(folder)) == tokens_of(PAIRS[:9])
    assert len([path for path in folder.iterdir() if path.name != "lock"]) == 5


def test_a_failing_write_leaves_the_old_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write and every fsync in turn; the disk is full from there on."""
    cache_of(tmp_path, PAIRS[:9])
    monkeypatch.setattr(cache, "BLOCK", 100)
    left = [0]

    def failing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left[0] -= 1
            return inner(*arguments)

        return call

    class Stream:
        def __init__(self, path: Path) -> None:
            self._file = open(path, "xb")
            self.write = failing(self._file.write)
            self.flush, self.fileno = self._file.flush, self._file.fileno

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

    sync = failing(os.fsync)
    monkeypatch.setattr(cache, "open", lambda path, mode: Stream(path), raising=False)
    monkeypatch.setattr(cache, "sync", sync)
    monkeypatch.setattr(files, "sync", sync)
    writes = 5 * 4 + 1 + 4 + 1 + 1
    for count in range(100):
        left[0] = count
        try:
            cache_of(tmp_path, PAIRS)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            if count < writes:
                check_old(tmp_path)
        else:
            break
    # five blocks of four files, the first offset; four files, the folder, meta.json, the folder
    assert count == writes + 1
    assert content(TokenCache.open(tmp_path)) == tokens_of(PAIRS)
    assert len(list(tmp_path.iterdir())) == 6  # with the lock


LIMITED = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from small_data import cache_of, random_pairs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
cache_of({folder!r}, random_pairs(500))
"""


def run(program: str, **names: Any) -> subprocess.CompletedProcess[str]:
    names = {"tests": str(Path(__file__).parent)} | {x: str(y) for x, y in names.items()}
    package = str(Path(relpos.__file__).parent.parent)
    command = [sys.executable, "-c", program.format(**names)]
    return subprocess.run(command, capture_output=True, text=True, cwd=package, check=False)


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """No space as the system tells it; the sentence has the file's name."""
    cache_of(tmp_path, PAIRS[:9])
    done = run(LIMITED, folder=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("OSError: [Errno 27] File too large: ") and ".bin" in last
    check_old(tmp_path)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from relpos.data import TokenCache, cache
from small_data import Numbers, random_pairs
cache.BLOCK = 50
def progress(lines):
    if lines == {lines}:
        os.kill(os.getpid(), signal.SIGKILL)
TokenCache.build({folder!r}, random_pairs(500), Numbers(), progress=progress)
"""


@pytest.mark.parametrize("lines", [50, 500])
def test_a_build_that_is_killed(tmp_path: Path, lines: int) -> None:
    cache_of(tmp_path, PAIRS[:9])
    assert run(KILLED, folder=tmp_path, lines=lines).returncode == -signal.SIGKILL
    assert content(TokenCache.open(tmp_path)) == tokens_of(PAIRS[:9])
    assert len(list(tmp_path.glob("*.bin"))) == 8
    (tmp_path / "mine.0123abcd.bin").touch()
    built = cache_of(tmp_path, PAIRS)  # and clears away what was left, no more
    assert content(built) == tokens_of(PAIRS)
    assert len(list(tmp_path.glob("*.bin"))) == 5


def test_bad_text_leaves_the_old_cache(tmp_path: Path) -> None:
    cache_of(tmp_path / "cache", PAIRS[:9])
    source, target = write_pairs(tmp_path, PAIRS)
    target.write_bytes(target.read_bytes()[:-2] + b"\xff\n")
    with pytest.raises(ValueError, match="t: line 500, byte .* is not UTF-8"):
        cache_of(tmp_path / "cache", read_pairs(source, target))
    check_old(tmp_path / "cache")
    target.write_text("5\n" * 499)
    with pytest.raises(ValueError, match="s has 500 lines, .*t has 499"):
        cache_of(tmp_path / "cache", read_pairs(source, target))
    check_old(tmp_path / "cache")


@pytest.mark.parametrize(
    ("pairs", "error", "sentence"),
    [
        ([], ValueError, "pairs: expected at least one with text, got 0 read, 0 kept"),
        ([("", "5")] * 3, ValueError, "at least one with text, got 3 read, 3 empty, 0 kept"),
        ("5 6", TypeError, "pairs: expected several, as read_pairs gives, got '5 6'"),
        (7, TypeError, "pairs: expected several, as read_pairs gives, got 7"),
        ([("5", "6"), "7"], TypeError, r"expected \(source, target\) of str as at first, item 1"),
        (["5", ("6", "7")], TypeError, "pairs: expected str as at first, item 1 is"),
        ([("5", "6", "7")], TypeError, r"expected \(source, target\) of str as at first, item 0"),
        ([("5", 6)], TypeError, r"expected \(source, target\) of str as at first, item 0"),
        ([7], TypeError, r"expected \(source, target\) of str as at first, item 0 is 7"),
        ([("5", "6"), ("5", "6\ud800")], ValueError, "^pairs: item 1: .* half of a surrogate pair"),
        ([("5", "1000")], ValueError, "subwords: expected tokens from 0 to 999, got 1000"),
        ([("5", "-1")], ValueError, "subwords: expected tokens from 0 to 999, got -1"),
    ],
)
def test_pairs_that_are_refused(tmp_path: Path, pairs: Any, error: Any, sentence: str) -> None:
    cache_of(tmp_path, PAIRS[:9])
    with pytest.raises(error, match=sentence):
        cache_of(tmp_path, pairs)
    check_old(tmp_path)


@pytest.mark.parametrize("tokens", [[3.7, 4.2], ["5", "6"], "345", [True], {5, 6}])
def test_tokens_that_are_none(tmp_path: Path, tokens: Any) -> None:
    class Odd(Numbers):
        def encode(self, text: str) -> Any:
            return tokens

    with pytest.raises(TypeError, match=r"^subwords: encode_many\(\): expected integers, got "):
        TokenCache.build(tmp_path, PAIRS[:9], Odd())


@pytest.mark.parametrize(("more", "got"), [([], 8), ([[5]] * 2, 10)])
def test_as_many_sentences_come_back_as_were_given(
    tmp_path: Path, more: list[list[int]], got: int
) -> None:
    class Odd(Numbers):
        def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
            return super().encode_many(texts[:-1]) + more

    said = rf"^subwords: encode_many\(\): expected 9 lists, got {got}$"
    for given in (PAIRS[:9], [target for _, target in PAIRS[:9]]):
        with pytest.raises(ValueError, match=said):
            TokenCache.build(tmp_path, given, Odd())


def test_a_vocabulary_that_is_none(tmp_path: Path) -> None:
    none: tuple[Any, ...] = (object(), Numbers)
    for given in none:
        with pytest.raises(
            TypeError, match="subwords: expected SentencePiece.* got <.*; .*Wrapped"
        ):
            TokenCache.build(tmp_path, PAIRS, given)


def test_an_error_of_the_iterable_is_its_own(tmp_path: Path) -> None:
    cache_of(tmp_path, PAIRS[:9])

    def spoilt() -> Iterator[tuple[str, str]]:
        yield "5", "6"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache_of(tmp_path, spoilt())
    check_old(tmp_path)


BROKEN: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("meta", lambda x: x[:50], "meta.json: not JSON"),
    ("meta", lambda x: b"\xff" + x, "meta.json: not JSON"),
    ("meta", lambda x: b"[" * 100_000, "meta.json: not JSON"),
    ("meta", lambda x: rewritten(x, format=2), "meta.json: format: expected 1, got 2"),
    ("meta", lambda x: rewritten(x, pairs=None), "not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, pairs="x"), "meta.json: not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, bos=math.inf), "not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, dtype="no"), "not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, dtype="|O"), "not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, files={}), "not the meta.json of a token cache: 'tokens'"),
    ("meta", lambda x: rewritten(x, files=[1]), "not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, report={"a": 1}), "not the meta.json of a token cache"),
    ("meta", lambda x: rewritten(x, pairs=499), "expected 4,000 bytes, got 4,008"),
    ("tokens", lambda x: x[:-2], "tokens.*bin: expected .* bytes, got"),
    ("source", lambda x: x + b"0000", "source.*bin: expected 2,000 bytes, got 2,004"),
    ("target", lambda x: b"", "target.*bin: expected 2,000 bytes, got 0"),
]


def rewritten(whole: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(whole) | changes).encode()


@pytest.mark.parametrize(("name", "change", "said"), BROKEN, ids=[x[2][:30] for x in BROKEN])
def test_a_broken_cache_is_refused_and_built_anew(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], said: str
) -> None:
    paths, folder = write_pairs(tmp_path, PAIRS), tmp_path / "cache"
    for act in range(2):
        built = TokenCache.build(folder, read_pairs(*paths), Numbers())
        assert content(built) == tokens_of(PAIRS)
        told = json.loads((folder / "meta.json").read_text())
        path = folder / (told["files"] | {"meta": "meta.json"})[name]
        if act == 0:
            path.write_bytes(change(path.read_bytes()))
            with pytest.raises(ValueError, match=said):
                TokenCache.open(folder)


def test_a_cache_with_a_file_less(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no token cache here, meta.json is missing"):
        TokenCache.open(tmp_path)
    TokenCache.build(tmp_path, PAIRS, Numbers(), key="pairs")
    next(tmp_path.glob("offsets.*")).unlink()
    with pytest.raises(FileNotFoundError, match="offsets"):
        TokenCache.open(tmp_path)
    built = TokenCache.build(tmp_path, PAIRS, Numbers(), key="pairs")
    assert content(built) == tokens_of(PAIRS)
