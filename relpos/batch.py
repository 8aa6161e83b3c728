# SPDX-License-Identifier: Apache-2.0
"""Sentences end to end, as a model takes them: no padding anywhere.

source          7 4 9 5 2                 two sentences of 3 and 2 tokens
source_offsets  0     3   5
target          1 6 8 1 3 3 6             what the decoder sees: bos and the sentence
target_offsets  0     3       7
labels          6 8 2 3 3 6 2             what it shall say: the sentence and eos
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from relpos import _core
from relpos.position.arrays import check_count, check_int64, check_unmasked, describe

Tokens = Any  # integers (n,): an array or a sequence
Graphs = Any  # integers (n, n) for every sentence; -1: no relation


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """Sentences end to end, source tokens for the encoder and target tokens for the decoder.

    source, target: int (tokens,). None for a model without encoder, without decoder.
    source_offsets, target_offsets: int (sentences + 1,). Where each sentence begins, and the end.
    labels: int (tokens,). What the token at each place predicts: of the target's places, or of
        the source's where there is no target. -1: not counted.
    source_graphs, target_graphs: a list of int (n, n), one for each sentence. The relation of
        query i to key j, -1: none. None: no graphs.
    ordinals: int (sentences,). The number of each sentence in the whole accumulated batch, which
        decides its dropout. None: as they come.

    The arrays are copied once, into the types of the core, and are read-only from then on.
    `from_pairs`, `from_sentences` and `from_labels` make a batch of single sentences.
    """

    source: Any = None
    source_offsets: Any = None
    target: Any = None
    target_offsets: Any = None
    labels: Any = None
    source_graphs: Graphs = None
    target_graphs: Graphs = None
    ordinals: Any = None
    _packed: _core.BatchTuple = field(init=False)

    def __post_init__(self) -> None:
        if self.source is None and self.target is None:
            raise ValueError("Batch: give source, target or both")
        graphs = []
        for side in ("source", "target"):
            for name, dtype in ((side, np.int32), (f"{side}_offsets", np.int64)):
                self._set(name, _owned(name, getattr(self, name), dtype))
            tokens, offsets = getattr(self, side), getattr(self, f"{side}_offsets")
            if (tokens is None) != (offsets is None):
                raise ValueError(f"Batch: give {side} and {side}_offsets together")
            _check_offsets(f"{side}_offsets", offsets, side, tokens)
            name = f"{side}_graphs"
            packed = _pack_graphs(name, getattr(self, name), offsets)
            self._set(name, None if packed is None else packed[0])
            graphs.append(None if packed is None else packed[1])
        self._set("labels", _owned("labels", self.labels, np.int32))
        self._set("ordinals", _owned("ordinals", self.ordinals, np.uint32))
        packed_batch = (
            self.source, self.source_offsets, self.target, self.target_offsets, self.labels,
            *graphs, self.ordinals,
        )  # fmt: skip
        self._set("_packed", packed_batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """By the constructor: copies are read-only too, which NumPy does not keep."""
        graphs = self.source_graphs, self.target_graphs
        given = self.source, self.source_offsets, self.target, self.target_offsets, self.labels
        return Batch, (*given, *graphs, self.ordinals)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_pairs(
        cls,
        sources: Iterable[Tokens],
        targets: Iterable[Tokens],
        *,
        bos: int,
        eos: int,
        source_graphs: Graphs = None,
        target_graphs: Graphs = None,
    ) -> Batch:
        """Pairs of sentences for an encoder and a decoder.

        sources: int (n,) each, taken as they are.
        targets: int (n,) each, without bos and eos: the decoder sees bos and the sentence, and is
            to say the sentence and eos, n + 1 places.
        bos, eos: int. The tokens for the beginning and the end.
        source_graphs, target_graphs: int (n, n) each, target's (n + 1, n + 1).
        """
        source, source_offsets = _pack("sources", sources)
        target, target_offsets, labels = _pack_shifted("targets", targets, bos, eos)
        if len(source_offsets) != len(target_offsets):
            raise ValueError(
                f"targets: expected {len(source_offsets) - 1} sentences as in sources, "
                f"got {len(target_offsets) - 1}"
            )
        return cls(
            source, source_offsets, target, target_offsets, labels, source_graphs, target_graphs
        )

    @classmethod
    def from_sentences(
        cls, sentences: Iterable[Tokens], *, bos: int, eos: int, graphs: Graphs = None
    ) -> Batch:
        """Sentences for a decoder alone, a language model.

        sentences: int (n,) each, without bos and eos: the decoder sees bos and the sentence, and
            is to say the sentence and eos, n + 1 places.
        bos, eos: int. The tokens for the beginning and the end.
        graphs: int (n + 1, n + 1) each.
        """
        target, offsets, labels = _pack_shifted("sentences", sentences, bos, eos)
        return cls(target=target, target_offsets=offsets, labels=labels, target_graphs=graphs)

    @classmethod
    def from_labels(
        cls, sources: Iterable[Tokens], labels: Iterable[Tokens], *, graphs: Graphs = None
    ) -> Batch:
        """Sentences for an encoder alone, with a label for each token.

        sources: int (n,) each.
        labels: int (n,) each. -1: not counted.
        graphs: int (n, n) each.
        """
        source, offsets = _pack("sources", sources)
        wanted, label_offsets = _pack("labels", labels)
        if not np.array_equal(offsets, label_offsets):
            counts, label_counts = np.diff(offsets).tolist(), np.diff(label_offsets).tolist()
            if len(counts) != len(label_counts):
                raise ValueError(
                    f"labels: expected {len(counts)} sentences as in sources, got {len(label_counts)}"
                )
            i = next(i for i, n in enumerate(counts) if n != label_counts[i])
            raise ValueError(f"labels[{i}]: expected {counts[i]} labels, got {label_counts[i]}")
        return cls(source, offsets, labels=wanted, source_graphs=graphs)

    @property
    def sentences(self) -> int:
        """How many there are."""
        offsets = self.source_offsets if self.target is None else self.target_offsets
        return len(offsets) - 1

    def split(self, places: Any) -> list[Any]:
        """An array with a row for each label, cut into one for each sentence; nothing is copied."""
        offsets = self.source_offsets if self.target is None else self.target_offsets
        return [places[begin:end] for begin, end in pairwise(offsets.tolist())]

    def __repr__(self) -> str:
        sides = (("source", self.source), ("target", self.target))
        shown = [f"{name}: {x.size} tokens" for name, x in sides if x is not None]
        return f"<Batch of {self.sentences} sentences, {', '.join(shown)}>"


def packed(batch: Batch) -> _core.BatchTuple:
    """A batch as the core takes it."""
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: expected relpos.Batch, got {type(batch).__name__}")
    return batch._packed


# --------------------------------------------------------------------------------------------------
# Packing
# --------------------------------------------------------------------------------------------------


def _integers(name: str, values: Any, shape: str, ndim: int) -> npt.NDArray[Any]:
    """An integer array; an empty list is one too."""
    check_unmasked(name, values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected integers {shape}: {error}") from None
    if array.ndim != ndim or (array.dtype.kind not in "iu" and array.size > 0):
        kind = ValueError if array.dtype.kind in "iu" else TypeError
        raise kind(f"{name}: expected integers {shape}, got {describe(array)}")
    return array


def _owned(name: str, values: Any, dtype: Any) -> Any:
    """A read-only copy of the core's type, or None."""
    if values is None:
        return None
    array = _integers(name, values, "(count,)", 1)
    limits = np.iinfo(dtype)
    if array.size > 0 and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        at = next(i for i, x in enumerate(array.tolist()) if not limits.min <= x <= limits.max)
        raise ValueError(
            f"{name}[{at}]: expected {limits.min} to {limits.max}, got {int(array[at])}"
        )
    owned = array.astype(dtype)
    owned.setflags(write=False)
    return owned


def _check_offsets(name: str, offsets: Any, side: str, tokens: Any) -> None:
    if offsets is None:
        return
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens):
        got = "none" if len(offsets) == 0 else f"{offsets[0]} to {offsets[-1]}"
        raise ValueError(
            f"{name}: expected sentences + 1 numbers from 0 to the {len(tokens)} tokens of {side}, "
            f"got {got}"
        )
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if falls.size:
        b = int(falls[0])
        raise ValueError(
            f"{name}[{b + 1}]: expected {offsets[b]} or more, as the one before it, "
            f"got {offsets[b + 1]}"
        )


def _pack(name: str, sentences: Iterable[Tokens]) -> tuple[Any, Any]:
    """Sentences end to end, and their offsets."""
    if not isinstance(sentences, Iterable):
        raise TypeError(f"{name}: expected sentences of tokens, got {type(sentences).__name__}")
    parts = [_integers(f"{name}[{i}]", x, "(n,)", 1) for i, x in enumerate(sentences)]
    for i, part in enumerate(parts):
        check_int64(f"{name}[{i}]", part)
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.size for part in parts], out=offsets[1:])
    filled = [part for part in parts if part.size > 0]  # an empty list is float64 to NumPy
    tokens = np.concatenate(filled) if filled else np.zeros(0, np.int64)
    return tokens.astype(np.int64), offsets


def _pack_shifted(
    name: str, sentences: Iterable[Tokens], bos: int, eos: int
) -> tuple[Any, Any, Any]:
    """bos before each sentence, the offsets of that, and eos after each sentence instead."""
    tokens, offsets = _pack(name, sentences)
    for which, token in (("bos", bos), ("eos", eos)):
        if check_count(which, token, 0) >= 1 << 31:
            raise ValueError(f"{which}: expected a token, got {token}")
    target, labels = np.insert(tokens, offsets[:-1], bos), np.insert(tokens, offsets[1:], eos)
    return target, offsets + np.arange(len(offsets)), labels


def _pack_graphs(name: str, graphs: Graphs, offsets: Any) -> tuple[Sequence[Any], Any] | None:
    """Read-only matrices, views of the labels end to end, and (labels, starts) for the core."""
    if graphs is None:
        return None
    if offsets is None:
        raise ValueError(f"{name}: there are no such sentences")
    counts = np.diff(offsets).tolist()
    parts = [_integers(f"{name}[{b}]", x, "(n, n)", 2) for b, x in enumerate(graphs)]
    if len(parts) != len(counts):
        raise ValueError(f"{name}: expected {len(counts)} matrices, got {len(parts)}")
    for b, (part, n) in enumerate(zip(parts, counts, strict=True)):
        if part.shape != (n, n):
            raise ValueError(f"{name}[{b}]: expected integers ({n}, {n}), got {describe(part)}")
        check_int64(f"{name}[{b}]", part)
    sizes = np.array([n * n for n in counts], np.int64)
    ends = np.cumsum(sizes)
    filled = [part.ravel().astype(np.int64) for part in parts if part.size > 0]
    whole = np.concatenate(filled) if filled else np.zeros(0, np.int8)
    labels = _owned(name, whole, _label_type(whole))
    starts = ends - sizes
    matrices = tuple(
        labels[start : start + n * n].reshape(n, n)
        for start, n in zip(starts.tolist(), counts, strict=True)
    )
    return matrices, (labels, starts)


def _label_type(labels: Any) -> Any:
    """The smallest type of labels that holds them."""
    low, high = (int(labels.min()), int(labels.max())) if labels.size > 0 else (0, 0)
    fitting = (t for t in (np.int8, np.int16) if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    return next(fitting, np.int32)
