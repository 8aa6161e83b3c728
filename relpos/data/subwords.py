# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back: SentencePiece, whole words, or any object that encodes and decodes.

A vocabulary travels in a folder: `subwords.json`, which says what it is, and its own file.

    tokenizer/subwords.json  tokenizer/sentencepiece.model      (or tokenizer/words.txt)

Where source and target have one each, they lie in folders below it, `source` and `target`. How an
object of the user's own gets there is in objects.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from relpos.config import Config
from relpos.data import objects
from relpos.data.files import read_json
from relpos.data.pieces import SentencePiece
from relpos.data.text import Item, check_text, texts_of
from relpos.data.vocabulary import (
    BOS,
    DESCRIPTION,
    EOS,
    NONE,
    SPECIAL,
    UNKNOWN,
    Folder,
    Subwords,
    description_of,
    integers,
    is_subwords,
    save_vocabulary,
    within,
)
from relpos.position.arrays import check_count


def load_subwords(folder: Folder, *, tokenizer: Any = None, unpickle: bool = False) -> Subwords:
    """The vocabulary that was saved in a folder.

    folder: str or PathLike, as the `tokenizer` of a checkpoint.
    tokenizer: the object itself, where it is one of your own, wrapped or Subwords; it is checked to
        be the same, and so are Subwords of any kind. Of `Sides` a pair of them, or of one of them
        and None. One of Hugging Face's tokenizers is in the folder, and need not be given.
    unpickle: bool. Any other object that can be pickled is in the folder too, and is read from there
        if this is True, which is for folders of people you trust: a pickle is a program.
    """
    if isinstance(tokenizer, type):
        raise TypeError(f"tokenizer: expected an object, got {tokenizer!r:.80}")
    if not isinstance(unpickle, bool):
        raise TypeError(f"unpickle: expected a bool, got {type(unpickle).__name__}")
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(
            f"{os.fspath(folder)}: no vocabulary here, {DESCRIPTION} is missing"
        )
    told = read_json(path)
    kinds: dict[str, Any] = {each.kind: each for each in (SentencePiece, Words, Wrapped, Sides)}
    known = (*kinds, OWN)
    if told.get("kind") not in known:
        raise ValueError(f"{path}: kind: expected {', '.join(known)}, got {told.get('kind')!r}")
    if told["kind"] in OBJECTS and tokenizer is None:
        tokenizer = objects.fetch(Path(folder), unpickle)
    if told["kind"] == Wrapped.kind:
        subwords: Subwords = _wrapped_again(path, told, tokenizer)
    elif told["kind"] == OWN:
        subwords = _own_again(path, tokenizer)
    elif told["kind"] == Sides.kind:
        subwords = _sides_again(Path(folder), tokenizer, unpickle)
    elif tokenizer is None or isinstance(tokenizer, Subwords):
        subwords = kinds[told["kind"]].load(folder)
    else:
        raise TypeError(
            f"tokenizer: expected None, as {os.fspath(folder)} has the vocabulary itself, got "
            f"{tokenizer!r:.80}"
        )
    before = _fingerprint_before(subwords)
    for name, value in description_of(told["kind"], subwords).items():
        if told.get(name) not in ((value, before) if name == "fingerprint" else (value,)):
            raise ValueError(f"{path}: {name}: expected {told.get(name)!r}, got {value!r}")
    if isinstance(tokenizer, Subwords) and tokenizer.fingerprint() != subwords.fingerprint():
        raise ValueError(f"tokenizer: another vocabulary than that of {os.fspath(folder)}")
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
        if isinstance(words, str):
            raise TypeError(f"words: expected several str, got one, {words!r:.80}")
        self._words = tuple(check_text("words", word) for word in words)
        if not self._words:
            raise ValueError("words: expected at least one, got none")
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
        return [find(word, UNKNOWN) for word in check_text("text", text).split()]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        known = (token for token in within(tokens, self.size) if token not in (BOS, EOS))
        return " ".join(map(self.piece, known))

    def piece(self, token: int) -> str:
        """How the token is written: for pictures."""
        within((token,), self.size)
        return self.names[token] if token < SPECIAL else self._words[token - SPECIAL]

    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self._words).encode()).hexdigest()

    def save(self, folder: Folder) -> None:
        save_vocabulary(
            folder, self, self.kind, self.file, ("\n".join(self._words) + "\n").encode()
        )

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
CHARACTERS = tuple(map(chr, range(32, 127)))  # for what refuses a sentence, or takes little of it


class Wrapped:
    """Any object with encode(text) and decode(tokens) as a vocabulary.

        subwords = relpos.data.Wrapped(tokenizer, size=50257, bos=50256, eos=50256)

    tokenizer: its encode gives integers, or an object whose `ids` are (Hugging Face's tokenizers),
        without bos and eos.
    size, bos, eos: int.
    unknown: int. -1: there is none.

    It is saved with the model: one of Hugging Face's tokenizers in their format, any other by pickle,
    which `load_subwords` reads only if it is told to; one that cannot be pickled must be given to it
    again. The fingerprint is made of its tokens for a few sentences and each character of ASCII.
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
        return within(getattr(tokens, "ids", tokens), self._size, "tokenizer: encode()")

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        said = within(tokens, self._size)
        text = self._tokenizer.decode([x for x in said if x not in (self._bos, self._eos)])
        if not isinstance(text, str):
            raise TypeError(f"tokenizer: decode(): expected str, got {type(text).__name__}")
        return text

    def fingerprint(self) -> str:
        return self._fingerprint((*PROBES, *CHARACTERS))

    def _fingerprint(self, probes: Sequence[str]) -> str:
        numbers = [self._size, self._bos, self._eos, self._unknown]
        text = json.dumps([numbers, [self._probe(text) for text in probes]])
        return hashlib.sha256(text.encode()).hexdigest()

    def _probe(self, text: str) -> list[int] | str:
        try:
            return self.encode(text)
        except Exception as error:  # a tokenizer of few characters may refuse what it does not know
            return type(error).__name__

    def save(self, folder: Folder) -> None:
        objects.store(Path(folder), self._tokenizer)
        save_vocabulary(folder, self, self.kind)

    def __repr__(self) -> str:
        return f"<Wrapped {type(self._tokenizer).__name__} of {self.size:,} tokens>"


def _wrapped_again(path: Path, told: dict[str, Any], tokenizer: Any) -> Wrapped:
    inner = tokenizer.tokenizer if isinstance(tokenizer, Wrapped) else tokenizer
    numbers = {name: told.get(name) for name in ("size", "bos", "eos", "unknown")}
    if not all(isinstance(value, int) for value in numbers.values()):
        raise ValueError(f"{path}: expected integers, got {numbers}")
    return Wrapped(inner, **numbers)  # type: ignore[arg-type]


OWN = "own"  # the kind of Subwords that say none themselves
OBJECTS = (Wrapped.kind, OWN)  # kinds that are objects of the user's own


def save_subwords(folder: Folder, subwords: Any) -> None:
    """Into a folder that is made, with a description where `save` writes none."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / DESCRIPTION).unlink(missing_ok=True)  # another vocabulary's
    objects.clear(path)
    subwords.save(path)
    if isinstance(subwords, Subwords) and not (path / DESCRIPTION).is_file():
        objects.store(path, subwords)
        save_vocabulary(path, subwords, OWN)


def wants_object(folder: Folder) -> bool:
    """Has `load_subwords` to be given the vocabulary of this folder, or that of a side?"""
    path = Path(folder)
    kind = read_json(path / DESCRIPTION).get("kind") if (path / DESCRIPTION).is_file() else None
    if kind == Sides.kind:
        return any(wants_object(path / side) for side in ("source", "target"))
    return kind in OBJECTS and not objects.comes_alone(path)


def _own_again(path: Path, tokenizer: Any) -> Subwords:
    if not isinstance(tokenizer, Subwords):
        raise TypeError(
            f"tokenizer: expected the Subwords that {path} tells of, got {tokenizer!r:.80}"
        )
    return tokenizer


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
            if not is_subwords(given) or isinstance(given, Sides):
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
        return _of_both(self.source.fingerprint(), self.target.fingerprint())

    def save(self, folder: Folder) -> None:
        save_subwords(Path(folder) / "source", self.source)
        save_subwords(Path(folder) / "target", self.target)
        save_vocabulary(folder, self, self.kind)

    def __repr__(self) -> str:
        return f"<Sides: {self.source!r} and {self.target!r}>"


def encode_texts(subwords: Subwords, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts; those of a vocabulary of the user's are looked at."""
    encoded = subwords.encode_many(texts)
    if type(subwords) not in (SentencePiece, Words, Wrapped):
        encoded = [integers("subwords: encode_many()", tokens) for tokens in encoded]
    if len(encoded) != len(texts):
        raise ValueError(
            f"subwords: encode_many(): expected {len(texts)} lists, got {len(encoded)}"
        )
    return encoded


def of_side(subwords: Subwords, side: Side) -> Subwords:
    """The vocabulary of a side: its own, or the one that both have."""
    return getattr(subwords, side) if isinstance(subwords, Sides) else subwords


def _of_both(source: str, target: str) -> str:
    return hashlib.sha256(f"{source} {target}".encode()).hexdigest()


def _fingerprint_before(subwords: Subwords) -> str:
    """As it was without CHARACTERS, which folders of then have."""
    if isinstance(subwords, Wrapped):
        return subwords._fingerprint(PROBES)
    if isinstance(subwords, Sides):
        return _of_both(*map(_fingerprint_before, (subwords.source, subwords.target)))
    return subwords.fingerprint()


def _sides_again(folder: Path, tokenizer: Any, unpickle: bool) -> Sides:
    if isinstance(tokenizer, Sides):
        tokenizer = tokenizer.source, tokenizer.target
    elif isinstance(tokenizer, Subwords):  # another vocabulary: load_subwords compares
        tokenizer = None
    pair = (None, None) if tokenizer is None else tokenizer
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(
            f"tokenizer: expected a pair, as source and target have a vocabulary each, got {pair!r:.80}"
        )
    source, target = (
        load_subwords(folder / name, tokenizer=own, unpickle=unpickle)
        for name, own in zip(("source", "target"), pair, strict=True)
    )
    return Sides(source, target)
