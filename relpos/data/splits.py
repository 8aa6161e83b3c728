# SPDX-License-Identifier: Apache-2.0
"""Tokens that now and then are two others, spelled alike: a sentence looks different every epoch.

A model learns so what its subwords are made of, which helps where there is little text. It is what
BPE-dropout (Provilkov et al. 2020) and sampled segmentations (Kudo 2018) are for; here it begins
from tokens, so that neither the text nor a tokenizer is needed while a model is trained, and it
follows from integers, so that an epoch is the same however often it is made.
"""

from __future__ import annotations

import zlib
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from relpos.data.order import STEP, mixed, word
from relpos.data.subwords import Subwords

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

_PARTS = 1  # names the draws for the parts of a token, after those for the token


@runtime_checkable
class Spelled(Protocol):
    """A vocabulary whose tokens have parts."""

    def spellings(self) -> list[str | None]:
        """How each token is written; None: a token that is not written, or cannot be parted."""


def check_chance(chance: float) -> float:
    if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance < 1:
        raise ValueError(f"split: expected 0 or more and below 1, got {chance!r}")
    return float(chance)


class Splits:
    """Which tokens of training data are split in two, and into which.

        splits = relpos.data.Splits(subwords, 0.1)
        batches = relpos.data.Batches(cache, splits=splits)

    subwords: Subwords. With `spellings`, as SentencePiece has.
    chance: float, 0 or more and below 1. That a token is split where it comes; of all pairs of tokens
        that are spelled as it is, each is as likely, and its halves are split with the same chance.

    checksum: int. Of all that decides, 32 bits.
    """

    def __init__(self, subwords: Subwords, chance: float) -> None:
        chance = check_chance(chance)
        if not isinstance(subwords, Spelled):
            raise ValueError(
                f"split: tokens of {type(subwords).__name__} have no parts; SentencePiece's have"
            )
        spellings = subwords.spellings()
        self.size = len(spellings)
        self._chance = np.uint64(int(chance * (1 << 32)))
        pairs = _pairs(spellings)
        ways = np.bincount([token for token, _, _ in pairs], minlength=self.size)
        self._ways = ways.astype(np.uint64)
        self._begins: Counts = np.cumsum(ways) - ways
        self._halves = np.array([pair[1:] for pair in pairs], np.int32).reshape(-1, 2)
        decides = b"".join(x.tobytes() for x in (self._chance, self._ways, self._halves))
        self.checksum = zlib.crc32(decides)

    def apply(self, tokens: npt.NDArray[np.integer], key: int) -> tuple[Tokens, Counts]:
        """The tokens with some of them split, and how many each of them has become.

        tokens: integers (n,), each below size.
        key: int. The draws that belong to it; the same key splits the same tokens alike.
        """
        draws = mixed(np.arange(tokens.size, dtype=np.uint64) * np.uint64(STEP) + np.uint64(key))
        ways = self._ways[tokens]
        split = (ways > 0) & ((draws >> np.uint64(32)) < self._chance)
        counts = np.ones(tokens.size, np.int64)
        if not split.any():
            return tokens.astype(np.int32), counts
        draws, ways = draws[split] & np.uint64((1 << 32) - 1), ways[split]
        way = (draws * ways >> np.uint64(32)).astype(np.int64)
        halves = self._halves[self._begins[tokens[split]] + way]
        parts, parts_counts = self.apply(halves.ravel(), word(key, _PARTS))
        counts[split] = parts_counts.reshape(-1, 2).sum(axis=1)
        made = np.repeat(split, counts)
        result = np.empty(made.size, np.int32)
        result[made], result[~made] = parts, tokens[~split]
        return result, counts

    def __repr__(self) -> str:
        can, chance = np.count_nonzero(self._ways), int(self._chance) / (1 << 32)
        return f"<Splits of {can:,} of {self.size:,} tokens, chance {chance:.3g}>"


def _pairs(spellings: list[str | None]) -> list[tuple[int, int, int]]:
    """(token, first half, second half), for every way to write a token with two others."""
    named = {text: token for token, text in enumerate(spellings) if text}
    return [
        (token, named[text[:i]], named[text[i:]])
        for token, text in enumerate(spellings)
        if text
        for i in range(1, len(text))
        if text[:i] in named and text[i:] in named
    ]
