# SPDX-License-Identifier: Apache-2.0
"""The door from Python to the model: batches, views of its memory, threads, and what is refused.

That the model computes what it should is shown elsewhere; here the numbers only have to agree with
each other.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
import threading
import weakref
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
    LONGEST,
    VOCABULARY,
    assert_same_bits,
    pairs,
    sentences,
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
        r"^sentences\[0\]: expected integers \(n,\), got <U2 \(\)$",
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
]


@pytest.mark.parametrize(("make", "error", "sentence"), BATCHES_REFUSED)
def test_batches_refused(make: Callable[[], Batch], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


# --------------------------------------------------------------------------------------------------
# What the binding itself refuses
# --------------------------------------------------------------------------------------------------

FIELDS = (
    "source", "source_offsets", "target", "target_offsets", "labels", "source_graphs",
    "target_graphs", "ordinals",
)  # fmt: skip


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


def test_wrong_types(idle: relpos.Transformer) -> None:
    batch = pairs()
    for call, sentence in (
        (lambda: relpos.Transformer("tiny"), r"config: expected relpos\.Config, got str"),  # type: ignore[arg-type]
        (lambda: idle.step(3), "'int' object is not iterable"),  # type: ignore[arg-type]
        (lambda: idle.step([3]), r"batch: expected relpos\.Batch, got int"),  # type: ignore[list-item]
        (lambda: idle.score(None), r"batch: expected relpos\.Batch, got NoneType"),  # type: ignore[arg-type]
        (lambda: idle.attention_maps(batch, 0.5, 0), "layer: expected an integer, got float"),  # type: ignore[arg-type]
        (
            lambda: _core.Model(3, (1, 1, True, False, "cpu", 0)),
            "config: expected a tuple of pairs",
        ),  # type: ignore[arg-type]
        (lambda: _core.Model((), 3), "limits: expected a tuple"),  # type: ignore[arg-type]
        (lambda: idle._core.forward(3, False, False), "batch: expected a tuple"),  # type: ignore[arg-type]
        (lambda: idle.save(3), r"os\.PathLike object, not int"),  # type: ignore[arg-type]
        (lambda: relpos.profile(3), r"model: expected relpos\.Transformer, got int"),  # type: ignore[arg-type]
        (lambda: pickle.dumps(idle), "cannot pickle"),
    ):
        with pytest.raises(TypeError, match=sentence):
            call()
    with pytest.raises(ValueError, match="embedded null byte"):
        idle.save("a\0b")
    with pytest.raises(ValueError, match="tokens: expected 1 or more, got 0"):
        relpos.Transformer(small_config(), tokens=0)
    with pytest.raises((ValueError, MemoryError, OverflowError)):
        relpos.Transformer(small_config(), tokens=2**62)


# --------------------------------------------------------------------------------------------------
# Steps
# --------------------------------------------------------------------------------------------------


def test_results_of_a_step() -> None:
    model = small_model()
    batch = pairs()
    before = model.forward(batch)
    assert before.step == before.attempt == 0 and before.gradient_norm == 0
    first = model.step(batch)
    assert isinstance(first, relpos.StepResult)
    assert (first.step, first.attempt) == (1, 1) == model.counters
    assert first.tokens == batch.labels.size == before.tokens
    assert first.finite is True and first.first_bad == ""
    assert first.learning_rate == 0.01 and first.gradient_norm > 0
    assert 0 <= first.accuracy <= 1 and first.loss > 0 and first.nll > 0
    for _ in range(100):
        last = model.step(batch)
    assert last.loss < 0.7 * first.loss and last.nll < 0.7 * first.nll


def test_parts_are_the_step() -> None:
    whole, parts = small_model(), small_model()
    batches = [pairs(seed=1), pairs(seed=2)]
    expected = whole.step(batches)
    for batch in batches:
        parts.backward(batch)
    assert parts.update() == expected
    assert_same_bits(parts.parameters, whole.parameters)
    assert_same_bits(parts.first_moments, whole.first_moments)
    assert whole.step(iter(batches)) == parts.step(tuple(batches))


def test_results_come_when_they_are_asked_for() -> None:
    """In the order of the steps, each once; on the CPU they are there at once."""
    model, twin = small_model(), small_model()
    batches = [pairs(seed=1), pairs(seed=2)]
    expected = [twin.step(batches), twin.step(batches[0]), twin.step(batches[1])]
    assert model.step(batches, wait=False) is None
    assert model.backward(batches[0], wait=False) is None
    assert model.results == (1, 1)
    assert model.update(wait=False) is None
    assert model.results == (2, 2)
    assert model.step(batches[1], wait=True) == expected[2]
    assert [model.result(), model.result()] == expected[:2]
    assert model.results == (0, 0) and model.counters == (3, 3)
    with pytest.raises(RuntimeError, match="there is no result to ask for"):
        model.result()
    assert_same_bits(model.parameters, twin.parameters)


def test_an_update_of_nothing() -> None:
    model = small_model()
    with pytest.raises(RuntimeError):
        model.update()
    model.backward(pairs())
    model.zero_gradients()
    assert all(not gradient.any() for gradient in model.gradients.values())
    with pytest.raises(RuntimeError):
        model.update()
    with pytest.raises(ValueError):
        model.step([])
    assert model.counters == (0, 0)


def test_nothing_to_predict() -> None:
    """No sentence, empty sentences, and labels that do not count: no update and no NaN."""
    model = small_model()
    empty = Batch([], [0, 0], [], [0, 0], [])
    for batch in (Batch([], [0], [], [0], []), empty, Batch([3], [0, 1], [BOS], [0, 1], [-1])):
        result = model.forward(batch)
        assert result.tokens == 0 and np.isfinite(result.loss) and result.finite
        assert [x.tolist() for x in model.score(batch)] == [
            [0.0] * n for n in np.diff(batch.target_offsets)
        ]
        assert [x.shape for x in model.hidden(batch)] == [
            (n, 16) for n in np.diff(batch.target_offsets)
        ]
    together = model.step([pairs(), empty])
    alone = small_model().step(pairs())
    assert together == alone


def test_numbers_that_are_not_finite() -> None:
    model = small_model()
    batch = pairs()
    model.step(batch)
    name = next(n for n in model.parameters if "feed_forward" in n or "ffn" in n or "encoder" in n)
    model.parameters[name].flat[0] = np.nan
    before, moments = weights(model), dict(model.first_moments)
    result = model.step(batch)
    assert result.finite is False and result.first_bad
    assert (result.step, result.attempt) == (1, 2) == model.counters
    assert_same_bits(model.parameters, before)
    assert_same_bits(model.first_moments, moments)
    model.parameters[name].flat[0] = 0
    assert model.step(batch).finite


def test_counters_can_be_set() -> None:
    """They decide dropout's masks and the learning rate."""
    model = small_model(schedule="inverse-sqrt", warmup=10)
    batch = pairs()
    losses = {}
    for attempt in (0, 5, 0):
        model.counters = (0, attempt)
        loss = model.forward(batch, dropout=True).loss
        assert losses.setdefault(attempt, loss) == loss
    assert losses[0] != losses[5]
    model.counters = (39, 50)
    result = model.step(batch)
    assert (result.step, result.attempt) == (40, 51) == model.counters
    assert result.learning_rate == model.config.learning_rate_at(40) == 0.005
    for counters, sentence in (
        ((-1, 0), "step: expected 0 or more, got -1"),
        ((3, 2), "step=3, attempt=2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model.counters = counters
    assert model.counters == (40, 51)


def test_without_training() -> None:
    model = relpos.Transformer(small_config(), tokens=256, sentences=32, training=False)
    twin = small_model()
    batch = pairs()
    assert len(model.gradients) == len(model.first_moments) == len(model.second_moments) == 0
    assert model.forward(batch) == twin.forward(batch)
    for call in (lambda: model.step(batch), lambda: model.backward(batch), model.update):
        with pytest.raises(RuntimeError, match="training"):
            call()


def test_recomputed_activations_change_no_bit() -> None:
    stored = small_model(encoder__layers=2, decoder__layers=2)
    again = relpos.Transformer(stored.config, tokens=256, sentences=32, recompute=True)
    for seed in range(3):
        assert stored.step(pairs(seed=seed)) == again.step(pairs(seed=seed))
    assert_same_bits(stored.parameters, again.parameters)


def test_one_stack_alone() -> None:
    reader = small_model(decoder__layers=0)
    tokens = sentences(4, longest=LONGEST)
    batch = Batch.from_labels(tokens, [x[::-1] for x in tokens])
    first = reader.step(batch)
    assert first.tokens == batch.source.size
    for _ in range(60):
        last = reader.step(batch)
    assert last.loss < first.loss
    assert [len(x) for x in reader.score(batch)] == [len(x) for x in tokens]
    writer = small_model(encoder__layers=0)
    language = Batch.from_sentences(sentences(4), bos=BOS, eos=EOS)
    first = writer.step(language)
    for _ in range(60):
        last = writer.step(language)
    assert last.loss < first.loss
    assert [len(x) for x in writer.score(language)] == [len(x) + 1 for x in sentences(4)]
    for model in (reader, writer):
        with pytest.raises(ValueError, match="source|target"):
            model.score(pairs())
    with pytest.raises(ValueError, match="source_offsets is NULL|no decoder"):
        reader.score(language)
    with pytest.raises(ValueError, match="target_offsets is NULL|no encoder"):
        writer.score(batch)


def test_graphs_reach_the_model() -> None:
    model = small_model(encoder__relations=3, dropout=0, attention_dropout=0, activation_dropout=0)
    random = np.random.default_rng(5)
    tokens = sentences(4)
    graphs = [random.integers(-1, 3, (len(x), len(x))) for x in tokens]
    batch = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS, source_graphs=graphs)
    other = [np.where(x == 0, 1, x) for x in graphs]
    changed = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS, source_graphs=other)
    for _ in range(3):
        assert model.step(batch).finite
    assert model.forward(batch).loss != model.forward(changed).loss
    graphs[0][2, 3] = 3
    above = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS, source_graphs=graphs)
    with pytest.raises(ValueError, match=r"source_graphs.*\b3\b"):
        model.step(above)
    plain = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS)
    with pytest.raises(ValueError, match="source_graphs"):
        model.step(plain)
    with pytest.raises(ValueError, match="graphs"):
        small_model().step(batch)


def test_ordinals_decide_dropout() -> None:
    batch = pairs(count=3)
    numbered, other = (
        Batch(*(getattr(batch, name) for name in FIELDS[:5]), ordinals=ordinals)
        for ordinals in ([0, 1, 2], [0, 1, 7])
    )
    model = small_model()
    loss = model.forward(batch, dropout=True).loss
    assert model.forward(numbered, dropout=True).loss == loss
    assert model.forward(other, dropout=True).loss != loss
    assert model.forward(batch).loss == model.forward(other).loss


# --------------------------------------------------------------------------------------------------
# Views
# --------------------------------------------------------------------------------------------------


def test_names_and_shapes() -> None:
    model = small_model(ema=0.9)
    for arrays in (model.gradients, model.first_moments, model.second_moments, model.averages):
        assert list(arrays) == list(model.parameters)
        assert [x.shape for x in arrays.values()] == [x.shape for x in model.parameters.values()]
    numbers = sum(array.size for array in model.parameters.values())
    assert repr(model.parameters) == f"<{len(model.parameters)} arrays of {numbers:,} numbers>"
    memory = relpos.model_memory(model.config, tokens=256, sentences=32)
    assert memory.parameters >= 4 * numbers
    spans = sorted((x.ctypes.data, x.ctypes.data + x.nbytes) for x in model.parameters.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert len(small_model().averages) == 0


def test_parameters_are_the_models_own() -> None:
    model = small_model()
    batch = pairs()
    before = model.forward(batch).loss
    name, array = next(iter(model.parameters.items()))
    assert array.dtype == np.float32 and array.flags.c_contiguous and array.flags.writeable
    assert not array.flags.owndata and array.base is model._core
    array += 0.1
    assert model.forward(batch).loss != before
    assert model.parameters[name] is array


def test_gradients_are_the_models_own() -> None:
    """Of the sum of the tokens' losses: scaled by hand, the update is another."""
    model, twin = small_model(clip_norm=1.0), small_model(clip_norm=1.0)
    for each in (model, twin):
        each.backward(pairs())
    for name, gradient in model.gradients.items():
        assert gradient.flags.writeable
        assert np.array_equal(gradient, twin.gradients[name])
    norm = np.sqrt(
        sum(float(np.square(g, dtype=np.float64).sum()) for g in model.gradients.values())
    )
    for gradient in model.gradients.values():
        gradient *= 0.5  # a power of two: exact
    result, expected = model.update(), twin.update()
    assert expected.gradient_norm == pytest.approx(norm / expected.tokens, rel=1e-5)
    assert result.gradient_norm == pytest.approx(expected.gradient_norm / 2, rel=1e-6)
    assert all(not gradient.any() for gradient in model.gradients.values())


def test_moments_and_averages_are_read_only() -> None:
    model = small_model(ema=0.5)
    for _ in range(2):
        model.step(pairs())
    for arrays in (model.first_moments, model.second_moments, model.averages):
        assert any(array.any() for array in arrays.values())
        for array in arrays.values():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)


def test_views_outlive_the_model() -> None:
    model = small_model()
    model.step(pairs())
    core = model._core
    copies = weights(model)
    views = dict(model.parameters)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and sys.getrefcount(core) > 2
    del core
    gc.collect()
    noise = [small_model() for _ in range(3)]  # which would take the memory
    assert_same_bits(views, copies)
    last = views.popitem()[1]
    del views, noise
    gc.collect()
    assert np.isfinite(last).all()
    last += 1
    assert isinstance(last.base, _core.Model)
    last.base.step((pairs()._packed,))  # and the model behind it still works


def test_models_are_seen_by_the_collector() -> None:
    model = small_model()
    assert gc.is_tracked(model._core)
    assert type(model._core) in gc.get_referents(model._core)
    assert repr(model).startswith("Transformer(Config(") and "arrays of" in repr(model)


# --------------------------------------------------------------------------------------------------
# Scores, hidden states, maps
# --------------------------------------------------------------------------------------------------


def test_scores_are_the_loss() -> None:
    model = small_model()
    batch = pairs()
    scores = model.score(batch)
    assert [x.shape for x in scores] == [(n,) for n in np.diff(batch.target_offsets)]
    mean = -np.concatenate(scores).mean(dtype=np.float64)
    assert mean == pytest.approx(model.forward(batch).nll, rel=1e-5)
    fewer = batch.labels.copy()
    fewer[::2] = -1
    some = Batch(*(getattr(batch, name) for name in FIELDS[:4]), labels=fewer)
    expected = np.where(fewer < 0, 0, np.concatenate(scores))
    np.testing.assert_array_equal(np.concatenate(model.score(some)), expected)


def test_hidden_states_are_before_the_projection() -> None:
    model = small_model(share_output=True, share_embeddings=True)
    batch = pairs()
    hidden = model.hidden(batch)
    assert [x.shape for x in hidden] == [(n, 16) for n in np.diff(batch.target_offsets)]
    [embedding] = [x for x in model.parameters.values() if x.shape == (VOCABULARY, 16)]
    logits = np.concatenate(hidden).astype(np.float64) @ embedding.T.astype(np.float64)
    chosen = np.take_along_axis(logits, batch.labels[:, None], 1)[:, 0]
    expected = chosen - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(np.concatenate(model.score(batch)), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_attention_maps(kind: Any) -> None:
    model = small_model(encoder__layers=2, decoder__layers=2)
    for _ in range(3):
        model.step(pairs())
    batch = pairs()
    sources, targets = np.diff(batch.source_offsets), np.diff(batch.target_offsets)
    for sentence, (source, target) in enumerate(zip(sources, targets, strict=True)):
        queries, keys = {"encoder": (source, source), "decoder": (target, target)}.get(
            kind, (target, source)
        )
        for layer, head in itertools.product(range(2), range(2)):
            where = (batch, layer, head, kind)
            p = model.attention_maps(*where, sentence=sentence)
            assert p.shape == (queries, keys) and p.dtype == np.float32
            if keys == 0:
                continue
            np.testing.assert_allclose(p.sum(1), 1, atol=1e-5)
            logits = model.attention_maps(*where, sentence=sentence, show="logits")
            e = np.exp(logits - logits.max(1, keepdims=True))
            np.testing.assert_allclose(p, e / e.sum(1, keepdims=True), atol=1e-6)
            content = model.attention_maps(*where, sentence=sentence, show="content")
            relations = 0
            if kind != "cross":
                relations = model.attention_maps(*where, sentence=sentence, show="key")
            for absent in ("key_2", "query", "query_2", "bias", "bias_2"):
                assert not model.attention_maps(*where, sentence=sentence, show=absent).any()
            seen = np.isfinite(logits)
            np.testing.assert_allclose((content + relations)[seen], logits[seen], atol=1e-5)
            assert np.array_equal(
                seen, np.tri(queries, dtype=bool) if kind == "decoder" else seen | True
            )
    first = [model.attention_maps(batch, 0, head, kind) for head in range(2)]
    assert first[0].size and not np.array_equal(*first)


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


# --------------------------------------------------------------------------------------------------
# Profile
# --------------------------------------------------------------------------------------------------


def test_profile() -> None:
    model = small_model(encoder__layers=2)
    batch = pairs()
    with relpos.profile(model) as profile:
        assert all(line.calls == 0 for line in profile.lines)
        model.step(batch)
        first = profile.lines
        model.step(batch)
    model.step(batch)
    lines = profile.lines
    assert {line.backward for line in lines} == {False, True}
    assert any(line.name.startswith("encoder.1.") for line in lines)
    assert all(line.calls > 0 and line.seconds >= 0 and line.operations >= 0 for line in lines)
    counted = {(line.name, line.backward): line.calls for line in first}
    assert all(line.calls == 2 * counted[line.name, line.backward] for line in lines)
    summed = profile.over_layers()
    assert len(summed) < len(lines)
    for key in ("calls", "operations", "bytes"):
        total = sum(getattr(line, key) for line in lines)
        assert sum(getattr(line, key) for line in summed) == pytest.approx(total, rel=1e-12)
    rows = str(profile).splitlines()
    assert len(rows) == len(lines) + 2 and rows[0].split()[:3] == ["operation", "pass", "calls"]
    assert len({len(row) for row in rows[:-1]}) == 1
    with relpos.profile(model) as profile:
        model.forward(batch)
    assert not any(line.backward and line.calls for line in profile.lines)


def test_profile_of_nothing() -> None:
    empty = relpos.Profile(small_model())
    assert empty.lines == () and len(str(empty).splitlines()) == 2


# --------------------------------------------------------------------------------------------------
# Over time and over threads
# --------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_leaks() -> None:
    model = small_model(encoder__relations=2)
    tokens = sentences(4)
    graphs = [np.zeros((len(x), len(x)), int) for x in tokens]
    batch = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS, source_graphs=graphs)
    bad = tuple(x if i != 4 else x[:-1] for i, x in enumerate(batch._packed))
    held = [batch._packed, *batch._packed[:5], *batch._packed[5], model._core]
    held += [model.parameters, next(iter(model.parameters.values())), _core.Model, None]

    def calls(times: int) -> None:
        for _ in range(times):
            model.step(batch)
            model.backward(batch)
            model.update()
            model.forward(batch, dropout=True)
            model.score(batch)
            model.hidden(batch)
            model.attention_maps(batch, 0, 0, "cross")
            with pytest.raises(ValueError):
                model._core.step((batch._packed, bad))
            with pytest.raises(ValueError):
                model.attention_maps(batch, 7, 0)
            model._core.parameters()
            with relpos.profile(model):
                pass

    calls(20)
    gc.collect()
    counts = [sys.getrefcount(x) for x in held]
    resident = resident_bytes()
    calls(200)
    gc.collect()
    after = [sys.getrefcount(x) for x in held]
    assert after[:-1] == counts[:-1]
    if sys.version_info < (3, 12):  # from there on nobody has to count None
        assert abs(after[-1] - counts[-1]) < 100
    if "-fsanitize" not in relpos.build_info()["flags"]:
        assert resident_bytes() - resident < 1 << 20


def test_models_and_configurations_do_not_leak() -> None:
    config = small_config()

    def make(times: int) -> None:
        for _ in range(times):
            relpos.Transformer(config, tokens=256, sentences=32).step(pairs())
            with pytest.raises(ValueError):
                config.replace({"heads": 3})
            with pytest.raises(ValueError):
                _core.Model((("no", "such"),), (1, 1, True, False, "cpu", 0))

    make(20)
    gc.collect()
    resident, references = resident_bytes(), sys.getrefcount(_core.Model)
    make(100)
    gc.collect()
    after = sys.getrefcount(_core.Model)  # not in the assert, which holds references of its own
    assert after == references
    if "-fsanitize" not in relpos.build_info()["flags"]:
        assert resident_bytes() - resident < 1 << 20


def test_a_busy_model_refuses_a_second_thread() -> None:
    """While one thread trains, every call of another raises, and the training is what it would
    have been."""
    config = small_config(max_length=256)
    tokens = [np.full(255, 3 + i) for i in range(8)]
    batch = Batch.from_pairs(tokens, tokens, bos=BOS, eos=EOS)
    small = pairs()
    model, twin = (relpos.Transformer(config, tokens=2048, sentences=8) for _ in range(2))
    done = threading.Event()
    refused: list[str] = []

    def train() -> None:
        steps = 0
        while steps < 10:
            try:
                model.step(batch)
                steps += 1
            except RuntimeError as error:
                refused.append(str(error))
        done.set()

    worker = threading.Thread(target=train)
    worker.start()
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: model.forward(small),
        "score": lambda: model.score(small),
        "map": lambda: model.attention_maps(small, 0, 0),
        "update": model.update,
        "counters": lambda: model.counters,
    }
    met: set[str] = set()
    while not done.is_set():
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                if "accumulated" not in str(error):
                    met.add(name)
                    refused.append(str(error))
    worker.join()
    assert refused and met >= {"step", "score", "map"}
    for _ in range(10):
        twin.step(batch)
    assert_same_bits(model.parameters, twin.parameters)
    assert model.counters == twin.counters == (10, 10)


def test_models_side_by_side() -> None:
    """Different models may work in different threads: the bits are those of one alone."""
    batch = pairs()
    models = [small_model() for _ in range(4)]

    def train(model: relpos.Transformer) -> None:
        for _ in range(20):
            model.step(batch)

    threads = [threading.Thread(target=train, args=(model,)) for model in models[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(models[0])
    for model in models[1:]:
        assert_same_bits(model.parameters, models[0].parameters)
