# SPDX-License-Identifier: Apache-2.0
"""Models and batches whose attention is looked at, for test_model_maps*.py."""

from __future__ import annotations

from typing import Any

import numpy as np

import relpos
from test_model_gradients import BASE

KINDS = ("encoder", "decoder", "cross")


def made(changes: dict[str, Any], **limits: Any) -> relpos.Transformer:
    """A model whose weights are away from zeros and ones."""
    model = relpos.Transformer(
        relpos.Config().replace(BASE | changes), **{"tokens": 64, "sentences": 8} | limits
    )
    random = np.random.default_rng(3)
    for w in model.parameters.values():
        w += 0.15 * random.standard_normal(w.shape).astype(np.float32)
    return model


def batch_for(config: relpos.Config, seed: int = 0, **more: Any) -> relpos.Batch:
    """Sentences of 5, 1, 9, 0 and 3 tokens, targets of 4, 2, 6, 3 and 1, graphs where needed."""
    random = np.random.default_rng(seed)
    sides: list[Any] = []
    graphs: dict[str, Any] = {}
    for name, stack, lengths in (
        ("source", config.encoder, (5, 1, 9, 0, 3)),
        ("target", config.decoder, (4, 2, 6, 3, 1)),
    ):
        if stack.layers == 0:
            sides += (None, None)
            continue
        sides += (random.integers(0, 11, sum(lengths)), np.cumsum([0, *lengths]))
        if stack.relations > 0:
            graphs[f"{name}_graphs"] = [random.integers(-1, 3, (n, n)) for n in lengths]
    count = len(sides[2] if sides[2] is not None else sides[0])
    return relpos.Batch(*sides, random.integers(0, 11, count), **graphs, **more)


def everything(maps: relpos.ModelMaps) -> dict[str, Any]:
    return {
        f"{kind} {name}": array
        for kind, own in maps.maps.items()
        for name, array in {
            "probabilities": own.probabilities, "logits": own.logits, **own.parts
        }.items()
    }  # fmt: skip
