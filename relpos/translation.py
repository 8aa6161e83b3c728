# SPDX-License-Identifier: Apache-2.0
"""What a Translator gives: translations, scores and alignments of lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relpos.position.arrays import Array


class TranslationWarning(UserWarning):
    """Something is amiss with a line, and the others are translated."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One of the things that may be said.

    text: str. tokens: int32 (n,), without begin and end.
    score: float. After penalties. log_probability: float. Of the tokens that were searched.
    finished: bool. False: it was cut off where it became too long.
    links: (i, j) each, as of `Alignment`, where they were asked for.
    """

    text: str
    tokens: npt.NDArray[np.int32]
    score: float
    log_probability: float
    finished: bool
    links: tuple[tuple[int, int], ...] = ()

    @property
    def pharaoh(self) -> str:
        """The links as "0-0 1-2"."""
        return _pharaoh(self.links)


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """What became of a line.

    line: int. Its number, from 1.
    n_best: Candidate each, from the best on. (): the line is empty, or it failed.
    cut: int. Tokens of the line that were left out, because it is too long.
    unknown: int. Tokens of the line that are the vocabulary's unknown.
    failed: bool. The model's numbers were not finite, or no token was left that may follow.
    """

    line: int
    n_best: tuple[Candidate, ...] = ()
    cut: int = 0
    unknown: int = 0
    failed: bool = False

    @property
    def text(self) -> str:
        """The best; empty where there is none."""
        return self.n_best[0].text if self.n_best else ""

    @property
    def score(self) -> float:
        """Of the best; 0 for an empty line, NaN where it failed."""
        return self.n_best[0].score if self.n_best else np.nan if self.failed else 0.0


def why_failed(no_repeat: int) -> str:
    """What a `Translation` that failed is told with; no_repeat: of its search."""
    dead_end = "no token is left that may follow, or " if no_repeat > 0 else ""
    return f"{dead_end}the model's numbers are not finite"


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """What the model thinks of a target that was given, the end counted among its tokens.

    line: int. Its number, from 1.
    log_probability: float. Of the whole.
    tokens: float32 (n + 1,). log p of each token; (n,) where the target is as long as the model
        takes: the end is not among them.
    hits: bool, as many. Whether it had the highest score of all; of an ensemble in its first model.
    source_tokens: int. Of the source; 0 if it says nothing, and of a decoder alone.
    """

    line: int
    log_probability: float
    tokens: Array
    hits: npt.NDArray[np.bool_]
    source_tokens: int

    @property
    def failed(self) -> bool:
        """The model's numbers were not finite."""
        return not np.isfinite(self.log_probability)


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Which source tokens the model looks at when it says a target token.

    line: int. Its number, from 1.
    weights: float32 (n + 1, m). Row j: where it looks when it says target token j; the last row is
        that of the end. A target as long as the model takes has no such row: (n, m).
    links: (i, j) each. A token of target word j looks at one of source word i most; words are
        numbered from 0 and stand between white space. With a vocabulary of your own they are tokens.
    source_words, target_words: int (m,), int (n,). The word that each token belongs to.
    """

    line: int
    weights: Array
    links: tuple[tuple[int, int], ...]
    source_words: tuple[int, ...] = ()
    target_words: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        """The model's numbers were not finite; there are no links then."""
        return not np.isfinite(self.weights).all()

    @property
    def soft(self) -> Array:
        """float32 (target words, source words): how much it looks at a source word, all of its
        tokens together, when it says a target word, the mean of its tokens. Rows sum to 1, but that
        of a word without a token is 0."""
        m, n = len(self.source_words), len(self.target_words)
        looks = np.zeros((1 + max(self.target_words, default=-1), n), np.float32)
        looks[list(self.target_words), range(n)] = 1
        looks /= np.maximum(looks.sum(axis=1, keepdims=True), 1)
        words = np.zeros((m, 1 + max(self.source_words, default=-1)), np.float32)
        words[range(m), list(self.source_words)] = 1
        soft: Array = (looks @ self.weights[:n] @ words).astype(np.float32)
        return soft

    @property
    def pharaoh(self) -> str:
        """The links as "0-0 1-2"."""
        return _pharaoh(self.links)

    def weighted(self, least: float = 0.01) -> str:
        """Every pair of words whose weight in `soft` is at least so much: "0-0:0.981 1-2:0.530"."""
        if self.failed:
            return ""
        return " ".join(
            f"{i}-{j}:{weight:.3f}"
            for i, column in enumerate(self.soft.T.tolist())
            for j, weight in enumerate(column)
            if weight >= least
        )


def _pharaoh(links: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{i}-{j}" for i, j in links)
