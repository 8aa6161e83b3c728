# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back: SentencePiece, whole words, or any object that encodes and decodes.

A vocabulary travels in a folder: `subwords.json`, which says what it is, and its own file.

    tokenizer/subwords.json  tokenizer/sentencepiece.model      (or tokenizer/words.txt)

Where source and target have one each, they lie in folders below it, `source` and `target`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from relpos.config import Config
from relpos.data.files import read_json, write_file, write_json
from relpos.data.text import Item, texts_of
from relpos.position.arrays import check_choice, check_count, check_truth

UNKNOWN, BOS, EOS = 0, 1, 2  # of the vocabularies made here
SPECIAL = 3
DESCRIPTION = "subwords.json"
NONE = -1  # a vocabulary that knows every text has no token for the unknown

Folder = str | os.PathLike[str]


@runtime_checkable
class Subwords(Protocol):
    """What the data pipeline needs of a vocabulary."""

    @property
    def size(self) -> int:
        """Tokens go from 0 to below this."""

    @property
    def bos(self) -> int:
        """The token before a target."""

    @property
    def eos(self) -> int:
        """The token after a target."""

    @property
    def unknown(self) -> int:
        """The token for what is not in the vocabulary; -1: there is none."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a sentence, without bos and eos."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of many sentences."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The sentence; bos and eos among the tokens say nothing."""

    def fingerprint(self) -> str:
        """The same for vocabularies that give the same tokens: whether a token cache is valid."""

    def save(self, folder: Folder) -> None:
        """Writes what `load_subwords` reads."""


def load_subwords(folder: Folder, *, tokenizer: Any = None) -> Subwords:
    """The vocabulary that was saved in a folder.

    folder: str or PathLike, as the `tokenizer` of a checkpoint.
    tokenizer: the object itself, where it is one of your own that was wrapped; it is checked to be
        the same. Of `Sides` a pair of them, or of one of them and None.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(
            f"{os.fspath(folder)}: no vocabulary here, {DESCRIPTION} is missing"
        )
    told = read_json(path)
    kinds: dict[str, Any] = {each.kind: each for each in (SentencePiece, Words, Wrapped, Sides)}
    if told.get("kind") not in kinds:
        raise ValueError(f"{path}: kind: expected {', '.join(kinds)}, got {told.get('kind')!r}")
    if told["kind"] == Wrapped.kind:
        subwords: Subwords = _wrapped_again(path, told, tokenizer)
    elif told["kind"] == Sides.kind:
        subwords = _sides_again(Path(folder), tokenizer)
    else:
        subwords = kinds[told["kind"]].load(folder)
    for name, value in _description(told["kind"], subwords).items():
        if told.get(name) != value:
            raise ValueError(f"{path}: {name}: expected {told.get(name)!r}, got {value!r}")
    return subwords


def check_vocabulary(subwords: Subwords, config: Config) -> None:
    """Refuses a vocabulary that does not fit the model's embeddings."""
    sides: tuple[tuple[Side, int], ...] = (
        ("source", config.encoder.layers), ("target", config.decoder.layers),
    )  # fmt: skip
    for side, layers in sides:
        own = of_side(subwords, side)
        if not hasattr(own, "encode") or not hasattr(own, "size"):
            raise TypeError(
                f"subwords: expected a vocabulary, with size and encode, got {type(own).__name__}"
            )
        size, expected = own.size, getattr(config, f"{side}_vocabulary")
        if layers > 0 and size != expected:
            raise ValueError(
                f"tokenizer: has {size:,} tokens, the model's {side}_vocabulary is {expected:,}: it "
                "belongs to another model"
            )
    both = config.encoder.layers > 0 and config.decoder.layers > 0
    if isinstance(subwords, Sides) and both and config.share_embeddings:
        raise ValueError(
            "share_embeddings: expected False, as source and target have a vocabulary each"
        )


# --------------------------------------------------------------------------------------------------
# SentencePiece
# --------------------------------------------------------------------------------------------------


class SentencePiece:
    """Pieces of words, by sentencepiece (`pip install 'relpos[train]'`).

        subwords = relpos.data.SentencePiece.train(lines, size=8000)
        subwords.encode("Two dogs run.")

    model: bytes. The content of a sentencepiece model, which must have bos and eos.
    """

    kind = "sentencepiece"
    file = "sentencepiece.model"

    def __init__(self, model: bytes) -> None:
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
        fewer: bool. Where the lines give fewer tokens than size, so many; False: an error.

        The same lines and arguments give the same vocabulary, on any machine with the same
        sentencepiece.
        """
        check_choice("kind", kind, ("bpe", "unigram"))
        check_count("size", size, SPECIAL + 1)
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
            if fewer and (most := _most(error)) is not None:
                return cls(_trained(sample, most, kind, byte_fallback, character_coverage))
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
        return list(self._processor.Encode(text))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores that this process may use."""
        threads = len(os.sched_getaffinity(0))
        return list(self._processor.Encode(list(texts), num_threads=threads))

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._processor.Decode(_within(tokens, self.size)))

    def piece(self, token: int) -> str:
        """How the token is written, with "▁" for a space: for pictures."""
        return str(self._processor.IdToPiece(_within((token,), self.size)[0]))

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
        _save(folder, self, self.kind, self.file, self._model)

    def __repr__(self) -> str:
        return f"<SentencePiece of {self.size:,} tokens>"


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


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(
            "sentencepiece is not installed: pip install 'relpos[train]', or use whole words, "
            "relpos.data.Words or --subwords words"
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
    _sentencepiece().SentencePieceTrainer.Train(
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


def _why_no_training(error: RuntimeError, size: int) -> str:
    text = str(error)
    if (most := _most(error)) is not None:
        return f"size: {size:,} tokens are more than these lines give, at most {most:,}"
    if limit := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return (
            f"size: {size:,} tokens are too few, single characters and bytes alone need "
            f"{int(limit[1]):,}; from Python a lower character_coverage or byte_fallback=False "
            "needs fewer"
        )
    if "sentences_.empty()" in text or "all_chars_count" in text:
        return "lines: none has text of up to 4,192 bytes that sentencepiece could learn from"
    return f"sentencepiece: {_short(error)}"


def _short(error: Exception) -> str:
    """Without the source file and the condition that sentencepiece puts first."""
    return re.sub(r"^.*\.(?:cc|h)\(\d+\)\s*(?:\[.*?\]\s*)?", "", str(error)).strip() or "unreadable"


# --------------------------------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------------------------------


class Words:
    """A token for each word between white space; needs nothing but Python.

        subwords = relpos.data.Words.train(lines, size=1000)

    words: str each, different and without white space: tokens 3, 4, 5 and so on.
    """

    kind = "words"
    file = "words.txt"
    names = ("<unk>", "<s>", "</s>")

    def __init__(self, words: Iterable[str]) -> None:
        self._words = tuple(words)
        self._tokens = {word: token for token, word in enumerate(self._words, SPECIAL)}
        if len(self._tokens) != len(self._words):
            twice = next(word for word, count in Counter(self._words).items() if count > 1)
            raise ValueError(f"words: expected different ones, got {twice!r} twice")
        for word in self._words:
            if word.split() != [word]:
                raise ValueError(f"words: expected words without white space, got {word!r}")

    @classmethod
    def train(cls, lines: Iterable[Item], size: int = 32768) -> Words:
        """The most frequent words of these lines, in alphabetical order among equals.

        lines: str each, or pairs of str, whose sides share one vocabulary.
        size: int. The most tokens, those for bos, eos and the unknown among them.
        """
        check_count("size", size, SPECIAL + 1)
        counts: Counter[str] = Counter()
        for line in texts_of("lines", lines):
            counts.update(line.split())
        if not counts:
            raise ValueError("lines: expected at least one that is not empty, got none")
        order = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(order[: size - SPECIAL])

    @classmethod
    def load(cls, path: Folder) -> Words:
        """From a file of a word a line, or from the folder that `save` wrote."""
        file = Path(path)
        file = file / cls.file if file.is_dir() else file
        try:
            return cls(file.read_bytes().decode().removesuffix("\n").split("\n"))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def size(self) -> int:
        return SPECIAL + len(self._words)

    @property
    def bos(self) -> int:
        return BOS

    @property
    def eos(self) -> int:
        return EOS

    @property
    def unknown(self) -> int:
        return UNKNOWN

    def encode(self, text: str) -> list[int]:
        find = self._tokens.get
        return [find(word, UNKNOWN) for word in text.split()]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        known = (token for token in _within(tokens, self.size) if token not in (BOS, EOS))
        return " ".join(map(self.piece, known))

    def piece(self, token: int) -> str:
        """How the token is written: for pictures."""
        _within((token,), self.size)
        return self.names[token] if token < SPECIAL else self._words[token - SPECIAL]

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self._words).encode()).hexdigest()

    def save(self, folder: Folder) -> None:
        _save(folder, self, self.kind, self.file, ("\n".join(self._words) + "\n").encode())

    def __repr__(self) -> str:
        return f"<Words, {self.size:,} tokens>"


# --------------------------------------------------------------------------------------------------
# An object of the user's
# --------------------------------------------------------------------------------------------------

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Dès Noël où un zéphyr haï me vêt de glaçons würmiens, 1,234.50 € !",
    "  several   spaces\tand a tab, 'quotes', “more”, semi-colons; 90 % (or less)",
    "Съешь ещё этих мягких французских булок 色は匂へど散りぬるを",
)


class Wrapped:
    """Any object with encode(text) and decode(tokens) as a vocabulary.

        subwords = relpos.data.Wrapped(tokenizer, size=50257, bos=50256, eos=50256)

    tokenizer: its encode gives integers, or an object whose `ids` are (Hugging Face's tokenizers),
        without bos and eos.
    size, bos, eos: int.
    unknown: int. -1: there is none.

    What it is cannot be saved with the model: `save` writes sizes and a fingerprint, and
    `load_subwords` wants the object again. The fingerprint is of what it makes of a few sentences.
    """

    kind = "wrapped"

    def __init__(
        self, tokenizer: Any, *, size: int, bos: int, eos: int, unknown: int = NONE
    ) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(tokenizer, name, None)):
                raise TypeError(
                    f"tokenizer: expected an object with encode and decode, "
                    f"{type(tokenizer).__name__} has no {name}"
                )
        self._tokenizer = tokenizer
        self._size = check_count("size", size, 1)
        for name, token, least in (("bos", bos, 0), ("eos", eos, 0), ("unknown", unknown, NONE)):
            if check_count(name, token, least) >= size:
                raise ValueError(f"{name}: expected a token below size={size}, got {token}")
        self._bos, self._eos, self._unknown = int(bos), int(eos), int(unknown)

    @property
    def tokenizer(self) -> Any:
        """The object itself."""
        return self._tokenizer

    @property
    def size(self) -> int:
        return self._size

    @property
    def bos(self) -> int:
        return self._bos

    @property
    def eos(self) -> int:
        return self._eos

    @property
    def unknown(self) -> int:
        return self._unknown

    def encode(self, text: str) -> list[int]:
        tokens = self._tokenizer.encode(text)
        return _within(getattr(tokens, "ids", tokens), self._size)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        said = _within(tokens, self._size)
        return str(self._tokenizer.decode([x for x in said if x not in (self._bos, self._eos)]))

    def fingerprint(self) -> str:
        numbers = [self._size, self._bos, self._eos, self._unknown]
        text = json.dumps([numbers, [self._probe(text) for text in PROBES]])
        return hashlib.sha256(text.encode()).hexdigest()

    def _probe(self, text: str) -> list[int] | str:
        try:
            return self.encode(text)
        except Exception as error:  # a tokenizer of few characters may refuse what it does not know
            return type(error).__name__

    def save(self, folder: Folder) -> None:
        _save(folder, self, self.kind)

    def __repr__(self) -> str:
        return f"<Wrapped {type(self._tokenizer).__name__} of {self.size:,} tokens>"


def _wrapped_again(path: Path, told: dict[str, Any], tokenizer: Any) -> Wrapped:
    if tokenizer is None:
        raise ValueError(
            f"{path}: the vocabulary was an object of your own, which is not in the folder: "
            "load_subwords(folder, tokenizer=...) takes it"
        )
    inner = tokenizer.tokenizer if isinstance(tokenizer, Wrapped) else tokenizer
    numbers = {name: told.get(name) for name in ("size", "bos", "eos", "unknown")}
    if not all(isinstance(value, int) for value in numbers.values()):
        raise ValueError(f"{path}: expected integers, got {numbers}")
    return Wrapped(inner, **numbers)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# One for each side
# --------------------------------------------------------------------------------------------------

Side = Literal["source", "target"]


class Sides:
    """A vocabulary for the source and another one for the target.

        subwords = relpos.data.Sides(Words.train(english), Words.train(chinese))

    source, target: Subwords. A model of theirs has share_embeddings=False.

    What is asked of it as Subwords is answered by the target's; `of_side` gives either.
    """

    kind = "sides"

    def __init__(self, source: Subwords, target: Subwords) -> None:
        for name, given in (("source", source), ("target", target)):
            if not isinstance(given, Subwords) or isinstance(given, type | Sides):
                raise TypeError(f"{name}: expected Subwords of one side, got {given!r:.80}")
        self.source, self.target = source, target

    @property
    def size(self) -> int:
        return self.target.size

    @property
    def bos(self) -> int:
        return self.target.bos

    @property
    def eos(self) -> int:
        return self.target.eos

    @property
    def unknown(self) -> int:
        return self.target.unknown

    def encode(self, text: str) -> list[int]:
        return self.target.encode(text)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return self.target.encode_many(texts)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.target.decode(tokens)

    def fingerprint(self) -> str:
        both = f"{self.source.fingerprint()} {self.target.fingerprint()}"
        return hashlib.sha256(both.encode()).hexdigest()

    def save(self, folder: Folder) -> None:
        self.source.save(Path(folder) / "source")
        self.target.save(Path(folder) / "target")
        _save(folder, self, self.kind)

    def __repr__(self) -> str:
        return f"<Sides: {self.source!r} and {self.target!r}>"


def of_side(subwords: Subwords, side: Side) -> Subwords:
    """The vocabulary of a side: its own, or the one that both have."""
    return getattr(subwords, side) if isinstance(subwords, Sides) else subwords


def _sides_again(folder: Path, tokenizer: Any) -> Sides:
    if isinstance(tokenizer, Sides):
        tokenizer = tokenizer.source, tokenizer.target
    elif isinstance(tokenizer, Subwords):  # another vocabulary: the caller compares
        tokenizer = None
    pair = (None, None) if tokenizer is None else tokenizer
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"tokenizer: expected a pair, as source and target have a vocabulary each, got {pair!r:.80}"
        )
    source, target = (
        load_subwords(folder / name, tokenizer=own)
        for name, own in zip(("source", "target"), pair, strict=True)
    )
    return Sides(source, target)


# --------------------------------------------------------------------------------------------------
# What they share
# --------------------------------------------------------------------------------------------------


def _description(kind: str, subwords: Subwords) -> dict[str, Any]:
    return {
        "kind": kind,
        "size": subwords.size,
        "bos": subwords.bos,
        "eos": subwords.eos,
        "unknown": subwords.unknown,
        "fingerprint": subwords.fingerprint(),
    }


def _save(
    folder: Folder, subwords: Subwords, kind: str, file: str = "", content: bytes = b""
) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if file:
        write_file(path / file, content)
    write_json(path / DESCRIPTION, _description(kind, subwords))


def _within(tokens: Iterable[int], size: int) -> list[int]:
    numbers = [int(token) for token in tokens]
    if numbers and not (0 <= min(numbers) and max(numbers) < size):
        wrong = next(token for token in numbers if not 0 <= token < size)
        raise ValueError(f"tokens: expected 0 to {size - 1}, the vocabulary's, got {wrong}")
    return numbers
