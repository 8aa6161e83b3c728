# SPDX-License-Identifier: Apache-2.0
"""From text to text: translations, continuations, scores and alignments by a trained model.

    translator = relpos.Translator.load("run")
    translator.translate(["Two dogs run through the snow."])

A checkpoint knows its vocabulary, so that a folder is all it takes. docs/translation.md says more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, repeat
from typing import Any

import numpy as np

from relpos.batch import Batch
from relpos.config import path_text
from relpos.data.batches import cut
from relpos.data.pieces import SentencePiece
from relpos.data.subwords import Side, check_vocabulary, encode_texts, of_side
from relpos.data.vocabulary import Subwords
from relpos.model import Integers, Precision, Transformer
from relpos.position.arrays import Array, check_count
from relpos.saved import find_model, load_model
from relpos.search import Decoder, Hypothesis, Search
from relpos.translation import (
    Alignment,
    Candidate,
    Score,
    Translation,
    TranslationWarning,
    why_failed,
)
from relpos.warned import warn

BATCH_TOKENS = 2048
WINDOW = 2048  # lines that are read ahead, to be sorted by length

Progress = Callable[[int], object]  # is told how many lines are done
Align = tuple[Integers, Integers | None]  # layers, and heads of them or the mean of all


@dataclass(slots=True)
class _Line:
    """A line on its way through the model."""

    line: int
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)  # what is forced, or given
    source_text: str | None = None
    target_text: str | None = None
    cut: int = 0
    unknown: int = 0


class Translator:
    """A model, or several of one vocabulary, that translate text; or a decoder alone that goes on
    from it.

        translator = relpos.Translator.load("run", average=5)
        for translation in translator.stream(lines, search=relpos.Search(beam=8)):
            print(translation.text, translation.score)

    models: Transformer, or several, whose probabilities are averaged.
    subwords: Subwords. The vocabulary they were trained with.

    A line that is too long is cut at the model's max_length and the rest of it left out; one on
    which the model's numbers are not finite gives "", and so does one of which Search.no_repeat
    leaves no token that may follow. A TranslationWarning names such a line, and the others are
    translated.
    """

    def __init__(self, models: Transformer | Sequence[Transformer], subwords: Subwords) -> None:
        if not isinstance(models, Transformer | Iterable):
            got = type(models).__name__
            raise TypeError(f"models: expected relpos.Transformer, or several, got {got}")
        self.models = (models,) if isinstance(models, Transformer) else tuple(models)
        self.subwords = subwords
        self._decoder = Decoder(*self.models)
        for model in self.models:
            check_vocabulary(subwords, model.config)
        self.max_length = min(model.config.max_length for model in self.models)
        self._tokens = min(model.limits[0] for model in self.models)
        self._sentences = min(model.limits[1] for model in self.models)
        self.max_length = min(self.max_length, self._tokens)
        self.generates = self.models[0].config.encoder.layers == 0

    @classmethod
    def load(
        cls,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        average: int | None = None,
        best: bool = False,
        tokenizer: Any = None,
        unpickle: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        device: str = "cpu",
        precision: Precision = "f32",
    ) -> Translator:
        """From a checkpoint, a run (its newest checkpoint), or a file of weights with its vocabulary
        beside it; from several, an ensemble.

        paths: str or PathLike, or several.
        average: int. The mean of so many of a run's last checkpoints.
        best: bool. A run's checkpoint with the best validation instead of the newest.
        tokenizer: the vocabulary itself, where it is an object of your own; of two a pair.
        unpickle: bool. Such an object is read from the folder, which runs what whoever wrote it
            wants (`relpos.data.load_subwords`).
        batch_tokens: int. The most source tokens that are translated at the same time.
        device, precision: as of `Transformer`.
        """
        if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
            paths = [paths]
        given = [path_text(path, "paths") for path in paths]
        if not given:
            raise ValueError("paths: expected a folder or several, got none")
        check_count("batch_tokens", batch_tokens, 1)
        models, found = [], None
        for path in given:
            model, subwords = load_model(
                find_model(path, average, best), tokenizer=tokenizer, unpickle=unpickle,
                batch_tokens=batch_tokens, device=device, precision=precision,
            )  # fmt: skip
            if found is not None and subwords.fingerprint() != found.fingerprint():
                raise ValueError(
                    f"{path}: has another vocabulary than {given[0]}: the models of an ensemble "
                    "share one"
                )
            found = subwords
            models.append(model)
        assert found is not None
        return cls(models, found)

    # ---- translating -----------------------------------------------------------------------------

    def translate(
        self,
        sentences: Iterable[str],
        *,
        search: Search | None = None,
        batch_tokens: int | None = None,
        prefixes: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> list[str]:
        """The translations of sentences, in their order; "" of an empty one.

        sentences: str each.
        search: Search. None: Search().
        batch_tokens: int. The most source tokens that are translated at the same time.
        prefixes: str each. What each translation begins with.
        progress: is called with the number of sentences that are done.
        """
        found = self.translate_all(
            sentences, search=search, batch_tokens=batch_tokens, prefixes=prefixes,
            progress=progress,
        )  # fmt: skip
        return [each.text for each in found]

    def translate_all(
        self,
        sentences: Iterable[str],
        *,
        search: Search | None = None,
        batch_tokens: int | None = None,
        prefixes: Iterable[str] | None = None,
        align: Align | None = None,
        progress: Progress | None = None,
    ) -> list[Translation]:
        """As `translate`, with scores, tokens and n-best lists.

        align: (layer, head). Links of words too, by the decoder's attention there: as of `align`.
        """
        return list(
            self.stream(
                _several("sentences", sentences),
                search=search,
                batch_tokens=batch_tokens,
                prefixes=prefixes,
                align=align,
                progress=progress,
            )
        )

    def stream(
        self,
        lines: Iterable[str],
        *,
        search: Search | None = None,
        batch_tokens: int | None = None,
        prefixes: Iterable[str] | None = None,
        align: Align | None = None,
        progress: Progress | None = None,
        window: int = WINDOW,
    ) -> Iterator[Translation]:
        """Translations in the order of the lines, while they are read.

        lines: str each, without end if need be.
        window: int. So many are read ahead and sorted by length, so that a batch holds equals.

        The rest as in `translate_all`.
        """
        if self.generates:
            raise ValueError("model: has no encoder, it goes on from text: generate() does that")
        check_count("window", window, 1)
        each = iter(_several("lines", lines))
        windows = iter(lambda: list(islice(each, window)), [])
        return self.in_windows(
            windows, search=search, batch_tokens=batch_tokens, prefixes=prefixes, align=align,
            progress=progress,
        )  # fmt: skip

    def in_windows(
        self,
        windows: Iterable[Sequence[str]],
        *,
        search: Search | None = None,
        batch_tokens: int | None = None,
        prefixes: Iterable[str] | None = None,
        align: Align | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Translation]:
        """As `stream`, where the caller says how far to read ahead: by lists of lines, each of which
        is translated before the next one is asked for. A decoder alone goes on from each line."""
        if self.generates and (prefixes is not None or align is not None):
            raise ValueError(f"{'align' if prefixes is None else 'prefixes'}: there is no source")
        how = self._checked(search)
        if prefixes is not None:
            _several("prefixes", prefixes)
        budget = self._budget(batch_tokens)
        if align is not None:
            try:
                layer, head = align
            except (TypeError, ValueError):
                raise TypeError(f"align: expected (layer, head), got {align!r}") from None
            self._check_aligned(layer, head)
        return self._searched(windows, prefixes, how, budget, align, progress)

    def generate(
        self,
        prompts: Iterable[str],
        *,
        search: Search | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
        window: int = WINDOW,
    ) -> Iterator[Translation]:
        """What a decoder alone, a language model, says after each prompt; the prompt is part of it.

        prompts: str each. An empty one lets it begin by itself.

        The rest as in `stream`.
        """
        if not self.generates:
            raise ValueError("model: has an encoder, it translates: translate() does that")
        check_count("window", window, 1)
        each = iter(_several("prompts", prompts))
        windows = iter(lambda: list(islice(each, window)), [])
        return self.in_windows(windows, search=search, batch_tokens=batch_tokens, progress=progress)

    def _checked(self, search: Search | None) -> Search:
        """The search with the vocabulary's tokens, if this model can make it."""
        how = Search() if search is None else search
        if not isinstance(how, Search):
            raise TypeError(f"search: expected relpos.Search, got {type(how).__name__}")
        vocabulary = self.models[0].config.target_vocabulary
        for name in ("top_k",) if how.sample else ("beam", "n_best"):
            if getattr(how, name) > vocabulary:
                raise ValueError(
                    f"{name}: expected at most {vocabulary:,}, the tokens of the vocabulary, "
                    f"got {getattr(how, name):,}"
                )
        if how.rows > self._tokens:
            raise ValueError(
                f"{'n_best' if how.sample else 'beam'}: expected at most {self._tokens:,}, the "
                f"tokens of a batch (batch_tokens), got {how.rows:,}"
            )
        how = replace(how, begin=self.subwords.bos, end=self.subwords.eos)
        if len({*how.suppressed, how.end}) == vocabulary:
            raise ValueError("suppressed: expected tokens that leave others to be said, got all")
        return how

    def _said(self, lines: list[_Line], search: Search | None) -> dict[int, Translation]:
        """What is made of lines that are tokens already, and were warned of as they became so."""
        how = self._checked(search)
        found = {each.line: each for each in self._window(lines, how, self._tokens, None)}
        warn_of_unknown(*unknown_in(lines))
        return found

    def _check_aligned(self, layer: Integers, head: Integers | None) -> None:
        """Before the first line is answered."""
        for model in self.models:
            model._chosen(layer, head)

    def _searched(
        self,
        windows: Iterable[Sequence[str]],
        prefixes: Iterable[str] | None,
        how: Search,
        budget: int,
        align: Align | None,
        progress: Progress | None,
    ) -> Iterator[Translation]:
        forced = repeat("") if prefixes is None else iter(prefixes)
        read = done = unknown = touched = 0
        for window in windows:
            if self.generates:
                _check_texts("prompts", window)
                lines = self._encoded(read, None, window, forced=True)
            else:
                begins = list(islice(forced, len(window)))
                _check_texts("sentences", window)
                _check_texts("prefixes", begins)
                if len(begins) < len(window):
                    raise ValueError(
                        f"prefixes: expected one for each sentence, got {read + len(begins):,}"
                    )
                lines = self._encoded(read, window, begins, forced=True)
            read += len(lines)
            tokens, several = unknown_in(lines)
            unknown, touched = unknown + tokens, touched + several
            for each in _in_order(self._window(lines, how, budget, align), done):
                done = each.line
                if each.failed:
                    warn(
                        f"line {done:,}: {why_failed(how.no_repeat)}, no translation",
                        TranslationWarning,
                    )
                if progress is not None:
                    progress(done)
                yield each
        if prefixes is not None and next(forced, None) is not None:
            raise ValueError(f"prefixes: expected one for each of {read:,} sentences, got more")
        warn_of_unknown(unknown, touched)

    def _window(
        self, lines: list[_Line], how: Search, budget: int, align: Align | None
    ) -> Iterator[Translation]:
        """Those of a window, as they are done."""
        full = []
        for line in lines:
            if line.source or self.generates:
                full.append(line)
            else:
                yield Translation(line.line)
        for batch in self._batches(full, budget, how.rows):
            results = self._decoder.search(self._packed(batch, forced=True), how)
            several = [list(map(self._candidate, found)) for found in results]
            if align is not None:
                self._link(batch, several, *align)
            for line, found in zip(batch, several, strict=True):
                yield Translation(line.line, tuple(found), line.cut, line.unknown, not found)

    def _candidate(self, found: Hypothesis) -> Candidate:
        text = self.subwords.decode(found.tokens.tolist())
        return Candidate(text, found.tokens, found.score, found.log_probability, found.finished)

    def _link(
        self,
        batch: list[_Line],
        several: list[list[Candidate]],
        layer: Integers,
        head: Integers | None,
    ) -> None:
        """Puts links into the candidates of each line."""
        whose: list[tuple[list[Candidate], int]] = []
        lines: list[_Line] = []
        for line, found in zip(batch, several, strict=True):
            for rank, each in enumerate(found):
                said = each.tokens[: self.max_length].tolist()
                number = len(lines) + 1
                lines.append(_Line(number, line.source, said, source_text=line.source_text))
                whose.append((found, rank))
        for (found, rank), alignment in zip(whose, self._aligned(lines, layer, head), strict=True):
            found[rank] = replace(found[rank], links=alignment.links)

    # ---- targets that are given --------------------------------------------------------------------

    def score(
        self,
        sources: Iterable[str] | None,
        targets: Iterable[str],
        *,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Score]:
        """How probable targets are, each token given those before it.

        sources, targets: str each, as many; sources None for a decoder alone. Of a target that has
            the model's max_length of tokens, or was cut there, the end is not scored.
        """
        lines = self._given(sources, targets)
        found = self._scored(lines, batch_tokens, progress)
        warn_of_unknown(*unknown_in(lines))
        return found

    def _scored(
        self, lines: list[_Line], batch_tokens: int | None = None, progress: Progress | None = None
    ) -> list[Score]:
        """Who calls this tells of unknown words."""
        nothing = Score(0, 0.0, np.zeros(0, np.float32), np.zeros(0, bool), 0)
        found = [nothing] * len(lines)
        done = 0
        for batch in self._batches(lines, self._budget(batch_tokens), 1):
            packed = self._packed(batch)
            several = [model.scores(packed) for model in self.models]
            for b, line in enumerate(batch):
                tokens = several[0][b][0]
                for other in several[1:]:
                    tokens = np.logaddexp(tokens, other[b][0])
                tokens = tokens - np.float32(np.log(len(several)))
                total = float(tokens.sum(dtype=np.float64))
                hits = several[0][b][1]
                found[line.line - 1] = Score(line.line, total, tokens, hits, len(line.source))
            done += len(batch)
            if progress is not None:
                progress(done)
        for each in found:
            if each.failed:
                warn(
                    f"line {each.line:,}: the model's numbers are not finite, no score",
                    TranslationWarning,
                )
        return found

    def align(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        *,
        layer: Integers = -1,
        head: Integers | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Alignment]:
        """Which words of the sources belong to which of the targets, by the decoder's attention.

        sources, targets: str each, as many.
        layer: int, or several, whose mean is taken. Of the decoder; negative ones count from the
            last.
        head: int, or several, whose mean is taken in each of the layers. None: all.
        """
        window = list(_several("sources", sources)), list(_several("targets", targets))
        return list(
            self.align_in_windows(
                [window], layer=layer, head=head, batch_tokens=batch_tokens, progress=progress
            )
        )

    def align_in_windows(
        self,
        windows: Iterable[tuple[Sequence[str], Sequence[str]]],
        *,
        layer: Integers = -1,
        head: Integers | None = None,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Alignment]:
        """As `align`, by lists of sources and of their targets, each of which is aligned before the
        next one is asked for."""
        if self.generates:
            raise ValueError("model: has no encoder, there is nothing to align to")
        self._check_aligned(layer, head)
        return self._aligned_windows(windows, layer, head, self._budget(batch_tokens), progress)

    def _aligned_windows(
        self,
        windows: Iterable[tuple[Sequence[str], Sequence[str]]],
        layer: Integers,
        head: Integers | None,
        budget: int,
        progress: Progress | None,
    ) -> Iterator[Alignment]:
        read = unknown = touched = 0
        for sources, targets in windows:
            lines = self._given(sources, targets, read)
            read += len(lines)
            tokens, several = unknown_in(lines)
            unknown, touched = unknown + tokens, touched + several
            for each in self._aligned(lines, layer, head, budget):
                if each.failed:
                    warn(
                        f"line {each.line:,}: the model's numbers are not finite, no links",
                        TranslationWarning,
                    )
                yield each
                if progress is not None:
                    progress(each.line)
        warn_of_unknown(unknown, touched)

    def _aligned(
        self,
        lines: list[_Line],
        layer: Integers,
        head: Integers | None,
        budget: int | None = None,
    ) -> list[Alignment]:
        found: dict[int, Alignment] = {}
        for batch in self._batches(lines, self._budget(budget), 1):
            packed = self._packed(batch)
            several = [model.alignments(packed, layer, head) for model in self.models]
            for b, line in enumerate(batch):
                weights: Array = np.stack([each[b] for each in several]).mean(axis=0)
                found[line.line] = self._alignment(line, weights)
        return [found[line.line] for line in lines]

    def _alignment(self, line: _Line, weights: Array) -> Alignment:
        words = words_of(of_side(self.subwords, "source"), line.source, line.source_text)
        said = words_of(of_side(self.subwords, "target"), line.target, line.target_text)
        links: tuple[tuple[int, int], ...] = ()
        if words and said and np.isfinite(weights).all():
            best = weights[: len(said)].argmax(axis=1).tolist()
            links = tuple(sorted({(words[i], said[j]) for j, i in enumerate(best) if said[j] >= 0}))
        return Alignment(line.line, weights, links, tuple(words), tuple(said))

    def _given(
        self, sources: Iterable[str] | None, targets: Iterable[str], before: int = 0
    ) -> list[_Line]:
        """Lines of text, the first of them number before + 1."""
        texts = list(_several("targets", targets))
        if (sources is None) != self.generates:
            raise ValueError(
                "sources: expected None for a decoder alone" if self.generates
                else "sources: expected one for each target, got None"
            )  # fmt: skip
        origins = None if sources is None else list(_several("sources", sources))
        if origins is not None and len(origins) != len(texts):
            raise ValueError(
                f"targets: expected {len(origins):,} as in sources, got {len(texts):,}"
            )
        _check_texts("sources", origins or ())
        _check_texts("targets", texts)
        return self._encoded(before, origins, texts)

    # ---- lines to batches --------------------------------------------------------------------------

    def _encoded(
        self,
        before: int,
        sources: Sequence[str] | None,
        targets: Sequence[str],
        *,
        forced: bool = False,
    ) -> list[_Line]:
        """Tokens of lines; what is too long is cut. forced: as of `_packed`."""
        lines = [_Line(before + i) for i in range(1, len(targets) + 1)]
        if sources is not None:
            self._encode("source", sources, lines, self.max_length)
        # The last token of a target that is given is said, and not read.
        longest = self.max_length - 1 if forced else self.max_length
        self._encode("target", targets, lines, longest)
        return lines

    def _encode(self, side: Side, texts: Sequence[str], lines: list[_Line], longest: int) -> None:
        if not any(texts):
            return
        subwords = of_side(self.subwords, side)
        unknown = subwords.unknown
        try:
            encoded = encode_texts(subwords, texts)
        except Exception:
            _check_letters(lines, texts)
            raise
        for line, text, tokens in zip(lines, texts, encoded, strict=True):
            if not text or text.isspace():
                continue
            if len(tokens) > longest:
                warn(
                    f"line {line.line:,}: {len(tokens):,} tokens, of which the model takes "
                    f"{longest:,}: the rest is left out",
                    TranslationWarning,
                )
                line.cut += len(tokens) - longest
                tokens = tokens[:longest]
            line.unknown += tokens.count(unknown)
            setattr(line, side, tokens)
            setattr(line, f"{side}_text", text)

    def _budget(self, batch_tokens: int | None) -> int:
        if batch_tokens is None:
            return self._tokens
        return min(max(check_count("batch_tokens", batch_tokens, 1), self.max_length), self._tokens)

    def _batches(self, lines: list[_Line], budget: int, rows: int) -> Iterator[list[_Line]]:
        """Lines by length, the longest first, in batches that the model has room for."""
        if not lines:
            return
        order = sorted(lines, key=lambda line: (-len(line.source), -len(line.target)))
        most = self.max_length
        sizes = np.array([(len(x.source), min(len(x.target) + 1, most)) for x in order]).T
        sentences = max(1, min(self._sentences, self._tokens // rows))
        for begin, end in pairwise(cut(sizes, budget, sentences)):
            yield order[begin:end]

    def _packed(self, lines: list[_Line], *, forced: bool = False) -> Batch:
        """forced: targets are what is to be gone on from, not what the decoder reads."""
        source = source_offsets = target = target_offsets = labels = None
        if not self.generates:
            source, source_offsets = _joined([line.source for line in lines])
        if not forced:
            bos, eos, most = [self.subwords.bos], [self.subwords.eos], self.max_length
            target, target_offsets = _joined([(bos + line.target)[:most] for line in lines])
            labels, _ = _joined([(line.target + eos)[:most] for line in lines])
        elif self.generates or any(line.target for line in lines):
            target, target_offsets = _joined([line.target for line in lines])
        ordinals = [(line.line - 1) % (1 << 32) for line in lines]  # what draws depend on
        return Batch(
            source, source_offsets, target, target_offsets, labels, ordinals=np.array(ordinals)
        )

    def __repr__(self) -> str:
        many = f"{len(self.models)} models" if len(self.models) > 1 else "a model"
        return f"<Translator: {many}, {self.subwords!r}>"


# White space to sentencepiece. Python's words end at these others too, which stay in a piece.
_SPACES = re.compile(r"[^\S\x0b\x1c-\x1f\x85]+")


# Pieces that say nothing but white space, some of them byte by byte: words end there.
_WHITE = {"▁", *(f"<0x{byte:02X}>" for byte in (*range(9, 14), *range(28, 33)))}


def words_of(subwords: Subwords, tokens: Sequence[int], text: str | None = None) -> list[int]:
    """The number of the word, from 0, that each token belongs to.

    text: what the tokens were made of, if it is known: words are what white space parts in it.
        sentencepiece may see more of them: it reads "don´t" as "don ´t". None: words are those that
        decode makes of the tokens; -1: a token that says nothing there.
    """
    if text is None:
        return _words_said(subwords, tokens)
    if not isinstance(subwords, SentencePiece):
        return list(range(len(tokens)))
    count = len(text.split())
    numbers = _words_said(subwords, tokens)
    if not numbers or (text.isascii() and text.isprintable() and numbers[-1] + 1 == count):
        return numbers
    chunks = [chunk for chunk in _SPACES.split(text) if chunk]
    origins, first = list[int](), 0
    for chunk, each in zip(chunks, subwords.encode_many(chunks), strict=True):
        origins += [min(first, max(count - 1, 0))] * len({*_words_said(subwords, each)})
        first += len(chunk.split())
    return [origins[min(number, len(origins) - 1)] if origins else 0 for number in numbers]


def _words_said(subwords: Subwords, tokens: Sequence[int]) -> list[int]:
    """The words of what decode makes of tokens. Of pieces what is unknown stands alone, " ⁇ "."""
    silent, unknown = {subwords.bos, subwords.eos}, subwords.unknown
    numbers, word, ended = list[int](), -1, True
    for token in tokens:
        if token in silent:
            numbers.append(-1)
            continue
        # of other vocabularies a token is a word
        piece = subwords.piece(token) if isinstance(subwords, SentencePiece) else "▁word"
        if piece in _WHITE:  # goes with the word after it
            numbers.append(word + 1)
            ended = True
            continue
        if ended or piece.startswith("▁") or token == unknown:
            word += 1
        ended = token == unknown
        numbers.append(word)
    return [min(number, word) for number in numbers]


def _joined(sentences: list[list[int]]) -> tuple[Any, Any]:
    offsets = np.zeros(len(sentences) + 1, np.int64)
    np.cumsum([len(each) for each in sentences], out=offsets[1:])
    return np.array([token for each in sentences for token in each], np.int32), offsets


def _several(name: str, texts: Iterable[str]) -> Iterable[str]:
    """Refuses one text, whose letters would be lines."""
    if isinstance(texts, str):
        raise TypeError(f"{name}: expected several str, got one str")
    if not isinstance(texts, Iterable):
        raise TypeError(f"{name}: expected several str, got {type(texts).__name__}")
    return texts


def _check_texts(name: str, texts: Sequence[str]) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name}: expected str, got {type(text).__name__}")


def _check_letters(lines: Sequence[_Line], texts: Sequence[str]) -> None:
    """Refuses what no file could hold, as half a surrogate pair."""
    for line, text in zip(lines, texts, strict=True):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            letter = ascii(text[error.start])
            raise ValueError(f"line {line.line:,}: {letter} cannot be written as UTF-8") from None


def _in_order(translations: Iterable[Translation], done: int) -> Iterator[Translation]:
    """Each as soon as those before it are there."""
    waiting: dict[int, Translation] = {}
    for each in translations:
        waiting[each.line] = each
        while (next_one := waiting.pop(done + 1, None)) is not None:
            done += 1
            yield next_one


def unknown_in(lines: Sequence[_Line]) -> tuple[int, int]:
    """How many tokens of lines the vocabulary does not know, and in how many of them."""
    return sum(line.unknown for line in lines), sum(line.unknown > 0 for line in lines)


def warn_of_unknown(tokens: int, lines: int) -> None:
    if tokens > 0:
        warn(
            f"{tokens:,} {'token' if tokens == 1 else 'tokens'} in {lines:,} "
            f"{'line' if lines == 1 else 'lines'} unknown to the vocabulary",
            TranslationWarning,
        )
