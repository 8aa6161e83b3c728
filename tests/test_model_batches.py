# SPDX-License-Identifier: Apache-2.0
"""Batches: how they are made, and what of them Python, the binding and the core refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import Batch, _core
from small_model import (
    BOS,
    EOS,
    FIELDS,
    LONGEST,
    VOCABULARY,
    assert_same_bits,
    pairs,
    small_config,
    small_model,
    weights,
)

# --------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------


def test_pairs_end_to_end() -> None:
    batch = Batch.from_pairs([[7, 4, 9], [5, 2]], [[6, 8], [3, 3, 6]], bos=1, eos=2)
    assert batch.source.tolist() == [7, 4, 9, 5, 2]
    assert batch.source_offsets.tolist() == [0, 3, 5]
    assert batch.target.tolist() == [1, 6, 8, 1, 3, 3, 6]
    assert batch.target_offsets.tolist() == [0, 3, 7]
    assert batch.labels.tolist() == [6, 8, 2, 3, 3, 6, 2]
    assert batch.sentences == 2
    assert repr(batch) == "<Batch of 2 sentences, source: 5 tokens, target: 7 tokens>"
    assert [x.tolist() for x in batch.split(batch.labels)] == [[6, 8, 2], [3, 3, 6, 2]]


def test_other_batches() -> None:
    alone = Batch.from_sentences([[], [6, 8]], bos=1, eos=2)
    assert alone.source is None and alone.source_offsets is None
    assert alone.target.tolist() == [1, 1, 6, 8] and alone.labels.tolist() == [2, 6, 8, 2]
    assert alone.target_offsets.tolist() == [0, 1, 4]
    graphs = [np.zeros((1, 1), np.int8), np.arange(9, dtype=np.int8).reshape(3, 3)]
    related = Batch.from_sentences([[], [6, 8]], bos=1, eos=2, graphs=graphs)
    assert [x.tolist() for x in related.target_graphs] == [x.tolist() for x in graphs]
    labelled = Batch.from_labels([[3, 4], [], [5]], [[1, -1], [], [0]])
    assert labelled.target is None and labelled.sentences == 3
    assert labelled.source.tolist() == [3, 4, 5] and labelled.labels.tolist() == [1, -1, 0]
    none = Batch.from_pairs([], [], bos=1, eos=2)
    assert none.sentences == 0 and none.split(none.labels) == []


def test_batches_own_their_arrays() -> None:
    tokens = np.arange(3, 8)
    batch = Batch(source=tokens, source_offsets=[0, 5], labels=tokens, ordinals=[2**32 - 1])
    tokens[:] = 0
    assert batch.source.tolist() == [3, 4, 5, 6, 7] == batch.labels.tolist()
    types = (batch.source.dtype, batch.source_offsets.dtype, batch.ordinals.dtype)
    assert types == (np.int32, np.int64, np.uint32)
    for array in (batch.source, batch.source_offsets, batch.labels, batch.ordinals):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_own_theirs(copied: Any) -> None:
    """The core checks a batch and reads it again: what is checked may not change."""
    batch = Batch.from_pairs(
        [[3, 4, 5]], [[3, 4]], bos=1, eos=2, source_graphs=[np.arange(9).reshape(3, 3)]
    )
    twin = copied(batch)
    assert repr(twin) == repr(batch)
    assert all(
        np.array_equal(a, b) for a, b in zip(twin.source_graphs, batch.source_graphs, strict=True)
    )
    for array in (twin.source, twin.source_offsets, twin.target, twin.labels):
        assert not array.flags.writeable
    edges = copied(relpos.EdgeList([0, 1], [1, 0], [0, 2]))
    assert edges.label.tolist() == [0, 2] and not edges.label.flags.writeable


def test_tokens_of_any_integer_type() -> None:
    lists = Batch.from_pairs([[7, 4], []], [[200], [3]], bos=300, eos=2)
    for dtype in (np.uint8, np.int16, np.int64, np.uint64):
        arrays = [[np.array(x, dtype) for x in side] for side in ([[7, 4], []], [[200], [3]])]
        if dtype == np.int16:
            arrays = [[x[::-1].copy()[::-1] for x in side] for side in arrays]  # any strides
        batch = Batch.from_pairs(*arrays, bos=300, eos=2)
        for name in ("source", "source_offsets", "target", "target_offsets", "labels"):
            assert getattr(batch, name).tolist() == getattr(lists, name).tolist()


@pytest.mark.parametrize(("top", "dtype"), [(3, np.int8), (200, np.int16), (70000, np.int32)])
def test_graphs_end_to_end(top: int, dtype: Any) -> None:
    one, two = np.array([[0, -1], [top, 1]]), np.zeros((0, 0), np.int64)
    batch = Batch.from_labels([[3, 4], [], [5]], [[1, 1], [], [0]], graphs=[one, two, [[2]]])
    labels, starts = batch._packed[5]
    assert labels.dtype == dtype and labels.tolist() == [0, -1, top, 1, 2]
    assert starts.tolist() == [0, 4, 4]
    assert [x.tolist() for x in batch.source_graphs] == [one.tolist(), [], [[2]]]
    assert np.shares_memory(batch.source_graphs[0], labels)


def test_graphs_of_any_types() -> None:
    """As NumPy makes them: float64 where there is nothing, uint64 beside int64."""
    one, two = np.zeros((1, 1), np.uint64), np.array([[0, 1], [1, 0]])
    graphs = [np.zeros((0, 0)), one, two]
    batch = Batch.from_labels([[], [3], [4, 5]], [[], [1], [1, 1]], graphs=graphs)
    labels, starts = batch._packed[5]
    assert labels.dtype == np.int8 and labels.tolist() == [0, 0, 1, 1, 0]
    assert starts.tolist() == [0, 0, 1]


BATCHES_REFUSED: list[tuple[Callable[[], Batch], type[Exception], str]] = [
    (lambda: Batch(), ValueError, "^Batch: give source, target or both$"),
    (lambda: Batch(source=[3]), ValueError, "^Batch: give source and source_offsets together$"),
    (
        lambda: Batch(source=[3.5], source_offsets=[0, 1]),
        TypeError,
        r"^source: expected integers \(count,\), got float64 \(1,\)$",
    ),
    (
        lambda: Batch(source=[[3]], source_offsets=[0, 1]),
        ValueError,
        r"^source: expected integers \(count,\), got int64 \(1, 1\)$",
    ),
    (
        lambda: Batch(target=[3, 2**31], target_offsets=[0, 2]),
        ValueError,
        rf"^target\[1\]: expected {-(2**31)} to {2**31 - 1}, got {2**31}$",
    ),
    (
        lambda: Batch(source=[3, 4], source_offsets=[0, 1]),
        ValueError,
        "^source_offsets: expected sentences . 1 numbers from 0 to the 2 tokens of source, "
        "got 0 to 1$",
    ),
    (
        lambda: Batch(source=[], source_offsets=[]),
        ValueError,
        "^source_offsets: .* 0 tokens of source, got none$",
    ),
    (
        lambda: Batch(source=[3, 4], source_offsets=[0, 2, 1, 2]),
        ValueError,
        r"^source_offsets\[2\]: expected 2 or more, as the one before it, got 1$",
    ),
    (
        lambda: Batch.from_pairs([[3], [4.5]], [[3], [4]], bos=1, eos=2),
        TypeError,
        r"^sources\[1\]: expected integers \(n,\), got float64 \(1,\)$",
    ),
    (
        lambda: Batch.from_pairs([3, 4], [[3], [4]], bos=1, eos=2),
        ValueError,
        r"^sources\[0\]: expected integers \(n,\), got int64 \(\)$",
    ),
    (
        lambda: Batch.from_pairs([[3]], [[3], [4]], bos=1, eos=2),
        ValueError,
        "^targets: expected 1 sentences as in sources, got 2$",
    ),
    (
        lambda: Batch.from_sentences(["ab"], bos=1, eos=2),
        TypeError,
        r"^sentences\[0\]: expected integers \(n,\), got text \(\)$",
    ),
    (
        lambda: Batch.from_pairs([["ab", "c"]], [[3]], bos=1, eos=2),
        TypeError,
        r"^sources\[0\]: expected integers \(n,\), got text \(2,\)$",
    ),
    (
        lambda: Batch.from_sentences([[3]], bos=1.5, eos=2),  # type: ignore[arg-type]
        TypeError,
        "^bos: expected an integer, got float$",
    ),
    (
        lambda: Batch.from_sentences([[3]], bos=1, eos=-1),
        ValueError,
        "^eos: expected 0 or more, got -1$",
    ),
    (
        lambda: Batch.from_labels([[3], [4, 5]], [[3], [4]]),
        ValueError,
        r"^labels\[1\]: expected 2 labels, got 1$",
    ),
    (
        lambda: Batch.from_labels([[3], [4]], [[3], np.array([2**64 - 1], np.uint64)]),
        ValueError,
        rf"^labels\[1\]: expected integers below 2\^63, got {2**64 - 1}$",
    ),
    (
        lambda: Batch.from_labels([[3], [4, 5]], [[3]]),
        ValueError,
        "^labels: expected 2 sentences as in sources, got 1$",
    ),
    (
        lambda: Batch.from_labels([[3]], [[3]], graphs=[]),
        ValueError,
        "^source_graphs: expected 1 matrices, got 0$",
    ),
    (
        lambda: Batch.from_labels([[3], [4, 5]], [[3], [4, 5]], graphs=[[[0]], [[1]]]),
        ValueError,
        r"^source_graphs\[1\]: expected integers \(2, 2\), got int64 \(1, 1\)$",
    ),
    (
        lambda: Batch.from_labels([[3]], [[3]], graphs=[[[0.5]]]),
        TypeError,
        r"^source_graphs\[0\]: expected integers \(n, n\), got float64 \(1, 1\)$",
    ),
    (
        lambda: Batch(source=[3], source_offsets=[0, 1], target_graphs=[[[0]]]),
        ValueError,
        "^target_graphs: there are no such sentences$",
    ),
    (
        lambda: Batch(source=[3], source_offsets=[0, 1], ordinals=[-1]),
        ValueError,
        rf"^ordinals\[0\]: expected 0 to {2**32 - 1}, got -1$",
    ),
    (
        lambda: Batch(source=[3], source_offsets=[0, 1], labels=np.ma.array([3], mask=[1])),
        TypeError,
        "^labels: expected an array without a mask of its own, .* got MaskedArray; fill it first$",
    ),
    (
        lambda: Batch.from_pairs([np.ma.array([3], mask=[1])], [[3]], bos=1, eos=2),
        TypeError,
        r"^sources\[0\]: expected an array without a mask of its own, ",
    ),
    (
        lambda: Batch.from_labels([[3]], [[3]], graphs=[np.ma.array([[0]], mask=[[1]])]),
        TypeError,
        r"^source_graphs\[0\]: expected an array without a mask of its own, ",
    ),
]


@pytest.mark.parametrize(("make", "error", "sentence"), BATCHES_REFUSED)
def test_batches_refused(make: Callable[[], Batch], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


# --------------------------------------------------------------------------------------------------
# What the binding itself refuses
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def idle() -> relpos.Transformer:
    """A model that is only asked for what it refuses."""
    return small_model()


def spoilt(**changes: Any) -> Any:
    """The tuple of a good batch, with other fields."""
    batch = Batch.from_pairs([[3, 4], [5, 6, 7]], [[3], [4]], bos=BOS, eos=EOS)
    return tuple((dict(zip(FIELDS, batch._packed, strict=True)) | changes).values())


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


def int64(*values: int) -> Any:
    return np.array(values, np.int64)


TUPLES_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"source": np.zeros(5)},
        TypeError,
        r"^source: expected int32 \(tokens,\), got float64 \(5,\); "
        r"use np.ascontiguousarray\(source, np.int32\)$",
    ),
    ({"source": int64(3, 4, 5, 6, 7)}, TypeError, r"^source: expected int32 .*, got int64 \(5,\)"),
    ({"source": [3, 4, 5, 6, 7]}, TypeError, "^source: expected int32 .*, got list"),
    ({"source": int32(*range(10))[::2]}, ValueError, "^source: the last axis must be contiguous"),
    ({"source": int32(3, 4, 5, 6)}, ValueError, "^source_offsets: the last one is 5, but source has 4"),
    ({"source": None}, ValueError, "^source_offsets: the last one is 5, but source has 0 tokens"),
    ({"source_offsets": int32(0, 2, 5)}, TypeError, r"^source_offsets: expected int64 .*, got int32"),
    ({"source_offsets": int64()}, ValueError, "^source_offsets: expected B . 1 numbers"),
    (
        {"target_offsets": int64(0, 2, 3, 4)},
        ValueError,
        r"^target_offsets: expected int64 \(B . 1=3,\), got int64 \(4,\)$",
    ),
    ({"labels": int32(3, 4, 5)}, ValueError, r"^labels: expected int32 \(tokens=4,\), got int32 \(3,\)"),
    ({"labels": int64(3, 4, 5, 6)}, TypeError, "^labels: expected int32 .*, got int64"),
    ({"ordinals": int32(0, 1)}, TypeError, r"^ordinals: expected uint32 \(B=2,\), got int32 \(2,\)"),
    (
        {"ordinals": np.zeros(3, np.uint32)},
        ValueError,
        r"^ordinals: expected uint32 \(B=2,\), got uint32 \(3,\)$",
    ),
    ({"source_graphs": int32(1)}, TypeError, r"^source_graphs: expected a tuple \(labels, starts\)$"),
    (
        {"source_graphs": (int64(*range(13)), int64(0, 4))},
        TypeError,
        "^source_graphs: expected int8, int16 or int32 .*, got int64",
    ),
    (
        {"source_graphs": (int32(*range(13)), int32(0, 4))},
        TypeError,
        r"^source_graphs starts: expected int64 \(B=2,\), got int32 \(2,\)",
    ),
    (
        {"source_graphs": (int32(*range(12)), int64(0, 4))},
        ValueError,
        "^source_graphs: the 3 x 3 labels of sentence 1 begin at 4, but there are 12$",
    ),
    (
        {"target_graphs": (int32(*range(8)), int64(-1, 4))},
        ValueError,
        "^target_graphs: the 2 x 2 labels of sentence 0 begin at -1, but there are 8$",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "sentence"), TUPLES_REFUSED, ids=str)
def test_tuples_refused(
    idle: relpos.Transformer, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    batch = spoilt(**changes)
    core = idle._core
    for call in (
        lambda: core.step((batch,)),
        lambda: core.forward(batch, False, False),
        lambda: core.backward(batch),
        lambda: core.score(batch),
        lambda: core.hidden(batch),
        lambda: core.attention_map(batch, 0, 0, 0, 0, 0),
    ):
        with pytest.raises(error, match=sentence):
            call()


# What libcore says to a batch, seen from Python.
REFUSED_BY_CORE: list[tuple[str, dict[str, Any], str]] = [
    ("token", {"source": int32(3, 4, 5, 99, 7)}, r"source.*\b3\b.*\b99\b|source.*\b99\b.*\b3\b"),
    ("negative", {"target": int32(1, -3, 1, 4)}, r"target.*\b1\b.*-3|target.*-3.*\b1\b"),
    ("vocabulary", {"source": int32(3, 4, 5, 6, VOCABULARY)}, rf"source.*\b{VOCABULARY}\b"),
    ("label", {"labels": int32(3, 2, -2, 2)}, r"labels.*-2"),
    ("offsets", {"source_offsets": int64(0, 6, 5)}, "source_offsets"),
    ("first", {"source_offsets": int64(1, 2, 5)}, "source_offsets"),
    ("no source", {"source": None, "source_offsets": None}, "source"),
    ("no target", {"target": None, "target_offsets": None, "labels": None}, "target"),
    ("no labels", {"labels": None}, "labels"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), [x[1:] for x in REFUSED_BY_CORE], ids=[x[0] for x in REFUSED_BY_CORE]
)
def test_batches_refused_by_the_core(
    idle: relpos.Transformer, changes: dict[str, Any], sentence: str
) -> None:
    before = weights(idle)
    batch = spoilt(**changes)
    for call in (
        lambda: idle._core.step((spoilt(), batch)),
        lambda: idle._core.forward(batch, False, False),
        lambda: idle._core.score(batch),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    assert_same_bits(idle.parameters, before)
    assert idle.counters == (0, 0)


def test_the_longest_and_one_above_it() -> None:
    model = small_model()
    fits = Batch.from_pairs([[3] * LONGEST], [[3] * (LONGEST - 1)], bos=BOS, eos=EOS)
    assert model.step(fits).tokens == LONGEST
    for source, target in ((LONGEST + 1, 1), (1, LONGEST)):
        above = Batch.from_pairs([[3] * source], [[3] * target], bos=BOS, eos=EOS)
        with pytest.raises(ValueError, match=rf"\b{LONGEST + 1}\b.*\b{LONGEST}\b"):
            model.step(above)
    assert model.counters == (1, 1)


def test_limits_of_a_batch() -> None:
    model = relpos.Transformer(small_config(), tokens=10, sentences=2)
    for count, n in ((3, 1), (2, 6)):
        with pytest.raises(ValueError, match="tokens|sentences"):
            model.step(Batch.from_pairs([[3] * n] * count, [[3]] * count, bos=BOS, eos=EOS))
    assert model.step(Batch.from_pairs([[3] * 5] * 2, [[3] * 4] * 2, bos=BOS, eos=EOS)).tokens == 10


def test_what_the_core_says_in_words_of_python(idle: relpos.Transformer) -> None:
    """Of functions and limits that have other names there."""
    model = small_model()
    decoder = relpos.Decoder(model)
    name, weights = next((k, x) for k, x in model.parameters.items() if x.ndim == 1)
    many = relpos.Batch.from_pairs([[3]] * 33, [[3]] * 33, bos=1, eos=2)
    long = relpos.Batch.from_pairs([[3] * 11] * 30, [[3]] * 30, bos=1, eos=2)
    one, unknown = (relpos.Batch.from_pairs([[x]], [[3]], bos=1, eos=2) for x in (3, 300))
    alone, words = small_model(encoder__layers=0), relpos.Batch.from_sentences([[3]], bos=1, eos=2)
    cases: list[tuple[Any, type[Exception], str]] = [
        (model.update, RuntimeError, "model: nothing is accumulated; backward comes before update"),
        (model.result, RuntimeError, "model: there is no result to ask for; a step or an update .*"),
        (lambda: decoder.step([3, 3, -1]), ValueError,
         "tokens: expected tokens of the vocabulary, from 0 on, got -1"),
        (lambda: decoder.step([1]), RuntimeError,
         "decoder: nothing was begun; begin comes before step"),
        (lambda: model.step(many), ValueError,
         "batch: sentences=33, must be from 0 to the model's sentences=32"),
        (lambda: model.step(long), ValueError,
         "batch: more than the model's tokens=256 source tokens, 264 with sentence 23"),
        (lambda: model.step([]), ValueError, "batches: expected at least one, got none"),
        (lambda: model.step(long, wait="no"), TypeError,  # type: ignore[call-overload]
         "wait: expected True or False, got str"),
        (lambda: model.backward(long, wait="no"), TypeError,  # type: ignore[call-overload]
         "wait: expected True or False, got str"),
        (lambda: model.update(wait="no"), TypeError,  # type: ignore[call-overload]
         "wait: expected True or False, got str"),
        (lambda: model.forward(long, dropout="no"), TypeError,  # type: ignore[arg-type]
         "dropout: expected True or False, got str"),
        (lambda: model.forward(long, average="no"), TypeError,  # type: ignore[arg-type]
         "average: expected True or False, got str"),
        (lambda: model.assign(name, weights.astype(str)), TypeError,
         rf"values: expected real numbers, got text \({weights.size},\)"),
        (lambda: model.assign(name, weights > 0), TypeError,
         rf"values: expected real numbers, got bool \({weights.size},\)"),
        (lambda: model.assign(name, weights * 1j), TypeError,
         rf"values: expected real numbers, got complex64 \({weights.size},\)"),
        (lambda: model.assign(name, np.full(weights.shape, 1e300)), ValueError,
         "values: expected numbers that float32 has, got larger ones"),
        (lambda: model.assign(name, np.full(weights.shape, np.finfo(np.longdouble).max)), ValueError,
         "values: expected numbers that float32 has, got larger ones"),
        (lambda: model.assign(name, [None] * weights.size), TypeError,
         rf"values: expected real numbers, got object \({weights.size},\)"),
        (lambda: model.assign(name, [[1], [1, 2]]), TypeError,
         "values: expected an array of real numbers: setting an array element .*"),
        (lambda: model.assign(name, [10**400]), TypeError, "values: expected real numbers, got .*"),
        (lambda: model.assign(name, np.ma.array(weights)), TypeError,
         "values: expected an array without a mask of its own, .* got MaskedArray; fill it first"),
        (lambda: model.assign(["a"], 1), ValueError,  # type: ignore[arg-type]
         r"name: \['a'\] is no parameter of this model"),
        (lambda: setattr(model, "counters", 5), TypeError,
         r"counters: expected \(step, attempt\), got 5"),
        (lambda: setattr(model, "counters", (1, 2, 3)), TypeError,
         r"counters: expected \(step, attempt\), got \(1, 2, 3\)"),
        (lambda: model.step([one, one, unknown]), ValueError,
         r"batches\[2\]: source\[0\]=300 \(token 0 of sentence 0\), must be from 0 to 22"),
        (lambda: model.step([unknown]), ValueError, r"batch: source\[0\]=300 .*"),
        (lambda: alone.attention_maps(words, 0, 0), ValueError,
         "kind: expected 'decoder', got 'encoder'"),
        (lambda: alone.attention_maps(words, 0, 0, "cross"), ValueError,
         "kind: expected 'decoder', got 'cross'"),
        (lambda: relpos.Transformer(small_config(), tokens=1 << 70), ValueError,
         "tokens: expected less than 2\\^31, got 1180591620717411303424"),
        (lambda: relpos.Transformer(small_config(), training="no"), TypeError,  # type: ignore[arg-type]
         "training: expected True or False, got str"),
        (lambda: relpos.Batch.from_pairs(3, [], bos=1, eos=2), TypeError,  # type: ignore[arg-type]
         "sources: expected sentences of tokens, got int"),
        (lambda: relpos.Batch.from_pairs([[3]], [[3]], bos=1 << 70, eos=2), ValueError,
         "bos: expected a token, got 1180591620717411303424"),
        (lambda: relpos.Search(suppressed=3), TypeError, "suppressed: expected tokens, got int"),  # type: ignore[arg-type]
        (lambda: relpos.Search(sample="no"), TypeError, "sample: expected True or False, got str"),  # type: ignore[arg-type]
        (lambda: relpos.Decoder(), ValueError, "models: expected a model or several, got none"),
        (lambda: relpos.Translator(3, None), TypeError,  # type: ignore[arg-type]
         "models: expected relpos.Transformer, or several, got int"),
        (lambda: relpos.Translator(model, []), TypeError,  # type: ignore[arg-type]
         "subwords: expected a vocabulary, with size and encode, got list"),
        (lambda: relpos.Config().replace({1: 2}), TypeError,  # type: ignore[dict-item]
         r"changes: expected a dict of values by name, got \{1: 2\}"),
        (lambda: relpos.Config.preset(3), TypeError, "name: expected str, got int"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for call, error, sentence in cases:
        with pytest.raises(error, match=f"^{sentence}$"):
            call()


def test_paths_are_quoted_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "limits.of rp_model_update is NULL" / "x"
    with pytest.raises(OSError, match="limits.of rp_model_update is NULL"):
        small_model().save(path)


def test_wrong_types(idle: relpos.Transformer) -> None:
    batch = pairs()
    for call, sentence in (
        (lambda: relpos.Transformer("tiny"), r"config: expected relpos\.Config, got str"),  # type: ignore[arg-type]
        (lambda: idle.step(3), r"batches: expected relpos\.Batch, or several, got int"),  # type: ignore[arg-type]
        (lambda: idle.step([3]), r"batch: expected relpos\.Batch, got int"),  # type: ignore[list-item]
        (lambda: idle.score(None), r"batch: expected relpos\.Batch, got NoneType"),  # type: ignore[arg-type]
        (lambda: idle.attention_maps(batch, 0.5, 0), "layer: expected an integer, got float"),  # type: ignore[arg-type]
        (
            lambda: _core.Model(3, (1, 1, True, False, "cpu", 0)),
            "config: expected a tuple of pairs",
        ),  # type: ignore[arg-type]
        (lambda: _core.Model((), 3), "limits: expected a tuple"),  # type: ignore[arg-type]
        (lambda: idle._core.forward(3, False, False), "batch: expected a tuple"),  # type: ignore[arg-type]
        (lambda: relpos.profile(3), r"model: expected relpos\.Transformer, got int"),  # type: ignore[arg-type]
        (lambda: pickle.dumps(idle), "cannot pickle"),
    ):
        with pytest.raises(TypeError, match=sentence):
            call()
    with pytest.raises(ValueError, match="tokens: expected 1 or more, got 0"):
        relpos.Transformer(small_config(), tokens=0)
    with pytest.raises((ValueError, MemoryError, OverflowError)):
        relpos.Transformer(small_config(), tokens=2**62)


def test_maps_refused(idle: relpos.Transformer) -> None:
    batch = pairs()
    for arguments, sentence in (
        ({"layer": 1}, "layer.*1"),
        ({"head": 2}, "head.*2"),
        ({"layer": -1}, "layer: expected 0 or more, got -1"),
        ({"sentence": 5}, "sentence: expected 0 to below 5, got 5"),
        ({"kind": "self"}, "kind: expected 'encoder' or 'decoder' or 'cross', got 'self'"),
        ({"show": "all"}, "show: expected 'probabilities' or"),
    ):
        with pytest.raises(ValueError, match=sentence):
            idle.attention_maps(batch, **({"layer": 0, "head": 0} | arguments))
