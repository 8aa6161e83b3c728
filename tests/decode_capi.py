# SPDX-License-Identifier: Apache-2.0
"""decode.h for ctypes: a decoder as a C program sees it, in float or in double."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capi import Core, fields
from model_capi import Model, Sentences

NONE, WU, POWER = range(3)


class Search(ctypes.Structure):
    """rp_search."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int32, "begin", "end"),
        *fields(ctypes.c_int64, "beam", "n_best"),
        *fields(ctypes.c_int, "penalty"),
        *fields(ctypes.c_double, "alpha", "coverage"),
        *fields(ctypes.c_int64, "min_length", "max_length", "max_more", "no_repeat"),
        *fields(ctypes.c_void_p, "suppressed"),
        *fields(ctypes.c_int64, "suppressed_count"),
        *fields(ctypes.c_int, "sample"),
        *fields(ctypes.c_double, "temperature"),
        *fields(ctypes.c_int64, "top_k"),
        *fields(ctypes.c_double, "top_p"),
        *fields(ctypes.c_uint64, "seed"),
        *fields(ctypes.c_int, "average"),
    ]


class Hypothesis(ctypes.Structure):
    """rp_hypothesis."""

    _fields_ = [
        *fields(ctypes.c_size_t, "struct_size"),
        *fields(ctypes.c_int64, "count"),
        *fields(ctypes.POINTER(ctypes.c_int32), "tokens"),
        *fields(ctypes.c_double, "log_probability", "score"),
        *fields(ctypes.c_int, "finished"),
    ]


@dataclass(frozen=True)
class Found:
    """One result."""

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    finished: bool


class Decoder:
    """An rp_decoder."""

    def __init__(self, *models: Model) -> None:
        self.core: Core = models[0].core
        self.models = models
        self.handle = ctypes.c_void_p()
        handles = (ctypes.c_void_p * len(models))(*(m.handle for m in models))
        create = self.core.lib.rp_decoder_create
        self.core.check(create(handles, ctypes.c_int64(len(models)), ctypes.byref(self.handle)))

    def close(self) -> None:
        self.core.lib.rp_decoder_free(self.handle)
        self.handle = ctypes.c_void_p()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(
        self, batch: Sentences, suppressed: Sequence[int] = (), **options: Any
    ) -> list[list[Found]]:
        given = {"begin": 1, "end": 2, "beam": 4, "n_best": 1, "penalty": WU, "alpha": 0.6}
        given |= {"max_more": 50, "temperature": 1, "top_p": 1} | options
        banned = np.array(suppressed, np.int32)
        search = Search(ctypes.sizeof(Search), **given)
        search.suppressed, search.suppressed_count = banned.ctypes.data, len(banned)
        where = ctypes.byref(batch.struct), ctypes.byref(search)
        self.core.check(self.core.lib.rp_decoder_search(self.handle, *where))
        return self.results(batch.struct.sentences)

    def results(self, sentences: int) -> list[list[Found]]:
        return [self._results_of(b) for b in range(sentences)]

    def _results_of(self, sentence: int) -> list[Found]:
        count, b = ctypes.c_int64(-1), ctypes.c_int64(sentence)
        lib = self.core.lib
        self.core.check(lib.rp_decoder_result_count(self.handle, b, ctypes.byref(count)))
        found = []
        for rank in range(count.value):
            h = Hypothesis(ctypes.sizeof(Hypothesis))
            place = b, ctypes.c_int64(rank), ctypes.byref(h)
            self.core.check(lib.rp_decoder_result(self.handle, *place))
            tokens = tuple(h.tokens[: h.count])
            found.append(Found(tokens, h.log_probability, h.score, bool(h.finished)))
        return found

    def _rows(self, rows: int) -> Any:
        return np.full((rows, *self._vocabulary()), np.nan, self.core.dtype)

    def _vocabulary(self) -> tuple[int]:
        weights = self.models[0].weights
        name = "output.weight" if "output.weight" in weights else "target_embedding.weight"
        return (len(weights[name]),)

    def begin(self, batch: Sentences, most_rows: int) -> Any:
        logits = self._rows(batch.struct.sentences)
        begin = self.core.lib.rp_decoder_begin
        where = ctypes.c_void_p(logits.ctypes.data)
        rows = ctypes.c_int64(most_rows)
        self.core.check(begin(self.handle, ctypes.byref(batch.struct), rows, where))
        return logits

    def step(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Any:
        logits = self._rows(len(tokens))
        words = np.array(tokens, np.int32)
        rows = None if parents is None else np.array(parents, np.int64)
        pointers = [
            ctypes.c_void_p(None if x is None else x.ctypes.data) for x in (rows, words, logits)
        ]
        count = ctypes.c_int64(len(tokens))
        self.core.check(self.core.lib.rp_decoder_step(self.handle, count, *pointers))
        return logits


def alignments(
    model: Model, batch: Sentences, shapes: Sequence[tuple[int, int]], layer: int, head: int
) -> list[Any]:
    """rp_model_alignments of one layer and one head, or all, cut into the sentences' maps."""
    sizes = [rows * columns for rows, columns in shapes]
    to = np.full(sum(sizes), np.nan, model.core.dtype)
    one = ctypes.c_int64(layer), ctypes.c_int64(head)
    heads = None if head < 0 else ctypes.byref(one[1])
    numbers = ctypes.byref(one[0]), ctypes.c_int64(1), heads, ctypes.c_int64(1)
    where = ctypes.c_void_p(to.ctypes.data)
    function = model.lib.rp_model_alignments
    model.core.check(function(model.handle, ctypes.byref(batch.struct), *numbers, where))
    cuts = np.split(to, np.cumsum(sizes)[:-1])
    return [x.reshape(shape) for x, shape in zip(cuts, shapes, strict=True)]
