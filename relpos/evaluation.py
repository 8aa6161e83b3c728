# SPDX-License-Identifier: Apache-2.0
"""How good translations are: BLEU and chrF by sacrebleu, perplexity, and BLEU by length; and what a
language model thinks of a text.

result = relpos.evaluation.evaluate(translations, [references], sources)
print(result)
print(relpos.evaluation.evaluate_text(language_model, texts))
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos.position.arrays import integer_of
from relpos.train.progress import perplexity

if TYPE_CHECKING:
    from relpos.translation import Score
    from relpos.translator import Progress, Translator

__all__ = [
    "Evaluation",
    "Likelihood",
    "Metric",
    "Places",
    "Range",
    "TextEvaluation",
    "bleu",
    "by_length",
    "chrf",
    "evaluate",
    "evaluate_text",
    "likelihood_of",
    "plot",
]

LENGTHS = (10, 20, 30, 40, 50)
PLACES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Metric:
    """A score of a whole text.

    name: str, as "BLEU". value: float, of 100. signature: str, which says how it was computed.
    more: str. Of BLEU its precisions and lengths.
    """

    name: str
    value: float
    signature: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """BLEU of the sentences whose sources have from `least` to `most` words (None: and more).

    sentences: int. bleu: float. length_ratio: float. Words of the translations to those of the
        references.
    """

    least: int
    most: int | None
    sentences: int
    bleu: float
    length_ratio: float

    @property
    def name(self) -> str:
        return _name_of(self.least, self.most)


def _name_of(least: int, most: int | None) -> str:
    return f"{least} and more" if most is None else f"{least} to {most}"


@dataclass(frozen=True, slots=True)
class Likelihood:
    """What a model thinks of a text, each token given those before it.

    nll: float. The mean of -log p. perplexity: float, its exponential, infinite where that is too
        large. accuracy: float. The share of tokens that had the highest score. tokens: int, the ends
        counted.
    """

    nll: float
    perplexity: float
    accuracy: float
    tokens: int

    def as_json(self) -> dict[str, Any]:
        """An infinite perplexity is None, as JSON has none."""
        return asdict(self) | ({"perplexity": None} if math.isinf(self.perplexity) else {})


@dataclass(frozen=True, slots=True)
class Places:
    """What a language model thinks of tokens that are the `least`th to the `most`th (None: and
    later) of their lines."""

    least: int
    most: int | None
    likelihood: Likelihood

    @property
    def name(self) -> str:
        return _name_of(self.least, self.most)


@dataclass(frozen=True, slots=True)
class TextEvaluation:
    """What `evaluate_text` found; `str` is a table of it.

    lines: int. Those that have tokens. failed: int. Those of them for which the model's numbers
        are not finite; they are left out of the rest.
    """

    lines: int
    failed: int
    likelihood: Likelihood
    by_place: tuple[Places, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain lists and dictionaries; an infinite perplexity is None, as JSON has none."""
        places = [
            {"least": x.least, "most": x.most, **x.likelihood.as_json()} for x in self.by_place
        ]
        return {
            "lines": self.lines, "failed": self.failed, "likelihood": self.likelihood.as_json(),
            "by_place": places,
        }  # fmt: skip

    def __str__(self) -> str:
        it = self.likelihood
        rows = [
            f"{self.lines:,} {'line' if self.lines == 1 else 'lines'}",
            "",
            f"perplexity {it.perplexity:.4g}, accuracy {it.accuracy:.2%} of {it.tokens:,} tokens",
            "",
            f"{'token of its line':>17}  {'tokens':>10}  {'perplexity':>10}  accuracy",
        ]
        for part in self.by_place:
            it = part.likelihood
            rows.append(
                f"{part.name:>17}  {it.tokens:10,}  {it.perplexity:10.4g}  {it.accuracy:8.2%}"
            )
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found; `str` is a table of it."""

    sentences: int
    metrics: tuple[Metric, ...]
    likelihood: Likelihood | None
    by_length: tuple[Range, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain lists and dictionaries; an infinite perplexity is None, as JSON has none."""
        it = self.likelihood
        return asdict(self) | {"likelihood": None if it is None else it.as_json()}

    def __str__(self) -> str:
        rows = [f"{self.sentences:,} {'sentence' if self.sentences == 1 else 'sentences'}", ""]
        width = max(len(each.name) for each in self.metrics)
        for each in self.metrics:
            rows.append(f"{each.name:{width}}  {each.value:6.2f}  {each.signature}")
            if each.more:
                rows.append(f"{'':{width}}          {each.more}")
        if self.likelihood is not None:
            it = self.likelihood
            rows += [
                "",
                f"perplexity {it.perplexity:.4g}, accuracy {it.accuracy:.2%} of {it.tokens:,} tokens "
                "of the reference",
            ]
        if self.by_length:
            rows += ["", f"{'words of source':>15}  {'sentences':>9}  {'BLEU':>6}  length ratio"]
            for part in self.by_length:
                rows.append(
                    f"{part.name:>15}  {part.sentences:9,}  {part.bleu:6.2f}  "
                    f"{part.length_ratio:12.3f}"
                )
        return "\n".join(rows)


def evaluate(
    translations: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None = None,
    *,
    translator: Translator | None = None,
    lowercase: bool = False,
    tokenize: str = "13a",
    lengths: Sequence[int] = LENGTHS,
) -> Evaluation:
    """Compares translations with references.

    translations: str each.
    references: lists of str, of each of which line i is one way to say translation i.
    sources: str each; None: there is no BLEU by length.
    translator: Translator. If given, its perplexity and accuracy on the first references, too;
        needs sources.
    lowercase: bool. BLEU of lower case beside the other.
    tokenize: str. Of BLEU, as sacrebleu names it.
    lengths: int each, rising. Where ranges of words of the source end.
    """
    others = {} if sources is None else {"sources": sources}
    check_counts(references, translations=translations, **others)
    if translator is not None and sources is None:
        raise ValueError("sources: expected what the translator is to read, got None")
    metrics = [bleu(translations, references, tokenize=tokenize)]
    if lowercase:
        metrics.append(bleu(translations, references, tokenize=tokenize, lowercase=True))
    metrics.append(chrf(translations, references))
    likelihood: Likelihood | None = None
    ranges: tuple[Range, ...] = ()
    if sources is not None:
        ranges = by_length(translations, references, sources, lengths=lengths, tokenize=tokenize)
        if translator is not None:
            likelihood = likelihood_of(translator, sources, references[0])
    return Evaluation(len(translations), tuple(metrics), likelihood, ranges)


def bleu(
    translations: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    advice: bool = True,
) -> Metric:
    """BLEU of a text, with its signature.

    advice: bool. sacrebleu warns of text that seems to be tokenised.
    """
    check_counts(references, translations=translations)
    _check_tokenize(tokenize)
    metrics = _sacrebleu().metrics
    # Once is enough.
    metric = metrics.BLEU(lowercase=lowercase, tokenize=tokenize, force=lowercase or not advice)
    score = metric.corpus_score(list(translations), [list(each) for each in references])
    precisions = "/".join(f"{each:.1f}" for each in score.precisions)
    more = (
        f"{precisions}, brevity {score.bp:.3f}, {score.sys_len:,} words to {score.ref_len:,} of the "
        "reference"
    )
    name = "BLEU, lower case" if lowercase else "BLEU"
    return Metric(name, float(score.score), str(metric.get_signature()), more)


def chrf(translations: Sequence[str], references: Sequence[Sequence[str]]) -> Metric:
    """chrF2 of a text, with its signature."""
    check_counts(references, translations=translations)
    metric = _sacrebleu().metrics.CHRF()
    score = metric.corpus_score(list(translations), [list(each) for each in references])
    return Metric("chrF2", float(score.score), str(metric.get_signature()))


def by_length(
    translations: Sequence[str],
    references: Sequence[Sequence[str]],
    sources: Sequence[str],
    *,
    lengths: Sequence[int] = LENGTHS,
    tokenize: str = "13a",
) -> tuple[Range, ...]:
    """BLEU of the sentences of each range of lengths, where there are any."""
    check_counts(references, translations=translations, sources=sources)
    _check_tokenize(tokenize)
    ends = _ends("lengths", lengths)
    metric = _sacrebleu().metrics.BLEU(tokenize=tokenize, force=True)
    words = [len(source.split()) for source in sources]
    ranges = []
    for above, most in pairwise((-1, *ends, math.inf)):
        chosen = [i for i, count in enumerate(words) if above < count <= most]
        if not chosen:
            continue
        score = metric.corpus_score(
            [translations[i] for i in chosen], [[each[i] for i in chosen] for each in references]
        )
        ratio = score.sys_len / max(score.ref_len, 1)
        last = None if most == math.inf else int(most)
        least = 0 if above < 0 and min(words) == 0 else max(int(above) + 1, 1)
        ranges.append(Range(least, last, len(chosen), float(score.score), ratio))
    return tuple(ranges)


def likelihood_of(
    translator: Translator, sources: Sequence[str], references: Sequence[str]
) -> Likelihood | None:
    """Perplexity and accuracy of a model; pairs of which a side gives no token don't count, as in
    training."""
    # Of all: what it warns of has a line's number. Unknown words were told of when it translated.
    scores = translator._scored(translator._given(sources, references))
    whole = [x for x in scores if x.source_tokens > 0 and x.tokens.size > 1 and not x.failed]
    return _mean_of(*_tokens_of(whole)) if whole else None


def evaluate_text(
    translator: Translator,
    texts: Sequence[str],
    *,
    places: Sequence[int] = PLACES,
    progress: Progress | None = None,
) -> TextEvaluation:
    """What a language model thinks of lines of text, and by where in its line a token stands.

    translator: Translator of a decoder alone.
    texts: str each. Lines that give no token don't count, as in training; of a line that is too
        long the beginning counts.
    places: int each, rising. Where ranges of places end, the first token of a line being at 1.
    progress: called with the number of lines that are done.
    """
    _check_lines("texts", texts)
    ends = _ends("places", places)
    if not translator.generates:
        raise ValueError("translator: expected one of a decoder alone, got one with an encoder")
    scores = translator.score(None, texts, progress=progress)
    there = [each for each in scores if each.tokens.size > 1]
    whole = [each for each in there if not each.failed]
    if not whole:
        raise ValueError(f"texts: {len(texts):,} lines, none of which has tokens to be looked at")
    log_p, hits = _tokens_of(whole)
    at = np.concatenate([np.arange(1, each.tokens.size + 1) for each in whole])
    parts = []
    for above, most in pairwise((0, *ends, math.inf)):
        chosen = (at > above) & (at <= most)
        if chosen.any():
            last = None if most == math.inf else int(most)
            parts.append(Places(int(above) + 1, last, _mean_of(log_p[chosen], hits[chosen])))
    failed = len(there) - len(whole)
    return TextEvaluation(len(there), failed, _mean_of(log_p, hits), tuple(parts))


def _tokens_of(scores: Sequence[Score]) -> tuple[Any, Any]:
    """log p and hits of the tokens of all, one after the other."""
    log_p = np.concatenate([each.tokens for each in scores]).astype(np.float64)
    return log_p, np.concatenate([each.hits for each in scores])


def _mean_of(log_p: Any, hits: Any) -> Likelihood:
    nll = -float(log_p.mean())
    return Likelihood(nll, perplexity(nll), float(hits.mean()), log_p.size)


def plot(evaluation: Evaluation | TextEvaluation, path: str | os.PathLike[str]) -> Path:
    """Draws BLEU by length, or a text by place, into a file, whose ending says its kind."""
    plots = _plots()
    ax = plots.canvas.without_display((8, 4.5)).subplots()
    by_place = isinstance(evaluation, TextEvaluation)
    draw = plots.perplexity_by_place if by_place else plots.bleu_by_length
    return Path(plots.save(draw(evaluation, ax=ax), path))


def _ends(name: str, given: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected rising numbers from 1 on, got {type(given).__name__}")
    ends = tuple(integer_of(name, each) for each in given)
    if any(one >= other for one, other in pairwise((0, *ends))):
        got = ", ".join(map(str, ends))
        raise ValueError(f"{name}: expected rising numbers from 1 on, got {got}")
    return ends


def check_counts(references: Sequence[Sequence[str]], **others: Sequence[str]) -> None:
    """Refuses what are no texts, texts that are not as long as each other, and empty ones."""
    if isinstance(references, str) or not hasattr(references, "__len__"):
        raise TypeError(f"references: expected lists of str, got {type(references).__name__}")
    if len(references) == 0:
        raise ValueError("references: expected one text or several, got none")
    if isinstance(references[0], str):
        raise TypeError(
            "references: expected lists of str, each a way to say all of the translations, got str: "
            "[references] is one such way"
        )
    texts = {f"references[{i}]": each for i, each in enumerate(references)} | others
    for name, lines in texts.items():
        _check_lines(name, lines)
    expected = len(references[0])
    for name, lines in texts.items():
        if len(lines) != expected:
            raise ValueError(
                f"{name}: {len(lines):,} lines, the reference has {expected:,}: line i of one must "
                "be line i of the other"
            )
    if expected == 0:
        raise ValueError("references: expected a line at least, got none")


def _check_lines(name: str, lines: Sequence[str]) -> None:
    if isinstance(lines, str) or not hasattr(lines, "__len__"):
        raise TypeError(f"{name}: expected a list of str, got {type(lines).__name__}")
    for i, line in enumerate(lines):
        if not isinstance(line, str):
            raise TypeError(f"{name}: expected str, item {i} is {line!r:.80}")


def check_asked(tokenize: str, plot: str | os.PathLike[str] | None) -> None:
    """Says what is missing, or cannot be had, before hours of work."""
    _check_tokenize(tokenize)
    check_picture(plot)


def check_picture(plot: str | os.PathLike[str] | None) -> None:
    if plot is not None:
        _plots().canvas.check_ending("plot", plot)


def _check_tokenize(tokenize: str) -> None:
    bleu = _sacrebleu().metrics.BLEU
    known = bleu.TOKENIZERS
    if tokenize not in known:
        raise ValueError(f"tokenize: expected {', '.join(known)}, got {tokenize}")
    try:  # some want a package of their own, or a file from a network
        bleu(tokenize=tokenize)
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ValueError(f"tokenize: {tokenize} cannot be had: {why.strip()}") from None


def check_sacrebleu(what: str) -> None:
    """Refuses what takes sacrebleu where that is not installed."""
    _sacrebleu(what)


def _sacrebleu(what: str = "evaluate") -> Any:
    try:
        module = importlib.import_module("sacrebleu")
        importlib.import_module("sacrebleu.metrics")
        return module
    except ImportError:
        raise ImportError(f"{what}: takes sacrebleu, `pip install 'relpos[train]'`") from None


def _plots() -> Any:
    """Drawing: takes matplotlib, which nothing else here does."""
    return importlib.import_module("relpos.plots")
