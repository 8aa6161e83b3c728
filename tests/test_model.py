# SPDX-License-Identifier: Apache-2.0
"""What a training step promises: bits, sums over batches, refusals, and nothing half-done.

Gradients themselves are test_model_gradients.py's, allocations and their failures those of
tests/c/test_model.c.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import ARGUMENT, ORDER, SHAPE, Core, CoreError, core_by_name
from model_capi import CROSS, DECODER, ENCODER, OPTIMIZER, Config, Model, Sentences

SMALL: dict[str, Any] = {
    "width": 16,
    "heads": 2,
    "feed_forward": 24,
    "source_vocabulary": 13,
    "target_vocabulary": 13,
    "max_length": 12,
    "dropout": 0.2,
    "attention_dropout": 0.2,
    "activation_dropout": 0.2,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "warmup": 0,
    "clip_norm": 1.0,
    "ema": 0.9,
}


@pytest.fixture(scope="module", params=["f32", "f64"])
def core(request: Any, libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, request.param)


def sentences(seed: int, lengths: tuple[int, ...] = (5, 12, 1, 0, 7)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 13, n).tolist() for n in lengths]


def pairs(seed: int = 0, ordinals: list[int] | None = None) -> Sentences:
    source, target = sentences(seed), sentences(seed + 1, (3, 12, 2, 6, 0))
    return Sentences(source, target, sentences(seed + 2, (3, 12, 2, 6, 0)), ordinals=ordinals)


def bits(model: Model) -> dict[str, bytes]:
    """Everything that a step changes."""
    return {
        f"{kind} {name}": array.tobytes()
        for kind, views in model.views.items()
        for name, array in views.items()
        if kind != "gradient"
    }


# ------------------------------------------------------------------------------------- the same bits


def trained(core: Core, steps: int = 4, changes: Any = None, **limits: int) -> dict[str, bytes]:
    with Model(Config(core, "tiny", SMALL | (changes or {})), **limits) as model:
        for step in range(steps):
            model.step(pairs(step), pairs(step + 10))
        return bits(model)


def test_threads_and_runs_do_not_change_a_bit(core: Core) -> None:
    results = []
    for threads in (1, 2, 3, 1):
        core.set_threads(threads)
        results.append(trained(core))
    core.set_threads(0)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_recomputing_does_not_change_a_bit(core: Core, norm: str, activation: str) -> None:
    changes = {"norm": norm, "activation": activation}
    assert trained(core, 3, changes) == trained(core, 3, changes, recompute=1)


def test_limits_do_not_change_a_bit(core: Core) -> None:
    assert trained(core) == trained(core, tokens=500, sentences=100)


def test_recomputing_takes_less_memory(core: Core) -> None:
    import ctypes

    from model_capi import Limits, Memory

    config = Config(core, "tiny", SMALL | {"encoder.layers": 6, "decoder.layers": 6})
    told = []
    for recompute in (0, 1):
        memory = Memory(struct_size=ctypes.sizeof(Memory))
        limits = Limits(ctypes.sizeof(Limits), 512, 64, 1, recompute, None, 0)
        where = ctypes.byref(limits), ctypes.byref(memory)
        core.check(core.lib.rp_model_memory(config.memory, *where))
        told.append(memory.activations)
    assert told[1] < 0.6 * told[0]


def test_resumed_training_has_the_same_bits(core: Core, tmp_path: Path) -> None:
    config = Config(core, "tiny", SMALL)
    with Model(config) as model, Model(config) as other:
        for step in range(3):
            model.step(pairs(step))
        model.save(tmp_path / "weights.safetensors")
        model.save(tmp_path / "optimizer.safetensors", OPTIMIZER)
        other.load(tmp_path / "weights.safetensors")
        other.load(tmp_path / "optimizer.safetensors", OPTIMIZER)
        for step in range(3, 6):
            result, again = model.step(pairs(step)), other.step(pairs(step))
            assert (result.loss, result.step, result.attempt) == (
                again.loss,
                again.step,
                again.attempt,
            )
        assert bits(model) == bits(other)


# ---------------------------------------------------------------------------------- sums over batches


def split(batch: list[list[list[int]]], at: int) -> tuple[list[Any], list[Any]]:
    return [part[:at] for part in batch], [part[at:] for part in batch]


def test_micro_batches_are_one_batch(core: Core) -> None:
    """Dropout is on: the ordinals of the sentences go on from batch to batch."""
    whole = [sentences(0), sentences(1, (3, 12, 2, 6, 0)), sentences(2, (3, 12, 2, 6, 0))]
    whole[2][1][3] = -1  # the parts have different shares of labels
    config = Config(core, "tiny", SMALL)
    with Model(config) as one, Model(config) as parts:
        first, second = split(whole, 2)
        result = one.step(Sentences(*whole))
        again = parts.step(Sentences(*first), Sentences(*second))
        assert result.tokens == again.tokens == 22
        exact = 1e-12 if core.dtype == np.float64 else 2e-6
        assert again.loss == pytest.approx(result.loss, rel=exact)
        assert again.gradient_norm == pytest.approx(result.gradient_norm, rel=10 * exact)
        for name, weights in one.weights.items():
            # Adam's first step moves every weight by the learning rate, whatever its gradient's
            # size, so those whose gradient is mere rounding may differ; moments say it all.
            moment, other = one.views["moment1"][name], parts.views["moment1"][name]
            assert np.max(np.abs(moment - other)) <= exact * np.max(np.abs(moment) + 1), name
            assert weights.shape == parts.weights[name].shape


def test_batches_may_be_permuted_with_their_ordinals(core: Core) -> None:
    order = [3, 0, 4, 2, 1]
    given = [sentences(0), sentences(1, (3, 12, 2, 6, 0)), sentences(2, (3, 12, 2, 6, 0))]
    moved = [[part[i] for i in order] for part in given]
    with Model(Config(core, "tiny", SMALL)) as model:
        first = model.backward(Sentences(*given))
        gradients = {name: g.copy() for name, g in model.gradients.items()}
        model.zero_gradients()
        again = model.backward(Sentences(*moved, ordinals=order))
        exact = 1e-11 if core.dtype == np.float64 else 1e-4
        assert again.loss == pytest.approx(first.loss, rel=exact)
        for name, gradient in gradients.items():
            size = np.linalg.norm(gradient) + 1e-3
            assert np.linalg.norm(gradient - model.gradients[name]) <= exact * size, name
        model.zero_gradients()
        other = model.backward(Sentences(*moved))  # the masks are others': the loss is, too
        assert abs(other.loss - first.loss) > 1e-3


def test_step_is_its_parts(core: Core) -> None:
    config = Config(core, "tiny", SMALL)
    with Model(config) as one, Model(config) as parts:
        result = one.step(pairs(0), pairs(5))
        parts.backward(pairs(0))
        parts.backward(pairs(5))
        again = parts.update()
        assert bits(one) == bits(parts)
        for name in ("tokens", "loss", "nll", "accuracy", "gradient_norm", "learning_rate", "step"):
            assert getattr(result, name) == getattr(again, name), name
        assert not any(np.any(g) for g in parts.gradients.values())


def test_first_update_is_adams(core: Core) -> None:
    """By the formula, from the gradients: clipping, bias corrections, decay and average."""
    changes = SMALL | {"weight_decay": 0.1, "clip_norm": 0.5}
    with Model(Config(core, "tiny", changes)) as model:
        before = {name: w.astype(np.float64) for name, w in model.weights.items()}
        result = model.backward(pairs())
        gradients = {n: g.astype(np.float64) / result.tokens for n, g in model.gradients.items()}
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
        update = model.update()
        assert norm > 0.5
        assert update.gradient_norm == pytest.approx(norm, rel=1e-6)
        for name, gradient in gradients.items():
            g = gradient * 0.5 / norm
            decays = before[name].ndim > 1 and not name.endswith("bias_table")
            step = g / (np.abs(g) + 1e-9) + (0.1 * before[name] if decays else 0)
            expected = before[name] - 1e-2 * step
            sure = np.abs(g) > 1e-5  # elsewhere epsilon and rounding decide
            exact = 1e-12 if core.dtype == np.float64 else 1e-6
            got = model.weights[name].astype(np.float64)
            assert np.all(np.abs(got - expected)[sure] <= exact + 1e-2 * 2e-4 * (exact > 1e-7)), (
                name
            )
            average = 0.9 * before[name] + 0.1 * got
            np.testing.assert_allclose(model.views["average"][name], average, atol=exact, rtol=0)


# --------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("source_embedding.weight", "encoder.embedding"),
        ("encoder.1.feed_forward.in.weight", "encoder.1.feed_forward"),
        ("decoder.0.attention.key_table", "decoder.0.attention"),
        ("decoder.1.cross.q.weight", "decoder.1.cross"),
    ],
)
def test_a_number_that_is_not_finite_updates_nothing(core: Core, name: str, bad: str) -> None:
    changes = SMALL | {"norm": "pre", "share_embeddings": False, "share_output": False}
    with Model(Config(core, "tiny", changes)) as model:
        model.step(pairs(0))
        kept = model.weights[name].copy()
        model.weights[name][...] = np.nan
        before = bits(model)
        result = model.step(pairs(1))
        assert (result.finite, result.first_bad.decode()) == (0, bad)
        assert (result.step, result.attempt) == (1, 2)
        assert bits(model) == before
        assert not any(np.any(g) for g in model.gradients.values())
        model.weights[name][...] = kept
        assert model.step(pairs(1)).finite == 1


@pytest.mark.parametrize(
    ("norm", "name", "bad"),
    [
        ("pre", "encoder.1.attention.out.weight", "encoder.1.attention"),
        ("pre", "decoder.0.feed_forward.norm.gain", "decoder.0.feed_forward.norm"),
        ("pre", "decoder.norm.shift", "decoder.norm"),
        ("post", "decoder.0.feed_forward.norm.gain", "decoder.0.feed_forward.norm"),
        ("post", "encoder.1.feed_forward.out.bias", "encoder.1.feed_forward"),
    ],
)
@pytest.mark.parametrize("limits", [{}, {"recompute": 1}, {"training": 0}], ids=str)
def test_the_first_bad_layer_is_named(
    core: Core, norm: str, name: str, bad: str, limits: Any
) -> None:
    """Streams that share memory tell it, too."""
    with Model(Config(core, "tiny", SMALL | {"norm": norm}), **limits) as model:
        model.weights[name][...] = np.nan
        result = model.forward(pairs()) if "training" in limits else model.step(pairs())
        assert (result.finite, result.first_bad.decode()) == (0, bad)


@pytest.mark.parametrize("huge", [np.inf, 1e25], ids=str)
def test_a_gradient_that_is_not_finite_is_named(core: Core, huge: float) -> None:
    """Or one whose square the second moment could never forget."""
    with Model(Config(core, "tiny", SMALL | {"clip_norm": 0})) as model:
        model.backward(pairs())
        model.gradients["encoder.0.attention.out.weight"][0, 0] = huge
        before = bits(model)
        result = model.update()
        assert result.finite == 0
        assert result.first_bad.decode() == "gradient of encoder.0.attention.out.weight"
        assert bits(model) == before


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("source", "target", "labels", "status", "message"),
    [
        ([[1, 13]], [[1]], [[1]], ARGUMENT, "source[1]=13 (token 1 of sentence 0), must be"),
        (
            [[1], [2]],
            [[1], [3, -1]],
            [[1], [1, 1]],
            ARGUMENT,
            "target[2]=-1 (token 1 of sentence 1)",
        ),
        ([[1]], [[1]], [[-2]], ARGUMENT, "labels[0]=-2 (token 0 of sentence 0), must be from -1"),
        ([[1] * 13], [[1]], [[1]], SHAPE, "source sentence 0 has 13 tokens, at most max_length=12"),
        ([[1] * 12] * 6, [[1]] * 6, [[1]] * 6, SHAPE, "more than limits.tokens=64 source tokens"),
        ([[1]] * 17, [[1]] * 17, [[1]] * 17, SHAPE, "sentences=17, must be from 0 to"),
        ([[1]], None, [[1]], ARGUMENT, "target_offsets is NULL"),
    ],
)
def test_bad_batches_are_refused(
    core: Core, source: Any, target: Any, labels: Any, status: int, message: str
) -> None:
    with Model(Config(core, "tiny", SMALL)) as model:
        before = bits(model)
        with pytest.raises(CoreError) as refused:
            model.step(pairs(), Sentences(source, target, labels))
        assert refused.value.status == status
        assert message in refused.value.message
        assert bits(model) == before
        assert model.step(pairs()).finite == 1


def graphs_of(lengths: tuple[int, ...]) -> list[Any]:
    """Of two relations, with every label that there may be."""
    return [np.arange(n * n).reshape(n, n) % 3 - 1 for n in lengths]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("label", [-2, 2, 5])
def test_labels_of_graphs_out_of_range_are_refused(core: Core, side: str, label: int) -> None:
    """Each would be looked up in a table of two rows."""
    lengths = (1, 2, 3)
    good = {"source": graphs_of(lengths), "target": graphs_of(lengths)}
    bad = {name: [graph.copy() for graph in graphs] for name, graphs in good.items()}
    bad[side][1][1, 0] = label
    tokens = sentences(0, lengths)
    fine, wrong = (Sentences(tokens, tokens, tokens, *both.values()) for both in (good, bad))
    changes = SMALL | {"encoder.relations": 2, "decoder.relations": 2}
    with Model(Config(core, "tiny", changes)) as model:
        before = bits(model)
        with pytest.raises(CoreError) as refused:
            model.step(fine, wrong)
        assert refused.value.status == ARGUMENT
        assert refused.value.message == (
            f"batches[1]: {side}_graphs has label {label} at (1, 0) of sentence 1, "
            "must be from -1 to 1"
        )
        assert bits(model) == before
        assert model.step(fine).finite == 1


def test_calls_in_the_wrong_order_are_refused(core: Core) -> None:
    with Model(Config(core, "tiny", SMALL)) as model:
        with pytest.raises(CoreError, match="nothing is accumulated") as refused:
            model.update()
        assert refused.value.status == ORDER
        model.backward(pairs())
        with pytest.raises(CoreError, match="gradients of 1 batch are accumulated"):
            model.step(pairs())
        model.zero_gradients()
        model.step(pairs())
    with Model(Config(core, "tiny", SMALL), training=0) as model:
        assert not model.gradients
        model.forward(pairs())
        with pytest.raises(CoreError, match="training=0 and has no gradients"):
            model.step(pairs())


def test_more_threads_than_were_planned_for(core: Core) -> None:
    """The workspace grows with them, for a batch without a token as well."""
    core.set_threads(1)
    with Model(Config(core, "tiny", SMALL | {"encoder.layers": 0}), tokens=1, sentences=1) as model:
        core.set_threads(3)
        assert model.step(Sentences(None, [[]], [[]])).tokens == 0
        assert model.step(Sentences(None, [[1]], [[2]])).tokens == 1
    core.set_threads(0)


def test_counters_have_a_bound(core: Core) -> None:
    import ctypes

    with Model(Config(core, "tiny", SMALL)) as model:
        most = ctypes.c_int64(2**40 + 1)
        with pytest.raises(CoreError, match=r"must be 0 <= step <= attempt <= 2\^40"):
            core.check(core.lib.rp_model_set_counters(model.handle, most, most))


def test_the_average_begins_with_the_weights_that_are_loaded(core: Core, tmp_path: Path) -> None:
    with Model(Config(core, "tiny", SMALL | {"seed": 1})) as model:
        model.step(pairs())
        model.save(tmp_path / "weights.safetensors")
        with Model(Config(core, "tiny", SMALL | {"seed": 2})) as other:
            other.load(tmp_path / "weights.safetensors")
            for name, weights in model.weights.items():
                np.testing.assert_array_equal(other.views["average"][name], weights)


def test_a_batch_without_labels_updates_nothing(core: Core) -> None:
    with Model(Config(core, "tiny", SMALL)) as model:
        before = bits(model)
        for batch in (Sentences([[1]], [[2]], [[-1]]), Sentences([], [], [])):
            result = model.step(batch)
            assert (result.tokens, result.finite, result.step) == (0, 1, 0)
        assert bits(model) == before


# ------------------------------------------------------------------------------- what forward tells


def test_scores_are_the_loss(core: Core) -> None:
    batch = pairs()
    with (
        Model(Config(core, "tiny", SMALL)) as model,
        Model(Config(core, "tiny", SMALL), training=0) as inference,
    ):
        result = model.forward(batch)
        scores = model.score(batch)
        assert -np.sum(scores) / result.tokens == pytest.approx(result.nll, rel=1e-5)
        np.testing.assert_array_equal(inference.score(batch), scores)
        # and by hand, from what the output projection reads
        hidden = model.hidden(batch, 16).astype(np.float64)
        logits = hidden @ model.weights["source_embedding.weight"].T.astype(np.float64)
        logp = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
        labels = batch.alive[4]
        np.testing.assert_allclose(scores, logp[np.arange(len(labels)), labels], atol=1e-4)
        hits = model.score_and_hits(batch)[1]
        np.testing.assert_array_equal(hits, np.argmax(logits, axis=1) == labels)
        assert np.mean(hits) == pytest.approx(result.accuracy)


POSITIONS = (
    *("none", "shaw", "transformer-xl", "music", "t5", "deberta", "relative-key"),
    *("relative-key-query", "alibi", "alibi-learned", "rope"),
)


@pytest.mark.parametrize("position", POSITIONS)
def test_attention_maps_are_distributions(core: Core, position: str) -> None:
    batch = pairs()
    own = {f"{stack}.position": position for stack in ("encoder", "decoder")}
    with Model(Config(core, "tiny", SMALL | own)) as model:
        for kind in (ENCODER, DECODER, CROSS):
            attention = model.map(batch, kind, 1, 1, 1, (12, 12))
            np.testing.assert_allclose(attention.sum(axis=1), 1, atol=1e-5)
            if kind == DECODER:
                assert np.all(np.triu(attention, 1) == 0)
        with pytest.raises(CoreError, match="layer=2, must be from 0 to 1"):
            model.map(batch, ENCODER, 2, 0, 0, (5, 5))
        with pytest.raises(CoreError, match="head=2"):
            model.map(batch, ENCODER, 0, 2, 0, (5, 5))


# ---------------------------------------------------------------------------------------- learning


def train(model: Model, steps: int, batch: Any) -> float:
    """The accuracy on a batch that training has not seen."""
    for step in range(steps):
        model.step(batch(step))
    return float(model.forward(batch(10**6)).accuracy)


LEARNING: dict[str, Any] = {
    "width": 32,
    "heads": 2,
    "feed_forward": 64,
    "source_vocabulary": 8,
    "target_vocabulary": 8,
    "max_length": 12,
    "decoder.layers": 0,
    "dropout": 0,
    "attention_dropout": 0,
    "activation_dropout": 0,
    "label_smoothing": 0,
    "schedule": "constant",
    "warmup": 20,
    "learning_rate": 3e-3,
}


@pytest.fixture(scope="module")
def f32(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f32")


def previous_words(seed: int) -> Sentences:
    """Every word's label is the word before it: a task of order and nothing else."""
    rng = np.random.default_rng(seed)
    source = [rng.integers(0, 8, rng.integers(3, 12)).tolist() for _ in range(16)]
    return Sentences(source, None, [[-1, *words[:-1]] for words in source])


@pytest.mark.parametrize(
    ("position", "solves"),
    [
        ({"encoder.position": "none"}, False),
        ({"encoder.position": "shaw", "encoder.k": 0}, False),
        ({"encoder.position": "shaw", "encoder.k": 2}, True),
    ],
    ids=["none", "k = 0", "shaw"],
)
def test_order_needs_relative_positions(f32: Core, position: Any, solves: bool) -> None:
    with Model(Config(f32, "tiny", LEARNING | position), tokens=200) as model:
        accuracy = train(model, 250, previous_words)
    assert accuracy > 0.99 if solves else accuracy < 0.5


def parents(seed: int, labelled: bool) -> Sentences:
    """Every word's label is the word of its parent in a random tree, root: its own."""
    rng = np.random.default_rng(seed)
    source, labels, graphs = [], [], []
    for _ in range(16):
        n = int(rng.integers(3, 10))
        words = rng.integers(0, 8, n)
        order = rng.permutation(n)
        parent = np.arange(n)
        for at in range(1, n):
            parent[order[at]] = order[rng.integers(0, at)]
        graph = np.full((n, n), 2)
        graph[np.arange(n), parent] = 0
        graph[parent, np.arange(n)] = 1
        source.append(words.tolist())
        labels.append(words[parent].tolist())
        graphs.append(graph if labelled else np.full((n, n), -1))
    return Sentences(source, None, labels, graphs)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_graph_needs_its_labels(f32: Core, labelled: bool) -> None:
    changes = LEARNING | {"encoder.position": "none", "encoder.relations": 3}
    with Model(Config(f32, "tiny", changes), tokens=200) as model:
        accuracy = train(model, 250, lambda seed: parents(seed, labelled))
    assert accuracy > 0.97 if labelled else accuracy < 0.6


def test_eight_pairs_are_learned_to_the_floor_of_smoothing(f32: Core) -> None:
    """The least a smoothed loss can be is the entropy of what it asks for."""
    changes = LEARNING | {"decoder.layers": 2, "label_smoothing": 0.1, "learning_rate": 2e-3}
    rng = np.random.default_rng(3)
    source = [rng.integers(0, 8, rng.integers(3, 12)).tolist() for _ in range(8)]
    target = [rng.integers(2, 8, rng.integers(2, 11)).tolist() for _ in range(8)]
    batch = Sentences(source, [[0, *words] for words in target], [[*words, 1] for words in target])
    right, other = 1 - 0.1 + 0.1 / 8, 0.1 / 8
    floor = -right * math.log(right) - 7 * other * math.log(other)
    with Model(Config(f32, "tiny", changes), tokens=200) as model:
        for _ in range(400):
            model.step(batch)
        result = model.forward(batch)
    assert result.accuracy == 1
    assert floor <= result.loss < floor + 0.01
