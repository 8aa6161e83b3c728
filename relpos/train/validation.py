# SPDX-License-Identifier: Apache-2.0
"""What a model in training makes of the validation data: likelihood, and where asked for, BLEU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from relpos import evaluation
from relpos.batch import Batch
from relpos.config import Config
from relpos.data import Subwords
from relpos.model import Transformer
from relpos.search import Search
from relpos.train.progress import perplexity


@dataclass(frozen=True, slots=True)
class Validation:
    """What validation found.

    nll: float. The mean of -log p(label), without smoothing. perplexity: float, its exponential.
    accuracy: float. The share of labels that had the highest score. tokens: int. Labels.
    bleu: float or None. Of greedy translations, against the references as the vocabulary spells
        them.
    """

    nll: float
    perplexity: float
    accuracy: float
    tokens: int
    bleu: float | None = None

    def figures(self) -> dict[str, Any]:
        """By their names, those that there are."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        bleu = "" if self.bleu is None else f"  BLEU {self.bleu:.2f}"
        return (
            f"validation {self.nll:.4f}  perplexity {self.perplexity:.2f}  "
            f"accuracy {self.accuracy:.1%}{bleu}"
        )


def check_bleu(config: Config, validated: bool) -> None:
    """Refuses BLEU where there can be none, before hours are spent."""
    if not validated:
        raise ValueError("validate_bleu: there is no validation to translate")
    if config.encoder.layers == 0:
        raise ValueError("validate_bleu: a decoder alone translates nothing")
    evaluation.check_sacrebleu("validate_bleu")


def validate(
    model: Transformer, batches: Iterable[Batch], subwords: Subwords | None = None
) -> Validation:
    """The model as it is, without dropout; where it keeps an average of its weights, with that.

    subwords: of the translations whose BLEU is asked for; None: it is not.
    """
    nll = hits = 0.0
    tokens = 0
    average = len(model.averages) > 0
    said: list[str] = []
    references: list[str] = []
    for batch in batches:
        result = model.forward(batch, average=average)
        tokens += result.tokens
        nll += result.nll * result.tokens
        hits += result.accuracy * result.tokens
        if subwords is not None:
            said += _translated(model, batch, subwords, average)
            references += _references(batch, subwords)
    bleu = None if subwords is None else evaluation.bleu(said, [references], advice=False).value
    return Validation(nll / tokens, perplexity(nll / tokens), hits / tokens, tokens, bleu)


def _translated(model: Transformer, batch: Batch, subwords: Subwords, average: bool) -> list[str]:
    search = Search(begin=subwords.bos, end=subwords.eos, beam=1, average=average)
    found = model.search(Batch(batch.source, batch.source_offsets), search)
    return [subwords.decode(each[0].tokens.tolist()) if each else "" for each in found]


def _references(batch: Batch, subwords: Subwords) -> list[str]:
    """The labels, each sentence without the end."""
    offsets = batch.target_offsets
    return [
        subwords.decode(batch.labels[begin : end - 1].tolist())
        for begin, end in zip(offsets[:-1], offsets[1:], strict=True)
    ]
