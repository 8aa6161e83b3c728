# SPDX-License-Identifier: Apache-2.0
"""A model small enough for tests of the binding, and batches for it."""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos

VOCABULARY, LONGEST = 23, 12
BOS, EOS = 1, 2
# Those of a batch, in the order in which the binding takes them.
FIELDS = (
    "source", "source_offsets", "target", "target_offsets", "labels", "source_graphs",
    "target_graphs", "ordinals",
)  # fmt: skip


def small_config(**changes: Any) -> relpos.Config:
    """1 + 1 layers of width 16, with dropout; keywords for dotted names have __ for the dot."""
    given = {
        "width": 16, "heads": 2, "head_width": 0, "feed_forward": 32,
        "source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY, "max_length": LONGEST,
        "encoder.layers": 1, "decoder.layers": 1, "encoder.k": 3, "decoder.k": 3,
        "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1,
        "label_smoothing": 0.1, "schedule": "constant", "learning_rate": 0.01, "warmup": 0,
        "seed": 7,
    }  # fmt: skip
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return relpos.Config().replace(given | named)


def small_model(**changes: Any) -> relpos.Transformer:
    return relpos.Transformer(small_config(**changes), tokens=256, sentences=32)


def sentences(count: int = 5, seed: int = 0, longest: int = LONGEST - 1) -> list[Any]:
    """Tokens from 3; among them an empty sentence and the longest."""
    random = np.random.default_rng(seed)
    lengths = [longest, 0, 1, *random.integers(1, longest, count)][:count]
    return [random.integers(3, VOCABULARY, n) for n in lengths]


def pairs(count: int = 5, seed: int = 0) -> relpos.Batch:
    sources, targets = sentences(count, seed), sentences(count, seed + 1)
    return relpos.Batch.from_pairs(sources, targets[::-1], bos=BOS, eos=EOS)


def trained(steps: int = 3, **changes: Any) -> relpos.Transformer:
    model = small_model(**changes)
    for seed in range(steps):
        model.step(pairs(seed=seed))
    return model


def state_of(model: relpos.Transformer) -> dict[str, Any]:
    """Copies of all that a step changes."""
    kinds = ("parameters", "first_moments", "second_moments", "averages")
    return {f"{kind} {n}": x.copy() for kind in kinds for n, x in getattr(model, kind).items()}


def weights(model: relpos.Transformer) -> dict[str, Any]:
    return {name: array.copy() for name, array in model.parameters.items()}


def assert_same_bits(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    for name in one:
        assert np.array_equal(one[name].view(np.uint32), other[name].view(np.uint32)), name
