# SPDX-License-Identifier: Apache-2.0
"""Token caches: text tokenised once, in files that are mapped into memory.

    folder/meta.json            what is in it and what it was made from; written last
    folder/tokens.3f9c.bin      uint16, or int32 for large vocabularies
    folder/offsets.3f9c.bin     int64 (pairs + 1,): where each pair begins, and the end
    folder/source.3f9c.bin      int32 (pairs,): tokens of the source; not for single sentences
    folder/target.3f9c.bin      int32 (pairs,): tokens of the target

Pair i lies in one piece, its source and then its target. meta.json names the other files, so that a
new cache takes the place of the old one in a single rename, and a reader of the old one keeps it.
"""

from __future__ import annotations

import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from relpos.data.files import locked, named, read_json, sha256_of, sync, sync_path, write_json
from relpos.data.subwords import Side, encode_texts, of_side
from relpos.data.text import Item, Lines, Pairs, Report, check_text, has_sides
from relpos.data.vocabulary import Subwords, is_subwords

FORMAT = 1
META = "meta.json"
BLOCK = 8192  # pairs tokenised at a time: some 30 MB of Python integers
SMALL_VOCABULARY = 1 << 16  # tokens that SMALL can tell apart
SMALL, LARGE = np.dtype("<u2"), np.dtype("<i4")
OURS = re.compile(r"(tokens|offsets|source|target)\.[0-9a-f]{8}\.bin|\.meta\.json\.\d+")
LONGEST = (1 << 31) - 1

Folder = str | os.PathLike[str]
Integers = npt.NDArray[Any]


class TokenCache:
    """Pairs of sentences, or sentences, as tokens; made by `build`, or opened where it is.

        cache = relpos.data.TokenCache.build("cache", pairs, subwords)
        cache.source(0), cache.target(0), cache.source_lengths, cache.target_lengths

    All is mapped, nothing read before it is looked at. Single sentences are targets.

    folder: Path.
    sides: int. 2: pairs, 1: sentences.
    size, bos, eos, unknown: int. Of the vocabulary, where the sides have one each, of the target's.
    report: Report. What became of the lines.
    unknown_tokens: int. How many of the tokens are the unknown.
    target_lengths, source_lengths: int32 (pairs,). source_lengths are None for single sentences.
    offsets: int64 (pairs + 1,). Where each pair begins in `tokens`.
    tokens: uint16 or int32.
    checksum: int. Of the tokens, 32 bits.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(folder)
        path = self.folder / META
        if not path.is_file():
            raise FileNotFoundError(f"{self.folder}: no token cache here, {META} is missing")
        told = read_json(path)
        while True:
            try:
                self._take(path, told)
                break
            except FileNotFoundError:  # a build may have been faster
                before, told = told, read_json(path)
                if told == before:
                    raise

    def _take(self, path: Path, told: dict[str, Any]) -> None:
        """What META tells, and the files that it names."""
        if told.get("format") != FORMAT:
            raise ValueError(f"{path}: format: expected {FORMAT}, got {told.get('format')!r}")
        try:
            pairs, count = int(told["pairs"]), int(told["tokens"])
            dtype = {x.str: x for x in (SMALL, LARGE)}[told["dtype"]]
            self.sides, self.size = int(told["sides"]), int(told["size"])
            self.bos, self.eos, self.unknown = (int(told[x]) for x in ("bos", "eos", "unknown"))
            self.unknown_tokens, self.checksum = int(told["unknown_tokens"]), int(told["checksum"])
            self.report = Report(**told["report"])
            self._identity, self._subwords = told["identity"], told.get("subwords")
            names = ("tokens", "offsets", "target", *(("source",) if self.sides != 1 else ()))
            files = {name: Path(told["files"][name]).name for name in names}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}: not the {META} of a token cache: {error}") from None
        self.tokens = self._mapped(files["tokens"], dtype, count)
        self.offsets = self._mapped(files["offsets"], np.dtype("<i8"), pairs + 1)
        self.target_lengths = self._mapped(files["target"], np.dtype("<i4"), pairs)
        self.source_lengths = (
            self._mapped(files["source"], np.dtype("<i4"), pairs) if "source" in files else None
        )

    @classmethod
    def open(cls, folder: Folder) -> TokenCache:
        """The cache that lies in a folder."""
        return cls(folder)

    @classmethod
    def build(
        cls,
        folder: Folder,
        pairs: Iterable[Item],
        subwords: Subwords,
        *,
        key: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TokenCache:
        """Tokenises all lines into a folder, unless that has been done.

        folder: str or PathLike. Made where it does not exist.
        pairs: (source, target) of str each, or str each for a language model: what `read_pairs`
            and `read_lines` give, or anything else to iterate over, of any length.
        subwords: Subwords.
        key: str. For what does not come from files: the name of its content. The cache is used
            again as long as key and vocabulary are the same; without a key it is always built.
        progress: called with the number of lines read, now and then.

        A cache of files is used again as long as their content and the vocabulary are what they
        were; if its tokens have been damaged, it is built anew. A build that fails or is
        killed leaves the folder as it was; memory does not grow with the number of lines.
        """
        if isinstance(pairs, str) or not isinstance(pairs, Iterable):
            raise TypeError(f"pairs: expected several, as read_pairs gives, got {pairs!r:.80}")
        if not is_subwords(subwords):
            raise TypeError(
                f"subwords: expected SentencePiece, Words or another relpos.data.Subwords, got "
                f"{subwords!r:.80}; relpos.data.Wrapped makes them of an object with encode and decode"
            )
        if not isinstance(key, str | None):
            raise TypeError(f"key: expected str, got {type(key).__name__}")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        identity = _identity(pairs, subwords, key)
        with locked(folder):
            if identity is not None:
                with suppress(FileNotFoundError, ValueError):
                    cache = cls(folder)
                    other = Pairs if cache.sides == 1 else Lines  # of the same files
                    same = cache._identity == identity and not isinstance(pairs, other)
                    if same and zlib.crc32(cache.tokens.data) == cache.checksum:
                        return cache
            _build(folder, pairs, subwords, identity, progress)
            return cls(folder)

    def _mapped(self, name: str, dtype: Any, count: int) -> Integers:
        path = self.folder / name
        size, expected = os.stat(path).st_size, count * dtype.itemsize
        if size != expected or count < 1:
            raise ValueError(f"{path}: expected {expected:,} bytes, got {size:,}")
        return np.asarray(np.memmap(path, dtype, "r"))

    @cached_property
    def borders(self) -> int:
        """Of the lengths, 32 bits: the same tokens may be other sentences."""
        begun = 0 if self.source_lengths is None else zlib.crc32(self.source_lengths.data)
        return zlib.crc32(self.target_lengths.data, begun)

    def __len__(self) -> int:
        return len(self.target_lengths)

    def source(self, i: int) -> Integers:
        """The tokens of source i, a view."""
        if self.source_lengths is None:
            raise ValueError("source: this cache has single sentences, which are targets")
        begin = self.offsets[self._index(i)]
        return self.tokens[begin : begin + self.source_lengths[i]]

    def target(self, i: int) -> Integers:
        """The tokens of target i, or of sentence i, a view; without bos and eos."""
        end = self.offsets[self._index(i) + 1]
        return self.tokens[end - self.target_lengths[i] : end]

    def is_of(self, size: int, fingerprint: str) -> bool:
        """Were the tokens made by subwords of this size and fingerprint? Old caches know the size."""
        return self.size == size and self._subwords in (None, fingerprint)

    def _index(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"i: expected 0 to {len(self) - 1}, got {i}")
        return i

    def __repr__(self) -> str:
        what = "pairs" if self.sides == 2 else "sentences"
        return f"<TokenCache of {len(self):,} {what}, {len(self.tokens):,} tokens>"


def _identity(pairs: Iterable[Item], subwords: Subwords, key: str | None) -> Any:
    """What a cache depends on; None: it cannot be known. File names don't matter, contents do."""
    made_by = {"subwords": subwords.fingerprint(), "size": subwords.size}
    made_by |= {"bos": subwords.bos, "eos": subwords.eos, "unknown": subwords.unknown}
    if isinstance(pairs, Lines | Pairs):
        return made_by | {"files": [[os.stat(x).st_size, sha256_of(x)] for x in pairs.files]}
    return None if key is None else made_by | {"key": key}


# --------------------------------------------------------------------------------------------------
# Building
# --------------------------------------------------------------------------------------------------


def _build(
    folder: Path,
    pairs: Iterable[Item],
    subwords: Subwords,
    identity: Any,
    progress: Callable[[int], None] | None,
) -> None:
    """Writes the files of a new cache, then meta.json, then drops those of the old one."""
    generation = secrets.token_hex(4)
    names = {x: f"{x}.{generation}.bin" for x in ("tokens", "offsets", "source", "target")}
    paths = {x: folder / name for x, name in names.items()}
    try:
        with ExitStack() as stack:
            files = {x: stack.enter_context(_File(path)) for x, path in paths.items()}
            writer = _Writer(files, subwords)
            for block in _blocks(pairs):
                writer.add(block)
                if progress is not None:
                    progress(writer.lines)
        report = pairs.report if isinstance(pairs, Lines | Pairs) else Report(writer.lines)
        report = Report(report.lines, report.lines - writer.pairs)
        if writer.pairs == 0:
            raise ValueError(f"pairs: expected at least one with text, got {report}")
        if writer.sides == 1:
            del names["source"]
        content = {
            "format": FORMAT,
            "sides": writer.sides,
            "pairs": writer.pairs,
            "tokens": writer.tokens,
            "dtype": writer.dtype.str,
            "subwords": subwords.fingerprint(),
            "size": subwords.size,
            "bos": subwords.bos,
            "eos": subwords.eos,
            "unknown": subwords.unknown,
            "unknown_tokens": writer.unknown,
            "checksum": writer.checksum,
            "report": asdict(report),
            "files": names,
            "identity": identity,
        }
        sync_path(folder)
        write_json(folder / META, content)
    finally:
        _clear(folder)


def _clear(folder: Path) -> None:
    """Removes what meta.json does not name: of an older cache, or a build that failed or was killed."""
    kept: set[str] = set()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not ours
        kept = set(read_json(folder / META)["files"].values())
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in kept:
            with suppress(OSError):
                path.unlink()


class _File:
    """A binary file whose errors have its name, on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _File:
        self._file: IO[bytes] = open(self._path, "xb")
        return self

    def write(self, array: Integers) -> None:
        try:
            self._file.write(array.data)
        except OSError as error:
            raise named(error, self._path) from error

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            with self._file:
                if error is None:
                    self._file.flush()
                    sync(self._file.fileno())
        except OSError as failure:
            if error is None:  # or else the first failure is the one to tell
                raise named(failure, self._path) from failure


class _Writer:
    """Lines in, blocks of tokens out."""

    def __init__(self, files: dict[str, _File], subwords: Subwords) -> None:
        self._files = files
        names: tuple[Side, Side] = ("source", "target")
        self._subwords = [of_side(subwords, name) for name in names]
        largest = max(each.size for each in self._subwords)
        self.dtype = SMALL if largest <= SMALL_VOCABULARY else LARGE
        self.sides = self.lines = self.pairs = self.tokens = self.unknown = self.checksum = 0
        files["offsets"].write(np.zeros(1, "<i8"))

    def add(self, block: Sequence[Item]) -> None:
        sides = self._texts(block)
        subwords = self._subwords[-len(sides) :]
        encoded = [encode_texts(own, texts) for own, texts in zip(subwords, sides, strict=True)]
        lengths = np.array([[len(tokens) for tokens in side] for side in encoded], np.int64)
        kept = np.asarray((lengths > 0).all(axis=0))
        if not kept.all():
            encoded = [
                [tokens for tokens, keep in zip(side, kept, strict=True) if keep]
                for side in encoded
            ]
            lengths = lengths[:, kept]
        self.lines += len(block)
        if lengths.shape[1] == 0:
            return
        if lengths.max() > LONGEST:
            raise ValueError(f"pairs: expected up to {LONGEST} tokens, got {lengths.max()}")
        ordered = chain.from_iterable(zip(*encoded, strict=True))
        tokens = np.fromiter(chain.from_iterable(ordered), np.int64, int(lengths.sum()))
        self._check(tokens, lengths, subwords)
        self.unknown += int(
            np.count_nonzero(tokens == _of_each(lengths, [x.unknown for x in subwords]))
        )
        packed = tokens.astype(self.dtype)
        self.checksum = zlib.crc32(packed.data, self.checksum)
        self._files["tokens"].write(packed)
        ends = self.tokens + np.cumsum(lengths.sum(axis=0))
        self._files["offsets"].write(ends.astype("<i8"))
        self._files["target"].write(lengths[-1].astype("<i4"))
        if self.sides == 2:
            self._files["source"].write(lengths[0].astype("<i4"))
        self.pairs += lengths.shape[1]
        self.tokens += tokens.size

    def _check(self, tokens: Integers, lengths: Integers, subwords: Sequence[Subwords]) -> None:
        sizes = _of_each(lengths, [each.size for each in subwords])
        wrong = (tokens < 0) | (tokens >= sizes)
        if wrong.any():
            first = int(wrong.argmax())
            size = int(np.broadcast_to(sizes, tokens.shape)[first])
            raise ValueError(f"subwords: expected tokens from 0 to {size - 1}, got {tokens[first]}")

    def _texts(self, block: Sequence[Item]) -> list[list[str]]:
        """The block's sources and targets, or its sentences alone."""
        if self.sides == 0:
            self.sides = 1 if isinstance(block[0], str) else 2
        for i, item in enumerate(block, self.lines):
            if not has_sides(item, self.sides):
                wanted = "str" if self.sides == 1 else "(source, target) of str"
                raise TypeError(f"pairs: expected {wanted} as at first, item {i} is {item!r:.80}")
            for text in (item,) if isinstance(item, str) else item:
                check_text(f"pairs: item {i}", text)
        if self.sides == 1:
            return [[str(item) for item in block]]
        return [[item[side] for item in block] for side in range(2)]


def _of_each(lengths: Integers, values: Sequence[int]) -> Integers:
    """The value of its side for every token of pairs that lie one after the other.

    lengths: int (sides, pairs). values: of the sides; one number where they are the same.
    """
    if len(set(values)) == 1:
        return np.asarray(values[0])
    return np.repeat(np.tile(values, lengths.shape[1]), lengths.T.ravel())


def _blocks(items: Iterable[Item]) -> Iterator[list[Item]]:
    iterator = iter(items)
    while block := list(islice(iterator, BLOCK)):
        yield block
