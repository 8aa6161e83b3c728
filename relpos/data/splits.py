# SPDX-License-Identifier: Apache-2.0
"""Tokens that now and then are two others, spelled alike: a sentence looks different every epoch.

A model learns so what its subwords are made of, which helps where there is little text. It is what
BPE-dropout (Provilkov et al. 2020) and sampled segmentations (Kudo 2018) are for. Those segment a
text anew and may move borders; here every border stays and some are added, so that neither the text
nor a tokenizer is needed while a model is trained.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relpos.data.order import STEP, WORD, Numbers, mixed
from relpos.data.vocabulary import Subwords, is_subwords
from relpos.position.arrays import check_number

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

NEVER = np.uint64(WORD)  # a word that splits nothing
_HALF = 32  # bits of a word say whether a token is split, and as many into which two
_LOW = np.uint64((1 << _HALF) - 1)


@runtime_checkable
class Spelled(Protocol):
    """Subwords whose tokens are written as one string, which may be that of two others."""

    def spellings(self) -> list[str | None]:
        """How each token is written; None: it is not, or is never to be split."""


def check_chance(name: str, value: Any) -> float:
    chance = check_number(name, value)
    if not 0 <= chance < 1:
        raise ValueError(f"{name}: expected 0 or more and below 1, got {value}")
    return chance


def check_spelled(name: str, subwords: Any) -> Spelled:
    if not isinstance(subwords, Spelled):
        raise ValueError(
            f"{name}: tokens of {type(subwords).__name__} have no parts to be split into; "
            "those of SentencePiece have"
        )
    return subwords


class Splits:
    """Which tokens of training data are split in two, and into which.

        splits = relpos.data.Splits(subwords, 0.1)
        batches = relpos.data.Batches(cache, splits=splits)

    subwords: Subwords. With `spellings`, as SentencePiece has.
    chance: float, 0 or more and below 1, that a token is split, at each place where it comes. All
        pairs of tokens spelled as it is are equally likely; its halves are split with the same chance.

    size: int, fingerprint: str. Of the subwords.
    checksum: int. Of all that decides, 32 bits.
    """

    def __init__(self, subwords: Subwords, chance: float) -> None:
        self.chance = check_chance("chance", chance)
        if not is_subwords(subwords):
            raise TypeError(f"subwords: expected Subwords, got {subwords!r:.80}")
        spellings = check_spelled("subwords", subwords).spellings()
        self.size, self.fingerprint = subwords.size, subwords.fingerprint()
        fits = isinstance(spellings, list) and len(spellings) == self.size
        if not fits or not all(isinstance(x, str | None) for x in spellings):
            raise TypeError(
                f"subwords: expected spellings() to give a list of {self.size:,}, str or None "
                f"each, got {spellings!r:.80}"
            )
        self._below = np.uint64(min(math.ceil(self.chance * (1 << _HALF)), (1 << _HALF) - 1))
        pairs = _pairs(spellings)
        ways = np.bincount([token for token, _, _ in pairs], minlength=self.size)
        self._ways = ways.astype(np.uint64)
        self._begins: Counts = np.cumsum(ways) - ways
        self._halves = np.array([pair[1:] for pair in pairs], np.int32).reshape(-1, 2)
        decides = b"".join(x.tobytes() for x in (self._below, self._ways, self._halves))
        self.checksum = zlib.crc32(decides)

    def apply(self, tokens: npt.NDArray[Any], words: Numbers) -> tuple[Tokens, Counts]:
        """The tokens with some of them split, and how many each of them has become.

        tokens: integers (n,), each below size.
        words: uint64 (n,). 64 random bits for each token, which decide; NEVER: it stays.
        """
        ways = self._ways[tokens]
        split = (ways > 0) & ((words >> np.uint64(_HALF)) < self._below)
        counts = np.ones(tokens.size, np.int64)
        if not split.any():
            return tokens.astype(np.int32), counts
        words = words[split]
        way = ((words & _LOW) * ways[split] >> np.uint64(_HALF)).astype(np.int64)
        halves = self._halves[self._begins[tokens[split]] + way]
        each = mixed(words[:, None] + np.uint64(STEP) * np.arange(1, 3, dtype=np.uint64))
        parts, parts_counts = self.apply(halves.ravel(), each.ravel())
        counts[split] = parts_counts.reshape(-1, 2).sum(axis=1)
        made = np.repeat(split, counts)
        result = np.empty(made.size, np.int32)
        result[made], result[~made] = parts, tokens[~split]
        return result, counts

    def __repr__(self) -> str:
        can = np.count_nonzero(self._ways)
        return f"<Splits of {can:,} of {self.size:,} tokens, chance {self.chance:.3g}>"


def _pairs(spellings: list[str | None]) -> list[tuple[int, int, int]]:
    """(token, first half, second half), for every way to write a token with two others."""
    named: dict[str, int] = {}
    for token, text in enumerate(spellings):
        if text:
            named.setdefault(text, token)
    return [
        (token, named[text[:i]], named[text[i:]])
        for token, text in enumerate(spellings)
        if text
        for i in range(1, len(text))
        if text[:i] in named and text[i:] in named
    ]
