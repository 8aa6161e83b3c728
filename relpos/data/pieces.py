# SPDX-License-Identifier: Apache-2.0
"""Subwords of sentencepiece: learned from text, loaded, asked for what its model says."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from relpos.data.text import Item, check_text, texts_of
from relpos.data.vocabulary import BOS, EOS, SPECIAL, UNKNOWN, Folder, save_vocabulary, within
from relpos.position.arrays import check_choice, check_count, check_truth
from relpos.warned import warn


class SentencePiece:
    """Pieces of words, by sentencepiece (`pip install 'relpos[train]'`).

        subwords = relpos.data.SentencePiece.train(lines, size=8000)
        subwords.encode("Two dogs run.")

    model: bytes. The content of a sentencepiece model, which must have bos and eos.
    """

    kind = "sentencepiece"
    file = "sentencepiece.model"

    def __init__(self, model: bytes) -> None:
        if not isinstance(model, bytes):
            raise TypeError(
                f"model: expected bytes, got {type(model).__name__}; SentencePiece.load reads a file"
            )
        self._model = model
        self._processor = _sentencepiece().SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"model: not a sentencepiece model: {_short(error)}") from None
        for name, token in (("bos", self.bos), ("eos", self.eos)):
            if token < 0:
                raise ValueError(f"model: this sentencepiece model has no {name}")

    @classmethod
    def train(
        cls,
        lines: Iterable[Item],
        size: int = 32768,
        kind: Literal["bpe", "unigram"] = "bpe",
        *,
        byte_fallback: bool = True,
        character_coverage: float = 0.9995,
        sentences: int = 1_000_000,
        seed: int = 0,
        fewer: bool = False,
    ) -> SentencePiece:
        """A vocabulary for these lines, one for source and target together.

        lines: str each, or pairs of str. A sentence of more than 4,192 bytes is left out.
        size: int. All tokens, those for bos, eos and the unknown among them.
        kind: "bpe" or "unigram".
        byte_fallback: bool. 256 of the tokens are bytes, which spell characters that have none:
            nothing is unknown.
        character_coverage: float. The share of all characters that get tokens, the frequent ones
            first; 1: every character of the lines.
        sentences: int. The most to learn from; more are sampled, with the seed.
        seed: int.
        fewer: bool. True: if the lines give fewer tokens than size, so many; if single characters and
            bytes alone are more than size, so many. False: either is an error.

        The same lines and arguments give the same vocabulary, on any machine with the same
        sentencepiece.
        """
        check_choice("kind", kind, ("bpe", "unigram"))
        if check_count("size", size, SPECIAL + 1) > _MOST:
            raise ValueError(f"size: expected at most {_MOST:,}, got {size:,}")
        if not 0.0 < character_coverage <= 1.0:
            raise ValueError(
                f"character_coverage: expected above 0 and up to 1, got {character_coverage}"
            )
        byte_fallback = check_truth("byte_fallback", byte_fallback)
        fewer = check_truth("fewer", fewer)
        sample = _sample(lines, check_count("sentences", sentences, 1), seed)
        if not sample:
            raise ValueError("lines: expected at least one that is not empty, got none")
        try:
            return cls(_trained(sample, size, kind, byte_fallback, character_coverage))
        except RuntimeError as error:
            least = _least(error)
            fitting = _most(error) or least
            if fewer and fitting is not None:
                if least is not None:
                    warn(
                        f"a vocabulary of {size:,} tokens has no room for parts of words: it is the "
                        f"text's characters and bytes, {least:,}; a larger one (target_vocabulary=N, "
                        "--vocabulary N) makes shorter sentences"
                    )
                return cls(_trained(sample, fitting, kind, byte_fallback, character_coverage))
            raise ValueError(_why_no_training(error, size)) from None

    @classmethod
    def load(cls, path: Folder) -> SentencePiece:
        """From a sentencepiece model file, or from the folder that `save` wrote."""
        file = Path(path)
        file = file / cls.file if file.is_dir() else file
        try:
            return cls(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def size(self) -> int:
        return int(self._processor.GetPieceSize())

    @property
    def bos(self) -> int:
        return int(self._processor.bos_id())

    @property
    def eos(self) -> int:
        return int(self._processor.eos_id())

    @property
    def unknown(self) -> int:
        return int(self._processor.unk_id())

    def encode(self, text: str) -> list[int]:
        return list(self._processor.Encode(check_text("text", text)))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores that this process may use."""
        threads = len(os.sched_getaffinity(0))
        given = [check_text("texts", text) for text in texts]
        return list(self._processor.Encode(given, num_threads=threads))

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._processor.Decode(within(tokens, self.size)))

    def piece(self, token: int) -> str:
        """How the token is written, with "▁" for a space: for pictures."""
        return str(self._processor.IdToPiece(within((token,), self.size)[0]))

    def spellings(self) -> list[str | None]:
        """How each token is written, for `Splits`; None: bytes, what is not of a text, and symbols
        that whoever made the model wants to be one token always."""
        spellings = list[str | None]()
        for piece in _messages(self._model, 1):
            told = dict(_fields(piece))
            text: Any = told[1]
            spellings.append(text.decode() if told.get(3, _NORMAL) == _NORMAL else None)
        return spellings

    def fingerprint(self) -> str:
        return hashlib.sha256(self._model).hexdigest()

    def save(self, folder: Folder) -> None:
        save_vocabulary(folder, self, self.kind, self.file, self._model)

    def __repr__(self) -> str:
        return f"<SentencePiece of {self.size:,} tokens>"


_MOST = (1 << 31) - 1  # tokens that sentencepiece can count
_NORMAL = 1  # the type of a piece that text is made of, and what it is where none is told


def _messages(message: bytes, wanted: int) -> list[bytes]:
    return [value for number, value in _fields(message) if number == wanted]  # type: ignore[misc]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer, which a sentencepiece model is: number and value each.

    sentencepiece tells the types of pieces, but not which were defined by a user.
    """
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            yield field, number()
            continue
        length = {1: 8, 5: 4}.get(kind) or number()
        yield field, message[at : at + length]
        at += length


def _sentencepiece(instead: str = "") -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(
            f"sentencepiece is not installed: pip install 'relpos[train]'{instead}"
        ) from None
    return sentencepiece


def _sample(lines: Iterable[Item], most: int, seed: int) -> list[str]:
    """All lines that say something, or so many of them that each is as likely."""
    choose, kept, count = random.Random(seed), list[str](), 0
    for line in texts_of("lines", lines):
        if not line or line.isspace():
            continue
        count += 1
        if len(kept) < most:
            kept.append(line)
        elif (place := choose.randrange(count)) < most:
            kept[place] = line
    return kept


def _trained(
    sample: list[str], size: int, kind: str, byte_fallback: bool, character_coverage: float
) -> bytes:
    written = io.BytesIO()
    words = ", or use whole words, relpos.data.Words or --subwords words"
    _sentencepiece(words).SentencePieceTrainer.Train(
        sentence_iterator=iter(sample),
        model_writer=written,
        vocab_size=size,
        model_type=kind,
        byte_fallback=byte_fallback,
        character_coverage=character_coverage,
        unk_id=UNKNOWN,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=16,  # sums of the unigram model are in the order of its threads
        minloglevel=2,
    )
    return written.getvalue()


def _most(error: RuntimeError) -> int | None:
    """How many tokens there can be, if that is what was wrong."""
    limit = re.search(r"too high.*value <= (\d+)", str(error))
    return int(limit[1]) if limit else None


def _least(error: RuntimeError) -> int | None:
    """How many tokens there must be, if that is what was wrong."""
    limit = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
    return int(limit[1]) if limit else None


def _why_no_training(error: RuntimeError, size: int) -> str:
    text = str(error)
    if (most := _most(error)) is not None:
        return f"size: {size:,} tokens are more than these lines give, at most {most:,}"
    if (least := _least(error)) is not None:
        return (
            f"size: {size:,} tokens are too few, single characters and bytes alone need "
            f"{least:,}; from Python a lower character_coverage or byte_fallback=False "
            "needs fewer"
        )
    if "sentences_.empty()" in text or "all_chars_count" in text:
        return "lines: none has text of up to 4,192 bytes that sentencepiece could learn from"
    return f"sentencepiece: {_short(error)}"


def _short(error: Exception) -> str:
    """Without the source file and the condition that sentencepiece puts first."""
    return re.sub(r"^.*\.(?:cc|h)\(\d+\)\s*(?:\[.*?\]\s*)?", "", str(error)).strip() or "unreadable"
