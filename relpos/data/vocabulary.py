# SPDX-License-Identifier: Apache-2.0
"""What a vocabulary is to the rest, and what those that are made here share."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

from relpos.data.files import write_file, write_json

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
        """Writes into a folder what `load_subwords` reads, if that need not be given the object."""


def is_subwords(x: Any) -> TypeGuard[Subwords]:
    """A class has all that they have, and is none."""
    return isinstance(x, Subwords) and not isinstance(x, type)


def description_of(kind: str, subwords: Subwords) -> dict[str, Any]:
    return {
        "kind": kind,
        "size": subwords.size,
        "bos": subwords.bos,
        "eos": subwords.eos,
        "unknown": subwords.unknown,
        "fingerprint": subwords.fingerprint(),
    }


def save_vocabulary(
    folder: Folder, subwords: Subwords, kind: str, file: str = "", content: bytes = b""
) -> None:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if file:
        write_file(path / file, content)
    write_json(path / DESCRIPTION, description_of(kind, subwords))


def within(tokens: Iterable[int], size: int, name: str = "tokens") -> list[int]:
    numbers = integers(name, tokens)
    if numbers and not (0 <= min(numbers) and max(numbers) < size):
        wrong = next(token for token in numbers if not 0 <= token < size)
        raise ValueError(f"{name}: expected 0 to {size - 1}, the vocabulary's, got {wrong}")
    return numbers


def integers(name: str, tokens: Iterable[int]) -> list[int]:
    """As int each. What int() would make some of, as 3.7, "5" and True, is refused."""
    if isinstance(tokens, Iterable) and not isinstance(tokens, Set):  # which has no order
        given = list(tokens)
        try:  # suppress() takes as long as twenty tokens
            if bool not in map(type, given):
                return list(map(operator.index, given))
        except TypeError:
            pass
    raise TypeError(f"{name}: expected integers, got {tokens!r:.80}")
