# SPDX-License-Identifier: Apache-2.0
"""What a trained model says, in tokens: beam search, greedy search, sampling, or step by step.

    model = relpos.Transformer.load("model.safetensors", training=False)
    batch = relpos.Batch([7, 4, 9, 5, 2], [0, 3, 5])  # two sources, nothing forced
    for results in model.search(batch, relpos.Search(beam=8, n_best=2)):
        print(results[0].tokens, results[0].score)

`relpos.Translator` is the same for text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.batch import Batch, packed
from relpos.position.arrays import (
    Array,
    check_choice,
    check_count,
    check_integers,
    check_number,
    check_size,
    check_truth,
)

if TYPE_CHECKING:
    from relpos.model import Transformer

Tokens = npt.NDArray[np.int32]
Penalty = Literal["wu", "power", "none"]

_DEFAULTS = _core.search_default()
_TOKENS = 1 << 31
_SEEDS = 1 << 64


def _default(name: str) -> Any:
    return _DEFAULTS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How to search; `Search()` is a beam of 4 with Wu's length penalty of 0.6.

    begin, end: int. The tokens before the first and after the last; a Translator puts those of its
        vocabulary here.
    beam: int. Hypotheses a sentence; 1: greedy.
    n_best: int. Results a sentence, at most beam; of sampling: draws.
    penalty: "wu", ((5 + L) / 6)^alpha, "power", L^alpha, or "none", 1: what divides the
        log-probability of L tokens, the end counted.
    alpha: float.
    coverage: float. Adds coverage sum_i log(min(sum_j a_ji, 1)) to the score, a_ji being what
        target place j pays to source place i in the last layer, mean over its heads; 0: nothing.
    min_length: int. Tokens before the end, at least.
    max_length: int. Tokens at most, a given beginning counted; 0: source tokens + max_more (without
        a source, tokens of the beginning + max_more), or min_length, if that is more.
    max_more: int. See max_length.
    no_repeat: int. No n-gram of so many tokens comes twice; 0: they may.
    suppressed: int each. Tokens that are never said.
    sample: bool. n_best independent draws a sentence, and no beam.
    temperature: float. When sampling, logits are divided by it, and log_probability is of these.
    top_k: int. Draws are from so many most likely tokens; 0: from all.
    top_p: float. And from the fewest, likeliest first, that have this share together; 1: all.
    seed: int. Of the draws.
    average: bool. With the average of the weights, which a model in training with config.ema keeps.
    """

    begin: int = _default("begin")
    end: int = _default("end")
    beam: int = _default("beam")
    n_best: int = _default("n_best")
    penalty: Penalty = _default("penalty")
    alpha: float = _default("alpha")
    coverage: float = _default("coverage")
    min_length: int = _default("min_length")
    max_length: int = _default("max_length")
    max_more: int = _default("max_more")
    no_repeat: int = _default("no_repeat")
    suppressed: Sequence[int] = _default("suppressed")
    sample: bool = _default("sample")
    temperature: float = _default("temperature")
    top_k: int = _default("top_k")
    top_p: float = _default("top_p")
    seed: int = _default("seed")
    average: bool = _default("average")

    def __post_init__(self) -> None:
        for name in ("begin", "end", "seed"):
            self._set(name, check_count(name, getattr(self, name), 0))
        for name, least in _LEAST.items():
            self._set(name, check_size(name, getattr(self, name), least))
        for name in ("alpha", "coverage", "temperature", "top_p"):
            value = check_number(name, getattr(self, name), positive=name == "temperature")
            if value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value:g}")
            self._set(name, value)
        check_choice("penalty", self.penalty, ("wu", "power", "none"))
        for name in ("begin", "end"):
            if getattr(self, name) >= _TOKENS:
                raise ValueError(f"{name}: expected 0 to {_TOKENS - 1}, got {getattr(self, name)}")
        if not isinstance(self.suppressed, Iterable):
            got = type(self.suppressed).__name__
            raise TypeError(f"suppressed: expected tokens, got {got}")
        given = check_integers("suppressed", tuple(self.suppressed), "(count,)", (1,)).tolist()
        for token in given:
            if not 0 <= token < _TOKENS:
                raise ValueError(f"suppressed: expected 0 to {_TOKENS - 1}, got {token}")
        self._set("suppressed", tuple(dict.fromkeys(map(int, given))))
        self._set("sample", check_truth("sample", self.sample))
        self._set("average", check_truth("average", self.average))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and up to 1, got {self.top_p:g}")
        if self.seed >= _SEEDS:
            raise ValueError(f"seed: expected below 2**64, got {self.seed}")
        if not self.sample and self.n_best > self.beam:
            raise ValueError(
                f"n_best: expected at most beam={self.beam}, got {self.n_best}: a beam has no more "
                "results than hypotheses"
            )
        if 0 < self.max_length < self.min_length:
            raise ValueError(
                f"min_length: expected at most max_length={self.max_length}, got {self.min_length}"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def rows(self) -> int:
        """Targets of one sentence that grow at the same time."""
        return self.n_best if self.sample else self.beam

    @property
    def _packed(self) -> _core.SearchTuple:
        suppressed = np.array(self.suppressed, np.int32) if self.suppressed else None
        return (
            self.begin, self.end, self.beam, self.n_best, self.penalty, self.alpha, self.coverage,
            self.min_length, self.max_length, self.max_more, self.no_repeat, suppressed,
            self.sample, self.temperature, self.top_k, self.top_p, self.seed, self.average,
        )  # fmt: skip


_LEAST = {
    "beam": 1, "n_best": 1, "min_length": 0, "max_length": 0, "max_more": 0, "no_repeat": 0,
    "top_k": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """One target that a search has found.

    tokens: int32 (n,). With what was forced, without begin and end.
    score: float. After penalties; results are in falling order of it.
    log_probability: float. Of the tokens that were searched, the end among them.
    finished: bool. False: it was cut off at max_length.
    """

    tokens: Tokens
    score: float
    log_probability: float
    finished: bool


class Decoder:
    """One model, or an ensemble: several of one vocabulary, whose probabilities are averaged.

        decoder = relpos.Decoder(model)
        logits = decoder.begin(relpos.Batch([7, 4, 9], [0, 3], [1], [0, 1]), most_rows=2)
        logits = decoder.step([5, 6], parents=[0, 0])  # two rows go on from the first

    models: Transformer each. While the decoder is at work no other call into them is allowed.
    """

    def __init__(self, *models: Transformer) -> None:
        from relpos.model import Transformer

        if not models:
            raise ValueError("models: expected a model or several, got none")
        for model in models:
            if not isinstance(model, Transformer):
                raise TypeError(f"models: expected relpos.Transformer, got {type(model).__name__}")
        self._core = _core.Decoder(tuple(model._core for model in models))

    def search(self, batch: Batch, search: Search | None = None) -> list[list[Hypothesis]]:
        """The targets of a batch of sources, for each sentence from the best on.

        batch: Batch. Its target, if given, is what every target begins with, `begin` not among it;
            a decoder alone goes on from it. Labels are not read.
        search: Search. None: Search().

        A sentence whose logits are not finite, or of which no token may follow (no_repeat), has no
        results; the others do not depend on it.
        """
        how = Search() if search is None else search
        if not isinstance(how, Search):
            raise TypeError(f"search: expected relpos.Search, got {type(how).__name__}")
        found = self._core.search(packed(batch), how._packed)
        return [[Hypothesis(*each) for each in sentence] for sentence in found]

    def begin(self, batch: Batch, *, most_rows: int) -> Array:
        """Encodes the sources, and reads what the targets begin with: at least one token each.

        most_rows: int. The most that a step will have.

        Returns float32 (sentences, vocabulary): the logits of what comes next.
        """
        return self._core.begin(packed(batch), check_size("most_rows", most_rows, 1))

    def step(self, tokens: Any, parents: Any = None) -> Array:
        """Each row goes on with a token.

        tokens: int (rows,).
        parents: int (rows,). The rows of the step before that they go on from, each of which may
            come several times or not at all; None: row r goes on from row r.

        Returns float32 (rows, vocabulary): the logits of what comes next; of an ensemble the
        logarithm of its mean probabilities.
        """
        said = check_integers("tokens", tokens, "(rows,)", (1,))
        if said.size > 0 and not 0 <= int(said.min()) <= int(said.max()) < _TOKENS:
            wrong = said[(said < 0) | (said >= _TOKENS)][0]
            raise ValueError(f"tokens: expected tokens of the vocabulary, from 0 on, got {wrong}")
        rows = None
        if parents is not None:
            rows = check_integers("parents", parents, "(rows,)", (1,)).astype(np.int64)
        return self._core.step(rows, said.astype(np.int32))
