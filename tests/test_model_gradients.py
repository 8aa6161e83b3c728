# SPDX-License-Identifier: Apache-2.0
"""Every gradient of a 2 + 2-layer model, for every option that changes the graph.

libcore_f64, the same source in double, against central differences of its own loss, with dropout
on (the same masks each time: no update comes between). Then the float library against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capi import Core, core_by_name
from model_capi import Config, Model, Sentences

BASE: dict[str, Any] = {
    "width": 12,
    "heads": 2,
    "feed_forward": 10,
    "source_vocabulary": 11,
    "target_vocabulary": 11,
    "max_length": 9,
    "encoder.layers": 2,
    "decoder.layers": 2,
    "dropout": 0.1,
    "attention_dropout": 0.2,
    "activation_dropout": 0.1,
    "label_smoothing": 0.1,
    "seed": 7,
}


def both(**options: Any) -> dict[str, Any]:
    """The same for both stacks."""
    return {f"{s}.{name}": value for s in ("encoder", "decoder") for name, value in options.items()}


def decoder(**options: Any) -> dict[str, Any]:
    return {f"decoder.{name}": value for name, value in options.items()}


SHAW = both(position="shaw", k=2)
CASES: dict[str, dict[str, Any]] = {
    "shaw per layer and head": SHAW | both(per_layer=True, per_head=True),
    "shaw one table for all": SHAW | both(per_layer=False, per_head=False),
    "shaw per layer": SHAW | both(per_layer=True, per_head=False),
    "shaw per head, shared by layers": SHAW | both(per_layer=False, per_head=True),
    "shaw, values shared by layers and heads": SHAW
    | both(value_per_layer=False, value_per_head=False),
    "shaw, keys shared, values per layer and head": SHAW
    | both(per_layer=False, per_head=False, value_per_layer=True, value_per_head=True),
    "shaw keys alone": SHAW | both(value=False),
    "shaw values alone": SHAW | both(key=False),
    "shaw tied": SHAW | both(tied=True),
    "shaw lopsided, none beyond": SHAW | both(k=1, k_right=3, beyond="none"),
    "shaw k = 0": SHAW | both(k=0),
    "shaw, k of each stack": {"encoder.k": 3, "decoder.k": 1},
    "norm after": SHAW | {"norm": "post"},
    "norm after, no dropout": SHAW
    | {"norm": "post", "dropout": 0, "attention_dropout": 0, "activation_dropout": 0},
    "norm before, no dropout": SHAW
    | {"norm": "pre", "dropout": 0, "attention_dropout": 0, "activation_dropout": 0},
    "no biases": SHAW | {"bias": False},
    "gelu": SHAW | {"activation": "gelu"},
    "swiglu": SHAW | {"activation": "swiglu", "norm": "post"},
    "embeddings apart": SHAW | {"share_embeddings": False, "share_output": False},
    "embeddings apart, output shared": SHAW | {"share_embeddings": False, "share_output": True},
    "embeddings shared, output apart": SHAW | {"share_embeddings": True, "share_output": False},
    "embeddings unscaled": SHAW | {"scale_embeddings": False},
    "head width of its own": SHAW | {"head_width": 5},
    "one head": SHAW | {"heads": 1},
    "heads that share keys": SHAW | {"heads": 4, "key_heads": 2},
    "one head of keys, turned": both(position="rope") | {"key_heads": 1, "activation": "gelu"},
    "one head of keys, its positions by queries": {"key_heads": 1}
    | both(position="deberta", key=False, value=True, buckets=4, max_distance=8),
    "one head of keys, moved": both(position="transformer-xl") | {"key_heads": 1},
    "smoothing over the others": SHAW | {"smoothing": "others"},
    "no smoothing": SHAW | {"label_smoothing": 0},
    "no positions": both(position="none"),
    "sinusoidal": both(position="none", absolute="sinusoidal"),
    "sinusoidal, interleaved, closed, odd width": {"width": 13, "head_width": 6}
    | both(position="none", absolute="sinusoidal", sinusoid_interleaved=True)
    | both(sinusoid_rule="closed", sinusoid_first=1),
    "learned": both(position="none", absolute="learned"),
    "transformer-xl": both(position="transformer-xl"),
    "transformer-xl clamped, shared": both(position="transformer-xl", clamp=3, per_layer=False),
    "music": both(position="music", key=True, value=True),
    "t5": both(position="t5", buckets=6, max_distance=5, per_layer=False),
    "t5 per layer": both(position="t5", buckets=6, max_distance=5, per_layer=True),
    "deberta": both(position="deberta", key=True, value=True, buckets=0),
    "deberta, buckets": both(position="deberta", key=True, value=True, buckets=4, max_distance=8),
    "deberta, one term": both(position="deberta", key=True, value=False, buckets=0),
    "deberta, no biases": both(position="deberta", key=False, value=True, buckets=0)
    | {"bias": False},
    "relative-key": both(position="relative-key"),
    "relative-key-query": both(position="relative-key-query"),
    "alibi": both(position="alibi"),
    "alibi-learned": both(position="alibi-learned"),
    "rope": both(position="rope"),
    "rope, part, interleaved, ntk": both(position="rope", rope_width=4, rope_interleaved=True)
    | both(rope_rule="ntk", rope_scaling=2.0),
    "graphs": both(position="none", relations=3, relation_key=True, relation_value=True),
    "graphs beside shaw, tied": SHAW | both(relations=3, tied=True),
    "graphs beside shaw, values shared by layers": SHAW | both(relations=3, value_per_layer=False),
    "graphs, values per head": both(position="none", relations=3, per_head=False)
    | both(value_per_head=True),
    "graphs in the encoder": SHAW | {"encoder.relations": 3, "encoder.relation_value": False},
    "window and softcap": SHAW | both(window=2, softcap=3.0),
    "decoder alone": SHAW | {"encoder.layers": 0},
    "encoder alone": SHAW | {"decoder.layers": 0},
    "encoder alone, norm after": SHAW | {"decoder.layers": 0, "norm": "post"},
    "stacks of other depth": SHAW | {"encoder.layers": 1, "decoder.layers": 3},
}


@pytest.fixture(scope="module")
def f64(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f64")


@pytest.fixture(scope="module")
def f32(libraries: dict[str, Path]) -> Core:
    return core_by_name(libraries, "f32")


def batch_for(changes: dict[str, Any], seed: int = 0) -> Sentences:
    """Sentences of 5, 1, 0, 7 and 3 words (a target of 0 too), a label here and there not
    counted."""
    rng = np.random.default_rng(seed)
    encoder, decoder = (changes.get(f"{s}.layers", 2) != 0 for s in ("encoder", "decoder"))
    source = [rng.integers(0, 11, n).tolist() for n in (5, 1, 0, 7, 3)]
    target = [rng.integers(0, 11, n).tolist() for n in (4, 2, 3, 6, 0)]
    predicted = target if decoder else source
    labels = [
        [-1 if rng.random() < 0.1 else int(rng.integers(0, 11)) for _ in sentence]
        for sentence in predicted
    ]

    def graphs(sentences: list[list[int]], stack: str) -> Any:
        if changes.get(f"{stack}.relations", 0) == 0:
            return None
        return [rng.integers(-1, 3, (len(s), len(s))) for s in sentences]

    return Sentences(
        source if encoder else None,
        target if decoder else None,
        labels,
        graphs(source, "encoder") if encoder else None,
        graphs(target, "decoder") if decoder else None,
    )


def spread(model: Model, seed: int = 1) -> None:
    """Weights away from zeros and ones, so that no gradient is one by symmetry."""
    rng = np.random.default_rng(seed)
    for weights in model.weights.values():
        weights += 0.15 * rng.standard_normal(weights.shape)


def directions(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[Any]:
    """A random direction, and two single numbers of the array."""
    yield rng.standard_normal(shape)
    for _ in range(2):
        one = np.zeros(shape)
        one.flat[rng.integers(0, one.size)] = 1
        yield one


def derivative(model: Model, batch: Sentences, weights: Any, direction: Any) -> float:
    """Of the summed loss, by central differences of the fourth order: error h^4."""
    step = 1e-4 / max(1.0, float(np.linalg.norm(direction)))
    before = weights.copy()
    total = 0.0
    for factor, share in ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12)):
        weights[...] = before + factor * step * direction
        result = model.forward(batch, dropout=True)
        total += share * result.loss * result.tokens
    weights[...] = before
    return total / step


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_loss(f64: Core, name: str) -> None:
    changes = BASE | CASES[name]
    rng = np.random.default_rng(5)
    batch = batch_for(changes)
    with Model(Config(f64, "tiny", changes)) as model:
        spread(model)
        loss = model.forward(batch, dropout=True)
        result = model.backward(batch)
        assert (result.loss, result.tokens) == (loss.loss, loss.tokens)
        for parameter, weights in model.weights.items():
            gradient = model.gradients[parameter]
            for direction in directions(weights.shape, rng):
                expected = derivative(model, batch, weights, direction)
                got = float(np.sum(gradient * direction))
                # 1e-6 of the size a derivative along this direction may have
                size = float(np.linalg.norm(gradient) * np.linalg.norm(direction))
                assert abs(got - expected) <= 1e-6 * max(size, 1e-2), (parameter, got, expected)


# ------------------------------------------------------------------------------------ float

STAGES = 60  # results that are rounded one after the other between the weights and their gradient


def gradients(
    core: Core, changes: dict[str, Any], nudge: float, **limits: int
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients, the weights rounded to float and moved by so much of themselves."""
    rng = np.random.default_rng(9)
    with Model(Config(core, "tiny", changes), **limits) as model:
        spread(model)
        for weights in model.weights.values():
            weights[...] = weights.astype(np.float32)
            weights *= 1 + nudge * rng.standard_normal(weights.shape)
        result = model.backward(batch_for(changes))
        return result.loss, {n: g.astype(np.float64) for n, g in model.gradients.items()}


def assert_near(
    exact: dict[str, Any], moved: dict[str, Any], got: dict[str, Any], nudge: float, half_ulp: float
) -> None:
    """The bound of test_float_is_near_double for numbers of this half ulp; moved: the exact gradients
    of weights that are moved by so much of themselves."""
    stages = 4 * np.sqrt(STAGES)
    whole = np.sqrt(sum(np.sum(g * g) for g in exact.values()))
    for parameter, gradient in exact.items():
        shift = np.linalg.norm(moved[parameter] - gradient) / nudge
        error = np.linalg.norm(got[parameter] - gradient)
        # a gradient that is 0 by symmetry is what rounding leaves of larger numbers
        bound = stages * (shift + np.linalg.norm(gradient)) + 4 * whole
        assert error <= half_ulp * bound, (parameter, error, shift)


@pytest.mark.parametrize("name", CASES)
def test_float_is_near_double(f32: Core, f64: Core, name: str) -> None:
    """How far may float be off? Moving every weight by half an ulp, in double, moves a gradient by
    so much; float rounds so some STAGES times in a row, independently, in forward and backward.
    Four deviations of that sum."""
    changes = BASE | CASES[name]
    half_ulp = 2.0**-24
    loss, exact = gradients(f64, changes, 0)
    moved_loss, moved = gradients(f64, changes, half_ulp * 64)  # 64: well above double's rounding
    got_loss, got = gradients(f32, changes, 0)
    stages = 4 * np.sqrt(STAGES)
    # a sum of some 16 losses near 3, each rounded
    bound = stages * (abs(moved_loss - loss) / 64 + half_ulp * abs(loss))
    assert abs(got_loss - loss) <= bound
    assert_near(exact, moved, got, half_ulp * 64, half_ulp)
