# SPDX-License-Identifier: Apache-2.0
"""The door from Python to the model: steps, scores, hidden states, maps, profiles.

That the model computes what it should is shown elsewhere; here the numbers only have to agree with
each other. What goes in and what is refused: test_model_batches.py. Views of the model's memory,
leaks and threads: test_model_memory.py.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

import relpos
from relpos import Batch
from small_model import (
    BOS,
    EOS,
    FIELDS,
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


@pytest.mark.parametrize(("length", "met"), [(10, 5), (11, 6)])
def test_buckets_begin_where_those_of_the_schemes_do(length: int, met: int) -> None:
    """Of 10 buckets up to 160 the distance 10 is exactly the first of bucket 6."""
    assert relpos.position.t5_buckets([1 - length], 10, 160, bidirectional=False) == [met]
    model = small_model(
        encoder__layers=0, decoder__position="t5", decoder__buckets=10, decoder__max_distance=160
    )
    model.backward(Batch.from_sentences([[4] * (length - 1)], bos=BOS, eos=EOS))
    [table] = [x for x in model.gradients.values() if x.shape == (2, 10)]
    assert np.flatnonzero(table.any(axis=0)).max() == met


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
    with pytest.raises(ValueError, match="source_offsets is None|no decoder"):
        reader.score(language)
    with pytest.raises(ValueError, match="target_offsets is None|no encoder"):
        writer.score(batch)


def test_a_tied_table_is_one_parameter() -> None:
    def tables_of(**changes: Any) -> set[str]:
        names = small_model(encoder__relations=3, **changes).parameters
        return {name.removeprefix("encoder.0.attention.") for name in names if "_table" in name}

    keys = {"key_table", "relation_key_table"}
    assert tables_of(decoder__layers=0, encoder__tied=True) == keys
    assert tables_of(decoder__layers=0) == keys | {"value_table", "relation_value_table"}


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


# --------------------------------------------------------------------------------------------------
# Profile
# --------------------------------------------------------------------------------------------------


def test_of_several_batches_the_first_bad_one_is_told() -> None:
    model = small_model(share_embeddings=False, share_output=False)
    for side, token in (("source", 5), ("target", 6)):
        model.parameters[f"{side}_embedding.weight"][token] = np.nan
    batches = [Batch.from_pairs([[x]], [[y]], bos=1, eos=2) for x, y in ((7, 8), (5, 8), (7, 6))]
    for chosen, named in (((0, 1, 2), "encoder.embedding"), ((0, 2, 1), "decoder.embedding")):
        result = model.step([batches[i] for i in chosen])
        assert (result.finite, result.first_bad) == (False, named)


def test_profile() -> None:
    model = small_model(encoder__layers=2)
    batch = pairs()
    with relpos.profile(model) as profile:
        assert all(line.calls == 0 for line in profile.lines)
        begun = time.monotonic()
        model.step(batch)
        first, took = profile.lines, time.monotonic() - begun
        model.step(batch)
    model.step(batch)
    lines = profile.lines
    assert 0 < sum(line.seconds for line in first) <= took
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


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("width", [3, 4, 5, 7])
def test_closed_sinusoids_of_small_widths(width: int, layout: Any) -> None:
    """Those of `Sinusoidal`: width 3 has two frequencies where sines and cosines take turns."""
    model = small_model(
        width=width, heads=1, head_width=4, norm="post", encoder__position="none",
        encoder__absolute="sinusoidal", encoder__sinusoid_rule="closed",
        encoder__sinusoid_interleaved=layout == "interleaved", encoder__sinusoid_first=0,
        decoder__layers=0, norm_epsilon=1e-12,
    )  # fmt: skip
    for name, numbers in model.parameters.items():
        numbers[...] = name.endswith("gain")
    tokens = np.full(6, 3)
    batch = relpos.Batch(source=tokens, source_offsets=[0, 6], labels=tokens)
    table = relpos.Sinusoidal(width, exponent="t2t", layout=layout).table(6).astype(np.float64)
    spread = table.std(axis=1, keepdims=True)
    expected = (table - table.mean(axis=1, keepdims=True)) / spread
    # normalised twice: rounding of the table, over how far its rows are spread
    assert np.abs(model.hidden(batch)[0] - expected).max() < 8 * 2**-24 / spread.min()
